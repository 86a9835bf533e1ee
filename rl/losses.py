"""The loss of an objective: every trained token's share, summed under one global denominator.

    objective = weight * surrogate(ratio, A)                                          rl/corrections.py, rl/surrogates.py
    loss      = -sum over kept tokens of row_weight * (objective + entropy bonus)
                + sum over trained tokens of row_weight * penalties

In decoupled PPO, where it all began, the discrepancy ratio exp(proximal - sampler) is fixed and drops or weights a token, the
staleness ratio exp(logprobs - proximal) is differentiated and clipped, and they meet in the set of active tokens.

Three rules keep the numbers honest, whatever the objective. The denominator is global and fixed before the minibatch is split
(`rl/denominators.py`), and so is what else a token needs to know of the minibatch (`minibatch_statistics`): each microbatch takes
its rows of both, and losses and gradients add up exactly. So do metrics (`rl/loss_metrics.py`). And a
value that does not exist is selected away before the arithmetic, so nothing under the mask, infinite or NaN, can reach loss,
metrics or gradient.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rl import corrections, surrogates
from rl.corrections import Correction, CorrectionOptions, Discrepancy, Policies
from rl.denominators import CONSTANT_DENOMINATORS, row_weights
from rl.gates import Tokens
from rl.loss_metrics import Metrics, finalize_metrics, metric_sums
from rl.objective import KlEstimator, Objective
from rl.ratios import Level, check_token_arrays, clamp, difference, is_number, magnitude, pool, select_finite

LOGPROB_LIMIT = 1e6
"""Nats beyond which a logprob says nothing more; a sum of the largest float32 numbers would be infinite."""


class LossInputs(NamedTuple):
    """Tokens of a minibatch or of some of its rows; each [B, T]. Where `mask` is False they hold any value, NaN included."""

    logprobs: jax.Array  # float nats: the current policy; differentiated
    proximal_logprobs: jax.Array  # float nats: the anchor
    sampler_logprobs: jax.Array  # float nats: the engine, at sampling time
    advantages: jax.Array  # float
    mask: jax.Array  # bool: the trained tokens
    entropy: jax.Array | None = None  # float nats: of the current policy; differentiated
    reference_logprobs: jax.Array | None = None  # float nats: for the KL penalty


class MinibatchStatistics(NamedTuple):
    """What a token's share depends on beyond its own row; arrays [B, ...], of which a microbatch takes its rows."""

    correction: corrections.CorrectionStatistics
    surrogate: surrogates.BatchStatistics | None
    kept: jax.Array  # bool [B, T]: for denominators that count the kept tokens


