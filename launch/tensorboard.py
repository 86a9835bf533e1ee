"""The metrics of a run as TensorBoard events, beside `metrics.jsonl`: `tensorboard --logdir RUN_DIR/tensorboard`.

Events are written where they happen and flushed each learner step. tensorboardX's SummaryWriter would hand them to threads of its
own, which a killed run does not wait for, and which outlive a run that has ended.
"""

import pathlib
import time
from collections.abc import Mapping

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

DIRECTORY = "tensorboard"
_GROUPS = {
    "learning": ("reward", "success", "loss", "entropy", "gradient"),
    "ratios": ("clip", "dual_clip", "active", "effective", "nonfinite", "discrepancy", "staleness_kl", "staleness_ratio"),
    "exactness": ("engine_numerics", "exactness"),
    "asynchrony": ("staleness", "version", "fraction_multi_version", "groups", "dropped", "masked", "failed", "skipped"),
    "cost": ("seconds", "ring", "tokens", "trajectories", "trajectory"),
}
"""What the names of a group's metrics begin with. The first that fits counts."""


def tag(name: str) -> str:
    """A metric's name in TensorBoard, which folds what stands before the slash into one section."""
    group = next((group for group, beginnings in _GROUPS.items() if name.startswith(beginnings)), "other")
    return f"{group}/{name}"


class TensorBoard:
    """Writes the scalars of each learner step. Use it as a context manager, or `close` it.

    Args:
      run_dir: the run's; the events go into a directory of their own there.
      after_step: learner steps done before. What an earlier process wrote of later ones, before it was killed, is hidden.
    """

    def __init__(self, run_dir: pathlib.Path, *, after_step: int):
        directory = run_dir / DIRECTORY
        directory.mkdir(parents=True, exist_ok=True)
        # The suffix keeps two processes that begin within one second from writing one file.
        self._writer = EventsWriter(str(directory / "events"), f".after-{after_step}")
        self._write(after_step + 1, session_log=SessionLog(status=SessionLog.START))  # TensorBoard hides this step and later ones

    def __enter__(self) -> "TensorBoard":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        self._writer.close()

    def step(self, metrics: Mapping[str, float | str | None]) -> None:
        """Writes a row of `metrics.jsonl`; what has no value, or is a text, is left out."""
        numbers = {name: value for name, value in metrics.items() if name != "step" and isinstance(value, int | float)}
        values = [Summary.Value(tag=tag(name), simple_value=value) for name, value in numbers.items()]
        self._write(metrics["step"], summary=Summary(value=values))

    def _write(self, step: int, **content) -> None:
        self._writer.write_event(Event(wall_time=time.time(), step=step, **content))
        self._writer.flush()
