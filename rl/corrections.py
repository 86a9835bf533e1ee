"""The discrepancy ratio: what the trainer and the sampling engine say about one token, compared, filtered and weighted.

    discrepancy ratio = exp(proximal logprob - sampler logprob)

With an exact anchor both speak of the same policy version, so the ratio measures numerics alone: it should be 1, and a token far
from 1 on either side is unreliable. That asks for a band symmetric around 1 (in log space), whatever the sign of the advantage,
unlike the PPO clip of the staleness ratio. With an approximate anchor the ratio also holds policy lag, and the two bounds tangle;
comparing the two is what this code base is for (arXiv 2605.12070, "Missing Old Logits in Asynchronous Agentic RL").

The ratio may drop a token (a mask), weight it (truncated importance sampling), or both. The paper leaves open which one its runs
use, so it is an option.
"""

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to +-20 nats, so that no ratio, and no square of one, overflows float32."""


class Discrepancy(enum.Enum):
    """What the discrepancy ratio does to a token."""

    NONE = "none"  # nothing
    MASK = "mask"  # drops it outside the band [1/bound, bound]
    WEIGHT = "weight"  # weights it by min(ratio, weight_cap)
    BOTH = "both"  # drops it outside the band, weights it inside


class Correction(NamedTuple):
    """What the loss needs of the discrepancy ratio, each [B, T]. None of it is differentiated."""

    weights: jax.Array  # float32; 1 where no weight applies, so that multiplying by it is always safe
    kept: jax.Array  # bool: in the mask, of finite logprobs, and not dropped
    log_ratio: jax.Array  # float32 nats, proximal - sampler, clamped to +-LOG_RATIO_LIMIT; 0 where it does not exist


def check_token_arrays(**arrays: jax.Array) -> None:
    """Raises ValueError unless all arrays have one shape [B, T]; broadcasting would hide a wrong one."""
    shapes = {name: jnp.shape(array) for name, array in arrays.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 2 for shape in shapes.values()):
        raise ValueError(f"per-token arrays have shapes {shapes}, wanted one shape [B, T] for all; broadcast before the call")


def discrepancy(
    proximal_logprobs: jax.Array,
    sampler_logprobs: jax.Array,
    mask: jax.Array,
    *,
    treatment: Discrepancy,
    bound: float,
    weight_cap: float,
) -> Correction:
    """Filters and weights tokens by the discrepancy ratio exp(proximal - sampler).

    The band is |log ratio| <= log bound, symmetric ("Missing Old Logits in Asynchronous Agentic RL", arXiv 2605.12070). The
    weight min(ratio, weight_cap) is truncated importance sampling, on one side only: a cap bounds the variance, and small weights
    need no bound. BOTH with a bound is IcePop ("Every Step Evolves", arXiv 2510.18855) with a symmetric band.

    Args:
      proximal_logprobs: float [B, T], nats.
      sampler_logprobs: float [B, T], nats.
      mask: bool [B, T]. Where it is False the logprobs hold any value, NaN and infinities included, and none reaches the result.
      treatment: what the ratio does.
      bound: at least 1; infinity keeps all. Read by MASK and BOTH.
      weight_cap: above 0; infinity leaves the weights untruncated. Read by WEIGHT and BOTH.

    Returns:
      `Correction`. A token inside the mask whose logprob is missing or infinite (sampled outside the other's support) has no
      ratio: it is never kept, whatever the treatment.

    Raises:
      ValueError: shapes differ, or a bound given as a Python number is out of range.
    """
    check_token_arrays(proximal_logprobs=proximal_logprobs, sampler_logprobs=sampler_logprobs, mask=mask)
    if isinstance(bound, (int, float)) and not bound >= 1:
        raise ValueError(f"discrepancy bound is {bound}, wanted at least 1: the band is [1/bound, bound]; give the upper end")
    if isinstance(weight_cap, (int, float)) and not weight_cap > 0:
        raise ValueError(f"discrepancy weight cap is {weight_cap}, wanted above 0; give infinity for no cap")
    proximal_logprobs, sampler_logprobs = jax.lax.stop_gradient(
        (jnp.asarray(proximal_logprobs, jnp.float32), jnp.asarray(sampler_logprobs, jnp.float32))
    )
    exists = jnp.asarray(mask, bool) & jnp.isfinite(proximal_logprobs) & jnp.isfinite(sampler_logprobs)
    # Select before the arithmetic: inf - inf under the mask would be NaN, and NaN survives a product with 0.
    log_ratio = jnp.where(exists, proximal_logprobs, 0.0) - jnp.where(exists, sampler_logprobs, 0.0)
    log_ratio = jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    kept, weights = exists, jnp.ones_like(log_ratio)
    if treatment in (Discrepancy.MASK, Discrepancy.BOTH):
        kept = exists & (jnp.abs(log_ratio) <= jnp.log(jnp.asarray(bound, jnp.float32)))
    if treatment in (Discrepancy.WEIGHT, Discrepancy.BOTH):
        weights = jnp.where(exists, jnp.minimum(jnp.exp(log_ratio), weight_cap), 1.0)
    return Correction(weights=weights, kept=kept, log_ratio=log_ratio)
