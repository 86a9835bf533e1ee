"""The sampling engine: JetStream's `Engine` contract over our own cached forward.

Parameters are an argument of every call, which is what lets the sampler swap policies between two tokens. Three things go
beyond the contract of JetStream 0.2.2, because reinforcement learning needs them and it has no place for them:

* `decode` returns each token's logprob and the version of the policy that sampled it. The version rides in `LoadedPolicy`
  with the weights, so a token cannot be stamped with another version than the one whose weights were used.
* Sampling noise is a function of (seed, request id, token position). The request id rides in the prefix.
* `append` adds an environment's tokens to running rows, and `refill` recomputes their caches under new weights.

A row holds a context of n+1 tokens as n in the cache and one, `next_tokens`, that the next decode step feeds. A row whose
`remaining` is 0 is idle: decoding leaves it as it is.

JetStream imports TensorFlow (seconds, and about a gigabyte), so this is the only module that imports it.
"""

import contextlib
import functools
import os

import chex
import jax
import jax.numpy as jnp
import numpy as np

from models import decode
from models.sharding import (BATCH_AXES, DECODE_RULES, batch_sharding, check_rows, parameter_shardings, replicated)
from models.tokenizer import ByteTokenizer
from models.transformer import Model, Params
from rl.logprobs import log_softmax_and_entropy


@contextlib.contextmanager
def _silenced_stderr():
    """TensorFlow's C++ greets every importer on file descriptor 2, whatever its log level says."""
    saved = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)


with _silenced_stderr():
    from jetstream.engine import engine_api, tokenizer_api, tokenizer_pb2


@chex.dataclass(frozen=True)
class LoadedPolicy:
    """A policy ready to sample: weights laid out by `decode.prepare`, and the version (int32 scalar) they belong to."""

    weights: Params
    version: jax.Array


@chex.dataclass(frozen=True)
class Prefix:
    """A prefilled context of one row, and whose it is. `cache` has room for its length bucket; scalars are int32."""

    cache: decode.Cache
    next_token: jax.Array
    length: jax.Array  # tokens in the cache
    request_id: jax.Array
    remaining: jax.Array  # tokens the turn may sample
    greedy: jax.Array  # bool


@chex.dataclass(frozen=True)
class DecodeState:
    """S slots. Every array but the cache has shape [S]."""

    cache: decode.Cache
    next_tokens: jax.Array
    lengths: jax.Array
    request_ids: jax.Array
    remaining: jax.Array
    greedy: jax.Array


@chex.dataclass(frozen=True)
class Sampled:
    """What a `decode` of K steps sampled; arrays [S, K]. Where `valid` is False the slot was idle and the rest is garbage."""

    tokens: jax.Array
    logprobs: jax.Array  # float32 nats, of the distribution sampled from
    versions: jax.Array
    valid: jax.Array
    num_steps: jax.Array  # [S], the same for all: steps really run, for decoding ends early when every slot is idle


