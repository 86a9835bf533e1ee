"""Returns and value targets of single tokens: what followed a token, discounted, and how much of it a value function expected.

For methods with a critic, with rewards inside an episode, or with turns as steps. Nearly all of it is one recurrence, from the
last token to the first:

    x(t) = gain(t) + decay(t) x(t + 1)

A step is a token of the policy. What the environment wrote in between is no step: it is jumped over, discounts nothing and has
no value, so a token's successor is the next token in the mask (gain 0, decay 1 outside it). `ends` cuts the recurrence (decay 0).

Everything is computed in float32, or in float64 where an array [B, T] is float64. Nothing is differentiated: these are targets.
Outside the mask the arguments hold any value at all, NaN included, and the results are 0.
"""

import jax
import jax.numpy as jnp

from rl.ratios import check_token_arrays


def discounted_returns(rewards: jax.Array, mask: jax.Array, *, discount: jax.typing.ArrayLike) -> jax.Array:
    """The reward from each token on, discounted per token (REINFORCE++, arXiv 2501.03262, section 3.1).

    Args:
      rewards: float [B, T]; an outcome reward stands at the last token of the mask.
      mask: bool [B, T].
      discount: within [0, 1].

    Returns:
      float [B, T], 0 outside the mask.

    Raises:
      ValueError: shapes differ.
    """
    check_token_arrays(rewards=rewards, mask=mask)
    (rewards,), mask, dtype = _prepared([rewards], mask)
    return jnp.where(mask, _recurrence(rewards, jnp.where(mask, jnp.asarray(discount, dtype), 1)), 0)


def segment_returns(rewards: jax.Array, mask: jax.Array, *, discount: jax.typing.ArrayLike) -> jax.Array:
    """One return for all tokens of a turn, discounted per turn (IPA, "Let It Flow", arXiv 2512.24873).

    A turn is a maximal run of the mask. Its return is the reward at its last token plus the discounted return of the next turn;
    rewards at its other tokens are not read.

    Args, returns, raises: as `discounted_returns`.
    """
    check_token_arrays(rewards=rewards, mask=mask)
    (rewards,), mask, dtype = _prepared([rewards], mask)
    last = mask & ~_shifted(mask, jnp.zeros(mask.shape[0], bool))
    returns = _recurrence(jnp.where(last, rewards, 0), jnp.where(last, jnp.asarray(discount, dtype), 1))
    return jnp.where(mask, returns, 0)


def temporal_differences(
    rewards: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    *,
    discount: jax.typing.ArrayLike,
    targets: jax.Array | None = None,
    final_values: jax.Array | None = None,
    ends: jax.Array | None = None,
) -> jax.Array:
    """reward + discount * what comes next - value: what a token brought beyond what was expected before it.

    With `targets` of `vtrace_targets` or `brace_targets` for what comes next, these are the advantages of those methods.

    Args:
      rewards: float [B, T].
      values: float [B, T], the value of the state in which the token was sampled.
      mask: bool [B, T].
      discount: within [0, 1].
      targets: float [B, T], takes the place of the next token's value; None stands for `values`.
      final_values: float [B], what comes after the last token; None: 0, the episode is over.
      ends: bool [B, T]: an episode ends here, at a token of the mask or between two, and what follows belongs to another one.
        None: a row holds one episode.

    Returns:
      float [B, T], 0 outside the mask.

    Raises:
      ValueError: shapes differ.
    """
    targets = values if targets is None else targets
    ends = jnp.zeros(jnp.shape(mask), bool) if ends is None else jnp.asarray(ends, bool)
    check_token_arrays(rewards=rewards, values=values, mask=mask, targets=targets, ends=ends)
    (rewards, values, targets), mask, dtype = _prepared([rewards, values, targets], mask)
    final_values = _of_rows(final_values, mask, dtype)
    from_here = _recurrence(targets, jnp.where(mask | ends, 0, jnp.ones((), dtype)), final_values)
    following = jnp.where(ends, 0, _shifted(from_here, final_values))
    return jnp.where(mask, rewards + jnp.asarray(discount, dtype) * following - values, 0)


def generalized_advantages(
    rewards: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    *,
    discount: jax.typing.ArrayLike,
    trace_decay: jax.typing.ArrayLike,
    final_values: jax.Array | None = None,
    ends: jax.Array | None = None,
) -> jax.Array:
    """Generalised advantage estimation (arXiv 1506.02438, section 3): a discounted sum of temporal differences.

    Args:
      trace_decay: lambda, within [0, 1]; 0 trusts the values, 1 the rewards.
      others: as `temporal_differences`.

    Returns:
      float [B, T], 0 outside the mask. Added to the values they are the targets of the value function.

    Raises:
      ValueError: shapes differ.
    """
    differences = temporal_differences(rewards, values, mask, discount=discount, final_values=final_values, ends=ends)
    return _traced(differences, mask, discount, trace_decay, ends)


