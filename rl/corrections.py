"""Corrections: which trained tokens leave the loss, and what weighs the rest, for what their policies say of each other.

    discrepancy ratio = exp(proximal logprob - sampler logprob)

With an exact anchor both speak of the same policy version, so the ratio measures numerics alone: it should be 1, and a token far
from 1 on either side is unreliable. That asks for a band symmetric around 1 (in log space), whatever the sign of the advantage,
unlike the PPO clip of the staleness ratio. With an approximate anchor the ratio also holds policy lag, and the two bounds tangle;
comparing the two is what this code base is for (arXiv 2605.12070, "Missing Old Logits in Asynchronous Agentic RL").

The ratio may drop a token (a mask), weight it (truncated importance sampling), or both. The paper leaves open which one its runs
use, so it is an option. `correct` puts it together with the filters of other methods; each of those is a function of its own over
arrays [B, T], and a token stays if none of them drops it.

A token of the mask whose logprob is missing or infinite (sampled outside the other's support) has no ratio. It is dropped, it
weighs 1, and nothing that is taken over its row counts it: no mean, no sum, no veto. It also ends a segment.
"""

import dataclasses
import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rl.ratios import (
    Level,
    as_float,
    check_token_arrays,
    clamp,
    difference,
    divide,
    is_number,
    pool,
    ranks,
    select_finite,
)


class Discrepancy(enum.Enum):
    """What the discrepancy ratio does to a token."""

    NONE = "none"  # nothing
    MASK = "mask"  # drops it outside the band [low, bound]
    WEIGHT = "weight"  # weights it by min(ratio, weight_cap)
    BOTH = "both"  # drops it outside the band, weights it inside


class Statistic(enum.Enum):
    """What a rejection looks at; y is the log ratio of a token, sampled by the denominator of the ratio."""

    RATIO = "ratio"  # exp(y), pooled as y: the product of a sequence, the geometric mean of a row
    K1 = "k1"  # y. verl's k1 is -y, and AReaL's is y: with bounds, mirrored
    K2 = "k2"  # y^2 / 2
    K3 = "k3"  # exp(y) - 1 - y
    K3_REVERSED = "k3_reversed"  # exp(-y) - 1 + y: what AReaL calls k3
    DIFFERENCE = "difference"  # of the two probabilities (ROLL)


@dataclasses.dataclass(frozen=True)
class CorrectionOptions:
    """What is dropped and weighted. Of the discrepancy ratio proximal / sampler, where nothing else is said; None: not used."""

    discrepancy: Discrepancy = Discrepancy.MASK
    discrepancy_level: Level = Level.TOKEN  # whose ratio it is
    discrepancy_bound: float = 2.0  # upper end of the band
    discrepancy_low: float | None = None  # lower end; None: 1 / bound
    weight_cap: float = 2.0  # weights are truncated to it
    weight_floor: float = 0.0  # and raised to this
    normalize_weights: bool = False  # divides them by their mean over the minibatch; outside the band they count as 0
    total_ratio_cap: float | None = None  # in weights, a token of a larger current / sampler has its sampler logprob lifted to it
    rejection: Statistic | None = None  # drops tokens by it
    rejection_level: Level = Level.TOKEN
    rejection_low: float | None = None
    rejection_high: float | None = None
    veto: float | None = None  # drops a row that holds a token of a smaller discrepancy ratio
    off_policy_drift: float | None = None  # nats; drops the negative tokens of a row that has drifted further from the sampler
    entropy_normalized_bound: float | None = None  # of log(current / sampler)^2 / (entropy + 0.01)
    second_moment_budget: float | None = None  # drops the largest squared log ratios until the mean of the rest is below

    @property
    def needs_batch(self) -> bool:
        """Whether what it does to a token depends on the whole minibatch."""
        return self.normalize_weights or self.second_moment_budget is not None

    def check(self) -> None:
        """Refuses what has no meaning; options that are traced pass.

        Raises:
          ValueError: what, got, wanted, what to do.
        """
        _check_discrepancy(self.discrepancy_bound, self.discrepancy_low, self.weight_floor, self.weight_cap)
        _check_rejection(self.rejection, self.rejection_low, self.rejection_high)
        of_weights = {"total_ratio_cap": self.total_ratio_cap is not None, "normalize_weights": self.normalize_weights}
        for name, is_used in of_weights.items():
            if is_used and self.discrepancy not in (Discrepancy.WEIGHT, Discrepancy.BOTH):
                raise ValueError(f"{name} is {self.__dict__[name]} but discrepancy is {self.discrepancy.value!r}, which weights "
                                 "nothing; choose 'weight' or 'both', or leave it out")
        if is_number(self.off_policy_drift) and not self.off_policy_drift >= 0:
            raise ValueError(f"off_policy_drift is {self.off_policy_drift}, wanted at least 0 nats; None turns it off")
        for name in ("total_ratio_cap", "veto", "entropy_normalized_bound", "second_moment_budget"):
            value = self.__dict__[name]
            if is_number(value) and not value > 0:
                raise ValueError(f"{name} is {value}, wanted above 0; None turns it off")