class PolicyEngine(engine_api.Engine):
    """Samples from a `Model` in S slots.

    Args:
      model: the decoder's structure; its `max_length` is the room of a slot.
      mesh: slots spread over its data and fsdp axes, heads over tensor.
      slots: rows decoded together.
      max_steps: most decode steps in one device call.
      temperature: of sampling, > 0. Greedy decoding is a request's own choice.
      top_p: nucleus mass; below 1 the reported logprobs are those of the truncated distribution, which training refuses.
      seed: of the sampling noise.
      stop_tokens: ids that end a turn.
    """

    def __init__(self, model: Model, mesh: jax.sharding.Mesh, *, slots: int, max_steps: int, temperature: float, top_p: float = 1.0,
                 seed: int, stop_tokens: tuple[int, ...] = ()):
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}, wanted more than 0; for greedy decoding make the request greedy")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p is {top_p}, wanted a probability mass in (0, 1]")
        check_rows("sampler slots", slots, mesh)
        self._model, self._mesh = model, mesh
        self._slots, self.max_steps = slots, max_steps
        self.temperature, self.top_p = temperature, top_p
        self._key = jax.device_put(jax.random.key(seed), replicated(mesh))
        is_stop = np.zeros(model.config.padded_vocab_size, bool)
        is_stop[list(stop_tokens)] = True
        self._is_stop = jax.device_put(is_stop, replicated(mesh))

        state_shardings = self._state_shardings()
        weight_shardings = self._weight_shardings()
        self._load = jax.jit(functools.partial(decode.prepare, model), out_shardings=weight_shardings)
        self._init = jax.jit(self._empty_state, out_shardings=state_shardings)
        self._decode = jax.jit(self._decode_loop, donate_argnums=1, out_shardings=(state_shardings, batch_sharding(mesh)))
        self._prefill = jax.jit(functools.partial(_prefill, model))
        self._insert = jax.jit(_insert, donate_argnums=1, out_shardings=state_shardings)
        self._append = jax.jit(functools.partial(_append, model), donate_argnums=1, out_shardings=state_shardings)
        self._free = jax.jit(_free, donate_argnums=0, out_shardings=state_shardings)
        self._refill = jax.jit(functools.partial(_refill, model), donate_argnums=1, out_shardings=state_shardings)

    # --- JetStream's contract ---

    def load_params(self, params: Params, version: int) -> LoadedPolicy:
        """Published parameters (float32 or bfloat16, stacked layers) laid out for decoding, stamped with their version."""
        return LoadedPolicy(weights=self._load(params), version=self._device(np.int32(version)))

    def prefill(self, *, params: LoadedPolicy, existing_prefix: Prefix | None = None, padded_tokens: jax.Array, true_length: int,
                request_id: int = 0, remaining: int | None = None, greedy: bool = False) -> Prefix:
        """The KV cache of a context. Compiled once for each length of `padded_tokens`, int32 [n].

        The tokens follow those of `existing_prefix`, if there is one. `remaining`, the tokens that may be sampled, is by default
        whatever fits.
        """
        tokens = np.asarray(padded_tokens, np.int32)
        if not 1 <= true_length <= len(tokens):
            raise ValueError(f"prefill of {true_length} tokens padded to {len(tokens)}; wanted at least 1 and at most the padded length")
        if existing_prefix is not None:
            known = existing_prefix.length + 1
            raise_if_too_long(int(known) + true_length, self.max_prefill_length)
        else:
            raise_if_too_long(true_length, self.max_prefill_length)
        if remaining is None:
            remaining = self.max_prefill_length - true_length - (0 if existing_prefix is None else int(known))
        scalars = (np.int32(true_length), np.int32(request_id), np.int32(remaining), np.bool_(greedy))
        return self._prefill(params.weights, existing_prefix, self._device(tokens), *map(self._device, scalars))

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """Puts a prefix into a slot; `decode_state` is donated."""
        return self._insert(prefix, decode_state, self._device(np.int32(slot)))

    def generate(self, params: LoadedPolicy, decode_state: DecodeState) -> tuple[DecodeState, engine_api.ResultTokens]:
        """One decode step as JetStream sees it: tokens, validity and lengths in one array, without logprobs."""
        decode_state, sampled = self.decode(params, decode_state, 1)
        packed = jnp.concatenate([sampled.tokens[:, :1], sampled.valid[:, :1].astype(jnp.int32), decode_state.lengths[:, None] + 1], axis=1)
        return decode_state, engine_api.ResultTokens(data=packed, tokens_idx=(0, 1), valid_idx=(1, 2), length_idx=(2, 3), samples_per_slot=1)

    def init_decode_state(self) -> DecodeState:
        """All slots idle and empty."""
        return self._init()

    def get_prefix_destination_sharding(self) -> jax.sharding.Sharding:
        """A prefix is whole on every device that decodes."""
        return replicated(self._mesh)

    def get_tokenizer(self) -> tokenizer_pb2.TokenizerParameters:
        return tokenizer_pb2.TokenizerParameters(path="bytes")

    def build_tokenizer(self, metadata: tokenizer_pb2.TokenizerParameters) -> tokenizer_api.Tokenizer:
        return _JetStreamTokenizer()

    @property
    def max_concurrent_decodes(self) -> int:
        return self._slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        return self._model.config.max_length

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        return None

    # --- beyond it ---

    def decode(self, params: LoadedPolicy, state: DecodeState, num_steps: int) -> tuple[DecodeState, Sampled]:
        """Up to `num_steps` decode steps in one device call, fewer when every slot falls idle; `state` is donated.

        Compiled once: the number of steps is data. A turn ends at a stop token or when nothing remains.
        """
        if not 1 <= num_steps <= self.max_steps:
            raise ValueError(f"decode of {num_steps} steps, wanted 1 to {self.max_steps}; raise --decode-steps-per-call")
        return self._decode(params, state, self._key, self._is_stop, self._device(np.int32(num_steps)))

    def append(self, params: LoadedPolicy, state: DecodeState, tokens: np.ndarray, counts: np.ndarray, remaining: np.ndarray) -> DecodeState:
        """Appends counts[s] tokens of int32 [S, T] to slot s and lets it sample `remaining[s]`; count 0 leaves a slot alone."""
        return self._append(params.weights, state, *map(self._device_rows, (tokens, counts, remaining)))

    def refill(self, params: LoadedPolicy, state: DecodeState, slots: np.ndarray, *, contexts: np.ndarray, counts: np.ndarray,
               request_ids: np.ndarray, remaining: np.ndarray, greedy: np.ndarray) -> DecodeState:
        """Computes R slots afresh under these weights: contexts int32 [R, T] of counts[r] >= 1 tokens each, the rest [R].

        A slot number of S stands for no slot.
        """
        return self._refill(params.weights, state, *map(self._device, (slots, contexts, counts, request_ids, remaining, greedy)))

    def free_resource(self, state: DecodeState, slot: int) -> DecodeState:
        """Makes a slot idle, in the middle of a turn too."""
        return self._free(state, self._device(np.int32(slot)))

    # --- inside ---

    def _device(self, array: np.ndarray) -> jax.Array:
        return jax.device_put(array, replicated(self._mesh))

    def _device_rows(self, array: np.ndarray) -> jax.Array:
        return jax.device_put(array, batch_sharding(self._mesh))

    def _weight_shardings(self):
        shapes, axes = self._model.shapes, self._model.axes
        shardings = parameter_shardings(axes, shapes, self._mesh, rules=DECODE_RULES)
        unstacked = jax.tree.map(lambda sharding: jax.sharding.NamedSharding(self._mesh, jax.sharding.PartitionSpec(*sharding.spec[1:])),
                                 shardings["blocks"])
        return {**shardings, "blocks": (unstacked,) * self._model.config.num_layers}

    def _state_shardings(self) -> DecodeState:
        rows = batch_sharding(self._mesh)
        cache = jax.sharding.NamedSharding(self._mesh, jax.sharding.PartitionSpec(BATCH_AXES, None, "tensor"))
        layers = (cache,) * self._model.config.num_layers
        return DecodeState(cache=decode.Cache(keys=layers, values=layers), next_tokens=rows, lengths=rows, request_ids=rows,
                           remaining=rows, greedy=rows)

    def _empty_state(self) -> DecodeState:
        zeros = jnp.zeros((self._slots,), jnp.int32)
        return DecodeState(cache=decode.init_cache(self._model.config, self._slots, self._model.config.max_length), next_tokens=zeros,
                           lengths=zeros, request_ids=zeros, remaining=zeros, greedy=jnp.zeros((self._slots,), bool))

    def _decode_loop(self, policy: LoadedPolicy, state: DecodeState, key: jax.Array, is_stop: jax.Array, num_steps: jax.Array):
        shape = (self._slots, self.max_steps)
        empty = Sampled(tokens=jnp.zeros(shape, jnp.int32), logprobs=jnp.zeros(shape, jnp.float32), versions=jnp.zeros(shape, jnp.int32),
                        valid=jnp.zeros(shape, bool), num_steps=jnp.zeros((self._slots,), jnp.int32))

        def going(carry):
            step, state, _ = carry
            return (step < num_steps) & jnp.any(state.remaining > 0)

        def one_step(carry):
            step, state, sampled = carry
            active = state.remaining > 0
            positions = jnp.where(active, state.lengths, self._model.config.max_length)
            logits, cache = decode.decode_step(self._model, policy.weights, state.cache, state.next_tokens, positions=positions)
            tokens, logprobs = sample(logits, key, request_ids=state.request_ids, positions=state.lengths + 1, greedy=state.greedy,
                                      temperature=self.temperature, top_p=self.top_p)
            remaining = jnp.where(is_stop[tokens], 0, state.remaining - 1)
            sampled = Sampled(tokens=sampled.tokens.at[:, step].set(tokens), logprobs=sampled.logprobs.at[:, step].set(logprobs),
                              versions=sampled.versions.at[:, step].set(policy.version), valid=sampled.valid.at[:, step].set(active),
                              num_steps=sampled.num_steps + 1)
            state = state.replace(cache=cache, next_tokens=jnp.where(active, tokens, state.next_tokens),
                                  lengths=state.lengths + active.astype(jnp.int32), remaining=jnp.where(active, remaining, 0))
            return step + 1, state, sampled

        _, state, sampled = jax.lax.while_loop(going, one_step, (jnp.int32(0), state, empty))
        return state, sampled