def vtrace_targets(
    rewards: jax.Array,
    values: jax.Array,
    mask: jax.Array,
    *,
    log_ratios: jax.Array,
    discount: jax.typing.ArrayLike,
    trace_decay: jax.typing.ArrayLike = 1.0,
    weight_cap: jax.typing.ArrayLike = 1.0,
    trace_cap: jax.typing.ArrayLike = 1.0,
    final_values: jax.Array | None = None,
    ends: jax.Array | None = None,
) -> jax.Array:
    """Targets of the value function from tokens of another policy: V-trace (IMPALA, arXiv 1802.01561, section 4.1).

        target(t) = value(t) + weight(t) difference(t) + discount trace(t) (target(t + 1) - value(t + 1))

    with weight = min(weight_cap, ratio), trace = trace_decay min(trace_cap, ratio). A policy gradient uses the temporal
    differences towards the targets, times the weight.

    Args:
      log_ratios: float [B, T], nats, log of policy / sampler.
      trace_decay: lambda, within [0, 1].
      weight_cap: rho bar, above 0: the policy whose values are estimated; infinity means the policy itself.
      trace_cap: c bar, above 0: how far corrections are carried back.
      others: as `temporal_differences`.

    Returns:
      float [B, T], 0 outside the mask.

    Raises:
      ValueError: shapes differ.
    """
    check_token_arrays(rewards=rewards, values=values, mask=mask, log_ratios=log_ratios)
    (rewards, values, log_ratios), mask, dtype = _prepared([rewards, values, log_ratios], mask)
    differences = temporal_differences(rewards, values, mask, discount=discount, final_values=final_values, ends=ends)
    weights, traces = _weights_and_traces(log_ratios, weight_cap, trace_cap, trace_decay)
    return jnp.where(mask, values + _traced(weights * differences, mask, discount, traces, ends), 0)


def brace_targets(
    values: jax.Array,
    log_ratios: jax.Array,
    mask: jax.Array,
    *,
    outcomes: jax.Array,
    window: int,
    discount: jax.typing.ArrayLike,
    trace_decay: jax.typing.ArrayLike = 1.0,
    weight_cap: jax.typing.ArrayLike = 1.2,
    trace_cap: jax.typing.ArrayLike = 1.1,
    final_values: jax.Array | None = None,
) -> jax.Array:
    """Targets of the value function from an outcome, corrected over a window of tokens of another policy (BRACE).

    arXiv 2609.09783. V-trace multiplies the outcome by a ratio for every token before it, and little of it is left after a few
    hundred. BRACE stops after `window` tokens and takes the outcome itself from there on:

        y(s, 0) = discount^(n - s) outcome - value(s)
        y(s, k) = weight(s) difference(s) + discount trace(s) y(s + 1, k - 1)        target(s) = value(s) + y(s, window)

    over the n tokens of the mask, with weights and traces as in `vtrace_targets`. The outcome arrives after the last token, in a
    state of its own (s = n), where it is not weighted. A window of 0 gives the discounted outcome; one of n tokens or more gives
    V-trace over n + 1 steps, the last of which has a ratio of 1 and the outcome as its reward.

    Args:
      values: float [B, T].
      log_ratios: float [B, T], nats, log of policy / sampler.
      mask: bool [B, T].
      outcomes: float [B], the reward of the episode.
      window: tokens of the mask, at least 0; a Python integer, since it is a number of iterations.
      discount: within [0, 1], per token of the mask.
      trace_decay: lambda, within [0, 1].
      weight_cap: rho bar, above 0.
      trace_cap: c bar, above 0.
      final_values: float [B], the value of the state after the last token; None: 0.

    Returns:
      float [B, T], 0 outside the mask.

    Raises:
      ValueError: shapes differ, or the window is negative.
    """
    check_token_arrays(values=values, log_ratios=log_ratios, mask=mask)
    if not window >= 0:
        raise ValueError(f"BRACE window is {window}, wanted at least 0 tokens")
    (values, log_ratios), mask, dtype = _prepared([values, log_ratios], mask)
    discount = jnp.asarray(discount, dtype)
    outcomes, final_values = (_of_rows(array, mask, dtype)[:, None] for array in (outcomes, final_values))
    # Tokens of the mask move to the front, so that a token's successor is its neighbour and the window counts only them.
    order = jnp.argsort(~mask, axis=1, stable=True)
    num_tokens = jnp.sum(mask, axis=1, keepdims=True, dtype=jnp.int32)
    left = jnp.maximum(num_tokens - jnp.arange(mask.shape[1], dtype=jnp.int32)[None], 0)
    packed_values = jnp.where(left > 0, jnp.take_along_axis(values, order, axis=1), final_values)
    ratios = jnp.take_along_axis(log_ratios, order, axis=1)
    weights, traces = _weights_and_traces(ratios, weight_cap, trace_cap, trace_decay)
    differences = weights * (discount * _shifted(packed_values, final_values[:, 0]) - packed_values)
    surprise = outcomes - final_values  # y in the last state, whatever the window
    gains, decays = jnp.where(left > 0, differences, surprise), jnp.where(left > 0, discount * traces, 0)
    corrections = jax.lax.fori_loop(
        0,
        min(window, mask.shape[1]),
        lambda _, following: gains + decays * _shifted(following, surprise[:, 0]),
        discount ** left.astype(dtype) * outcomes - packed_values,
    )
    places = jnp.maximum(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0)
    return jnp.where(mask, values + jnp.take_along_axis(corrections, places, axis=1), 0)


