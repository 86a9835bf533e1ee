"""The one attention function: everything that attends calls it, so a TPU kernel has one place to go."""

import math

import jax
import jax.numpy as jnp

MASKED_LOGIT = -1e30
"""Of what must have no probability. Finite: an infinite one would make inf - inf in a softmax and 0 * inf in an entropy."""
FEW_QUERIES = 8
"""Of a kv head and row: up to so many, a CPU is slow at multiplying them as a matrix."""
PARTS = 16
"""As many numbers as a CPU adds up without a store in between."""


def attention(queries: jax.Array, keys: jax.Array, values: jax.Array, *, query_positions: jax.Array,
              window: jax.Array | int | None = None, span: int | None = None) -> jax.Array:
    """Causal grouped-query attention; logits and softmax in float32.

    One rule serves training, prefill and decoding: the key at index s belongs to position s, and a query at position p sees
    the keys 0..p, or the last `window` of these. Rows are padded on the right, so padding lies after every token that exists
    and is never seen.

    Args:
      queries: [B, T, N, H].
      keys: [B, K, H, S] with N a multiple of K: the order of a matrix product, so that a cache is multiplied as it lies.
      values: [B, K, S, H].
      query_positions: int32 [B, T].
      window: how many keys a query sees, that of its own position included; an int32 scalar. None: no such bound.
      span: keys from here on are not looked at; by default S. A cut-out handed in would be copied, as often as there is a call.

    Returns:
      [B, T, N, H] in the type of `queries`.
    """
    num_rows, length, num_heads, head_dim = queries.shape
    num_kv_heads, span = keys.shape[1], span or keys.shape[3]
    group = num_heads // num_kv_heads
    # The query heads of one kv head are more queries to it: two plain matrix products a kv head, whatever the grouping.
    grouped = queries.reshape(num_rows, length, num_kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(num_rows, num_kv_heads, group * length, head_dim)
    key_positions, positions = jnp.arange(span)[None, None, :], jnp.tile(query_positions, (1, group))[:, :, None]
    visible = key_positions <= positions
    if window is not None:
        visible &= key_positions > positions - window
    logits = _products(grouped, keys, span, jnp.float32) * head_dim**-0.5
    weights = jax.nn.softmax(jnp.where(visible[:, None], logits, MASKED_LOGIT), axis=-1)
    attended = _products(weights.astype(values.dtype), values, head_dim, values.dtype)
    attended = attended.reshape(num_rows, num_kv_heads, group, length, head_dim)
    return attended.transpose(0, 3, 1, 2, 4).reshape(queries.shape)


def _products(queries: jax.Array, others: jax.Array, width: int, dtype) -> jax.Array:
    """[B, K, Q, X] times the first X rows and `width` columns of [B, K, *, *], to [B, K, Q, width] of a type.

    For few queries a CPU's matrix product first copies the keys into an order of its own, or reads them anew for each query. So
    they are read once, where they lie, in a loop that adds up `PARTS` products at a time, and what is left to be added up is a
    product with ones.
    """
    def together(queries, others):
        return jnp.einsum("bkqx,bkxy->bkqy", queries, others[:, :, :size, :width], preferred_element_type=dtype)

    def in_parts(queries, others):
        queries = queries[..., None].astype(jnp.float32)
        sums = sum(queries[:, :, :, part] * others[:, :, None, part, :width].astype(jnp.float32) for part in parts)
        return jnp.einsum("bkqx,bkqxy->bkqy", jnp.ones(sums.shape[:4]), sums).astype(dtype)

    size = queries.shape[3]
    step = size // math.gcd(size, PARTS)
    parts = [slice(start, start + step) for start in range(0, size, step)]
    if not 1 < queries.shape[2] <= FEW_QUERIES or len(parts) == 1:
        return together(queries, others)
    return jax.lax.platform_dependent(queries, others, cpu=in_parts, default=together)
