"""Where proximal logprobs come from: the one switch between knowing the old logits and making do without them.

A source that acts *before* the step turns trajectories into arrays; one that acts *inside* the step is a function of the current
logprobs, the sampler's, and the versions, which the learner calls in its loss. Only an exact source fills
`Trajectory.old_logprobs`: an approximation is an anchor, never "old".

`base` is the interface, `exact` the three routes to the old logits, `approximate` and `interpolation` what is used instead.
"""

from models.config import Precision
from rl.old_logprobs.approximate import (
    EwmaAverage,
    EwmaOptions,
    EwmaSource,
    InterpolateSource,
    LaggedSource,
    RecomputeSource,
    SamplerSource,
)
from rl.old_logprobs.base import (
    COSTLY,
    Anchored,
    Cost,
    GonePolicy,
    OldLogprobSource,
    SourceName,
    VersionScore,
    score_version,
)
from rl.old_logprobs.exact import DedicatedSource, InterruptSource, SnapshotSource
from rl.old_logprobs.interpolation import Interpolation
from rl.scorer import Scorer
from rl.snapshots import SnapshotRing

__all__ = [
    "COSTLY",
    "Anchored",
    "Cost",
    "EwmaAverage",
    "EwmaOptions",
    "GonePolicy",
    "Interpolation",
    "OldLogprobSource",
    "SourceName",
    "VersionScore",
    "make_source",
    "score_version",
]


def make_source(
    name: SourceName,
    *,
    ring: SnapshotRing,
    scorer: Scorer,
    gone: GonePolicy,
    interpolation: Interpolation,
    ewma: EwmaOptions,
    max_staleness: int,
    precision: Precision,
) -> OldLogprobSource:
    """The source of a name, with what it needs; a dedicated one wants its `scorer` on devices of its own."""
    match name:
        case SourceName.SNAPSHOT:
            return SnapshotSource(ring, scorer, gone)
        case SourceName.DEDICATED:
            return DedicatedSource(ring, scorer, gone)
        case SourceName.INTERRUPT:
            return InterruptSource(scorer, gone)
        case SourceName.EWMA:
            return EwmaSource(scorer, ewma, max_staleness=max_staleness, precision=precision)
        case SourceName.INTERPOLATE:
            return InterpolateSource(interpolation)
        case SourceName.LAGGED:
            return LaggedSource(scorer)
        case SourceName.RECOMPUTE:
            return RecomputeSource(scorer)
        case SourceName.SAMPLER:
            return SamplerSource()