def whiten(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Values minus their mean over the mask, divided by sqrt(variance + 1e-8); the variance is over the N tokens minus 1.

    Args:
      values: float [B, T].
      mask: bool [B, T].

    Returns:
      float [B, T], 0 outside the mask.

    Raises:
      ValueError: shapes differ.
    """
    check_token_arrays(values=values, mask=mask)
    (values,), mask, dtype = _prepared([values], mask)
    num_tokens = jnp.sum(mask, dtype=jnp.int32).astype(dtype)
    centered = jnp.where(mask, values - jnp.sum(values) / jnp.maximum(num_tokens, 1), 0)
    return centered / jnp.sqrt(jnp.sum(centered**2) / jnp.maximum(num_tokens - 1, 1) + 1e-8)


def _prepared(arrays: list[jax.Array], mask: jax.Array) -> tuple[list[jax.Array], jax.Array, jnp.dtype]:
    """The arrays in one dtype, 0 outside the mask: selected before any arithmetic, for NaN survives a product with 0."""
    mask, arrays = jnp.asarray(mask, bool), [jnp.asarray(array) for array in arrays]
    dtype = jnp.dtype(jnp.float64 if any(array.dtype == jnp.float64 for array in arrays) else jnp.float32)
    return [jax.lax.stop_gradient(jnp.where(mask, array.astype(dtype), 0)) for array in arrays], mask, dtype


def _of_rows(array: jax.Array | None, mask: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """One number a row, [B]; None stands for 0."""
    return jnp.zeros(mask.shape[0], dtype) if array is None else jax.lax.stop_gradient(jnp.asarray(array, dtype))


def _recurrence(gains: jax.Array, decays: jax.Array, beyond: jax.Array | None = None) -> jax.Array:
    """x(t) = gains(t) + decays(t) x(t + 1) along rows [B, T], where x(T) is `beyond` [B], or 0."""

    def step(following, column):
        gain, decay = column
        here = gain + decay * following
        return here, here

    beyond = jnp.zeros_like(gains[:, 0]) if beyond is None else beyond
    return jax.lax.scan(step, beyond, (gains.T, decays.T), reverse=True)[1].T


def _shifted(rows: jax.Array, beyond: jax.Array) -> jax.Array:
    """Each entry's right neighbour; `beyond` [B] stands after the last."""
    return jnp.concatenate([rows[:, 1:], beyond[:, None]], axis=1)


def _traced(differences, mask, discount, trace_decay, ends) -> jax.Array:
    """The sum of the differences [B, T] from each token on, carried back by discount * trace_decay, [B, T] or a number."""
    mask, dtype = jnp.asarray(mask, bool), differences.dtype
    decays = jnp.where(mask, jnp.asarray(discount, dtype) * jnp.asarray(trace_decay, dtype), 1)
    decays = decays if ends is None else jnp.where(ends, 0, decays)
    return jnp.where(mask, _recurrence(differences, decays), 0)


def _weights_and_traces(log_ratios, weight_cap, trace_cap, trace_decay) -> tuple[jax.Array, jax.Array]:
    """rho and c of V-trace, each [B, T]; capped before the exponential, so that nothing overflows."""
    dtype = log_ratios.dtype
    weights = jnp.exp(jnp.minimum(log_ratios, jnp.log(jnp.asarray(weight_cap, dtype))))
    traces = jnp.exp(jnp.minimum(log_ratios, jnp.log(jnp.asarray(trace_cap, dtype))))
    return weights, jnp.asarray(trace_decay, dtype) * traces
