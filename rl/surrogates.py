"""Surrogates: how a token's ratio and its advantage become the objective that is maximised.

Each is a dataclass of constants that is called with tokens: the method's formula in the field's notation, r for the ratio, A for
the advantage, sg for the stopped gradient. Two families cover the catalogue.

    of the ratio         r A, bounded in one way or another: the value and the gradient meet in r       Clip, SoftGate, ...
    of the log prob      sg(coefficient * gate) A log p: the gradient alone is meant, not the value     Reinforce

A gate decides whether a token counts, a coefficient how much. The ratio itself, its anchor and its level are chosen by the
`Objective` (`rl/objective.py`), and a method is one combination (`rl/presets.py`).
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rl.ratios import Anchor, Level, clamp, difference, divide, magnitude, pool


class Tokens(NamedTuple):
    """What a surrogate sees; each [B, T], finite, and only `logprobs` and `log_ratio` are differentiated."""

    logprobs: jax.Array  # nats, current policy
    log_ratio: jax.Array  # nats, current / anchor, at the objective's level
    advantages: jax.Array
    positive: jax.Array  # bool: the token is of a good trajectory
    proximal_logprobs: jax.Array
    sampler_logprobs: jax.Array
    kept: jax.Array  # bool: of those that are not, nothing counts

    @property
    def ratio(self) -> jax.Array:
        return jnp.exp(self.log_ratio)

    def against(self, anchor: Anchor) -> tuple[jax.Array, jax.Array]:
        """Detached logprobs of the current policy, and those of an anchor."""
        anchors = {Anchor.PROXIMAL: self.proximal_logprobs, Anchor.SAMPLER: self.sampler_logprobs}
        return jax.lax.stop_gradient(self.logprobs), anchors[anchor]


class Outcome(NamedTuple):
    """What a surrogate makes of tokens; each [B, T]."""

    objective: jax.Array  # to be maximised
    clipped: jax.Array  # bool: a bound acts, and takes the gradient of r A away or changes it
    dual_clipped: jax.Array  # bool: the dual clip does


class BatchStatistics(NamedTuple):
    """What a surrogate needs of the whole minibatch. Scalars."""

    clip_low: jax.Array  # SecondMomentClip
    clip_high: jax.Array
    advantage_mean: jax.Array  # CovarianceClip, CovariancePenalty
    logprob_mean: jax.Array
    least_covariance: jax.Array  # CovariancePenalty: of the tokens that it takes


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
        return Outcome(*clipped_objective(tokens.ratio, tokens.advantages, **self.__dict__))

    def check(self) -> None:
        _check_clip(self.clip_low, self.clip_high)
        if isinstance(self.dual_clip, (int, float)) and not self.dual_clip > 1:
            raise ValueError(f"dual_clip is {self.dual_clip}, wanted above 1, such as 3; None turns it off")


@dataclasses.dataclass(frozen=True)
class GradientPreservingClip(Clip):
    """The value of `Clip`; but where the clip acts, the gradient of the bound times r / sg(r), and not 0.

    GPPO, Klear-Reasoner, arXiv 2508.07629. The gradient stays 0 where the dual clip acts.
    """

    def __call__(self, tokens: Tokens, statistics: BatchStatistics | None = None) -> Outcome:
        ratio, (objective, clipped, dual_clipped) = tokens.ratio, super().__call__(tokens)
        carried = jax.lax.stop_gradient(objective / ratio) * ratio
        return Outcome(jnp.where(clipped & ~dual_clipped, carried, objective), clipped, dual_clipped)


@dataclasses.dataclass(frozen=True)
class SecondMomentClip:
    """`Clip` with one band [exp(-tau), exp(tau)] for the minibatch, never tighter than [1 - least_low, 1 + least_high].

    M2PO, arXiv 2510.01161, as its authors' code has it: the harmful tokens are those that have moved where their advantage pushes
    (A > 0 and r > 1, or A < 0 and r < 1); tau is the largest bound for which the mean of their squared log ratios, each cut at
    tau, is within the budget. The paper's text and AReaL mask instead: `CorrectionOptions.second_moment_budget`.
    """

    moment_budget: float = 0.04
    least_low: float = 0.3
    least_high: float = 0.5

    def __call__(self, tokens: Tokens, statistics: BatchStatistics | None = None) -> Outcome:
        band = statistics or self.statistics(tokens)
        bounds = {"clip_low": band.clip_low, "clip_high": band.clip_high}
        return Outcome(*clipped_objective(tokens.ratio, tokens.advantages, **bounds, dual_clip=None))

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
        fits = jnp.sum(squares) <= budget * count.astype(squares.dtype)
        low, high = jnp.where(fits, 1, -jnp.expm1(-tau)), jnp.where(fits, 99_999, jnp.expm1(tau))
        return _neutral(low)._replace(clip_low=jnp.maximum(low, self.least_low), clip_high=jnp.maximum(high, self.least_high))

    def check(self) -> None:
        if not self.moment_budget > 0:
            raise ValueError(f"moment_budget is {self.moment_budget}, wanted above 0, such as 0.04")


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
        return Outcome(objective, *_no_clip(tokens))

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
        clipped = _outward(log_ratio, tokens.advantages, -self.log_clip_low, self.log_clip_high)
        bounded = jnp.where(clipped, jnp.clip(log_ratio, -self.log_clip_low, self.log_clip_high), log_ratio)
        bounded = jnp.where(sign == 0, 0, bounded)
        mean = jnp.exp(pool(bounded, tokens.kept, Level.GEOMETRIC))
        return Outcome(mean * pool(tokens.advantages, tokens.kept, Level.GEOMETRIC), clipped, jnp.zeros_like(clipped))

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
        objective, clipped, dual_clipped = clipped_objective(
            tokens.ratio, tokens.advantages, clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=self.dual_clip
        )
        covariance = _covariance(tokens, statistics or self.statistics(tokens))
        left_out = ~clipped & (covariance > self.covariance_low) & (covariance < self.covariance_high)
        return Outcome(jnp.where(left_out, 0, objective), clipped | left_out, dual_clipped)

    def statistics(self, tokens: Tokens) -> BatchStatistics:
        """The two means over the minibatch."""
        return _means(tokens)


@dataclasses.dataclass(frozen=True)
class CovariancePenalty:
    """r A, less coefficient * |log r| for the share of tokens with the largest (A - mean A) (log p - mean log p).

    KL-Cov, arXiv 2505.22617.
    """

    penalized_fraction: float = 0.002
    penalty_coefficient: float = 1.0

    def __call__(self, tokens: Tokens, statistics: BatchStatistics | None = None) -> Outcome:
        statistics = statistics or self.statistics(tokens)
        penalized = _covariance(tokens, statistics) >= statistics.least_covariance
        penalty = self.penalty_coefficient * magnitude(tokens.log_ratio)
        return Outcome(tokens.ratio * tokens.advantages - jnp.where(penalized, penalty, 0), *_no_clip(tokens))

    def statistics(self, tokens: Tokens) -> BatchStatistics:
        """The two means over the minibatch, and the least covariance of the tokens that are penalized; at least one is."""
        statistics = _means(tokens)
        covariance = jnp.where(tokens.kept, _covariance(tokens, statistics), -jnp.inf)
        count = jnp.sum(tokens.kept, dtype=jnp.int32).astype(covariance.dtype)
        num_penalized = jnp.maximum(jnp.floor(count * self.penalized_fraction).astype(jnp.int32), 1)
        least = -jnp.sort(-covariance, axis=None)[num_penalized - 1]
        return statistics._replace(least_covariance=least)

    def check(self) -> None:
        if not 0 < self.penalized_fraction <= 1:
            raise ValueError(f"penalized_fraction is {self.penalized_fraction}, wanted in (0, 1]")


# Gates: which tokens count.


@dataclasses.dataclass(frozen=True)
class Open:
    """All of them."""

    def __call__(self, tokens: Tokens) -> jax.Array:
        return jnp.ones_like(tokens.kept)


@dataclasses.dataclass(frozen=True)
class SignedBand:
    """Not where the ratio to an anchor has left [1 - low, 1 + high] on the side that the advantage pushes to: PPO's clip, a mask.

    To the proximal policy: MiniRL, arXiv 2512.01374. To the policy of the ratio itself: the unified mask of ROLL's CISPO.
    """

    band_low: float = 0.2
    band_high: float = 0.28
    band_anchor: Anchor = Anchor.PROXIMAL

    def __call__(self, tokens: Tokens) -> jax.Array:
        ratio = jnp.exp(clamp(difference(*tokens.against(self.band_anchor))))
        return ~_outward(ratio, tokens.advantages, 1 - self.band_low, 1 + self.band_high)


@dataclasses.dataclass(frozen=True)
class Band:
    """Only where the ratio lies in [1 - low, 1 + high], whatever the advantage.

    DIS of GLM-5, arXiv 2602.15763, and SAO, arXiv 2607.07508; as a band of the log ratio, Kimi K2.5, arXiv 2602.02276.
    """

    band_low: float = 0.3
    band_high: float = 5.0

    def __call__(self, tokens: Tokens) -> jax.Array:
        ratio = tokens.ratio
        return (ratio >= 1 - self.band_low) & (ratio <= 1 + self.band_high)


@dataclasses.dataclass(frozen=True)
class TotalVariation:
    """Not where the token's probability has moved too far: p - q > high where A > 0, p - q < -low where A <= 0.

    DPPO, arXiv 2602.04879, binary total variation. q is the anchor's probability: the sampler's in the paper, the proximal one in
    its "recompute" variant. `both_sides` closes on |p - q| whatever the advantage: IPO of prime-rl.
    """

    divergence_low: float = 0.15
    divergence_high: float = 0.15
    divergence_anchor: Anchor = Anchor.SAMPLER
    both_sides: bool = False

    def __call__(self, tokens: Tokens) -> jax.Array:
        logprobs, anchor = tokens.against(self.divergence_anchor)
        change = jnp.exp(logprobs) - jnp.exp(anchor)
        if self.both_sides:
            return (change >= -self.divergence_low) & (change <= self.divergence_high)
        return ~_outward(change, tokens.advantages, -self.divergence_low, self.divergence_high)


@dataclasses.dataclass(frozen=True)
class BinaryKL:
    """Not where the KL divergence of the two-point distributions (q, 1 - q) and (p, 1 - p) is above a bound, and p moved outward.

    DPPO, arXiv 2602.04879, binary KL; the anchor as in `TotalVariation`.
    """

    divergence_low: float = 0.05
    divergence_high: float = 0.05
    divergence_anchor: Anchor = Anchor.SAMPLER

    def __call__(self, tokens: Tokens) -> jax.Array:
        logprobs, anchor = tokens.against(self.divergence_anchor)
        divergence = binary_kl(anchor, logprobs)
        away = jnp.where(tokens.advantages > 0, logprobs > anchor, logprobs < anchor)
        bound = jnp.where(tokens.advantages > 0, self.divergence_high, self.divergence_low)
        return ~(away & (divergence > bound.astype(divergence.dtype)))


# Coefficients: how much a token counts, and where that is less or more than r for a bound.


@dataclasses.dataclass(frozen=True)
class Unweighted:
    """1: the policy gradient of tokens, whoever sampled them."""

    def __call__(self, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        return jnp.ones_like(tokens.log_ratio), jnp.zeros_like(tokens.kept)


@dataclasses.dataclass(frozen=True)
class Truncated:
    """min(r, cap): truncated importance sampling."""

    ratio_cap: float = math.inf

    def __call__(self, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        return jnp.minimum(tokens.ratio, self.ratio_cap), tokens.ratio > self.ratio_cap


@dataclasses.dataclass(frozen=True)
class Clipped:
    """clip(r, 1 - low, 1 + high): no token loses its gradient. CISPO of MiniMax-M1, arXiv 2506.13585.

    The original has no lower bound (low = 1). verl, NeMo and tinker use both.
    """

    ratio_low: float = 1.0
    ratio_high: float = 0.28

    def __call__(self, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        bounded = jnp.clip(tokens.ratio, 1 - self.ratio_low, 1 + self.ratio_high)
        return bounded, bounded != tokens.ratio


@dataclasses.dataclass(frozen=True)
class Tapered:
    """1 for tokens of good trajectories, and clip(r, 0, 1) for those of bad ones.

    TOPR, arXiv 2503.14286. The paper takes the ratio of whole sequences; ROLL and Trinity that of each token; at the level of
    segments it is the weight of IPA (ROME, arXiv 2512.24873).
    """

    def __call__(self, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        return jnp.where(tokens.positive, 1, jnp.minimum(tokens.ratio, 1)), ~tokens.positive & (tokens.ratio > 1)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """phi(w) = exp(lambda + k log w - lambda w), with phi(1) = 1 and its peak at w = k / lambda; w the ratio of whole sequences.

    VESPO, arXiv 2602.10693, with the constants of the authors' code, which are not those of its docstring. The pair of constants
    goes by the sign of the advantage, 0 counting as positive.
    """

    k_positive: float = 2.0
    lambda_positive: float = 3.0
    k_negative: float = 3.0
    lambda_negative: float = 2.0

    def __call__(self, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        def choose(positive: float, negative: float) -> jax.Array:
            return jnp.where(tokens.advantages >= 0, positive, negative).astype(tokens.log_ratio.dtype)

        k = choose(self.k_positive, self.k_negative)
        slope = choose(self.lambda_positive, self.lambda_negative)
        return jnp.exp(slope + k * tokens.log_ratio - slope * tokens.ratio), jnp.zeros_like(tokens.kept)


Gate = Open | SignedBand | Band | TotalVariation | BinaryKL
Coefficient = Unweighted | Truncated | Clipped | Tapered | Kernel


@dataclasses.dataclass(frozen=True)
class Importance:
    """r A where the gate is open: the importance-weighted objective, without a clip."""

    gate: Gate = Open()

    def __call__(self, tokens: Tokens, statistics: BatchStatistics | None = None) -> Outcome:
        is_open = self.gate(tokens)
        return Outcome(jnp.where(is_open, tokens.ratio * tokens.advantages, 0), ~is_open, jnp.zeros_like(is_open))

    def check(self) -> None:
        """Every constant of a gate has a meaning."""


@dataclasses.dataclass(frozen=True)
class Reinforce:
    """sg(coefficient) A log p where the gate is open: REINFORCE, with a weight that is not differentiated."""

    coefficient: Coefficient = Unweighted()
    gate: Gate = Open()

    def __call__(self, tokens: Tokens, statistics: BatchStatistics | None = None) -> Outcome:
        is_open = self.gate(tokens)
        coefficient, bounded = self.coefficient(tokens)
        coefficient = jax.lax.stop_gradient(jnp.where(is_open, coefficient, 0))
        return Outcome(coefficient * tokens.advantages * tokens.logprobs, ~is_open | bounded, jnp.zeros_like(is_open))

    def check(self) -> None:
        """Every constant of a gate and of a coefficient has a meaning."""


Surrogate = (Clip | GradientPreservingClip | SecondMomentClip | SoftGate | GeometricMean | CovarianceClip | CovariancePenalty
             | Importance | Reinforce)  # fmt: skip


# What they are made of.


def clipped_objective(
    ratio: jax.Array, advantages: jax.Array, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A); where A < 0 and dual_clip is given, at least dual_clip A.

    The minimum is written as the choice it makes, so that a ratio exactly on the end of the band, such as 1 with clip_low = 0,
    has its whole gradient and not a share of a tie.

    Returns:
      The objective, float32 [B, T]; where the clip is active: A > 0 and ratio > 1 + clip_high, or A < 0 and ratio < 1 - clip_low;
      and where the dual clip is active: A < 0 and ratio > dual_clip. The gradient is 0 where either is.
    """
    clipped_ratio = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    clipped = _outward(ratio, advantages, 1 - clip_low, 1 + clip_high)
    objective = jnp.where(clipped, clipped_ratio, ratio) * advantages
    if dual_clip is None:
        return objective, clipped, jnp.zeros_like(clipped)
    dual_clipped = (advantages < 0) & (ratio > dual_clip)
    return jnp.where(dual_clipped, dual_clip * advantages, objective), clipped, dual_clipped


