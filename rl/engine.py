"""The sampling engine: JetStream's `Engine` contract over the compiled programs of `rl.sampling_programs`.

Parameters are an argument of every call, which is what lets the sampler swap policies between two tokens. Three things go
beyond the contract of JetStream 0.2.2, because reinforcement learning needs them and it has no place for them:

* `decode` returns each token's logprob and the version of the policy that sampled it.
* Sampling noise is a function of (seed, request id, token position). The request id rides in the prefix.
* `insert_group` gives a group's members one prefix, `append` adds an environment's tokens to running rows, and `refill`
  recomputes their caches under new weights.

JetStream imports TensorFlow (seconds, and about a gigabyte), so this is the only module that imports it.
"""

import contextlib
import os

import jax
import jax.numpy as jnp
import numpy as np

from models.sharding import replicated
from models.tokenizer import NO_TEXT, ByteTokenizer, Tokenizer
from models.transformer import Model, Params
from rl import sampling
from rl.sampling import DecodeState, LoadedPolicy, Prefix, Sampled
from rl.sampling_programs import SamplingPrograms


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
    from jetstream.engine import engine_api, token_utils, tokenizer_api, tokenizer_pb2


class PolicyEngine(engine_api.Engine):
    """Samples from a `Model` in S slots.

    Args:
      model: the decoder's structure; its `max_length` is the room of a slot.
      mesh: slots spread over its data and fsdp axes, heads over tensor.
      slots: rows decoded together.
      max_steps: most decode steps in one device call.
      temperature: of sampling, > 0. Greedy decoding is a request's own choice.
      top_k, top_p: see `drawing.sample`; for evaluation: training refuses a truncated distribution.
      seed: of the sampling noise.
      stop_tokens: ids that end a turn.
      tokenizer: for JetStream, which serves texts.
    """

    def __init__(self, model: Model, mesh: jax.sharding.Mesh, *, slots: int, max_steps: int, temperature: float,
                 top_k: int = 0, top_p: float = 1.0, seed: int, stop_tokens: tuple[int, ...] = (),
                 tokenizer: Tokenizer | None = None):
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}, wanted more than 0; for greedy decoding make the request greedy")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p is {top_p}, wanted a probability mass in (0, 1]")
        if top_k < 0:
            raise ValueError(f"top_k is {top_k}, wanted a number of tokens, or 0 for all")
        self._programs = SamplingPrograms(model, mesh, slots=slots, max_steps=max_steps, temperature=temperature, top_k=top_k,
                                          top_p=top_p)
        self._model, self._mesh = model, mesh
        self._slots, self.max_steps = slots, max_steps
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self._key = jax.device_put(jax.random.key(seed), replicated(mesh))
        self._tokenizer = _JetStreamTokenizer(tokenizer or ByteTokenizer(), stop_tokens)
        is_stop = np.zeros(model.config.padded_vocab_size, bool)
        is_stop[list(stop_tokens)] = True
        self._is_stop = jax.device_put(is_stop, replicated(mesh))

    # --- JetStream's contract ---

    def load_params(self, params: Params, version: int) -> LoadedPolicy:
        """Published parameters (float32 or bfloat16, stacked layers) laid out for decoding, stamped with their version.

        They may lie on other devices, in whatever shards; then they are copied to this engine's.
        """
        params = jax.device_put(params, self._programs.parameter_shardings)
        return LoadedPolicy(weights=self._programs.load(params), version=self._device(np.int32(version)))

    def prefill(self, *, params: LoadedPolicy, existing_prefix: Prefix | None = None, padded_tokens: jax.Array, true_length: int,
                request_id: int = 0, remaining: int | None = None, greedy: bool = False, room: int = 0) -> Prefix:
        """The KV cache of a context. Compiled once for each length of `padded_tokens`, int32 [n], and room of the cache.

        The tokens follow those of `existing_prefix`, if there is one. `remaining` may be sampled: by default, all that fits. The
        cache has room for the tokens, and at least for `room` of them: a prefix that others will extend is best given it at once.
        """
        tokens = np.asarray(padded_tokens, np.int32)
        if not 1 <= true_length <= len(tokens):
            raise ValueError(f"prefill of {true_length} tokens padded to {len(tokens)}; "
                             "wanted at least 1 and at most the padded length")
        context_length = true_length if existing_prefix is None else int(existing_prefix.length) + 1 + true_length
        sampling.raise_if_too_long(context_length, self.room)
        left = self.room - context_length
        scalars = {"true_length": np.int32(true_length), "request_id": np.int32(request_id),
                   "remaining": np.int32(left if remaining is None else min(remaining, left)), "greedy": np.bool_(greedy)}
        if existing_prefix is not None:
            room = max(room, existing_prefix.cache.room, context_length - true_length - 1 + len(tokens))
        tokens, scalars = self._device((tokens, scalars))
        return self._programs.prefill(params.weights, existing_prefix, tokens, **scalars, room=max(room, len(tokens)))

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """Puts a prefix into a slot; `decode_state` is donated."""
        if not 0 <= slot < self._slots:
            raise ValueError(f"insert into slot {slot}, wanted 0 to {self._slots - 1}")
        return self._programs.insert(prefix, decode_state, self._device(np.int32(slot)))

    def generate(self, params: LoadedPolicy, decode_state: DecodeState) -> tuple[DecodeState, engine_api.ResultTokens]:
        """One decode step as JetStream sees it: tokens, validity and numbers of tokens sampled in one array, without logprobs."""
        decode_state, sampled = self.decode(params, decode_state, 1)
        columns = [sampled.tokens[:, :1], sampled.valid[:, :1].astype(jnp.int32), decode_state.num_sampled[:, None]]
        return decode_state, engine_api.ResultTokens(data=jnp.concatenate(columns, axis=1), tokens_idx=(0, 1), valid_idx=(1, 2),
                                                     length_idx=(2, 3), samples_per_slot=1)

    def init_decode_state(self) -> DecodeState:
        """All slots idle and empty."""
        return self._programs.init()

    def get_prefix_destination_sharding(self) -> Prefix:
        """Of each part of a prefix: its heads lie as those of the slots that it may go into, and all of these are to reach it."""
        return self._programs.prefix_shardings

    def get_tokenizer(self) -> tokenizer_pb2.TokenizerParameters:
        return tokenizer_pb2.TokenizerParameters()

    def build_tokenizer(self, metadata: tokenizer_pb2.TokenizerParameters) -> tokenizer_api.Tokenizer:
        return self._tokenizer

    @property
    def compute_dtype(self) -> str:
        """What the policy is computed in, by name."""
        return self._model.config.compute_dtype.value

    @property
    def max_concurrent_decodes(self) -> int:
        return self._slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        """Of a padded prompt: JetStream pads to powers of two from 16 on and wants one of them, so it may exceed `room`."""
        return max(16, 1 << (self.room - 1).bit_length())

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        return None

    # --- beyond it ---

    @property
    def room(self) -> int:
        """Tokens that a slot holds, the prompt's included."""
        return self._model.config.max_length

    def decode(self, params: LoadedPolicy, state: DecodeState, num_steps: int, *,
               span: int | None = None) -> tuple[DecodeState, Sampled]:
        """Up to `num_steps` decode steps in one device call, fewer when every slot falls idle; `state` is donated.

        Compiled once for each `span`: the number of steps is data. A turn ends at a stop token or when nothing remains. Attention
        looks at the first `span` places of a slot, by default at all; what decodes must fit into them until the call ends.
        """
        if not 1 <= num_steps <= self.max_steps:
            raise ValueError(f"decode of {num_steps} steps, wanted 1 to {self.max_steps}; raise --decode-steps-per-call")
        return self._programs.decode(params, state, self._key, self._is_stop, self._device(np.int32(num_steps)),
                                     span=span or self.room)

    def insert_group(self, prefix: Prefix, state: DecodeState, slots: np.ndarray, *, request_ids: np.ndarray,
                     remaining: np.ndarray, greedy: np.ndarray) -> DecodeState:
        """Puts one prefix into R slots, for a request each; all arrays [R]. A slot number of S stands for no slot."""
        slots, rows = self._device((slots, {"request_ids": request_ids, "remaining": remaining, "greedy": greedy}))
        return self._programs.insert_group(prefix, state, slots, **rows)

    def append(self, params: LoadedPolicy, state: DecodeState, slots: np.ndarray, *, tokens: np.ndarray, counts: np.ndarray,
               remaining: np.ndarray, span: int | None = None) -> DecodeState:
        """Appends counts[r] of int32 tokens [R, T] to R slots and lets each sample `remaining[r]`; the rest [R].

        A slot number of S stands for no slot. What the slots then hold must fit `span`, by default all of a slot.
        """
        slots, rows = self._device((slots, {"tokens": tokens, "counts": counts, "remaining": remaining}))
        return self._programs.append(params.weights, state, slots, **rows, span=span or self.room)

    def refill(self, params: LoadedPolicy, state: DecodeState, slots: np.ndarray, *, contexts: np.ndarray, counts: np.ndarray,
               request_ids: np.ndarray, remaining: np.ndarray, greedy: np.ndarray) -> DecodeState:
        """Computes R slots afresh under these weights: contexts int32 [R, T] of counts[r] >= 1 tokens each, the rest [R].

        A slot number of S stands for no slot.
        """
        rows = {"contexts": contexts, "counts": counts, "request_ids": request_ids, "remaining": remaining, "greedy": greedy}
        slots, rows = self._device((slots, rows))
        return self._programs.refill(params.weights, state, slots, **rows)

    def free_resource(self, state: DecodeState, slot: int) -> DecodeState:
        """Makes a slot idle, in the middle of a turn too."""
        return self._programs.free(state, self._device(np.int32(slot)))

    # --- inside ---

    def _device(self, arrays):
        return jax.device_put(arrays, replicated(self._mesh))


