"""Logprobs and entropies of given tokens: the only place where a prediction is shifted onto the token it predicts.

The hidden state at t predicts token t+1. Everywhere else index t speaks of token t, so position 0, which nothing predicts,
has logprob 0 and entropy 0.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from models.transformer import Model, Params

VOCABULARY_CHUNK = 128
"""Tokens a row whose logits exist at one time, so that no [B, T, V] array does."""


class Score(NamedTuple):
    """Float32 [B, T]: log π of each token in nats, and the entropy in nats of the distribution it was drawn from."""

    logprobs: jax.Array
    entropy: jax.Array


def log_softmax_and_entropy(logits: jax.Array, *, temperature: jax.Array | float) -> tuple[jax.Array, jax.Array]:
    """log softmax(logits / temperature) [..., V] and its entropy [...].

    What is divided are differences to the largest logit: those of large logits are exact, their quotients are rounded.
    """
    shifted = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    log_probabilities = jax.nn.log_softmax(shifted / temperature, axis=-1)
    return log_probabilities, -jnp.sum(jnp.exp(log_probabilities) * log_probabilities, axis=-1)


def score(model: Model, params: Params, tokens: jax.Array, valid: jax.Array, *, temperature: jax.Array | float) -> Score:
    """log π(token t | tokens before t) under the distribution softmax(logits / temperature).

    The result of a row depends on that row's valid tokens alone. It is bitwise reproducible for the same shape, sharding, types
    and program; another shape moves float32 logprobs by about 1e-6 nats.

    Args:
      model: the decoder's structure.
      params: published parameters.
      tokens: int32 [B, T], padded on the right.
      valid: bool [B, T], True where a token exists.
      temperature: that of sampling; a different one would put the temperature into every ratio.

    Returns:
      `Score`; 0 at position 0 and where `valid` is False.
    """
    num_rows, length = tokens.shape
    hidden = model.hidden(params, tokens)
    targets = jnp.roll(tokens, -1, axis=1)  # what the last position predicts is not known; its result is dropped below
    chunk = min(VOCABULARY_CHUNK, length)
    num_chunks = -(-length // chunk)
    padding = ((0, 0), (0, num_chunks * chunk - length))
    hidden = jnp.pad(hidden, (*padding, (0, 0))).reshape(num_rows, num_chunks, chunk, -1)
    targets = jnp.pad(targets, padding).reshape(num_rows, num_chunks, chunk)

    @jax.checkpoint  # the backward pass makes a chunk's logits again instead of keeping all of them
    def score_chunk(chunk_hidden, chunk_targets):
        log_probabilities, entropy = log_softmax_and_entropy(model.logits(params, chunk_hidden), temperature=temperature)
        return jnp.take_along_axis(log_probabilities, chunk_targets[..., None], axis=-1)[..., 0], entropy

    logprobs, entropy = jax.lax.map(lambda xs: score_chunk(*xs), (hidden.swapaxes(0, 1), targets.swapaxes(0, 1)))

    def align(chunks):
        per_token = chunks.swapaxes(0, 1).reshape(num_rows, -1)[:, : length - 1]
        return jnp.where(valid, jnp.pad(per_token, ((0, 0), (1, 0))), 0.0)

    return Score(align(logprobs), align(entropy))
