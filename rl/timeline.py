"""Who was busy with what, and when: `timeline.jsonl`, one row for each stretch of time of one stage.

Stages happen in the sampler's thread and in the learner's; in lockstep both are one. A report draws the rows as two lanes.
"""

import json
import os
import pathlib
import time

LANES = {"rollout": "sampler", "sampler_wait": "sampler"}
"""The lane of a stage; any other is the learner's."""

_SAME_STRETCH = 0.01
"""Seconds between two spans of one stage that make no gap: a sampler rolls a hundred times a second."""


class Timeline:
    """Collects spans from any thread, and appends them to a file when told to."""

    def __init__(self, path: pathlib.Path):
        self._path = pathlib.Path(path)
        self._origin = time.perf_counter()
        self._spans: list[tuple[str, float, float]] = []  # appending is all that threads do

    def span(self, stage: str, started: float, stopped: float) -> None:
        """Notes that a stage took from `started` to `stopped`, in seconds of `time.perf_counter`."""
        self._spans.append((stage, started - self._origin, stopped - self._origin))

    def state(self) -> dict:
        """How much is written, and the time since the start of the run, as JSON values."""
        size = self._path.stat().st_size if self._path.exists() else 0
        return {"size": size, "elapsed": time.perf_counter() - self._origin}

    def restore(self, state: dict) -> None:
        """Cuts off what was written after a `state`, and goes on with its time."""
        self._origin = time.perf_counter() - state["elapsed"]
        if self._path.exists():
            os.truncate(self._path, state["size"])

    def flush(self, step: int) -> None:
        """Appends what was noted since the last time, as {"step", "lane", "stage", "start", "stop"}; seconds of the run."""
        spans, self._spans = self._spans, []
        stretches: dict[str, list[tuple[str, float, float]]] = {}
        for stage, started, stopped in spans:
            lane = stretches.setdefault(LANES.get(stage, "learner"), [])
            if lane and lane[-1][0] == stage and started - lane[-1][2] < _SAME_STRETCH:
                lane[-1] = (stage, lane[-1][1], stopped)
            else:
                lane.append((stage, started, stopped))
        rows = [{"step": step, "lane": name, "stage": stage, "start": round(started, 4), "stop": round(stopped, 4)}
                for name, lane in stretches.items() for stage, started, stopped in lane]
        with self._path.open("a") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
