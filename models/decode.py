"""Decoding with a KV cache, as pure functions of parameters.

There is one cached forward, `extend`: it writes the keys and values of some new tokens into a row's cache and attends to all
that is there. A prefill is an `extend` of an empty cache, a decode step an `extend` by one token. The cache index of a key is
its token's position, so a row's content is whatever lies below its length, and stale entries above it are never seen.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
from flax import nnx

from models.attention import attention
from models.config import ModelConfig
from models.transformer import Model, Params


@chex.dataclass(frozen=True)
class Cache:
    """Keys and values of R rows with room for S tokens, in the compute type.

    Layers are separate arrays, so that each is updated in place.
    """

    keys: tuple[jax.Array, ...]  # [R, K, H, S]
    values: tuple[jax.Array, ...]  # [R, K, S, H]

    @property
    def room(self) -> int:
        return self.keys[0].shape[3]

    def head(self, length: int) -> "Cache":
        """The first `length` tokens of each row; with room for as many, if there were fewer."""
        missing = max(length - self.room, 0)
        return Cache(keys=tuple(jnp.pad(leaf[..., :length], ((0, 0),) * 3 + ((0, missing),)) for leaf in self.keys),
                     values=tuple(jnp.pad(leaf[:, :, :length], ((0, 0),) * 2 + ((0, missing), (0, 0))) for leaf in self.values))

    def rows(self, rows: jax.Array) -> "Cache":
        """Some rows, int32 [n]; a number beyond the last gives some row."""
        return jax.tree.map(lambda leaf: leaf.at[rows].get(mode="clip"), self)

    def with_rows(self, rows: jax.Array, new: "Cache") -> "Cache":
        """With the first tokens of some rows, int32 [n], replaced; a number beyond the last stands for no row."""
        length = new.room
        return Cache(keys=tuple(leaf.at[rows, :, :, :length].set(part, mode="drop")
                                for leaf, part in zip(self.keys, new.keys, strict=True)),
                     values=tuple(leaf.at[rows, :, :length].set(part, mode="drop")
                                  for leaf, part in zip(self.values, new.values, strict=True)))


def init_cache(config: ModelConfig, rows: int, length: int) -> Cache:
    """An empty cache."""
    def zeros(*shape: int):
        return tuple(jnp.zeros((rows, config.num_kv_heads, *shape), config.compute_dtype.dtype) for _ in range(config.num_layers))

    return Cache(keys=zeros(config.head_dim, length), values=zeros(length, config.head_dim))


def decoding(model: Model) -> Model:
    """The same structure with kernels as decoding wants them."""
    return dataclasses.replace(model, outputs_first=True)


def prepare(model: Model, params: Params) -> Params:
    """Lays published parameters out for decoding: a tuple of layers in place of the stack, outputs first, in the compute type.

    A scan over stacked layers copies weights and cache at each step; unrolled layers do not. The values are the published ones:
    the cast is the one that the forward would make at each use.
    """
    def lay_out(leaf, axes, wanted):
        return leaf.transpose([axes.index(axis) for axis in wanted]).astype(model.config.compute_dtype.dtype)

    params = jax.tree.map(lay_out, params, model.axes, decoding(model).axes)
    layers = [jax.tree.map(lambda leaf, index=index: leaf[index], params["blocks"]) for index in range(model.config.num_layers)]
    return {**params, "blocks": tuple(layers)}


def extend(model: Model, prepared: Params, cache: Cache, tokens: jax.Array, *, starts: jax.Array, counts: jax.Array,
           span: int | None = None) -> tuple[jax.Array, Cache]:
    """Appends tokens to each row.

    Args:
      model: the structure.
      prepared: from `prepare`.
      cache: R rows of room S.
      tokens: int32 [R, T]; row r holds counts[r] tokens, then padding.
      starts: int32 [R], tokens already in each row.
      counts: int32 [R], from 0 to T; starts + counts must not exceed S.
      span: attention looks at so many of the S places, by default at all; what the rows then hold must fit into them.

    Returns:
      Hidden states [R, T, D] (padding holds garbage) and the cache with the tokens in it.
    """
    transformer, blocks = _bind(model, prepared)
    room = cache.room
    offsets = jnp.arange(tokens.shape[1])[None, :]
    positions = starts[:, None] + offsets
    # Padding is written nowhere: an index beyond the cache is dropped.
    targets = jnp.where(offsets < counts[:, None], positions, room)
    rows = jnp.arange(tokens.shape[0])[:, None]
    x = transformer.embed(tokens)
    all_keys, all_values = [], []
    for block, keys, values, window in zip(blocks, cache.keys, cache.values, model.config.windows, strict=True):
        queries, new_keys, new_values = block.project(x, positions)
        keys = keys.at[rows, :, :, targets].set(new_keys, mode="drop")
        values = values.at[rows, :, targets].set(new_values, mode="drop")
        x = block.combine(x, attention(queries, keys, values, query_positions=positions, window=window, span=span))
        all_keys.append(keys)
        all_values.append(values)
    return x, Cache(keys=tuple(all_keys), values=tuple(all_values))


def prefill(model: Model, prepared: Params, tokens: jax.Array, *, counts: jax.Array) -> Cache:
    """The cache, of room T, of R contexts: tokens int32 [R, T], padded on the right to T, counts int32 [R]."""
    empty = init_cache(model.config, *tokens.shape)
    return extend(model, prepared, empty, tokens, starts=jnp.zeros_like(counts), counts=counts)[1]


def decode_step(model: Model, prepared: Params, cache: Cache, tokens: jax.Array, *, positions: jax.Array,
                span: int | None = None) -> tuple[jax.Array, Cache]:
    """Feeds one token to each row: tokens and positions int32 [R] to float32 logits [R, V] of the next token, and the cache.

    A row whose position lies outside the cache is left as it is; its logits are garbage. `span`: see `extend`.
    """
    hidden, cache = extend(model, prepared, cache, tokens[:, None], starts=positions, counts=jnp.ones_like(positions), span=span)
    transformer, _ = _bind(model, prepared)
    return transformer.logits(hidden[:, 0]), cache


def _bind(model: Model, prepared: Params):
    """The module without its blocks' numbers, and one module a layer."""
    layers = prepared["blocks"]
    # The stack's structure serves each layer: it holds no shapes. The stack itself gets the first layer's numbers, unused.
    transformer = decoding(model).bind({**prepared, "blocks": layers[0]})
    structure, _ = nnx.split(transformer.blocks)
    return transformer, [nnx.merge(structure, nnx.State(layer)) for layer in layers]