def binary_kl(logprobs: jax.Array, other_logprobs: jax.Array) -> jax.Array:
    """KL((q, 1 - q) || (p, 1 - p)) in nats, from log q and log p; 1e-8 keeps certain tokens finite, as in verl."""
    q, rest, other_rest = jnp.exp(logprobs), -jnp.expm1(logprobs) + 1e-8, -jnp.expm1(other_logprobs) + 1e-8
    return q * (logprobs - other_logprobs) - jnp.expm1(logprobs) * jnp.log(rest / other_rest)


def _outward(value: jax.Array, advantages: jax.Array, low: float, high: float) -> jax.Array:
    """Where a value has left [low, high] on the side that its advantage pushes to; never where A = 0."""
    return ((advantages > 0) & (value > high)) | ((advantages < 0) & (value < low))


def _no_clip(tokens: Tokens) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros_like(tokens.kept), jnp.zeros_like(tokens.kept)


def _means(tokens: Tokens) -> BatchStatistics:
    def mean(values):
        return divide(jnp.sum(jnp.where(tokens.kept, values, 0)), jnp.sum(tokens.kept))

    logprobs = jax.lax.stop_gradient(tokens.logprobs)
    return _neutral(logprobs)._replace(advantage_mean=mean(tokens.advantages), logprob_mean=mean(logprobs))


def _covariance(tokens: Tokens, statistics: BatchStatistics) -> jax.Array:
    logprobs = jax.lax.stop_gradient(tokens.logprobs)
    return (tokens.advantages - statistics.advantage_mean) * (logprobs - statistics.logprob_mean)


def _neutral(like: jax.Array) -> BatchStatistics:
    return BatchStatistics(*[jnp.zeros((), like.dtype)] * len(BatchStatistics._fields))


def _check_clip(clip_low: float, clip_high: float) -> None:
    """Python numbers only: a traced option cannot be read here."""
    if isinstance(clip_low, (int, float)) and not 0 <= clip_low <= 1:
        raise ValueError(f"clip_low is {clip_low}, wanted in [0, 1]: the ratio is clipped below at 1 - clip_low")
    if isinstance(clip_high, (int, float)) and not clip_high >= 0:
        raise ValueError(f"clip_high is {clip_high}, wanted at least 0: the ratio is clipped above at 1 + clip_high")
