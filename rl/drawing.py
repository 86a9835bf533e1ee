"""How a token is drawn from logits, and the logprob that it is reported with.

A row's noise is two uniform numbers: one picks a stretch of the vocabulary by its mass, the other a token in it. They depend on
(key, request id, position of the token) alone, so neither the slot, nor its neighbours, nor the timing of the call changes what a
request samples. A token of probability 0 is never drawn.
"""

import jax
import jax.numpy as jnp

STRETCH = 256
"""Tokens that the second number picks from. Numbers of 24 bits, one after the other, resolve what one alone would not."""


def sample(logits: jax.Array, key: jax.Array, *, request_ids: jax.Array, positions: jax.Array, greedy: jax.Array,
           temperature: float, top_k: int = 0, top_p: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """One token a row, and its logprob.

    Args:
      logits: float32 [S, V].
      key: the run's sampling key.
      request_ids: int32 [S].
      positions: int32 [S], the position the sampled token will have.
      greedy: bool [S], take the likeliest token instead.
      temperature: divides the logits.
      top_k: draw from so many of the likeliest tokens; 0 for all.
      top_p: draw from the likeliest tokens that together hold this mass.

    Returns:
      Tokens int32 [S], and their logprobs float32 [S] in nats, at most 0: under the distribution that they were drawn from. What
      is greedy, or drawn from a truncated distribution, is for evaluation: its logprobs are the policy's at temperature 1.
    """
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)  # exact: a token far above the others has logprob 0
    scaled = shifted / temperature
    drawn_from = truncate(scaled, top_k=top_k, top_p=top_p)

    def numbers(request_id, position):
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, request_id), position), (2,))

    tokens = draw(jnp.exp(drawn_from), jax.vmap(numbers)(request_ids, positions))
    tokens = jnp.where(greedy, jnp.argmax(logits, axis=-1).astype(jnp.int32), tokens)

    def logprobs(logits):
        # The sum holds an exp(0), and so its logarithm is no less than 0.
        return jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0] - jnp.log(jnp.sum(jnp.exp(logits), axis=-1))

    if is_truncated(top_k=top_k, top_p=top_p):
        return tokens, logprobs(shifted)
    of_policy = jax.lax.cond(jnp.any(greedy), lambda: logprobs(shifted), lambda: jnp.zeros(greedy.shape, jnp.float32))
    return tokens, jnp.where(greedy, of_policy, logprobs(scaled))


def is_truncated(*, top_k: int, top_p: float) -> bool:
    """Whether some tokens cannot be drawn."""
    return top_k > 0 or top_p < 1


def draw(mass: jax.Array, numbers: jax.Array) -> jax.Array:
    """Picks an index of each row in proportion to its mass: float32 [S, V] of at least 0, by numbers [S, 2] in [0, 1)."""
    num_rows, size = mass.shape
    num_stretches = -(-size // STRETCH)
    stretches = jnp.pad(mass, ((0, 0), (0, num_stretches * STRETCH - size))).reshape(num_rows, num_stretches, STRETCH)
    stretch = _pick(jnp.sum(stretches, axis=-1), numbers[:, 0])
    chosen = jnp.take_along_axis(stretches, stretch[:, None, None], axis=1)[:, 0]
    return stretch * STRETCH + _pick(chosen, numbers[:, 1])


def _pick(mass: jax.Array, numbers: jax.Array) -> jax.Array:
    """The inverse of the cumulative distribution: rows [S, n] and one number each, to int32 [S]."""
    # A sum taken in parts may fall by a rounding error where nothing is added. What has no mass must have no room.
    edges = jax.lax.cummax(jnp.cumsum(mass, axis=-1), axis=1)
    total = edges[:, -1:]
    target = jnp.minimum(numbers[:, None] * total, jnp.nextafter(total, jnp.zeros_like(total)))
    return jnp.sum((edges <= target).astype(jnp.int32), axis=-1)


def truncate(logits: jax.Array, *, top_k: int, top_p: float) -> jax.Array:
    """Logits [S, V], -inf for all but the likeliest tokens: the first k, and of these those that hold the mass.

    Top-p is arXiv 1904.09751's. Tokens as likely as the last that is kept are kept too: which of them to drop would be an
    accident of their ids.
    """
    if 0 < top_k < logits.shape[-1]:
        threshold = jax.lax.top_k(logits, top_k)[0][:, -1:]
        logits = jnp.where(logits >= threshold, logits, -jnp.inf)
    if top_p < 1:
        descending = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
        probabilities = jax.nn.softmax(descending, axis=-1)
        mass_before = jnp.cumsum(probabilities, axis=-1) - probabilities
        last_kept = jnp.sum((mass_before < top_p).astype(jnp.int32), axis=-1, keepdims=True) - 1
        threshold = jnp.take_along_axis(descending, last_kept, axis=-1)
        logits = jnp.where(logits >= threshold, logits, -jnp.inf)
    return logits