class Correction(NamedTuple):
    """What the loss needs of the discrepancy ratio, each [B, T]. None of it is differentiated."""

    weights: jax.Array  # float32; 1 where no weight applies, so that multiplying by it is always safe
    kept: jax.Array  # bool: in the mask, of finite logprobs, and not dropped
    log_ratio: jax.Array  # float32 nats, proximal - sampler of the token, as it was before any bound; 0 where it does not exist


class Policies(NamedTuple):
    """Logprobs of three policies, detached, finite on `exists` and 0 elsewhere; each [B, T]."""

    current: jax.Array
    proximal: jax.Array
    sampler: jax.Array
    exists: jax.Array  # bool: in the mask, and all three are finite


class CorrectionStatistics(NamedTuple):
    """What a correction needs of the whole minibatch: a row of it for each row, so that microbatches take theirs."""

    weight_mean: jax.Array  # [B, 1], alike in all rows: what normalised weights are divided by
    within_budget: jax.Array  # bool [B, T]: of the second moment


def correct(
    policies: Policies,
    advantages: jax.Array,
    entropy: jax.Array,
    options: CorrectionOptions,
    statistics: CorrectionStatistics | None = None,
) -> Correction:
    """Everything that the options say, together.

    Args:
      policies: of the tokens.
      advantages: float [B, T]; read by `off_policy_drift`.
      entropy: float [B, T], nats; read by `entropy_normalized_bound`.
      options: the choice.
      statistics: these rows of those of the whole minibatch; None where these are all of it.

    Raises:
      ValueError: as `CorrectionOptions.check`, and shapes differ.
    """
    options.check()
    current, proximal, sampler, exists = policies
    weights, kept, log_ratio = _by_discrepancy(policies, options)
    if options.rejection is not None:
        kept &= within(
            proximal, sampler, exists, statistic=options.rejection, level=options.rejection_level, low=options.rejection_low,
            high=options.rejection_high,
        )  # fmt: skip
    if options.veto is not None:
        kept &= within(proximal, sampler, exists, statistic=Statistic.RATIO, level=Level.MINIMUM, low=options.veto)
    if options.off_policy_drift is not None:
        kept &= ~off_policy_negatives(current, sampler, advantages, exists, drift=options.off_policy_drift)
    if options.entropy_normalized_bound is not None:
        kept &= entropy_normalized(difference(current, sampler), entropy) <= options.entropy_normalized_bound
    if options.needs_batch:
        if statistics is None:
            statistics = correction_statistics(policies, options)
        if options.second_moment_budget is not None:
            kept &= statistics.within_budget
        if options.normalize_weights:
            weights = jnp.where(exists, divide(weights, statistics.weight_mean), 1)
    return Correction(weights, kept, log_ratio)


def discrepancy(
    proximal_logprobs: jax.Array,
    sampler_logprobs: jax.Array,
    mask: jax.Array,
    *,
    treatment: Discrepancy,
    bound: float,
    weight_cap: float,
    low: float | None = None,
    weight_floor: float = 0.0,
    level: Level = Level.TOKEN,
) -> Correction:
    """Filters and weights tokens by the discrepancy ratio exp(proximal - sampler).

    The band is [1 / bound, bound], symmetric in log space ("Missing Old Logits in Asynchronous Agentic RL", arXiv 2605.12070).
    The weight min(ratio, weight_cap) is truncated importance sampling, on one side only: a cap bounds the variance, and small
    weights need no bound. BOTH with an infinite cap is IcePop ("Every Step Evolves", arXiv 2510.18855). At level GEOMETRIC, MASK
    is the filter of geometric means, and at level SEQUENCE, BOTH is masked importance sampling.

    Args:
      proximal_logprobs: float [B, T], nats.
      sampler_logprobs: float [B, T], nats.
      mask: bool [B, T]. Where it is False the logprobs hold any value, NaN and infinities included, and none reaches the result.
      treatment: what the ratio does.
      bound: at least 1; infinity keeps all. Read by MASK and BOTH.
      weight_cap: above 0; infinity leaves the weights untruncated. Read by WEIGHT and BOTH.
      low: lower end of the band, if not 1 / bound; 0 leaves it open.
      weight_floor: smaller weights are raised to it.
      level: whose ratio it is: a token's, a sequence's, a segment's.

    Returns:
      `Correction`. A token inside the mask without a ratio is never kept, whatever the treatment.

    Raises:
      ValueError: shapes differ, or a bound given as a Python number is out of range.
    """
    _check_discrepancy(bound, low, weight_floor, weight_cap)
    proximal, sampler, exists = _existing(proximal_logprobs, sampler_logprobs, mask)
    log_ratio = difference(proximal, sampler)
    pooled = pool(log_ratio, exists, level)
    kept, weights = exists, jnp.ones_like(log_ratio)
    if treatment in (Discrepancy.MASK, Discrepancy.BOTH):
        log_bound = _log(bound)
        log_low = -log_bound if low is None else _log(low)
        kept = exists & (pooled >= log_low) & (pooled <= log_bound)
    if treatment in (Discrepancy.WEIGHT, Discrepancy.BOTH):
        weights = jnp.where(exists, jnp.clip(jnp.exp(clamp(pooled)), weight_floor, weight_cap), 1)
    return Correction(weights=weights, kept=kept, log_ratio=log_ratio)


