"""The decoder. `Transformer` is its Flax module; `Model` is what everyone else holds: the structure without the numbers.

Parameters are a plain nested dict, split from the module once, here, and an argument of every call: scoring under an older
snapshot or swapping a policy is then an ordinary call. The module itself never holds a number: it is built of declarations,
and `Model.init` draws what they declare. Layers are stacked on a leading axis and scanned, so compile time and the published
tree do not grow with depth. A block offers its two halves, `project` and `combine`, to whoever brings the attention in
between: the scan below over whole sequences, and `models.decode` over a KV cache.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from models.attention import MASKED_LOGIT, attention
from models.config import ModelConfig, RopeScaling
from models.parameters import Params, declarations, declare, draw
from models.sharding import lookup_shardings

UNROLLED_LAYERS = 2  # up to so many, no scan: it copies whatever the backward pass needs, and compiles no faster
FEW_ROWS = 64  # so few are multiplied from the other side


class RMSNorm(nnx.Module):
    """Root mean square normalisation in float32."""

    def __init__(self, size: int, axis: str, epsilon: float):
        self.scale = declare([size], [axis], mean=1.0)
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        normalized = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.epsilon)
        scale = jnp.expand_dims(self.scale[...], tuple(range(x.ndim - 1)))
        return normalized.astype(x.dtype) * scale.astype(x.dtype)


class Linear(nnx.Module):
    """An affine map over the trailing axes of its input; the kernel has shape [*inputs, *outputs], or outputs first."""

    def __init__(self, inputs: dict[str, int], outputs: dict[str, int], *, use_bias: bool = False, scale: float = 1.0,
                 outputs_first: bool = False):
        deviation = scale * math.prod(inputs.values()) ** -0.5
        sizes = {**outputs, **inputs} if outputs_first else {**inputs, **outputs}
        self.kernel = declare(sizes.values(), sizes, deviation=deviation)
        self.bias = declare(outputs.values(), outputs) if use_bias else None
        self.num_in, self.outputs_first = len(inputs), outputs_first

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.kernel[...].astype(x.dtype)
        y = outputs_first_product(kernel, x, self.num_in) if self.outputs_first else jnp.tensordot(x, kernel, axes=self.num_in)
        if self.bias is None:
            return y
        bias = self.bias[...].astype(x.dtype)
        return y + jnp.expand_dims(bias, tuple(range(y.ndim - bias.ndim)))


def outputs_first_product(kernel: jax.Array, x: jax.Array, num_in: int, **options) -> jax.Array:
    """x [*rows, *inputs] times a kernel [*outputs, *inputs] of `num_in` inputs, to [*rows, *outputs].

    Few rows leave matrix units of a CPU idle, unless they are the columns: the product is taken from the other side, twice as
    fast. The barrier keeps XLA from turning it around again.
    """
    kernel_axes, x_axes = (tuple(range(array.ndim - num_in, array.ndim)) for array in (kernel, x))
    if math.prod(x.shape[:-num_in]) > FEW_ROWS:
        return jax.lax.dot_general(x, kernel, ((x_axes, kernel_axes), ((), ())), **options)
    y = jax.lax.optimization_barrier(jax.lax.dot_general(kernel, x, ((kernel_axes, x_axes), ((), ())), **options))
    return jnp.moveaxis(y, range(kernel.ndim - num_in), range(num_in - kernel.ndim, 0))


def rotate(x: jax.Array, positions: jax.Array, theta: float, scaling: RopeScaling | None = None) -> jax.Array:
    """Rotary positions (arXiv 2104.09864), halves convention. x: [B, T, heads, H], positions: [B, T]; angles in float32."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is not None:
        turns = frequencies * (scaling.original_max_length / (2 * math.pi))
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        kept_share = jnp.clip((turns - low) / (high - low), 0, 1)
        frequencies = frequencies * (kept_share + (1 - kept_share) / scaling.factor)
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies[None, None, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    sines, cosines = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1).astype(x.dtype)


