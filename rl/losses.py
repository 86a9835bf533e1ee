"""The decoupled PPO loss: one ratio is clipped, the other filters, and they meet in the set of active tokens.

    discrepancy ratio  exp(proximal - sampler)   fixed; drops or weights a token                     rl/corrections.py
    staleness ratio    exp(logprobs - proximal)  differentiated; PPO clips it around the anchor      here

    objective = weight * min(staleness_ratio A, clip(staleness_ratio, 1 - clip_low, 1 + clip_high) A)
    loss      = -sum over kept tokens of row_weight * objective

Three rules keep the numbers honest. The denominator is global and counts the *original* mask: it is fixed before anything is
dropped (`row_weights`), each microbatch takes its rows of it, and losses and gradients add up exactly. So do metrics, which are
sums until the end (`combine_metrics`, `finalize_metrics`). And a value that does not exist is selected away before the
arithmetic, so nothing under the mask, infinite or NaN, can reach loss, metrics or gradient.
"""

import enum
import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from rl import corrections
from rl.corrections import LOG_RATIO_LIMIT, Correction, Discrepancy

Metrics = dict[str, jax.Array]


class Denominator(enum.Enum):
    """What the summed loss is divided by."""

    TOKENS = "tokens"  # every token weighs the same (DAPO, arXiv 2503.14476)
    SEQUENCES = "sequences"  # every non-empty row weighs the same: mean over its tokens, then over rows (GRPO, arXiv 2402.03300)
    CONSTANT = "constant"  # a constant the caller states, for instance rows times the largest length (Dr. GRPO, arXiv 2503.20783)


def row_weights(mask: jax.Array, *, denominator: Denominator, constant: float | None = None) -> jax.Array:
    """The weight in the loss of one token of each row, over a whole minibatch.

    With N tokens in the mask, n_b of them in row b, and S rows that are not empty: 1/N (TOKENS), 1/(S n_b) (SEQUENCES), or
    1/constant (CONSTANT). A microbatch uses its rows of the result, so any split gives the same sum.

    Args:
      mask: bool [B, T], the *original* mask of the minibatch. Tokens that the loss later drops stay counted, as in AReaL, so that
        dropping tokens makes the step smaller and not the remaining tokens heavier.
      denominator: the choice.
      constant: above 0; given with CONSTANT, and only then.

    Returns:
      float32 [B], finite also for an empty minibatch; with SEQUENCES 0 for an empty row.

    Raises:
      ValueError: `constant` is missing, superfluous or not above 0.
    """
    if (denominator is Denominator.CONSTANT) != (constant is not None):
        raise ValueError(f"denominator {denominator.value!r} got constant {constant}; give one with 'constant', and only then")
    if isinstance(constant, (int, float)) and not constant > 0:
        raise ValueError(f"denominator constant is {constant}, wanted above 0")
    num_row_tokens = jnp.sum(jnp.asarray(mask, bool), axis=1, dtype=jnp.int32)
    match denominator:
        case Denominator.TOKENS:
            return jnp.full(num_row_tokens.shape, _divide(1, jnp.sum(num_row_tokens)))
        case Denominator.SEQUENCES:
            num_rows = jnp.sum(num_row_tokens > 0, dtype=jnp.int32)
            return _divide(1, num_rows) * _divide(1, num_row_tokens)
        case Denominator.CONSTANT:
            return jnp.full(num_row_tokens.shape, 1 / jnp.asarray(constant, jnp.float32))


def decoupled_ppo_loss(
    logprobs: jax.Array,
    proximal_logprobs: jax.Array,
    sampler_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    discrepancy: Discrepancy = Discrepancy.MASK,
    discrepancy_bound: float = 2.0,
    weight_cap: float = 2.0,
    entropy: jax.Array | None = None,
    entropy_coefficient: float = 0.0,
    weights: jax.Array | None = None,
) -> tuple[jax.Array, Metrics]:
    """The decoupled PPO loss of one minibatch, to be minimised, and its metrics.

    Decoupled PPO: "Batch size-invariance for policy optimization", arXiv 2110.00641. The two constraints: "Missing Old
    Logits in Asynchronous Agentic RL", arXiv 2605.12070. `decoupled_ppo_terms` explains the arguments and what it raises.

    Args:
      weights: float32 [B] of `row_weights`; None is the mean over the tokens of this mask.

    Returns:
      The loss, a float32 scalar, and the metrics of `finalize_metrics`.
    """
    if weights is None:
        weights = row_weights(mask, denominator=Denominator.TOKENS)
    loss, sums = decoupled_ppo_terms(
        logprobs,
        proximal_logprobs,
        sampler_logprobs,
        advantages,
        mask,
        weights=weights,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        discrepancy=discrepancy,
        discrepancy_bound=discrepancy_bound,
        weight_cap=weight_cap,
        entropy=entropy,
        entropy_coefficient=entropy_coefficient,
    )
    return loss, finalize_metrics(sums)