class TokenLosses(NamedTuple):
    """The loss before it is summed, and what it is made of; each [B, T]."""

    losses: jax.Array  # of the objective and the entropy bonus, 0 where not kept, and of the penalties, 0 where not finite
    finite: jax.Array  # bool: in the mask, with finite values
    correction: Correction
    outcome: surrogates.Outcome
    staleness_log_ratio: jax.Array  # nats, current - proximal
    penalty: jax.Array  # of the KL divergence from the reference, before its coefficient


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
    Logits in Asynchronous Agentic RL", arXiv 2605.12070.

    Args:
      logprobs, proximal_logprobs, sampler_logprobs, advantages, mask, entropy: as in `LossInputs`.
      clip_low, clip_high, dual_clip: of `surrogates.Clip`, on the staleness ratio.
      discrepancy, discrepancy_bound, weight_cap: of `corrections.discrepancy`.
      entropy_coefficient: of the entropy bonus, which has the same weights as the objective; needs `entropy` unless 0.
      weights: float32 [B] of `row_weights`; None is the mean over the tokens of this mask.

    Returns:
      The loss, a float32 scalar, and the metrics of `finalize_metrics`.

    Raises:
      ValueError: shapes differ, or an option given as a Python number is out of range.
    """
    objective = Objective(
        surrogate=surrogates.Clip(clip_low, clip_high, dual_clip),
        correction=CorrectionOptions(discrepancy=discrepancy, discrepancy_bound=discrepancy_bound, weight_cap=weight_cap),
        entropy_coefficient=entropy_coefficient,
    )
    return objective_loss(
        objective, LossInputs(logprobs, proximal_logprobs, sampler_logprobs, advantages, mask, entropy), weights=weights
    )


def objective_loss(objective: Objective, inputs: LossInputs, *, weights: jax.Array | None = None) -> tuple[jax.Array, Metrics]:
    """The loss of one whole minibatch, to be minimised, and its metrics.

    Args:
      objective: the method.
      inputs: all of the minibatch.
      weights: float32 [B], one a token of each row; None: by the objective's denominator, with T as the default of its constant.
    """
    statistics = minibatch_statistics(objective, inputs)
    if weights is None:
        weights = denominator_weights(objective, inputs.mask, statistics, longest=inputs.mask.shape[1])
    loss, sums = loss_terms(objective, inputs, weights=weights, statistics=statistics)
    return loss, finalize_metrics(sums)


def denominator_weights(
    objective: Objective, mask: jax.Array, statistics: MinibatchStatistics | None, *, longest: int
) -> jax.Array:
    """`row_weights` of a minibatch, as the objective counts; `longest` stands in for a constant that it does not state."""
    constant = objective.denominator_constant
    if constant is None and objective.denominator in CONSTANT_DENOMINATORS:
        constant = longest
    return row_weights(statistics.kept if objective.count_kept else mask, denominator=objective.denominator, constant=constant)


def loss_terms(
    objective: Objective, inputs: LossInputs, *, weights: jax.Array, statistics: MinibatchStatistics | None
) -> tuple[jax.Array, Metrics]:
    """One microbatch's share of the loss, and the sums its metrics are made of.

    Shares add up to the loss of the minibatch, and so do their gradients; sums go through `combine_metrics`. A token is dropped,
    and counted, if a correction drops it or one of its values is not finite. It then has no objective and no entropy bonus, and
    stays in the denominator. The gradient flows through `logprobs` and `entropy` alone.

    Args:
      objective: the method.
      inputs: rows of a minibatch.
      weights: float32 [B], these rows' weights, of the minibatch.
      statistics: these rows' part of the `minibatch_statistics`.

    Returns:
      A float32 scalar and a dict of scalars.

    Raises:
      ValueError: shapes differ, or an option given as a Python number is out of range.
    """
    if jnp.shape(weights) != jnp.shape(inputs.mask)[:1]:
        raise ValueError(f"weights have shape {jnp.shape(weights)}, wanted {jnp.shape(inputs.mask)[:1]}: one per row; slice "
                         "row_weights")
    weights = jax.lax.stop_gradient(jnp.asarray(weights))
    tokens = token_losses(objective, inputs, statistics)
    loss = jnp.sum(weights.astype(tokens.losses.dtype)[:, None] * tokens.losses)
    kept = tokens.correction.kept
    counted = {
        "tokens": jnp.asarray(inputs.mask, bool),
        "finite_tokens": tokens.finite,
        "kept_tokens": kept,
        "clipped_tokens": tokens.finite & tokens.outcome.clipped,
        "dual_clipped_tokens": tokens.finite & tokens.outcome.dual_clipped,
        "active_tokens": kept & ~tokens.outcome.inactive,
    }
    sums = metric_sums(counted, tokens.correction, tokens.staleness_log_ratio)
    if inputs.entropy is not None:
        sums["entropy_sum"] = jnp.sum(jnp.where(tokens.finite, inputs.entropy, 0))
    if objective.needs_reference:
        sums["reference_kl_sum"] = jnp.sum(tokens.penalty)
    return loss, jax.lax.stop_gradient(sums)


def token_losses(objective: Objective, inputs: LossInputs, statistics: MinibatchStatistics | None) -> TokenLosses:
    """Each token's loss, before weights and sum; see `loss_terms`."""
    finite, arrays = _existing(objective, inputs)
    correction = _correct(objective, arrays, finite, statistics and statistics.correction)
    tokens = _tokens(objective, arrays, correction.kept)
    if statistics is None and objective.surrogate_needs_batch:
        raise ValueError(f"{type(objective.surrogate).__name__} depends on the whole minibatch; give minibatch_statistics of it")
    outcome = objective.surrogate(tokens, statistics and statistics.surrogate)
    gain = correction.weights * outcome.objective + objective.entropy_coefficient * arrays.entropy
    losses = jnp.where(correction.kept, -gain, 0)
    if objective.anchor_penalty:
        squares = jnp.square(_token_log_ratio(objective, arrays))
        losses += jnp.where(finite, objective.anchor_penalty / 2 * squares, 0)
    penalty = jnp.zeros_like(losses)
    if objective.needs_reference:
        penalty = kl_penalty(
            arrays.logprobs, arrays.reference_logprobs, estimator=objective.kl_estimator, k2_gradient=objective.kl_k2_gradient
        )
        penalty = jnp.where(finite, penalty, 0)
        losses += objective.kl_coefficient * penalty
    staleness = difference(jax.lax.stop_gradient(arrays.logprobs), arrays.proximal_logprobs)
    return TokenLosses(losses, finite, correction, outcome, staleness, penalty)


def minibatch_statistics(objective: Objective, inputs: LossInputs) -> MinibatchStatistics | None:
    """What a token's share depends on beyond its own row, from all rows of a minibatch; None where it depends on nothing."""
    if not objective.needs_batch:
        return None
    finite, arrays = _existing(objective, jax.lax.stop_gradient(inputs))
    statistics = corrections.correction_statistics(_policies(arrays, finite), objective.correction)
    kept = _correct(objective, arrays, finite, statistics).kept
    surrogate = objective.surrogate.statistics(_tokens(objective, arrays, kept)) if objective.surrogate_needs_batch else None
    return MinibatchStatistics(statistics, surrogate, kept)