class Block(nnx.Module):
    """One layer. Between its halves someone attends: over the sequence itself or over a cache."""

    def __init__(self, config: ModelConfig, *, outputs_first: bool):
        self.config = config
        linear = functools.partial(Linear, outputs_first=outputs_first)
        embed = {"embed": config.d_model}
        heads = {"heads": config.num_heads, "head": config.head_dim}
        kv_heads = {"kv_heads": config.num_kv_heads, "head": config.head_dim}
        mlp = {"mlp": config.d_ff}
        residual_scale = (2 * config.num_layers) ** -0.5  # keeps the residual stream's variance independent of depth
        self.attention_norm = RMSNorm(config.d_model, "embed", config.norm_epsilon)
        self.query = linear(embed, heads, use_bias=config.qkv_bias)
        self.key = linear(embed, kv_heads, use_bias=config.qkv_bias)
        self.value = linear(embed, kv_heads, use_bias=config.qkv_bias)
        self.output = linear(heads, embed, scale=residual_scale)
        self.query_norm = RMSNorm(config.head_dim, "head", config.norm_epsilon) if config.qk_norm else None
        self.key_norm = RMSNorm(config.head_dim, "head", config.norm_epsilon) if config.qk_norm else None
        self.mlp_norm = RMSNorm(config.d_model, "embed", config.norm_epsilon)
        self.gate = linear(embed, mlp)
        self.up = linear(embed, mlp)
        self.down = linear(mlp, embed, scale=residual_scale)

    def project(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x [B, T, D] to rotated queries [B, T, N, H], rotated keys and values [B, T, K, H]."""
        normalized = self.attention_norm(x)
        queries, keys, values = self.query(normalized), self.key(normalized), self.value(normalized)
        if self.query_norm is not None:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        theta, scaling = self.config.rope_theta, self.config.rope_scaling
        return rotate(queries, positions, theta, scaling), rotate(keys, positions, theta, scaling), values

    def combine(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """Adds the attention's output [B, T, N, H] and the feed-forward's to the residual stream x [B, T, D]."""
        x = x + self.output(attended)
        normalized = self.mlp_norm(x)
        return x + self.down(jax.nn.silu(self.gate(normalized)) * self.up(normalized))


class Transformer(nnx.Module):
    """Embedding, stacked blocks, final norm, and a language-model head unless the embedding is tied."""

    def __init__(self, config: ModelConfig, *, outputs_first: bool):
        self.config = config
        self.embedding = declare([config.padded_vocab_size, config.d_model], ["vocab", "embed"], deviation=config.d_model**-0.5)
        self.blocks = Block(config, outputs_first=outputs_first)  # one structure for all layers, whose parameters are stacked
        self.final_norm = RMSNorm(config.d_model, "embed", config.norm_epsilon)
        head = functools.partial(Linear, {"embed": config.d_model}, {"vocab": config.padded_vocab_size})
        self.head = None if config.tied_embeddings else head(outputs_first=outputs_first)
        self.outputs_first = outputs_first

    def embed(self, tokens: jax.Array) -> jax.Array:
        """int32 [B, T] to [B, T, D] in the compute type."""
        return jnp.take(self.embedding[...].astype(self.config.compute_dtype.dtype), tokens, axis=0)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Final hidden states [..., D] to float32 logits [..., V]. Padded ids get `MASKED_LOGIT`.

        Sampler and learner both come through here, so a padded vocabulary is masked alike on either side.
        """
        x = self.final_norm(hidden)
        kernel = (self.embedding if self.head is None else self.head.kernel)[...].astype(x.dtype)
        if self.outputs_first:
            logits = outputs_first_product(kernel, x, 1, preferred_element_type=jnp.float32)
        else:
            logits = jnp.matmul(x, kernel.T if self.head is None else kernel, preferred_element_type=jnp.float32)
        if self.config.padded_vocab_size == self.config.vocab_size:
            return logits
        is_real = jnp.arange(self.config.padded_vocab_size) < self.config.vocab_size
        return jnp.where(jnp.expand_dims(is_real, tuple(range(logits.ndim - 1))), logits, MASKED_LOGIT)


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder's structure. Hashable and without state: the parameters are an argument of every call.

    Attributes:
      config: the shape.
      remat: recompute each block's activations in the backward pass instead of keeping them.
      outputs_first: kernels are [*outputs, *inputs], as is faster for few rows.
      activation_sharding: where [B, T, D] activations live on a mesh; weights are then gathered to them, not the reverse.
    """

    config: ModelConfig
    remat: bool = False
    outputs_first: bool = False
    activation_sharding: jax.sharding.NamedSharding | None = None

    def init(self, key: jax.Array) -> Params:
        """Random parameters in float32: a function of the key, whatever the mesh."""
        others = dict(_structure(self.config, self.outputs_first)[1])
        block = others.pop("blocks")
        return draw(key, block, others, d_model=self.config.d_model, num_layers=self.config.num_layers)

    def bind(self, params: Params) -> Transformer:
        """The Flax module with these parameters in it; for use inside a trace."""
        return nnx.merge(_structure(self.config, self.outputs_first)[0], nnx.State(params))

    @property
    def axes(self) -> Params:
        """The logical axes of every leaf, in a tree like the parameters."""
        return jax.tree.map(lambda leaf: leaf.axes, self._declarations)

    @property
    def shapes(self) -> Params:
        """A `jax.ShapeDtypeStruct` for every leaf."""
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), self._declarations)

    def hidden(self, params: Params, tokens: jax.Array) -> jax.Array:
        """int32 [B, T], padded on the right, to hidden states [B, T, D] before the final norm."""
        transformer = self.bind(params)
        structure, stacked = nnx.split(transformer.blocks)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

        def layer(x, block_params_and_window):
            block_params, window = block_params_and_window
            block = nnx.merge(structure, block_params)
            queries, keys, values = block.project(x, positions)
            attended = attention(queries, keys.transpose(0, 2, 3, 1), values.swapaxes(1, 2), query_positions=positions,
                                 window=window)
            return self._constrain(block.combine(x, attended)), None

        layer = jax.checkpoint(layer) if self.remat else layer
        layers = stacked, self._windows(tokens.shape[1])
        return jax.lax.scan(layer, self._embed(transformer, tokens), layers, unroll=self.config.num_layers <= UNROLLED_LAYERS)[0]

    def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
        """Hidden states [..., D] to float32 logits [..., V]."""
        return self.bind(params).logits(hidden)

    def _windows(self, length: int) -> jax.Array | None:
        """How many of `length` tokens each layer attends to, int32 [L]; None where all of them attend to all."""
        if not self.config.sliding_layers:
            return None
        return jnp.asarray([length if window is None else window for window in self.config.windows], jnp.int32)

    def _embed(self, transformer: Transformer, tokens: jax.Array) -> jax.Array:
        """Tokens go to where the table's columns are and the looked-up columns come back: the table is never gathered."""
        if self.activation_sharding is None:
            return transformer.embed(tokens)
        token_sharding, column_sharding = lookup_shardings(self.activation_sharding.mesh)
        tokens = jax.lax.with_sharding_constraint(tokens, token_sharding)
        return self._constrain(jax.lax.with_sharding_constraint(transformer.embed(tokens), column_sharding))

    def _constrain(self, x: jax.Array) -> jax.Array:
        return x if self.activation_sharding is None else jax.lax.with_sharding_constraint(x, self.activation_sharding)

    @property
    def _declarations(self) -> Params:
        tree = _structure(self.config, self.outputs_first)[1]
        return {**tree, "blocks": jax.tree.map(lambda leaf: leaf.stacked(self.config.num_layers), tree["blocks"])}


@functools.cache
def _structure(config: ModelConfig, outputs_first: bool) -> tuple[nnx.GraphDef, Params]:
    """The module's static part, and its declarations: those of one layer under "blocks"."""
    graphdef, state = nnx.split(Transformer(config, outputs_first=outputs_first))
    return graphdef, declarations(state)
