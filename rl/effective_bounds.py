"""Proposition 1 of arXiv 2605.12070: under an interpolated anchor, clip and mask are bounds on one ratio.

Let r = current / sampler, and let the proximal policy lie between the two, alpha being the sampler's share. Then

                  proximal policy                          staleness ratio                discrepancy ratio
    log-linear    sampler^alpha current^(1 - alpha)        r^alpha                        r^(1 - alpha)
    linear        alpha sampler + (1 - alpha) current      r / (alpha + (1 - alpha) r)    alpha + (1 - alpha) r

and both ratios are functions of r, each growing with it. So a clip of the one and a mask of the other are a clip and a mask of r
with other bounds: no token is treated as it is for what the old policy said of it. A-3PO is the log-linear case, alpha = 1 / age.
"""

import dataclasses
import enum
import math


class Proxy(enum.Enum):
    """How the proximal policy is interpolated."""

    LOG_LINEAR = "log_linear"
    LINEAR = "linear"


@dataclasses.dataclass(frozen=True)
class EffectiveBounds:
    """Bounds on r = current / sampler. A bound that never acts is 0 below and infinite above."""

    clip_low: float  # below it the clip acts where A < 0
    clip_high: float  # above it the clip acts where A > 0
    mask_low: float  # the mask keeps r in [mask_low, mask_high]
    mask_high: float


def effective_bounds(
    proxy: Proxy, *, sampler_share: float, clip_low: float, clip_high: float, discrepancy_bound: float
) -> EffectiveBounds:
    """What a clip of the staleness ratio and a mask of the discrepancy ratio do to the single ratio.

    Args:
      proxy: the interpolation.
      sampler_share: alpha, in [0, 1]: 1 makes the sampler the anchor, 0 the current policy.
      clip_low: the staleness ratio is clipped below at 1 - clip_low; in [0, 1].
      clip_high: the staleness ratio is clipped above at 1 + clip_high; at least 0.
      discrepancy_bound: the mask keeps the discrepancy ratio in [1 / bound, bound]; at least 1.

    Raises:
      ValueError: an argument is out of range.
    """
    if not 0 <= sampler_share <= 1:
        raise ValueError(f"sampler_share is {sampler_share}, wanted in [0, 1]: the sampler's weight in the proximal policy")
    if not (0 <= clip_low <= 1 and clip_high >= 0 and discrepancy_bound >= 1):
        raise ValueError(f"got clip_low {clip_low}, clip_high {clip_high}, discrepancy_bound {discrepancy_bound}; wanted "
                         "clip_low in [0, 1], clip_high at least 0 and a bound of at least 1")
    share, rest = sampler_share, 1 - sampler_share
    if proxy is Proxy.LOG_LINEAR:
        return EffectiveBounds(
            clip_low=_root(1 - clip_low, share, never=0.0),
            clip_high=_root(1 + clip_high, share, never=math.inf),
            mask_low=_root(1 / discrepancy_bound, rest, never=0.0),
            mask_high=_root(discrepancy_bound, rest, never=math.inf),
        )
    return EffectiveBounds(
        clip_low=_inverse_staleness(1 - clip_low, share, never=0.0),
        clip_high=_inverse_staleness(1 + clip_high, share, never=math.inf),
        mask_low=max(0.0, (1 / discrepancy_bound - share) / rest) if rest else 0.0,
        mask_high=(discrepancy_bound - share) / rest if rest else math.inf,
    )


def _root(bound: float, exponent: float, *, never: float) -> float:
    """r where r^exponent is the bound; `never` where the exponent is 0, for then the power is 1 whatever r is."""
    if not exponent:
        return never
    if not bound:
        return 0.0
    logarithm = math.log(bound) / exponent
    return math.exp(logarithm) if logarithm < 700 else math.inf  # more than that is no float


def _inverse_staleness(bound: float, share: float, *, never: float) -> float:
    """r where r / (share + (1 - share) r), which stays below 1 / (1 - share), is the bound; `never` where that is 1 for all r."""
    if not share:
        return never
    left = 1 - (1 - share) * bound
    return share * bound / left if left > 0 else math.inf