def sample(logits: jax.Array, key: jax.Array, *, request_ids: jax.Array, positions: jax.Array, greedy: jax.Array, temperature: float,
           top_p: float) -> tuple[jax.Array, jax.Array]:
    """One token a row by the Gumbel maximum.

    The noise depends on (key, request id, position of the token) alone, so neither the slot, nor its neighbours, nor the timing of
    the call changes what a request samples.

    Args:
      logits: float32 [S, V].
      key: the run's sampling key.
      request_ids: int32 [S].
      positions: int32 [S], the position the sampled token will have.
      greedy: bool [S], take the likeliest token instead.
      temperature: divides the logits.
      top_p: keep the likeliest tokens that together hold this mass.

    Returns:
      Tokens int32 [S] and their logprobs float32 [S] in nats, under the distribution that sampled them.
    """
    log_probabilities, _ = log_softmax_and_entropy(logits, temperature=temperature)
    if top_p < 1:
        log_probabilities = _nucleus(log_probabilities, top_p)
    keys = jax.vmap(lambda request_id, position: jax.random.fold_in(jax.random.fold_in(key, request_id), position))(request_ids, positions)
    noise = jax.vmap(lambda row_key: jax.random.gumbel(row_key, (logits.shape[1],)))(keys)
    tokens = jnp.argmax(log_probabilities + jnp.where(greedy[:, None], 0.0, noise), axis=-1)
    return tokens, jnp.take_along_axis(log_probabilities, tokens[:, None], axis=-1)[:, 0]