def within(
    proximal_logprobs: jax.Array,
    sampler_logprobs: jax.Array,
    mask: jax.Array,
    *,
    statistic: Statistic,
    level: Level,
    low: float | None = None,
    high: float | None = None,
) -> jax.Array:
    """Where a statistic of the log ratio proximal - sampler lies in [low, high]; bool [B, T], False outside the mask.

    Rejection sampling of verl, ROLL, slime and AReaL. The tokens being the sampler's, K2 and K3 estimate KL(sampler || proximal),
    and K1 its negative. Their level pools the estimates; that of RATIO pools log ratios.

    Args:
      proximal_logprobs, sampler_logprobs, mask: as in `discrepancy`.
      statistic: the choice.
      level: how the tokens' values are put together.
      low, high: ends, both inside; None leaves one open. K1, K2, K3 in nats, of log ratios within +-20.

    Raises:
      ValueError: shapes differ, there is no end, or they are the wrong way round.
    """
    _check_rejection(statistic, low, high)
    proximal, sampler, exists = _existing(proximal_logprobs, sampler_logprobs, mask)
    whole = difference(proximal, sampler)
    log_ratio = clamp(whole)
    match statistic:
        case Statistic.RATIO:  # compared as its logarithm, which overflows nowhere
            value = pool(whole, exists, level)
            low, high = (None if end is None else _log(end) for end in (low, high))
        case Statistic.K1:
            value = pool(log_ratio, exists, level)
        case Statistic.K2:
            value = pool(jnp.square(log_ratio) / 2, exists, level)
        case Statistic.K3:
            value = pool(jnp.expm1(log_ratio) - log_ratio, exists, level)
        case Statistic.K3_REVERSED:
            value = pool(jnp.expm1(-log_ratio) + log_ratio, exists, level)
        case Statistic.DIFFERENCE:
            value = pool(jnp.exp(proximal) - jnp.exp(sampler), exists, level)
    kept = exists
    if low is not None:
        kept &= value >= low
    if high is not None:
        kept &= value <= high
    return kept


def off_policy_negatives(
    current_logprobs: jax.Array, sampler_logprobs: jax.Array, advantages: jax.Array, mask: jax.Array, *, drift: float
) -> jax.Array:
    """Tokens of negative advantage in rows whose mean of sampler - current logprob is above `drift` nats; bool [B, T].

    Off-policy sequence masking of DeepSeek-V3.2 (arXiv 2512.02556): a bad sequence that the policy would not write any more
    teaches little, and can do harm. These are the tokens to drop.

    Args:
      current_logprobs, sampler_logprobs, mask: as those of `discrepancy`.
      advantages: float [B, T].
      drift: nats.
    """
    check_token_arrays(advantages=advantages, mask=mask)
    current, sampler, exists = _existing(current_logprobs, sampler_logprobs, mask)
    return exists & (advantages < 0) & (pool(difference(sampler, current), exists, Level.GEOMETRIC) > drift)


def entropy_normalized(log_ratio: jax.Array, entropy: jax.Array) -> jax.Array:
    """log_ratio^2 / (entropy + 0.01): how far a token has moved for what its distribution leaves open.

    Float [B, T], of log ratio and entropy in nats. Entropy-normalised trust regions, arXiv 2607.22186; the paper takes the
    entropy of the behaviour distribution.
    """
    return jnp.square(log_ratio) / (entropy + 0.01)


