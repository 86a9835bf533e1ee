"""Anchors that are functions of the current logprobs, the sampler's and the versions; the learner calls them inside its loss.

With d = learner version - token version, every form gives the current policy the share (d - 1) / d of a token that is d >= 1
versions old, and none of a fresh one. By Proposition 1 of arXiv 2605.12070 none of them knows anything of the old policy: they
re-parameterise bounds on the single ratio of the current policy to the sampler.
"""

import enum

import jax
import jax.numpy as jnp


class Interpolation(enum.Enum):
    """How to interpolate, by where it was published."""

    A3PO = "a3po"  # log-linear: A-3PO, arXiv 2512.06547
    AREAL_LOGLINEAR = "areal_loglinear"  # log-linear: AReaL's prox_approx
    AREAL_LINEAR = "areal_linear"  # of probabilities: AReaL's prox_approx; `linear_prox` of arXiv 2605.12070


def sampler(
    logprobs: jax.Array, sampler_logprobs: jax.Array, policy_versions: jax.Array, learner_version: jax.Array
) -> jax.Array:
    """The sampler's own logprobs, [B, T]."""
    del logprobs, policy_versions, learner_version
    return sampler_logprobs


def interpolate(
    logprobs: jax.Array,
    sampler_logprobs: jax.Array,
    policy_versions: jax.Array,
    learner_version: jax.Array,
    *,
    form: Interpolation,
) -> jax.Array:
    """An anchor between the sampler and the current policy.

    Args:
      logprobs: float32 [B, T] nats of the current policy; not to be differentiated.
      sampler_logprobs: float32 [B, T] nats.
      policy_versions: int32 [B, T], negative where no policy sampled.
      learner_version: int32, broadcasts to [B, T].
      form: which of the published ones.

    Returns:
      float32 [B, T] nats; the sampler's where a token is not older than the learner.
    """
    if form is Interpolation.A3PO:
        share = 1.0 - a3po_sampler_weight(policy_versions, learner_version)
    else:
        share = areal_current_weight(policy_versions, learner_version)
    if form is Interpolation.AREAL_LINEAR:
        return jnp.log((1.0 - share) * jnp.exp(sampler_logprobs) + share * jnp.exp(logprobs) + 1e-10)
    # Not a sum of products: with share 0 it is the sampler's logprob to the bit, and infinities do not meet.
    return jnp.where(share > 0, sampler_logprobs + share * (logprobs - sampler_logprobs), sampler_logprobs)


def a3po_sampler_weight(policy_versions: jax.Array, learner_version: jax.Array) -> jax.Array:
    """alpha of A-3PO (arXiv 2512.06547): 1 / d, and 1 for d = 0, with d the age in versions. Float32 [B, T].

    The paper defines it for tokens of a policy; a token that none sampled, or of a version to come, counts as fresh.
    """
    age = jnp.where(policy_versions < 0, 0, learner_version - policy_versions)
    return 1.0 / jnp.maximum(age, 1).astype(jnp.float32)


def areal_current_weight(policy_versions: jax.Array, learner_version: jax.Array) -> jax.Array:
    """AReaL's share of the current policy: clip((V - 1 - v) / (V - v), 0, 1) where V > v >= 0, else 0. Float32 [B, T]."""
    age = (learner_version - policy_versions).astype(jnp.float32)
    is_old = (policy_versions >= 0) & (age > 0)
    return jnp.where(is_old, jnp.clip((age - 1.0) / jnp.where(is_old, age, 1.0), 0.0, 1.0), 0.0)
