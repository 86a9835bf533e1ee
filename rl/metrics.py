"""Metrics: one JSON object per learner step, appended to `metrics.jsonl` and flushed.

A row is always valid JSON with every number in full, so that any tool can read the file while the run goes on; a value that is
not finite becomes null. Steps only increase. A row that a killed run left half-written is cut off when the file is opened again,
and a run resumed from a checkpoint cuts off the rows written after it: what is done again is not recorded twice.
"""

import json
import math
import pathlib
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from rl.types import Trajectory

Value = bool | int | float | str | None


class MetricsWriter:
    """Appends rows to a JSON-lines file. Use it as a context manager, or `close` it.

    An existing file is continued: its last whole row gives the step that the next one must exceed.

    Raises:
      ValueError: the file exists and is not made of such rows.
    """

    def __init__(self, path: pathlib.Path):
        self._path = pathlib.Path(path)
        self._file = open(self._path, "ab+")
        self._keep(self._rows())

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def write(self, step: int, metrics: Mapping[str, object]) -> None:
        """Appends {"step": step, **metrics} and flushes.

        Args:
          step: the learner step; greater than that of the row before.
          metrics: scalars of Python, numpy or jax (fetched here, which waits for them), strings or None.

        Raises:
          ValueError: the step does not increase, a value is no scalar, or `metrics` has another "step".
        """
        if self._last_step is not None and step <= self._last_step:
            raise ValueError(f"{self._path}: got step {step} after step {self._last_step}, wanted a greater one; resume the "
                             "run from its checkpoint, or use another run directory")
        row = {"step": int(step), **{name: _plain(name, value) for name, value in jax.device_get(dict(metrics)).items()}}
        if row["step"] != step:
            raise ValueError(f"{self._path}: metrics name step {row['step']} in the row of step {step}; leave it out")
        self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        self._file.flush()
        self._num_rows, self._last_step = self._num_rows + 1, int(step)

    def state(self) -> dict:
        """The number of rows and the last step, for `restore`."""
        return {"num_rows": self._num_rows, "last_step": self._last_step}

    def restore(self, state: dict) -> None:
        """Cuts off every row after those that `state()` counted.

        Raises:
          ValueError: the file has fewer rows, or another step in the last one.
        """
        rows = self._rows()[: state["num_rows"]]
        found = {"num_rows": len(rows), "last_step": self._last_step_of(rows)}
        if found != state:
            raise ValueError(f"{self._path}: got {found}, wanted {state}; this is not the file of the checkpointed run")
        self._keep(rows)

    def _rows(self) -> list[bytes]:
        """The whole rows of the file, line end included."""
        self._file.seek(0)
        return [line for line in self._file.read().splitlines(keepends=True) if line.endswith(b"\n")]

    def _keep(self, rows: list[bytes]) -> None:
        """Truncates the file to `rows`, the first ones it has."""
        self._num_rows, self._last_step = len(rows), self._last_step_of(rows)
        self._file.truncate(sum(map(len, rows)))

    def _last_step_of(self, rows: list[bytes]) -> int | None:
        if not rows:
            return None
        try:
            return json.loads(rows[-1])["step"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self._path}: the last row is {rows[-1][:80]!r}, wanted a JSON object with a step; "
                             "name a new file, or the metrics.jsonl of a run") from error


def _plain(name: str, value: object) -> Value:
    """The JSON value of one metric that is on the host."""
    if value is None or isinstance(value, str):
        return value
    array = np.asarray(value)
    if array.ndim or array.dtype == object:
        raise ValueError(f"metric {name} is a {type(value).__name__} of shape {array.shape}, wanted a scalar, a string or None")
    scalar = array.item()
    return None if isinstance(scalar, float) and not math.isfinite(scalar) else scalar


def staleness_metrics(trajectories: Sequence[Trajectory], learner_version: int) -> dict[str, float]:
    """How old the trained tokens are, and how many policy versions wrote each trajectory.

    Args:
      trajectories: those of one learner step. Only their trained tokens (`loss_mask`) are looked at.
      learner_version: the policy version that staleness is counted from.

    Returns:
      `staleness_min/mean/max` over tokens, in publishes. Over the trajectories with a trained token:
      `versions_per_trajectory_mean/max`, and `fraction_multi_version`, the fraction with two or more versions. All are NaN when
      no token is trained.
    """
    versions = [trajectory.policy_versions[trajectory.loss_mask] for trajectory in trajectories if trajectory.loss_mask.any()]
    staleness = learner_version - np.concatenate(versions) if versions else np.array([math.nan])
    num_versions = np.array([len(np.unique(row)) for row in versions] or [math.nan])
    return {
        "staleness_min": float(staleness.min()),
        "staleness_mean": float(staleness.mean()),
        "staleness_max": float(staleness.max()),
        "versions_per_trajectory_mean": float(num_versions.mean()),
        "versions_per_trajectory_max": float(num_versions.max()),
        "fraction_multi_version": float(np.where(np.isnan(num_versions), math.nan, num_versions > 1).mean()),
    }


def batch_metrics(trajectories: list[Trajectory]) -> dict:
    """What a batch's trajectories say of themselves; engine numerics, in nats, where old logprobs are known."""
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
    facts = {
        "reward_mean": float(np.mean(rewards)),
        "success_mean": float(np.mean([trajectory.success for trajectory in trajectories])),
        "trajectories": len(trajectories),
        "trajectory_tokens_mean": float(np.mean([len(trajectory) for trajectory in trajectories])),
        "tokens_trained": int(sum(trajectory.loss_mask.sum() for trajectory in trajectories)),
    }
    if all(trajectory.old_logprobs is not None for trajectory in trajectories):
        differences = np.concatenate([np.abs(t.old_logprobs - t.sampler_logprobs)[t.loss_mask] for t in trajectories])
        if len(differences):
            facts |= {"engine_numerics": float(differences.mean()), "engine_numerics_max": float(differences.max())}
    return facts


def combine(rows: Sequence[Mapping[str, float | int | None]]) -> dict[str, float | int | None]:
    """One row from those of several processes with equal shares: counts add up, of `_min` and `_max` the outermost counts, any
    other figure is averaged. What a process does not know is left out."""
    combined = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row[name] for row in rows if row.get(name) is not None]
        if name.endswith("_max") or name.endswith("_min"):
            combined[name] = (max if name.endswith("_max") else min)(values, default=None)
        elif all(isinstance(value, int) for value in values):
            combined[name] = sum(values) if values else None
        else:
            combined[name] = sum(values) / len(values)
    return combined