def _nucleus(log_probabilities: jax.Array, top_p: float) -> jax.Array:
    """Renormalised over the smallest set of likeliest tokens whose mass reaches `top_p` (arXiv 1904.09751)."""
    descending = jnp.flip(jnp.sort(log_probabilities, axis=-1), axis=-1)
    mass_before = jnp.cumsum(jnp.exp(descending), axis=-1) - jnp.exp(descending)
    last_kept = jnp.sum((mass_before < top_p).astype(jnp.int32), axis=-1, keepdims=True) - 1
    threshold = jnp.take_along_axis(descending, last_kept, axis=-1)
    return jax.nn.log_softmax(jnp.where(log_probabilities >= threshold, log_probabilities, -jnp.inf), axis=-1)


def raise_if_too_long(length: int, room: int) -> None:
    """Raises ValueError when a context does not leave room for one sampled token."""
    if length >= room:
        raise ValueError(f"a context of {length} tokens leaves no room to sample: a slot holds {room}; shorten the prompt or raise --max-length")


def _prefill(model, weights, existing: Prefix | None, tokens, true_length, request_id, remaining, greedy) -> Prefix:
    """All tokens but the last go into the cache; the last is fed by the first decode step."""
    last = tokens[true_length - 1]
    if existing is None:
        fed, count, start = tokens, true_length - 1, jnp.zeros((), jnp.int32)
        cache = decode.init_cache(model.config, 1, tokens.shape[0])
    else:
        fed, count, start = jnp.concatenate([existing.next_token[None], tokens[:-1]]), true_length, existing.length
        cache = jax.tree.map(lambda leaf: jnp.pad(leaf, ((0, 0), (0, tokens.shape[0]), (0, 0), (0, 0))), existing.cache)
    _, cache = decode.extend(model, weights, cache, fed[None], starts=start[None], counts=count[None])
    return Prefix(cache=cache, next_token=last, length=start + count, request_id=request_id, remaining=remaining, greedy=greedy)


