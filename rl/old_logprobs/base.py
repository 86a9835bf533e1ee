"""What every old-logprob source is: the interface, and what the exact ones share."""

import collections
import dataclasses
import enum
import functools
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from models.transformer import Params
from rl import processes
from rl.learner import AnchorFunction
from rl.scorer import Bucket, RowScore, Scorer
from rl.types import NO_POLICY, Trajectory


class SourceName(enum.Enum):
    """The sources, by what fills the proximal logprobs."""

    SNAPSHOT = "snapshot"  # exact: each token scored under the snapshot that sampled it
    DEDICATED = "dedicated"  # exact: the same on devices of its own, as trajectories finish
    INTERRUPT = "interrupt"  # exact: everything is scored before its version is replaced, while the sampler pauses
    EWMA = "ewma"  # approximate: scored under a moving average of the policy
    INTERPOLATE = "interpolate"  # approximate: between the sampler's logprobs and the current ones
    LAGGED = "lagged"  # approximate: scored under the version before the present one
    RECOMPUTE = "recompute"  # approximate: scored under the parameters at the start of the learner step
    SAMPLER = "sampler"  # approximate: the sampling engine's own logprobs

    @property
    def is_exact(self) -> bool:
        """Whether the anchors are the old logprobs."""
        return self in (SourceName.SNAPSHOT, SourceName.DEDICATED, SourceName.INTERRUPT)

    @property
    def needs_ring(self) -> bool:
        """Whether versions must stay in the ring until their last token is scored."""
        return self in (SourceName.SNAPSHOT, SourceName.DEDICATED)

    def replays(self, *, is_decomposed: bool) -> bool:
        """Whether a run gets versions from the ring: for its anchors, or to compare them with the exact old logprobs."""
        return self.needs_ring or is_decomposed and not self.is_exact


class GonePolicy(enum.Enum):
    """What becomes of a trajectory when a version that it needs was let go before it was scored. Nothing takes its place."""

    ERROR = "error"  # the run ends
    DROP = "drop"  # the trajectory leaves the loss
    MASK = "mask"  # the tokens of that version leave the loss


@dataclasses.dataclass(frozen=True)
class Anchored:
    """Trajectories with their anchors; an exact source has filled `old_logprobs`, and masked out what it cannot know."""

    trajectories: list[Trajectory]
    proximal_logprobs: list[np.ndarray]  # float32 [T] each
    buckets: list[dict[int, Bucket]]  # of each trajectory: the bucket that each version was scored in; empty unless exact


COSTLY = ("fetch", "score", "stall")
"""What takes a source's time: parameters that are got in place, scoring with them, and a side of the run that waits for it.

Each is counted where the host spends it: scoring goes on while the next parameters are fetched, and what an interrupted sampler
waits for is scoring too.
"""


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a source spent since it was last asked."""

    scored_tokens: int = 0  # tokens up to the last that was wanted, row by row
    padded_tokens: int = 0  # the same, and what fills the buckets
    gone_trajectories: int = 0  # that left the loss, in whole or in part, because a version was gone
    gone_tokens: int = 0  # that left it with them
    seconds: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(COSTLY, 0.0))

    def counts(self) -> dict[str, int]:
        """All that is not time, by name."""
        return {name: count for name, count in self.__dict__.items() if name != "seconds"}

    def __add__(self, other: "Cost") -> "Cost":
        counts = {name: count + other.counts()[name] for name, count in self.counts().items()}
        return Cost(**counts, seconds={kind: self.seconds[kind] + other.seconds[kind] for kind in COSTLY})


class OldLogprobSource:
    """One way to fill the proximal logprobs. Of what it is told, a source needs little; the rest it lets pass.

    Attributes:
      name: its name in the switch.
      caveat: what a user of an approximation must know; None for an exact source.
      inside: the function to call inside the step, for a source that acts there.
      interrupts: whether the sampler must pause while a version is published.
      cost: so far.
    """

    name: SourceName
    caveat: str | None = None
    inside: AnchorFunction | None = None
    interrupts: bool = False

    def __init__(self):
        self.cost = Cost()
        self._spending = threading.Lock()  # a source's own thread spends, too

    @property
    def exact(self) -> bool:
        """Whether the anchors are the old logprobs."""
        return self.name.is_exact

    def anchor(self, trajectories: Sequence[Trajectory], version: int, params: Params) -> Anchored:
        """Anchors for a batch; `params` are the published parameters of the learner's `version`, at the start of its step."""
        raise NotImplementedError

    def published(self, version: int, params: Params, master: Params) -> None:
        """A version was published: its parameters, and the master weights they were cast from, which may be donated later."""

    def superseding(self, version: int, params: Params, held: Sequence[Trajectory]) -> None:
        """`version` is about to be replaced, and `held` is all that was not yet trained, finished or not."""

    def finished(self, trajectories: Sequence[Trajectory]) -> None:
        """Trajectories came to their end. From the sampler's side."""

    def forget(self, trajectories: Iterable[Trajectory]) -> None:
        """Trajectories will never be trained. From any side."""

    def trained(self, active_fraction: float) -> None:
        """A learner step is done, and that fraction of its tokens was neither masked nor clipped."""

    def metrics(self) -> dict[str, float]:
        """Figures of its own, so far."""
        return {}

    def spend(self, cost: Cost) -> None:
        """Adds to the cost. From any thread."""
        with self._spending:
            self.cost += cost

    def timed(self, kind: str, function: Callable, *arguments):
        """Calls, and spends the time it takes on one of `COSTLY` when it is over. From any thread."""
        started = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            self.spend(Cost(seconds={**dict.fromkeys(COSTLY, 0.0), kind: time.perf_counter() - started}))

    def take_cost(self) -> Cost:
        """What was spent since the last call."""
        with self._spending:
            cost, self.cost = self.cost, Cost()
        return cost

    def close(self) -> None:
        """Ends what it has running."""

    def state(self) -> dict:
        """Plain arrays and JSON values: `shared` by several processes, and this one's `own`. Collective."""
        return {"shared": {}, "own": {}}

    def restore(self, state: dict, params: Params) -> None:
        """Takes a `state` back; `params` are the published ones of the present version."""


