"""The one attention function: everything that attends calls it, so a TPU kernel has one place to go."""

import jax
import jax.numpy as jnp


def attention(queries: jax.Array, keys: jax.Array, values: jax.Array, *, query_positions: jax.Array) -> jax.Array:
    """Causal grouped-query attention; logits and softmax in float32.

    One rule serves training, prefill and decoding: the key at index s belongs to position s, and a query at position p sees
    the keys 0..p. Rows are padded on the right, so padding lies after every token that exists and is never seen.

    Args:
      queries: [B, T, N, H].
      keys: [B, S, K, H] with N a multiple of K.
      values: [B, S, K, H].
      query_positions: int32 [B, T].

    Returns:
      [B, T, N, H] in the type of `queries`.
    """
    visible = jnp.arange(keys.shape[1])[None, None, :] <= query_positions[:, :, None]
    return jax.nn.dot_product_attention(queries, keys, values, mask=visible[:, None])