def _insert(prefix: Prefix, state: DecodeState, slot) -> DecodeState:
    room = state.cache.keys[0].shape[1]

    def put(leaf, new):
        zero = jnp.zeros((), jnp.int32)
        return jax.lax.dynamic_update_slice(leaf, new[:, :room], (slot, zero, zero, zero))

    return DecodeState(cache=jax.tree.map(put, state.cache, prefix.cache), next_tokens=state.next_tokens.at[slot].set(prefix.next_token),
                       lengths=state.lengths.at[slot].set(prefix.length), request_ids=state.request_ids.at[slot].set(prefix.request_id),
                       remaining=state.remaining.at[slot].set(prefix.remaining), greedy=state.greedy.at[slot].set(prefix.greedy))


def _append(model, weights, state: DecodeState, tokens, counts, remaining) -> DecodeState:
    fed = jnp.concatenate([state.next_tokens[:, None], tokens[:, :-1]], axis=1)
    _, cache = decode.extend(model, weights, state.cache, fed, starts=state.lengths, counts=counts)
    appended = counts > 0
    last = jnp.take_along_axis(tokens, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
    return state.replace(cache=cache, next_tokens=jnp.where(appended, last, state.next_tokens), lengths=state.lengths + counts,
                         remaining=jnp.where(appended, remaining, state.remaining))


def _free(state: DecodeState, slot) -> DecodeState:
    return state.replace(remaining=state.remaining.at[slot].set(0))


def _refill(model, weights, state: DecodeState, slots, contexts, counts, request_ids, remaining, greedy) -> DecodeState:
    fresh = decode.prefill(model, weights, contexts, counts=counts - 1)
    width = contexts.shape[1]
    cache = jax.tree.map(lambda leaf, new: leaf.at[slots, :width].set(new, mode="drop"), state.cache, fresh)
    last = jnp.take_along_axis(contexts, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]

    def put(leaf, new):
        return leaf.at[slots].set(new, mode="drop")

    return DecodeState(cache=cache, next_tokens=put(state.next_tokens, last), lengths=put(state.lengths, counts - 1),
                       request_ids=put(state.request_ids, request_ids), remaining=put(state.remaining, remaining),
                       greedy=put(state.greedy, greedy))


class _JetStreamTokenizer(tokenizer_api.Tokenizer):
    """`ByteTokenizer` as JetStream wants it."""

    def encode(self, s: str, **kwargs) -> tuple[np.ndarray, int]:
        tokens = np.concatenate([[ByteTokenizer.bos], ByteTokenizer().encode(s)]).astype(np.int32)
        return tokens, len(tokens)

    def decode(self, token_ids: list[int], **kwargs) -> str:
        return ByteTokenizer().decode(np.asarray(token_ids, np.int32))

    @property
    def pad_id(self) -> int:
        return ByteTokenizer.pad

    @property
    def eos_id(self) -> int:
        return ByteTokenizer.eos

    @property
    def bos_id(self) -> int:
        return ByteTokenizer.bos