def decoupled_ppo_terms(
    logprobs: jax.Array,
    proximal_logprobs: jax.Array,
    sampler_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    weights: jax.Array,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    discrepancy: Discrepancy = Discrepancy.MASK,
    discrepancy_bound: float = 2.0,
    weight_cap: float = 2.0,
    entropy: jax.Array | None = None,
    entropy_coefficient: float = 0.0,
) -> tuple[jax.Array, Metrics]:
    """One microbatch's share of the loss, and the sums its metrics are made of.

    Shares add up to the loss of the minibatch, and so do their gradients; sums go through `combine_metrics`. A token is dropped,
    and counted, if its discrepancy ratio is out of the band or one of its values is not finite. It then has no objective and no
    entropy bonus, and stays in the denominator. The gradient flows through `logprobs` and `entropy` alone.

    Args:
      logprobs: float [B, T], nats: the current policy.
      proximal_logprobs: float [B, T], nats: the anchor.
      sampler_logprobs: float [B, T], nats: the engine, at sampling time.
      advantages: float [B, T].
      mask: bool [B, T]: the trained tokens. Elsewhere the other arrays hold any value, NaN included.
      weights: float32 [B], these rows of `row_weights` of the minibatch.
      clip_low: the staleness ratio is clipped below at 1 - clip_low; in [0, 1].
      clip_high: the staleness ratio is clipped above at 1 + clip_high; at least 0.
      dual_clip: caps the loss of a token with negative advantage at dual_clip * |A| (arXiv 1912.09729); above 1.
      discrepancy: what the discrepancy ratio does; the weight multiplies after both clips.
      discrepancy_bound: see `corrections.discrepancy`.
      weight_cap: see `corrections.discrepancy`.
      entropy: float [B, T], nats, or None.
      entropy_coefficient: of the entropy bonus, which has the same weights as the objective; needs `entropy` unless 0.

    Returns:
      A float32 scalar and a dict of scalars.

    Raises:
      ValueError: shapes differ, or an option given as a Python number is out of range.
    """
    _check_options(clip_low, clip_high, dual_clip, entropy, entropy_coefficient)
    arrays = {"logprobs": logprobs, "proximal_logprobs": proximal_logprobs, "sampler_logprobs": sampler_logprobs}
    arrays |= {"advantages": advantages, "entropy": jnp.zeros_like(logprobs) if entropy is None else entropy}
    corrections.check_token_arrays(**arrays, mask=mask)
    if jnp.shape(weights) != jnp.shape(mask)[:1]:
        raise ValueError(f"weights have shape {jnp.shape(weights)}, wanted {jnp.shape(mask)[:1]}: one per row; slice row_weights")
    weights = jax.lax.stop_gradient(jnp.asarray(weights, jnp.float32))
    mask = jnp.asarray(mask, bool)
    finite, (logprobs, proximal, sampler, advantages, token_entropy) = _select_finite(mask, arrays.values())
    proximal, sampler, advantages = jax.lax.stop_gradient((proximal, sampler, advantages))
    correction = corrections.discrepancy(
        proximal, sampler, finite, treatment=discrepancy, bound=discrepancy_bound, weight_cap=weight_cap
    )
    log_staleness_ratio = jnp.clip(logprobs - proximal, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    objective, clipped, dual_clipped = clipped_objective(
        jnp.exp(log_staleness_ratio), advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    token_losses = -correction.weights * objective - entropy_coefficient * token_entropy
    loss = jnp.sum(jnp.where(correction.kept, weights[:, None] * token_losses, 0.0))
    counted = {
        "tokens": mask,
        "finite_tokens": finite,
        "kept_tokens": correction.kept,
        "clipped_tokens": clipped,  # the advantage is 0 where not finite, so neither clip counts such a token
        "dual_clipped_tokens": dual_clipped,
        "active_tokens": correction.kept & ~clipped,
    }
    sums = _metric_sums(counted, correction, log_staleness_ratio)
    if entropy is not None:
        sums["entropy_sum"] = jnp.sum(token_entropy)
    return loss, jax.lax.stop_gradient(sums)


def clipped_objective(
    staleness_ratio: jax.Array, advantages: jax.Array, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A); where A < 0 and dual_clip is given, at least dual_clip A.

    PPO, arXiv 1707.06347, equation 7, and dual clip, arXiv 1912.09729. The minimum is written as the choice it makes,
    so that a ratio exactly on the end of the band, such as 1 with clip_low = 0, has its whole gradient and not a share of a tie.

    Returns:
      The objective, float32 [B, T]; where the clip is active: A > 0 and ratio > 1 + clip_high, or A < 0 and ratio < 1 - clip_low;
      and where the dual clip is active: A < 0 and ratio > dual_clip. The gradient is 0 where either is.
    """
    clipped_ratio = jnp.clip(staleness_ratio, 1 - clip_low, 1 + clip_high)
    clipped = ((advantages > 0) & (staleness_ratio > 1 + clip_high)) | ((advantages < 0) & (staleness_ratio < 1 - clip_low))
    objective = jnp.where(clipped, clipped_ratio, staleness_ratio) * advantages
    if dual_clip is None:
        return objective, clipped, jnp.zeros_like(clipped)
    dual_clipped = (advantages < 0) & (staleness_ratio > dual_clip)
    return jnp.where(dual_clipped, dual_clip * advantages, objective), clipped, dual_clipped


def combine_metrics(sums: Metrics, other_sums: Metrics) -> Metrics:
    """The sums of two microbatches together. Those of an empty mask are neutral, so they can start an accumulation."""

    def combine(name: str) -> jax.Array:
        if name.endswith("_max"):
            return jnp.maximum(sums[name], other_sums[name])
        if name.endswith("_min"):
            return jnp.minimum(sums[name], other_sums[name])
        return sums[name] + other_sums[name]

    return {name: combine(name) for name in sums}


def finalize_metrics(sums: Metrics) -> Metrics:
    """Divides the sums of a minibatch. Float32 scalars; 0 where there is nothing to average.

    Fractions are of all tokens in the mask, dropped ones included:
      `clip_fraction`, `dual_clip_fraction`: the clip is active, for the sign of the advantage (`clipped_objective`).
      `discrepancy_masked_fraction`: dropped by the band. `nonfinite_fraction`: dropped for a value that is not finite.
      `active_fraction`: kept and not clipped, the rho of arXiv 2605.12070 that resets the EWMA anchor.
      `effective_sample_fraction`: (sum w)^2 / (N sum w^2), w the discrepancy weight, 0 where dropped.

    Means, and extremes, are over the finite tokens of the mask, dropped or not, in nats or as ratios:
      `discrepancy_kl`: mean(sampler - proximal), the k1 estimator of KL(sampler || proximal): the tokens come from the sampler.
      `staleness_kl`: mean(proximal - logprobs), the k1 estimator of KL(proximal || current), as far as the anchor sampled them.
      `discrepancy_kl_k3`, `staleness_kl_k3`: the same by k3 = ratio - 1 - log ratio, never negative and of less variance.
      `discrepancy_ratio_mean/max/min`, `staleness_ratio_mean/max/min`. `entropy`, if it was given.
    `discrepancy_weight_mean` is over the kept tokens. `tokens` is the number of tokens in the mask.
    """
    num_tokens, num_finite_tokens, weight_sum = sums["tokens"], sums["finite_tokens"], sums["weight_sum"]
    metrics = {
        "tokens": num_tokens.astype(jnp.float32),
        "clip_fraction": _divide(sums["clipped_tokens"], num_tokens),
        "dual_clip_fraction": _divide(sums["dual_clipped_tokens"], num_tokens),
        "discrepancy_masked_fraction": _divide(num_finite_tokens - sums["kept_tokens"], num_tokens),
        "nonfinite_fraction": _divide(num_tokens - num_finite_tokens, num_tokens),
        "active_fraction": _divide(sums["active_tokens"], num_tokens),
        "effective_sample_fraction": _divide(weight_sum * _divide(weight_sum, sums["weight_square_sum"]), num_tokens),
        "discrepancy_weight_mean": _divide(weight_sum, sums["kept_tokens"]),
    }
    if "entropy_sum" in sums:
        metrics["entropy"] = _divide(sums["entropy_sum"], num_finite_tokens)
    for name in ("discrepancy", "staleness"):
        metrics[f"{name}_kl"] = _divide(-sums[f"log_{name}_ratio_sum"], num_finite_tokens)
        metrics[f"{name}_kl_k3"] = _divide(sums[f"{name}_k3_sum"], num_finite_tokens)
        metrics[f"{name}_ratio_mean"] = _divide(sums[f"{name}_ratio_sum"], num_finite_tokens)
        for extreme in (f"{name}_ratio_max", f"{name}_ratio_min"):
            metrics[extreme] = jnp.where(num_finite_tokens > 0, sums[extreme], 0.0)
    return metrics


def _select_finite(mask: jax.Array, arrays: Iterable[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
    """The tokens of the mask whose every value is finite, and the arrays in float32 with 0 at the other tokens."""
    arrays = [jnp.asarray(array, jnp.float32) for array in arrays]
    finite = functools.reduce(jnp.logical_and, map(jnp.isfinite, arrays), mask)
    # Select before the arithmetic: after it, the gradient of a value that is selected away would still be 0 * inf = NaN.
    return finite, [jnp.where(finite, array, 0.0) for array in arrays]


def _metric_sums(counted: dict[str, jax.Array], correction: Correction, log_staleness_ratio: jax.Array) -> Metrics:
    finite = counted["finite_tokens"]
    sums = {name: jnp.sum(tokens, dtype=jnp.int32) for name, tokens in counted.items()}  # float32 counts stop at 2^24
    kept_weights = jnp.where(correction.kept, correction.weights, 0.0)
    sums |= {"weight_sum": jnp.sum(kept_weights), "weight_square_sum": jnp.sum(jnp.square(kept_weights))}
    for name, log_ratio in (("discrepancy", correction.log_ratio), ("staleness", log_staleness_ratio)):
        ratio = jnp.exp(log_ratio)
        sums[f"log_{name}_ratio_sum"] = jnp.sum(log_ratio)  # log ratios are 0 where not finite, and so is k3
        sums[f"{name}_k3_sum"] = jnp.sum(jnp.expm1(log_ratio) - log_ratio)
        sums[f"{name}_ratio_sum"] = jnp.sum(jnp.where(finite, ratio, 0.0))
        sums[f"{name}_ratio_max"] = jnp.max(jnp.where(finite, ratio, -jnp.inf))
        sums[f"{name}_ratio_min"] = jnp.min(jnp.where(finite, ratio, jnp.inf))
    return sums


def _divide(total: jax.Array | int, count: jax.Array) -> jax.Array:
    """total / count in float32, 0 where count is 0."""
    count = jnp.asarray(count, jnp.float32)
    return jnp.where(count > 0, jnp.asarray(total, jnp.float32) / jnp.where(count > 0, count, 1.0), 0.0)


def _check_options(
    clip_low: float, clip_high: float, dual_clip: float | None, entropy: jax.Array | None, entropy_coefficient: float
) -> None:
    """Python numbers only: a traced option cannot be read here."""
    if isinstance(clip_low, (int, float)) and not 0 <= clip_low <= 1:
        raise ValueError(f"clip_low is {clip_low}, wanted in [0, 1]: the staleness ratio is clipped below at 1 - clip_low")
    if isinstance(clip_high, (int, float)) and not clip_high >= 0:
        raise ValueError(f"clip_high is {clip_high}, wanted at least 0: the staleness ratio is clipped above at 1 + clip_high")
    if isinstance(dual_clip, (int, float)) and not dual_clip > 1:
        raise ValueError(f"dual_clip is {dual_clip}, wanted above 1, such as 3; None turns it off")
    if entropy is None and isinstance(entropy_coefficient, (int, float)) and entropy_coefficient != 0:
        raise ValueError(f"entropy_coefficient is {entropy_coefficient} but entropy is None; pass the entropy that score returns")