class _JetStreamTokenizer(tokenizer_api.Tokenizer):
    """A tokenizer as JetStream wants it. It pads with what it takes for the end; neither is ever read."""

    def __init__(self, tokenizer: Tokenizer, stop_tokens: tuple[int, ...]):
        self._tokenizer, self._stop_tokens = tokenizer, stop_tokens

    def encode(self, s: str, *, is_bos: bool = True, **kwargs) -> tuple[jax.Array | np.ndarray, int]:
        has_bos = is_bos and self._tokenizer.bos is not None
        return token_utils.pad_tokens(self._tokenizer.encode(s), self.bos_id, self.pad_id, is_bos=has_bos, **kwargs)

    def decode(self, token_ids: list[int], **kwargs) -> str:
        """JetStream asks token by token, and puts together the bytes of a character that it gets as "<0x..>"."""
        stored = self._tokenizer.to_bytes(token_ids)
        if len(stored) == 1 and stored >= b"\x80" and stored != NO_TEXT:
            return f"<0x{stored[0]:02X}>"
        return self._tokenizer.decode(token_ids)

    @property
    def stop_tokens(self) -> set[int]:
        return set(self._stop_tokens)

    @property
    def eos_id(self) -> int:
        return min(self._stop_tokens, default=self._tokenizer.vocab_size - 1)

    @property
    def pad_id(self) -> int:
        return self.eos_id

    @property
    def bos_id(self) -> int:
        return self.eos_id if self._tokenizer.bos is None else self._tokenizer.bos
