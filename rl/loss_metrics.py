"""Metrics of the loss: sums over tokens until the end, so that microbatches, devices and padding do not change them."""

import jax
import jax.numpy as jnp

from rl.corrections import Correction
from rl.ratios import clamp, divide

Metrics = dict[str, jax.Array]


def metric_sums(counted: dict[str, jax.Array], correction: Correction, staleness_log_ratio: jax.Array) -> Metrics:
    """Sums over the tokens of a microbatch.

    Args:
      counted: bool [B, T] each; their numbers are kept by name.
      correction: weights, kept tokens and the discrepancy's log ratio.
      staleness_log_ratio: float [B, T] nats, current - proximal; 0 where it does not exist, as the other.
    """
    finite = counted["finite_tokens"]
    sums = {name: jnp.sum(tokens, dtype=jnp.int32) for name, tokens in counted.items()}  # float32 counts stop at 2^24
    kept_weights = jnp.where(correction.kept, correction.weights, 0)
    sums |= {"weight_sum": jnp.sum(kept_weights), "weight_square_sum": jnp.sum(jnp.square(kept_weights)),
             "weight_max": jnp.max(kept_weights)}  # fmt: skip
    for name, raw in (("discrepancy", correction.log_ratio), ("staleness", staleness_log_ratio)):
        log_ratio = clamp(raw)
        ratio = jnp.exp(log_ratio)
        sums[f"log_{name}_ratio_sum"] = jnp.sum(log_ratio)  # log ratios are 0 where not finite, and so is k3
        sums[f"{name}_k3_sum"] = jnp.sum(jnp.expm1(log_ratio) - log_ratio)
        sums[f"{name}_ratio_sum"] = jnp.sum(jnp.where(finite, ratio, 0))
        sums[f"{name}_ratio_max"] = jnp.max(jnp.where(finite, ratio, -jnp.inf))
        sums[f"{name}_ratio_min"] = jnp.min(jnp.where(finite, ratio, jnp.inf))
        sums[f"{name}_log_ratio_max"] = jnp.max(jnp.where(finite, raw, -jnp.inf))
        sums[f"{name}_log_ratio_min"] = jnp.min(jnp.where(finite, raw, jnp.inf))
    return sums


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
      `clip_fraction`, `dual_clip_fraction`: a bound of the surrogate is active, for the sign of the advantage.
      `discrepancy_masked_fraction`: dropped by the corrections. `nonfinite_fraction`: dropped for a value that is not finite.
      `kept_fraction`: neither. `active_fraction`: kept and not clipped, the rho of arXiv 2605.12070 that resets the EWMA anchor.
      `effective_sample_fraction`: (sum w)^2 / (N sum w^2), w the correction's weight, 0 where dropped.

    Means, and extremes, are over the finite tokens of the mask, dropped or not, in nats or as ratios:
      `discrepancy_kl`: mean(sampler - proximal), the k1 estimator of KL(sampler || proximal): the tokens come from the sampler.
      `staleness_kl`: mean(proximal - logprobs), the k1 estimator of KL(proximal || current), as far as the anchor sampled them.
      `discrepancy_kl_k3`, `staleness_kl_k3`: the same by k3 = ratio - 1 - log ratio, never negative and of less variance.
      `discrepancy_ratio_mean/max/min`, `staleness_ratio_mean/max/min`: of token ratios within exp(+-20).
      `discrepancy_log_ratio_max/min`, `staleness_log_ratio_max/min`: nats, before any clamp.
      `entropy`, `reference_kl`, if they were given.
    `discrepancy_weight_mean` is over the kept tokens, `discrepancy_weight_max` the largest. `tokens`: how many are in the mask.
    """
    num_tokens, num_finite_tokens, weight_sum = sums["tokens"], sums["finite_tokens"], sums["weight_sum"]
    metrics = {
        "tokens": num_tokens.astype(jnp.float32),
        "clip_fraction": divide(sums["clipped_tokens"], num_tokens),
        "dual_clip_fraction": divide(sums["dual_clipped_tokens"], num_tokens),
        "discrepancy_masked_fraction": divide(num_finite_tokens - sums["kept_tokens"], num_tokens),
        "nonfinite_fraction": divide(num_tokens - num_finite_tokens, num_tokens),
        "kept_fraction": divide(sums["kept_tokens"], num_tokens),
        "active_fraction": divide(sums["active_tokens"], num_tokens),
        "effective_sample_fraction": divide(weight_sum * divide(weight_sum, sums["weight_square_sum"]), num_tokens),
        "discrepancy_weight_mean": divide(weight_sum, sums["kept_tokens"]),
        "discrepancy_weight_max": sums["weight_max"],
    }
    for name in ("entropy", "reference_kl"):
        if f"{name}_sum" in sums:
            metrics[name] = divide(sums[f"{name}_sum"], num_finite_tokens)
    for name in ("discrepancy", "staleness"):
        metrics[f"{name}_kl"] = divide(-sums[f"log_{name}_ratio_sum"], num_finite_tokens)
        metrics[f"{name}_kl_k3"] = divide(sums[f"{name}_k3_sum"], num_finite_tokens)
        metrics[f"{name}_ratio_mean"] = divide(sums[f"{name}_ratio_sum"], num_finite_tokens)
        for extreme in ("ratio_max", "ratio_min", "log_ratio_max", "log_ratio_min"):
            metrics[f"{name}_{extreme}"] = jnp.where(num_finite_tokens > 0, sums[f"{name}_{extreme}"], 0)
    return metrics
