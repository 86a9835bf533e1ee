"""Where proximal logprobs come from: the one switch between knowing the old logits and making do without them.

Two kinds of source share one interface. A source that acts *before* the step turns trajectories into arrays; one that acts
*inside* the step is a function of the current logprobs, the sampler's, and the versions, which the learner calls in its loss.
Only an exact source fills `Trajectory.old_logprobs`: an approximation is an anchor, never "old".
"""

import abc
import dataclasses
import enum
from collections.abc import Sequence

import jax
import numpy as np

from models.transformer import Params
from rl.learner import AnchorFunction
from rl.scorer import Bucket, Scorer
from rl.snapshots import SnapshotRing
from rl.types import NO_POLICY, Trajectory


class SourceName(enum.Enum):
    """The sources, by what fills the proximal logprobs."""

    SNAPSHOT = "snapshot"  # exact: each token scored under the snapshot that sampled it
    RECOMPUTE = "recompute"  # approximate: scored under the parameters at the start of the learner step
    SAMPLER = "sampler"  # approximate: the sampling engine's own logprobs


@dataclasses.dataclass(frozen=True)
class Anchored:
    """Trajectories with their anchors; an exact source has filled `old_logprobs`."""

    trajectories: list[Trajectory]
    proximal_logprobs: list[np.ndarray]  # float32 [T] each
    buckets: list[
        dict[int, Bucket]
    ]  # for each trajectory, the bucket that each of its versions was scored in; empty unless exact


class OldLogprobSource(abc.ABC):
    """One way to fill the proximal logprobs.

    Attributes:
      name: its name in the switch.
      caveat: what a user of an approximation must know; None for an exact source.
      inside: the function to call inside the step, for a source that acts there.
    """

    name: SourceName
    caveat: str | None = None
    inside: AnchorFunction | None = None

    @property
    def exact(self) -> bool:
        """Whether the anchors are the old logprobs."""
        return self.caveat is None

    @abc.abstractmethod
    def anchor(self, trajectories: Sequence[Trajectory], params: Params) -> Anchored:
        """Anchors for a batch; `params` are the published parameters at the start of the learner step."""


class SnapshotSource(OldLogprobSource):
    """Exact. Each version in the batch, newest first, scores the rows that hold it, up to their last token of it."""

    name = SourceName.SNAPSHOT

    def __init__(self, ring: SnapshotRing, scorer: Scorer):
        self._ring, self._scorer = ring, scorer

    def anchor(self, trajectories: Sequence[Trajectory], params: Params) -> Anchored:
        del params  # exactness is a matter of the ring's versions only
        old_logprobs = [np.full(len(trajectory), np.nan, np.float32) for trajectory in trajectories]
        buckets: list[dict[int, Bucket]] = [{} for _ in trajectories]
        held = {version for trajectory in trajectories for version in trajectory.versions}
        for version in self._ring.held_by_any(held):
            holders = [index for index, trajectory in enumerate(trajectories) if version in trajectory.versions]
            for index, scored in zip(
                holders,
                score_version(self._scorer, self._ring.get(version), version, [trajectories[i] for i in holders]),
                strict=True,
            ):
                is_version = trajectories[index].policy_versions == version
                old_logprobs[index][is_version] = scored.logprobs
                buckets[index][version] = scored.bucket
        anchored = [
            dataclasses.replace(trajectory, old_logprobs=row) for trajectory, row in zip(trajectories, old_logprobs, strict=True)
        ]
        return Anchored(anchored, old_logprobs, buckets)


@dataclasses.dataclass(frozen=True)
class VersionScore:
    """The logprobs, float32 nats, of one trajectory's tokens of one version, in order, and their bucket."""

    logprobs: np.ndarray
    bucket: Bucket


def score_version(scorer: Scorer, params: Params, version: int, trajectories: Sequence[Trajectory]) -> list[VersionScore]:
    """Scores each trajectory's tokens of `version` under `params`, reading no further than the last of them.

    The bucket is therefore the same whether the trajectory has gone on since or not.
    """
    masks = [trajectory.policy_versions == version for trajectory in trajectories]
    stops = [int(np.flatnonzero(mask)[-1]) + 1 for mask in masks]
    scores = scorer.score(params, [trajectory.tokens[:stop] for trajectory, stop in zip(trajectories, stops, strict=True)])
    return [VersionScore(row.logprobs[mask[:stop]], row.bucket) for row, mask, stop in zip(scores, masks, stops, strict=True)]


class RecomputeSource(OldLogprobSource):
    """Approximate: what most systems call old. The policy has moved on since the tokens were sampled."""

    name = SourceName.RECOMPUTE
    caveat = "all staleness counts as discrepancy, and the clip sees none of it in the first minibatch"

    def __init__(self, scorer: Scorer):
        self._scorer = scorer

    def anchor(self, trajectories: Sequence[Trajectory], params: Params) -> Anchored:
        scores = self._scorer.score(params, [trajectory.tokens for trajectory in trajectories])
        rows = [
            np.where(trajectory.policy_versions == NO_POLICY, np.float32(np.nan), row.logprobs)
            for trajectory, row in zip(trajectories, scores, strict=True)
        ]
        return Anchored(list(trajectories), rows, [{} for _ in trajectories])


def _sampler_anchor(
    logprobs: jax.Array, sampler_logprobs: jax.Array, policy_versions: jax.Array, learner_version: jax.Array
) -> jax.Array:
    del logprobs, policy_versions, learner_version
    return sampler_logprobs


class SamplerSource(OldLogprobSource):
    """Approximate: the discrepancy ratio is 1 and the staleness ratio carries the engine's numerics too."""

    name = SourceName.SAMPLER
    caveat = "the engine's numerics count as staleness, and no discrepancy is seen"
    inside = staticmethod(_sampler_anchor)

    def anchor(self, trajectories: Sequence[Trajectory], params: Params) -> Anchored:
        del params
        return Anchored(
            list(trajectories), [trajectory.sampler_logprobs for trajectory in trajectories], [{} for _ in trajectories]
        )


def make_source(name: SourceName, *, ring: SnapshotRing, scorer: Scorer) -> OldLogprobSource:
    """The source of a name, with what it needs."""
    match name:
        case SourceName.SNAPSHOT:
            return SnapshotSource(ring, scorer)
        case SourceName.RECOMPUTE:
            return RecomputeSource(scorer)
        case SourceName.SAMPLER:
            return SamplerSource()