class CountedScorer:
    """A scorer that adds what it does to a source's cost."""

    def __init__(self, scorer: Scorer, source: OldLogprobSource):
        self._scorer, self._source = scorer, source

    def score(self, params: Params, rows: Sequence[np.ndarray]) -> list[RowScore]:
        return self.start(params, rows)()

    def start(self, params: Params, rows: Sequence[np.ndarray]) -> Callable[[], list[RowScore]]:
        self._source.spend(Cost(scored_tokens=sum(map(len, rows))))
        return functools.partial(self._collect, self._source.timed("score", self._scorer.start, params, rows))

    def _collect(self, collect: Callable[[], list[RowScore]]) -> list[RowScore]:
        scores = self._source.timed("score", collect)
        for bucket, count in collections.Counter(score.bucket for score in scores).items():
            own_rows = bucket.rows // processes.num_processes()
            self._source.spend(Cost(padded_tokens=-(-count // own_rows) * own_rows * bucket.length))
        return scores


@dataclasses.dataclass(frozen=True)
class VersionScore:
    """The logprobs, float32 nats, of one trajectory's tokens of one version, in order, and their bucket."""

    logprobs: np.ndarray
    bucket: Bucket


def score_version(
    scorer: Scorer | CountedScorer, params: Params, version: int, trajectories: Sequence[Trajectory]
) -> list[VersionScore]:
    """Scores each trajectory's tokens of `version` under `params`, reading no further than the last of them.

    The bucket is therefore the same whether the trajectory has gone on since or not.
    """
    return start_version(scorer, params, version, trajectories)()


def start_version(
    scorer: Scorer | CountedScorer, params: Params, version: int, trajectories: Sequence[Trajectory]
) -> Callable[[], list[VersionScore]]:
    """The same, but returns the function that waits for the scores."""
    masks = [trajectory.policy_versions == version for trajectory in trajectories]
    stops = [int(np.flatnonzero(mask)[-1]) + 1 for mask in masks]
    collect = scorer.start(params, [trajectory.tokens[:stop] for trajectory, stop in zip(trajectories, stops, strict=True)])

    def collect_version() -> list[VersionScore]:
        rows = zip(collect(), masks, stops, strict=True)
        return [VersionScore(row.logprobs[mask[:stop]], row.bucket) for row, mask, stop in rows]

    return collect_version


class ScoringSource(OldLogprobSource):
    """A source that scores."""

    def __init__(self, scorer: Scorer):
        super().__init__()
        self._scorer = CountedScorer(scorer, self)

    def _score_whole(self, params: Params, trajectories: Sequence[Trajectory]) -> Anchored:
        """An approximation's anchor: every token under the same parameters."""
        scores = self._scorer.score(params, [trajectory.tokens for trajectory in trajectories])
        rows = [
            np.where(trajectory.policy_versions == NO_POLICY, np.float32(np.nan), row.logprobs)
            for trajectory, row in zip(trajectories, scores, strict=True)
        ]
        return Anchored(list(trajectories), rows, [{} for _ in trajectories])
