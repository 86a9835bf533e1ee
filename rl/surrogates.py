"""Surrogates: how a token's ratio and its advantage become the objective that is maximised.

Each is a dataclass of constants that is called with tokens: the method's formula in the field's notation, r for the ratio, A for
the advantage, sg for the stopped gradient. Two families cover the catalogue.

    of the ratio         r A, bounded in one way or another: the value and the gradient meet in r       Clip, SoftGate, ...
    of the log prob      sg(coefficient * gate) A log p: the gradient alone is meant, not the value     Reinforce

A gate decides whether a token counts, a coefficient how much. The ratio itself, its anchor and its level are chosen by the
`Objective` (`rl/objective.py`), and a method is one combination (`rl/presets.py`).
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rl.gates import Coefficient, Gate, Open, Tokens, Unweighted, outward
from rl.ratios import Level, divide, is_number, magnitude, pool, ranks


class Outcome(NamedTuple):
    """What a surrogate makes of tokens; each [B, T]."""

    objective: jax.Array  # to be maximised
    clipped: jax.Array  # bool: a bound acts, and takes the gradient of r A away or changes it
    dual_clipped: jax.Array  # bool: the dual clip does
    inactive: jax.Array  # bool: the token has no gradient for it


class BatchStatistics(NamedTuple):
    """What a surrogate needs of the whole minibatch: a row of it for each row, so that microbatches take theirs."""

    clip_low: jax.Array  # [B, 1], alike in all rows: SecondMomentClip
    clip_high: jax.Array  # [B, 1]
    covariance: jax.Array  # [B, T], of the centred advantage and logprob: CovarianceClip
    penalized: jax.Array  # bool [B, T]: CovariancePenalty


# Of the ratio.


@dataclasses.dataclass(frozen=True)
class Clip:
    """min(r A, clip(r, 1 - low, 1 + high) A); where A < 0 and dual_clip is given, at least dual_clip A.

    PPO, arXiv 1707.06347, equation 7; bounds that differ, DAPO, arXiv 2503.14476; dual clip, arXiv 1912.09729. The gradient is 0
    where either acts. ROLL's dual clip is this one at 1 + 2 clip.
    """

    clip_low: float = 0.2  # in [0, 1]
    clip_high: float = 0.2  # at least 0
    dual_clip: float | None = None  # above 1

    def __call__(self, tokens: Tokens, statistics: BatchStatistics | None = None) -> Outcome:
        return clipped_objective(tokens.ratio, tokens.advantages, **self.__dict__)

    def check(self) -> None:
        _check_clip(self.clip_low, self.clip_high)
        if is_number(self.dual_clip) and not self.dual_clip > 1:
            raise ValueError(f"dual_clip is {self.dual_clip}, wanted above 1, such as 3; None turns it off")


@dataclasses.dataclass(frozen=True)
class GradientPreservingClip(Clip):
    """The value of `Clip`; but where the clip acts, the gradient of the bound times r / sg(r), and not 0.

    GPPO, Klear-Reasoner, arXiv 2508.07629. The gradient stays 0 where the dual clip acts.
    """

    def __call__(self, tokens: Tokens, statistics: BatchStatistics | None = None) -> Outcome:
        ratio, plain = tokens.ratio, super().__call__(tokens)
        carried = jax.lax.stop_gradient(plain.objective / ratio) * ratio
        objective = jnp.where(plain.clipped & ~plain.dual_clipped, carried, plain.objective)
        return plain._replace(objective=objective, inactive=plain.dual_clipped)


@dataclasses.dataclass(frozen=True)
class SecondMomentClip:
    """`Clip` with one band [exp(-tau), exp(tau)] for the minibatch, never tighter than [1 - least_low, 1 + least_high].

    M2PO, arXiv 2510.01161, as its authors' code has it: the harmful tokens are those that have moved where their advantage pushes
    (A > 0 and r > 1, or A < 0 and r < 1); tau is the largest |log r| among them with which the mean of their squares, each cut
    at its square, is within the budget. AReaL masks instead: `CorrectionOptions.second_moment_budget`.
    """

    moment_budget: float = 0.04
    least_low: float = 0.3
    least_high: float = 0.5

    def __call__(self, tokens: Tokens, statistics: BatchStatistics | None = None) -> Outcome:
        band = statistics or self.statistics(tokens)
        return clipped_objective(
            tokens.ratio, tokens.advantages, clip_low=band.clip_low, clip_high=band.clip_high, dual_clip=None
        )

    def statistics(self, tokens: Tokens) -> BatchStatistics:
        """The band, from the whole minibatch. Ends of 1 - exp(-tau) and exp(tau) - 1; all but open where the budget holds."""
        log_ratio, budget = jax.lax.stop_gradient(tokens.log_ratio), self.moment_budget
        harmful = tokens.kept & (((tokens.advantages > 0) & (log_ratio > 0)) | ((tokens.advantages < 0) & (log_ratio < 0)))
        squares = jnp.sort(jnp.where(harmful, jnp.square(log_ratio), jnp.inf), axis=None)
        exists, count = jnp.isfinite(squares), jnp.sum(harmful, dtype=jnp.int32)
        squares = jnp.where(exists, squares, 0)
        # Of the k-th and all larger ones cut at the k-th, the sum; the slack is the authors', so that ties fall alike.
        slack = 1e-12
        larger = (count - 1 - jnp.arange(squares.size, dtype=jnp.int32)).astype(squares.dtype)
        exceeds = exists & ((squares - slack) * larger + jnp.cumsum(squares) >= budget * count.astype(squares.dtype) - slack)
        first = jnp.argmax(exceeds)
        tau = jnp.sqrt(jnp.maximum(jnp.where(first > 0, squares[first - 1] - slack, 0), 0))
        # The slack puts the token that tau was taken from outside the band, but in float32 it is less than that token's rounding,
        # which another mesh or microbatch changes.
        tau = jnp.maximum(tau - 16 * jnp.finfo(tau.dtype).eps, 0)
        fits = jnp.sum(squares) <= budget * count.astype(squares.dtype)
        low, high = jnp.where(fits, 1, -jnp.expm1(-tau)), jnp.where(fits, 99_999, jnp.expm1(tau))
        return _neutral(tokens)._replace(
            clip_low=_in_rows(jnp.maximum(low, self.least_low), tokens),
            clip_high=_in_rows(jnp.maximum(high, self.least_high), tokens),
        )

    def check(self) -> None:
        if not (self.moment_budget > 0 and 0 <= self.least_low <= 1 and self.least_high >= 0):
            raise ValueError(f"{self}; wanted a budget above 0, least_low in [0, 1] and least_high at least 0")


@dataclasses.dataclass(frozen=True)
class SoftGate:
    """(4 / tau) sigmoid(tau (r - 1)) A, with a temperature for each sign of A: a clip that closes smoothly.

    SAPO, arXiv 2511.20347.
    """

    tau_positive: float = 1.0
    tau_negative: float = 1.05

    def __call__(self, tokens: Tokens, statistics: BatchStatistics | None = None) -> Outcome:
        tau = jnp.where(tokens.advantages > 0, self.tau_positive, self.tau_negative).astype(tokens.logprobs.dtype)
        objective = 4 / tau * jax.nn.sigmoid(tau * (tokens.ratio - 1)) * tokens.advantages
        return _unbounded(objective, tokens)

    def check(self) -> None:
        if not (self.tau_positive > 0 and self.tau_negative > 0):
            raise ValueError(f"tau is {self.tau_positive} and {self.tau_negative}, wanted above 0")


@dataclasses.dataclass(frozen=True)
class GeometricMean:
    """The geometric mean of a row's clipped token ratios, times the mean of its advantages.

    GMPO, arXiv 2507.20673: the ratio of each token is clipped in log space, to [exp(-low), exp(high)], on the side that its
    advantage pushes to. Every token of a row has the row's objective, so a denominator by sequences is the paper's.
    """

    log_clip_low: float = 0.4
    log_clip_high: float = 0.4

    def __call__(self, tokens: Tokens, statistics: BatchStatistics | None = None) -> Outcome:
        log_ratio, sign = tokens.log_ratio, jnp.sign(tokens.advantages)
        clipped = outward(log_ratio, tokens.advantages, -self.log_clip_low, self.log_clip_high)
        bounded = jnp.where(clipped, jnp.clip(log_ratio, -self.log_clip_low, self.log_clip_high), log_ratio)
        bounded = jnp.where(sign == 0, 0, bounded)
        mean = jnp.exp(pool(bounded, tokens.kept, Level.GEOMETRIC))
        objective = mean * pool(tokens.advantages, tokens.kept, Level.GEOMETRIC)
        return _unbounded(objective, tokens)._replace(clipped=clipped, inactive=clipped)

    def check(self) -> None:
        if not (self.log_clip_low >= 0 and self.log_clip_high >= 0):
            raise ValueError(f"log clips are {self.log_clip_low} and {self.log_clip_high}, wanted at least 0")


@dataclasses.dataclass(frozen=True)
class CovarianceClip(Clip):
    """`Clip`, and no objective for tokens whose (A - mean A) (log p - mean log p) lies between two bounds.

    Clip-Cov, "The Entropy Mechanism of Reinforcement Learning", arXiv 2505.22617. The paper draws a small share of those tokens
    at random; here all of them leave, so that the update is a function of the batch: take a higher lower bound for fewer.
    """

    covariance_low: float = 1.0
    covariance_high: float = 5.0

    def __call__(self, tokens: Tokens, statistics: BatchStatistics | None = None) -> Outcome:
        plain = clipped_objective(
            tokens.ratio, tokens.advantages, clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=self.dual_clip
        )
        covariance = (statistics or self.statistics(tokens)).covariance
        left_out = ~plain.clipped & (covariance > self.covariance_low) & (covariance < self.covariance_high)
        return Outcome(
            jnp.where(left_out, 0, plain.objective), plain.clipped | left_out, plain.dual_clipped, plain.inactive | left_out
        )

    def statistics(self, tokens: Tokens) -> BatchStatistics:
        """The covariance of each token, for which the means over the minibatch are needed."""
        return _neutral(tokens)._replace(covariance=_covariance(tokens))

    def check(self) -> None:
        super().check()
        if not self.covariance_low < self.covariance_high:
            raise ValueError(f"{self}; wanted covariance_low below covariance_high")


@dataclasses.dataclass(frozen=True)
class CovariancePenalty:
    """r A, less coefficient * |log r| for the share of tokens with the largest (A - mean A) (log p - mean log p).

    KL-Cov, arXiv 2505.22617.
    """

    penalized_fraction: float = 0.002
    penalty_coefficient: float = 1.0

    def __call__(self, tokens: Tokens, statistics: BatchStatistics | None = None) -> Outcome:
        penalized = (statistics or self.statistics(tokens)).penalized
        penalty = self.penalty_coefficient * magnitude(tokens.log_ratio)
        return _unbounded(tokens.ratio * tokens.advantages - jnp.where(penalized, penalty, 0), tokens)

    def statistics(self, tokens: Tokens) -> BatchStatistics:
        """Which tokens are penalized: at least one, and of equal ones the earlier."""
        covariance = jnp.where(tokens.kept, _covariance(tokens), -jnp.inf)
        count = jnp.sum(tokens.kept, dtype=jnp.int32).astype(covariance.dtype)
        num_penalized = jnp.maximum(jnp.floor(count * self.penalized_fraction).astype(jnp.int32), 1)
        return _neutral(tokens)._replace(penalized=tokens.kept & (ranks(-covariance) < num_penalized))

    def check(self) -> None:
        if not (0 < self.penalized_fraction <= 1 and self.penalty_coefficient >= 0):
            raise ValueError(f"{self}; wanted penalized_fraction in (0, 1] and penalty_coefficient at least 0")


@dataclasses.dataclass(frozen=True)
class Importance:
    """r A where the gate is open: the importance-weighted objective, without a clip."""

    gate: Gate = Open()

    def __call__(self, tokens: Tokens, statistics: BatchStatistics | None = None) -> Outcome:
        is_open = self.gate(tokens)
        objective = jnp.where(is_open, tokens.ratio * tokens.advantages, 0)
        return _unbounded(objective, tokens)._replace(clipped=~is_open, inactive=~is_open)

    def check(self) -> None:
        self.gate.check()


@dataclasses.dataclass(frozen=True)
class Reinforce:
    """sg(coefficient) A log p where the gate is open: REINFORCE, with a weight that is not differentiated."""

    coefficient: Coefficient = Unweighted()
    gate: Gate = Open()

    def __call__(self, tokens: Tokens, statistics: BatchStatistics | None = None) -> Outcome:
        is_open = self.gate(tokens)
        coefficient, bounded = self.coefficient(tokens)
        coefficient = jax.lax.stop_gradient(jnp.where(is_open, coefficient, 0))
        objective = coefficient * tokens.advantages * tokens.logprobs
        return _unbounded(objective, tokens)._replace(clipped=~is_open | bounded, inactive=~is_open)

    def check(self) -> None:
        self.coefficient.check()
        self.gate.check()


Surrogate = (Clip | GradientPreservingClip | SecondMomentClip | SoftGate | GeometricMean | CovarianceClip | CovariancePenalty
             | Importance | Reinforce)  # fmt: skip

OF_THE_BATCH = (SecondMomentClip, CovarianceClip, CovariancePenalty)
"""Those that have `statistics`."""


# What they are made of.


def clipped_objective(
    ratio: jax.Array,
    advantages: jax.Array,
    *,
    clip_low: float | jax.Array,
    clip_high: float | jax.Array,
    dual_clip: float | None,
) -> Outcome:
    """min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A); where A < 0 and dual_clip is given, at least dual_clip A.

    The minimum is written as the choice it makes, so that a ratio exactly on the end of the band, such as 1 with clip_low = 0,
    has its whole gradient and not a share of a tie.

    Returns:
      The objective, float [B, T]; `clipped` where A > 0 and ratio > 1 + clip_high, or A < 0 and ratio < 1 - clip_low;
      `dual_clipped` where A < 0 and ratio > dual_clip. The gradient is 0 where either is.
    """
    clipped_ratio = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    clipped = outward(ratio, advantages, 1 - clip_low, 1 + clip_high)
    objective = jnp.where(clipped, clipped_ratio, ratio) * advantages
    if dual_clip is None:
        return Outcome(objective, clipped, jnp.zeros_like(clipped), clipped)
    dual_clipped = (advantages < 0) & (ratio > dual_clip)
    objective = jnp.where(dual_clipped, dual_clip * advantages, objective)
    return Outcome(objective, clipped, dual_clipped, clipped | dual_clipped)


def _unbounded(objective: jax.Array, tokens: Tokens) -> Outcome:
    nowhere = jnp.zeros_like(tokens.kept)
    return Outcome(objective, nowhere, nowhere, nowhere)


def _covariance(tokens: Tokens) -> jax.Array:
    """(A - mean A) (log p - mean log p) [B, T], the means over the kept tokens of the minibatch."""
    def centered(values):
        return values - divide(jnp.sum(jnp.where(tokens.kept, values, 0)), jnp.sum(tokens.kept))

    return centered(tokens.advantages) * centered(jax.lax.stop_gradient(tokens.logprobs))


def _in_rows(scalar: jax.Array, tokens: Tokens) -> jax.Array:
    """[B, 1]"""
    return jnp.full((tokens.kept.shape[0], 1), scalar)


def _neutral(tokens: Tokens) -> BatchStatistics:
    zero = _in_rows(jnp.zeros((), tokens.logprobs.dtype), tokens)
    return BatchStatistics(zero, zero, zero, zero > 0)


def _check_clip(clip_low: float, clip_high: float) -> None:
    """Python numbers only: a traced option cannot be read here."""
    if is_number(clip_low) and not 0 <= clip_low <= 1:
        raise ValueError(f"clip_low is {clip_low}, wanted in [0, 1]: the ratio is clipped below at 1 - clip_low")
    if is_number(clip_high) and not clip_high >= 0:
        raise ValueError(f"clip_high is {clip_high}, wanted at least 0: the ratio is clipped above at 1 + clip_high")
