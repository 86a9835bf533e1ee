"""What a ratio is made of: for a sample of rows, the total log ratio of current policy to sampler, term by term.

    logprob in the loss - sampler's   =   engine numerics     old - sampler: two programs at one version
                                        + policy lag          step start - old: two versions, one program (`score`)
                                        + program numerics    forward inside the step - `score`, at equal parameters
                                        + optimizer step      `score` now - `score` at the step's start: earlier minibatches

An exact anchor puts the first term into the discrepancy ratio and the rest into the staleness ratio (arXiv 2605.12070). Whatever
the source, the anchor's error is its distance from the exact old logprob, so the ring must hold the versions.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from models.transformer import Params
from rl.learner import Forward, Learner
from rl.old_logprobs import Anchored, GonePolicy, OldLogprobSource
from rl.old_logprobs.exact import SnapshotSource
from rl.scorer import Scorer
from rl.snapshots import SnapshotRing
from rl.types import Trajectory

TERMS = ("engine_numerics", "policy_lag", "program_numerics", "optimizer_step")


@dataclasses.dataclass
class _Row:
    """A sampled row of the batch; arrays float32 [T] nats."""

    trajectory: Trajectory
    proximal: np.ndarray
    old: np.ndarray
    start: np.ndarray  # `score` at the start of the step
    now: np.ndarray | None = None  # `score` just before the row's optimizer step


class Decomposition:
    """Takes the ratios of some rows apart, step by step.

    Args:
      learner, source, ring, scorer: those of the run.
      every: of the request ids, one in so many is followed; 0 follows none.
    """

    def __init__(self, learner: Learner, source: OldLogprobSource, ring: SnapshotRing, scorer: Scorer, *, every: int):
        self._learner, self._source, self._scorer, self._every = learner, source, scorer, every
        self._exact = SnapshotSource(ring, scorer, GonePolicy.MASK)  # what cannot be known is left out
        self._rows: dict[int, _Row] = {}  # by its place in the batch
        self._version = 0

    @property
    def is_on(self) -> bool:
        """Whether it follows any row at all."""
        return self._every > 0

    def begin(self, anchored: Anchored, version: int, live: Params) -> None:
        """Before the learner step on these rows; `live` are the published parameters of the learner's `version`. Collective."""
        places = [place for place, t in enumerate(anchored.trajectories) if t.request_id % self._every == 0]
        sampled = [anchored.trajectories[place] for place in places]
        if not self._source.exact:
            sampled = self._exact.anchor(sampled, version, live).trajectories
        starts = self._scorer.score(live, [trajectory.tokens for trajectory in sampled])
        self._version = version
        self._rows = {
            place: _Row(trajectory, anchored.proximal_logprobs[place], trajectory.old_logprobs, start.logprobs)
            for place, trajectory, start in zip(places, sampled, starts, strict=True)
        }

    def before_update(self, rows: np.ndarray) -> None:
        """Before the optimizer step on these rows of the batch. Collective."""
        places = [place for place in rows.tolist() if place in self._rows]
        scores = self._scorer.score(self._learner.published(), [self._rows[place].trajectory.tokens for place in places])
        for place, score in zip(places, scores, strict=True):
            self._rows[place].now = score.logprobs

    def finish(self, forwards: Sequence[Forward]) -> dict[str, float | int | None]:
        """After the learner step: means of the absolute terms over the trained tokens, and the anchor's error; in nats."""
        parts: list[dict[str, np.ndarray]] = []
        for forward in forwards:
            for place, logprobs in zip(forward.rows.tolist(), forward.logprobs, strict=True):
                if place in self._rows:
                    parts.append(self._terms(self._rows[place], logprobs))
        tokens = {name: np.concatenate([part[name] for part in parts] or [np.zeros(0)]) for name in (*TERMS, "error")}
        found = len(tokens["error"])
        means = {name: float(np.abs(tokens[name]).mean()) if found else None for name in TERMS}
        error = np.abs(tokens["error"])
        self._rows = {}
        return {
            **means,
            "approximation_error_mean": float(error.mean()) if found else None,
            "approximation_error_max": float(error.max()) if found else None,
            "decomposed_tokens": found,
        }

    def _terms(self, row: _Row, forward: np.ndarray) -> dict[str, np.ndarray]:
        trajectory = row.trajectory
        forward = forward[: len(trajectory)]
        proximal = row.proximal
        if self._source.inside is not None:
            arrays = (forward, trajectory.sampler_logprobs, trajectory.policy_versions)
            proximal = np.asarray(self._source.inside(*(array[None] for array in arrays), np.int32(self._version)))[0]
        terms = {
            "engine_numerics": row.old - trajectory.sampler_logprobs,
            "policy_lag": row.start - row.old,
            "program_numerics": forward - row.now,
            "optimizer_step": row.now - row.start,
            "error": proximal - row.old,
        }
        return {name: term[trajectory.loss_mask].astype(np.float64) for name, term in terms.items()}