def kl_penalty(
    logprobs: jax.Array, reference_logprobs: jax.Array, *, estimator: KlEstimator, k2_gradient: bool = False
) -> jax.Array:
    """An estimate of the KL divergence from a reference policy, token by token; float [B, T], nats.

    "Approximating KL Divergence", Schulman 2020; d = logprobs - reference. As a penalty on the policy's own tokens, K1 has the
    expected gradient 0, K2 that of KL(current || reference), and K3 that of KL(reference || current). K3 is cut at 10, as in
    verl, and its exponent at 20.

    Args:
      logprobs, reference_logprobs: float [B, T], nats.
      estimator: the choice.
      k2_gradient: the value of `estimator` with the gradient of K2.
    """
    log_ratio = difference(logprobs, reference_logprobs)
    k2 = jnp.square(log_ratio) / 2
    match estimator:
        case KlEstimator.K1:
            value = log_ratio
        case KlEstimator.ABSOLUTE:
            value = magnitude(log_ratio)
        case KlEstimator.K2:
            value = k2
        case KlEstimator.K3:
            reverse = clamp(-log_ratio)
            value = jnp.clip(jnp.expm1(reverse) - reverse, -10, 10)
    return jax.lax.stop_gradient(value - k2) + k2 if k2_gradient else value


def _existing(objective: Objective, inputs: LossInputs) -> tuple[jax.Array, LossInputs]:
    """The tokens of the mask that have every value, and all arrays with 0 at the others, detached as they must be."""
    objective.check()
    zeros = jnp.zeros_like(inputs.logprobs)
    if inputs.entropy is None and is_number(objective.entropy_coefficient) and objective.entropy_coefficient != 0:
        raise ValueError(f"entropy_coefficient is {objective.entropy_coefficient} but entropy is None; pass the entropy that "
                         "score returns")
    if inputs.entropy is None and objective.correction.entropy_normalized_bound is not None:
        raise ValueError("entropy_normalized_bound wants the entropy, got None; pass the entropy that score returns")
    if inputs.reference_logprobs is None and objective.needs_reference:
        raise ValueError(f"kl_coefficient is {objective.kl_coefficient} but reference_logprobs is None; score the reference")
    given = {name: zeros if array is None else array for name, array in inputs._asdict().items()}
    check_token_arrays(**given)
    mask = given.pop("mask")
    finite, selected = select_finite(mask, given.values())
    arrays = LossInputs(mask=jnp.asarray(mask, bool), **dict(zip(given, selected, strict=True)))
    detach = jax.lax.stop_gradient
    return finite, arrays._replace(
        logprobs=clamp(arrays.logprobs, LOGPROB_LIMIT),
        proximal_logprobs=detach(arrays.proximal_logprobs),
        sampler_logprobs=detach(arrays.sampler_logprobs),
        advantages=detach(arrays.advantages),
        reference_logprobs=detach(arrays.reference_logprobs),
    )


def _policies(arrays: LossInputs, finite: jax.Array) -> Policies:
    return Policies(jax.lax.stop_gradient(arrays.logprobs), arrays.proximal_logprobs, arrays.sampler_logprobs, finite)


def _correct(
    objective: Objective, arrays: LossInputs, finite: jax.Array, statistics: corrections.CorrectionStatistics | None
) -> Correction:
    entropy = jax.lax.stop_gradient(arrays.entropy)
    return corrections.correct(_policies(arrays, finite), arrays.advantages, entropy, objective.correction, statistics)


def _tokens(objective: Objective, arrays: LossInputs, kept: jax.Array) -> Tokens:
    advantages, logprobs, log_ratio = arrays.advantages, arrays.logprobs, _token_log_ratio(objective, arrays)
    if objective.ratio_level is not Level.TOKEN:
        log_ratio = clamp(pool(log_ratio, kept, objective.ratio_level, runs=arrays.mask), objective.log_ratio_limit)
        if objective.token_gradient:
            log_ratio = jax.lax.stop_gradient(log_ratio) + (logprobs - jax.lax.stop_gradient(logprobs))
        else:
            level = Level.SEGMENT if objective.ratio_level is Level.SEGMENT else Level.GEOMETRIC
            advantages = pool(advantages, kept, level, runs=arrays.mask)
    return Tokens(logprobs, log_ratio, advantages, arrays.proximal_logprobs, arrays.sampler_logprobs, kept)


def _token_log_ratio(objective: Objective, arrays: LossInputs) -> jax.Array:
    anchor = objective.ratio_anchor.among(proximal=arrays.proximal_logprobs, sampler=arrays.sampler_logprobs)
    return clamp(difference(arrays.logprobs, anchor), objective.log_ratio_limit)