def correction_statistics(policies: Policies, options: CorrectionOptions) -> CorrectionStatistics:
    """What the correction needs of a whole minibatch.

    The mean of weights is over tokens, or over rows that have one where a row has one weight. A weight outside the band counts as
    0; rejections come after it and do not change it.

    Args:
      policies: of the whole minibatch.
      options: the choice.
    """
    weights, kept, log_ratio = _by_discrepancy(policies, options)
    mean, within_budget = jnp.ones((), weights.dtype), policies.exists
    if options.normalize_weights:
        counted = policies.exists
        if options.discrepancy_level not in (Level.TOKEN, Level.SEGMENT):
            counted &= jnp.cumsum(counted, axis=1, dtype=jnp.int32) == 1  # each row once
        mean = divide(jnp.sum(jnp.where(counted & kept, weights, 0)), jnp.sum(counted))
    if options.second_moment_budget is not None:
        within_budget = within_second_moment(log_ratio, policies.exists, budget=options.second_moment_budget)
    return CorrectionStatistics(jnp.full((len(weights), 1), mean), within_budget)


def within_second_moment(log_ratio: jax.Array, mask: jax.Array, *, budget: float) -> jax.Array:
    """The tokens that stay if those of the largest squared log ratio leave until the mean of the rest is below `budget`.

    At least one stays, and of equal ones the earlier; bool [B, T], of float nats [B, T] of a whole minibatch. M2PO, arXiv
    2510.01161, as AReaL implements it: on proximal / sampler, whatever the advantage. The authors' own code does something else,
    see `surrogates.SecondMomentClip`.
    """
    squares = jnp.where(mask, jnp.square(log_ratio), jnp.inf)
    ascending = jnp.sort(squares, axis=None)
    count = jnp.arange(1, squares.size + 1, dtype=jnp.int32)
    mean = jnp.cumsum(jnp.where(jnp.isfinite(ascending), ascending, 0)) / count.astype(squares.dtype)
    num_kept = jnp.sum((mean < budget) & jnp.isfinite(ascending), dtype=jnp.int32)  # means of a sorted array only grow
    return mask & (ranks(squares) < jnp.maximum(num_kept, 1))


def _by_discrepancy(policies: Policies, options: CorrectionOptions) -> Correction:
    def against(sampler: jax.Array) -> Correction:
        return discrepancy(
            policies.proximal,
            sampler,
            policies.exists,
            treatment=options.discrepancy,
            bound=options.discrepancy_bound,
            low=options.discrepancy_low,
            weight_cap=options.weight_cap,
            weight_floor=options.weight_floor,
            level=options.discrepancy_level,
        )

    correction = against(policies.sampler)
    if options.total_ratio_cap is not None:  # as the code of arXiv 2110.00641 does
        lifted = jnp.maximum(policies.sampler, policies.current - _log(options.total_ratio_cap))
        correction = correction._replace(weights=against(lifted).weights)
    return correction


def _existing(proximal_logprobs: jax.Array, sampler_logprobs: jax.Array, mask: jax.Array) -> tuple[jax.Array, ...]:
    """Both detached, 0 where one does not exist; and where both do."""
    check_token_arrays(proximal_logprobs=proximal_logprobs, sampler_logprobs=sampler_logprobs, mask=mask)
    exists, logprobs = select_finite(mask, jax.lax.stop_gradient((proximal_logprobs, sampler_logprobs)))
    return *logprobs, exists


def _log(ratio: float | jax.Array) -> jax.Array:
    return jnp.log(as_float(ratio))


def _check_rejection(statistic: Statistic | None, low: float | None, high: float | None) -> None:
    if (statistic is not None) != (low is not None or high is not None):
        raise ValueError(f"rejection is {statistic} with the ends {low} and {high}; give a statistic and an end, or neither")
    if is_number(low) and is_number(high) and not low <= high:
        raise ValueError(f"rejection keeps from {low} to {high}, which is nothing; give the lower end first")
    if statistic is Statistic.RATIO and any(is_number(end) and not end >= 0 for end in (low, high)):
        raise ValueError(f"rejection of a ratio has the ends {low} and {high}, wanted at least 0; give no logarithms")


def _check_discrepancy(bound: float, low: float | None, weight_floor: float, weight_cap: float) -> None:
    if is_number(bound) and not bound >= 1:
        raise ValueError(f"discrepancy bound is {bound}, wanted at least 1: the band is [1/bound, bound]; give the upper end")
    if is_number(low) and not 0 <= low <= 1:
        raise ValueError(f"the lower end of the discrepancy band is {low}, wanted in [0, 1]; None makes it 1/bound")
    if is_number(weight_cap) and not weight_cap > 0:
        raise ValueError(f"discrepancy weight cap is {weight_cap}, wanted above 0; give infinity for no cap")
    if is_number(weight_floor) and is_number(weight_cap) and not 0 <= weight_floor <= weight_cap:
        raise ValueError(f"discrepancy weight floor is {weight_floor}, wanted from 0 to the cap, {weight_cap}")
