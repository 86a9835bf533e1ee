"""The device programs of the sampling engine: the pure functions of `rl.sampling`, compiled for a mesh.

`rl.engine` puts them behind JetStream's contract. They stand apart from it, and hold no array, so that whoever plans a run for
devices that are not there compiles the very programs that will run, and needs neither those devices nor JetStream.
"""

import functools

import jax
import jax.numpy as jnp

from models import decode
from models.sharding import BATCH_AXES, DECODE_RULES, batch_sharding, check_rows, parameter_shardings, placed, replicated
from models.transformer import Model, Params
from rl import sampling
from rl.sampling import DecodeState, LoadedPolicy, Prefix


class SamplingPrograms:
    """What an engine of S slots calls; each attribute that is a program takes the arguments of its function in `rl.sampling`.

    Args:
      model: the decoder's structure; its `max_length` is the room of a slot.
      mesh: slots spread over its data and fsdp axes, heads over tensor.
      slots: rows decoded together.
      max_steps: most decode steps in one device call.
      temperature, top_k, top_p: see `drawing.sample`.

    Attributes:
      parameter_shardings: where published parameters must lie for `load`.
      prefix_shardings: where the parts of a prefix lie: its heads as the slots', all of it on every device of the other axes.
      weights, state: what `load` and `init` return, as `jax.ShapeDtypeStruct` with shardings.
      prefix_cache: likewise the cache of the longest prefix.

    Raises:
      ShardingError: slots or heads do not divide over the mesh.
    """

    def __init__(self, model: Model, mesh: jax.sharding.Mesh, *, slots: int, max_steps: int, temperature: float,
                 top_k: int, top_p: float):
        check_rows("sampler slots", slots, mesh)
        self._model, self._whole = model, replicated(mesh)
        self.parameter_shardings = parameter_shardings(model.axes, model.shapes, mesh, DECODE_RULES)
        prepare = functools.partial(decode.prepare, model)
        decoding = decode.decoding(model)
        stacked = parameter_shardings(decoding.axes, decoding.shapes, mesh, DECODE_RULES)
        self.weights = placed(jax.eval_shape(prepare, model.shapes), _weight_shardings(stacked, model, mesh))
        empty_state = functools.partial(sampling.empty_state, model, slots)
        self.state = placed(jax.eval_shape(empty_state), _state_shardings(model, mesh))
        self.prefix_shardings = _prefix_shardings(model, mesh)
        longest = functools.partial(decode.init_cache, model.config, 1, model.config.max_length)
        self.prefix_cache = placed(jax.eval_shape(longest), self.prefix_shardings.cache)

        def make(function, out_shardings, **options):
            return jax.jit(function, out_shardings=out_shardings, **options)

        weights, state = (jax.tree.map(lambda leaf: leaf.sharding, shapes) for shapes in (self.weights, self.state))
        self.load = make(prepare, weights)
        self.init = make(empty_state, state)
        self.prefill = make(functools.partial(sampling.prefill, model), self.prefix_shardings, static_argnames="room")
        self.insert = make(sampling.insert, state, donate_argnums=1)
        self.insert_group = make(sampling.insert_group, state, donate_argnums=1)
        self.append = make(functools.partial(sampling.append, model), state, donate_argnums=1, static_argnames="span")
        self.refill = make(functools.partial(sampling.refill, model), state, donate_argnums=1)
        self.free = make(sampling.free, state, donate_argnums=0)
        decode_loop = functools.partial(sampling.decode_loop, model, max_steps=max_steps, temperature=temperature, top_k=top_k,
                                        top_p=top_p)
        self.decode = make(decode_loop, (state, batch_sharding(mesh)), donate_argnums=1, static_argnames="span")

    def lower_decode(self) -> jax.stages.Lowered:
        """The program of a decode call over all of a slot, for whoever wants to know it before it runs."""
        policy = LoadedPolicy(weights=self.weights, version=self._shape(jnp.int32))
        key = self._shape(jax.eval_shape(jax.random.key, 0).dtype)
        is_stop = self._shape(jnp.bool_, self._model.config.padded_vocab_size)
        return self.decode.lower(policy, self.state, key, is_stop, self._shape(jnp.int32), span=self._model.config.max_length)

    def lower_refill(self, rows: int, length: int) -> jax.stages.Lowered:
        """The program that computes contexts [rows, length] afresh."""
        numbers = self._shape(jnp.int32, rows)
        return self.refill.lower(self.weights, self.state, numbers, contexts=self._shape(jnp.int32, rows, length), counts=numbers,
                                 request_ids=numbers, remaining=numbers, greedy=self._shape(jnp.bool_, rows))

    def _shape(self, dtype, *sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=self._whole)


def _weight_shardings(stacked: Params, model: Model, mesh: jax.sharding.Mesh) -> Params:
    """Of `decode.prepare`'s result: those of the stack, without its leading axis, once a layer."""
    def unstacked(sharding):
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*sharding.spec[1:]))

    return {**stacked, "blocks": (jax.tree.map(unstacked, stacked["blocks"]),) * model.config.num_layers}


def _state_shardings(model: Model, mesh: jax.sharding.Mesh) -> DecodeState:
    rows = batch_sharding(mesh)
    return DecodeState(cache=_cache_shardings(model, mesh, BATCH_AXES), next_tokens=rows, lengths=rows, num_sampled=rows,
                       request_ids=rows, remaining=rows, greedy=rows)


def _prefix_shardings(model: Model, mesh: jax.sharding.Mesh) -> Prefix:
    whole = replicated(mesh)
    return Prefix(cache=_cache_shardings(model, mesh, None), next_token=whole, length=whole, request_id=whole, remaining=whole,
                  greedy=whole)


def _cache_shardings(model: Model, mesh: jax.sharding.Mesh, rows: tuple[str, ...] | None) -> decode.Cache:
    """Rows over some axes, heads over tensor."""
    cache = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(rows, "tensor"))
    layers = (cache,) * model.config.num_layers
    return decode.Cache(keys=layers, values=layers)
