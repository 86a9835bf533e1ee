"""Gates and coefficients: whether a token counts in A log p, and how much.

Both are dataclasses of constants that are called with tokens, and see the current policy's logprobs detached. A coefficient also
says where it is not the ratio r for a bound, which the clip fraction counts.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rl.ratios import Anchor, clamp, difference


class Tokens(NamedTuple):
    """What gates, coefficients and surrogates see; each [B, T], finite; only `logprobs` and `log_ratio` are differentiated."""

    logprobs: jax.Array  # nats, current policy
    log_ratio: jax.Array  # nats, current / anchor, at the objective's level
    advantages: jax.Array
    proximal_logprobs: jax.Array
    sampler_logprobs: jax.Array
    kept: jax.Array  # bool: of those that are not, nothing counts

    @property
    def ratio(self) -> jax.Array:
        return jnp.exp(self.log_ratio)

    def against(self, anchor: Anchor) -> tuple[jax.Array, jax.Array]:
        """Detached logprobs of the current policy, and those of an anchor."""
        logprobs = anchor.among(proximal=self.proximal_logprobs, sampler=self.sampler_logprobs)
        return jax.lax.stop_gradient(self.logprobs), logprobs


# Gates: which tokens count.


@dataclasses.dataclass(frozen=True)
class Open:
    """All of them."""

    def __call__(self, tokens: Tokens) -> jax.Array:
        return jnp.ones_like(tokens.kept)

    def check(self) -> None:
        """It has no constants."""


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
        return ~outward(ratio, tokens.advantages, 1 - self.band_low, 1 + self.band_high)

    def check(self) -> None:
        _check(self, 0 <= self.band_low <= 1 and self.band_high >= 0, "band_low in [0, 1] and band_high at least 0")


@dataclasses.dataclass(frozen=True)
class Band:
    """Only where the ratio lies in [1 - low, 1 + high], whatever the advantage.

    DIS of GLM-5, arXiv 2602.15763, and SAO, arXiv 2607.07508, where the ends do not belong to it; as a band of the log ratio,
    Kimi K2.5, arXiv 2602.02276.
    """

    band_low: float = 0.3
    band_high: float = 5.0

    def __call__(self, tokens: Tokens) -> jax.Array:
        ratio = tokens.ratio
        return (ratio >= 1 - self.band_low) & (ratio <= 1 + self.band_high)

    def check(self) -> None:
        _check(self, 0 <= self.band_low <= 1 and self.band_high >= 0, "band_low in [0, 1] and band_high at least 0")


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
        return ~outward(change, tokens.advantages, -self.divergence_low, self.divergence_high)

    def check(self) -> None:
        _check(self, self.divergence_low >= 0 and self.divergence_high >= 0, "divergences of at least 0")


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

    def check(self) -> None:
        _check(self, self.divergence_low >= 0 and self.divergence_high >= 0, "divergences of at least 0")


# Coefficients: how much a token counts, and where that is less or more than r for a bound.


@dataclasses.dataclass(frozen=True)
class Unweighted:
    """1: the policy gradient of tokens, whoever sampled them."""

    def __call__(self, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        return jnp.ones_like(tokens.log_ratio), jnp.zeros_like(tokens.kept)

    def check(self) -> None:
        """It has no constants."""


@dataclasses.dataclass(frozen=True)
class Truncated:
    """min(r, cap): truncated importance sampling."""

    ratio_cap: float = math.inf

    def __call__(self, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        return jnp.minimum(tokens.ratio, self.ratio_cap), tokens.ratio > self.ratio_cap

    def check(self) -> None:
        _check(self, self.ratio_cap > 0, "ratio_cap above 0")


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

    def check(self) -> None:
        _check(self, self.ratio_low <= 1 and self.ratio_low > -self.ratio_high, "ratio_low at most 1 and above -ratio_high")


@dataclasses.dataclass(frozen=True)
class Tapered:
    """1 for tokens of good trajectories, which are those of positive advantage, and clip(r, 0, 1) for the others.

    TOPR, arXiv 2503.14286. The paper takes the ratio of whole sequences; ROLL and Trinity that of each token; at the level of
    segments it is the weight of IPA (ROME, arXiv 2512.24873).
    """

    def __call__(self, tokens: Tokens) -> tuple[jax.Array, jax.Array]:
        is_good = tokens.advantages > 0
        return jnp.where(is_good, 1, jnp.minimum(tokens.ratio, 1)), ~is_good & (tokens.ratio > 1)

    def check(self) -> None:
        """It has no constants."""


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

    def check(self) -> None:
        _check(self, min(dataclasses.astuple(self)) > 0, "constants above 0")


Gate = Open | SignedBand | Band | TotalVariation | BinaryKL
Coefficient = Unweighted | Truncated | Clipped | Tapered | Kernel


def outward(value: jax.Array, advantages: jax.Array, low: float | jax.Array, high: float | jax.Array) -> jax.Array:
    """Where a value has left [low, high] on the side that its advantage pushes to; never where A = 0."""
    return ((advantages > 0) & (value > high)) | ((advantages < 0) & (value < low))


def binary_kl(logprobs: jax.Array, other_logprobs: jax.Array) -> jax.Array:
    """KL((q, 1 - q) || (p, 1 - p)) in nats, from log q and log p; 1e-8 keeps certain tokens finite, as in verl."""
    q, rest, other_rest = jnp.exp(logprobs), -jnp.expm1(logprobs) + 1e-8, -jnp.expm1(other_logprobs) + 1e-8
    return q * (logprobs - other_logprobs) - jnp.expm1(logprobs) * jnp.log(rest / other_rest)


def _check(what: object, is_right: bool, wanted: str) -> None:
    if not is_right:
        raise ValueError(f"{what}; wanted {wanted}")
