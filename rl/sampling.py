"""Sampling in slots, as pure functions: the decode state, the loop of decode steps, and how contexts come, grow and go.

A row holds a context of n+1 tokens as n in the cache and one, `next_tokens`, that the next decode step feeds. A row whose
`remaining` is 0 is idle: decoding leaves it as it is. The version of a policy rides in `LoadedPolicy` with the weights, so no
token can be stamped with another version than the one whose weights were used.
"""

import chex
import jax
import jax.numpy as jnp

from models import decode
from models.transformer import Model, Params
from rl.drawing import sample


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
    num_sampled: jax.Array  # tokens sampled since the slot was filled
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


def empty_state(model: Model, slots: int) -> DecodeState:
    """All slots idle and empty."""
    zeros = jnp.zeros((slots,), jnp.int32)
    return DecodeState(cache=decode.init_cache(model.config, slots, model.config.max_length), next_tokens=zeros, lengths=zeros,
                       num_sampled=zeros, request_ids=zeros, remaining=zeros, greedy=jnp.zeros((slots,), bool))


def decode_loop(model: Model, policy: LoadedPolicy, state: DecodeState, key: jax.Array, is_stop: jax.Array, num_steps: jax.Array,
                *, span: int, max_steps: int, temperature: float, top_k: int, top_p: float) -> tuple[DecodeState, Sampled]:
    """Decode steps until `num_steps` of at most `max_steps` are done or every slot is idle.

    A turn ends at a token that `is_stop`, bool [V], marks, or when nothing remains. Attention looks at the first `span` places
    of a slot; what decodes must fit into them. `temperature`, `top_k` and `top_p`: see `drawing.sample`.
    """
    slots = state.remaining.shape[0]
    shape = (slots, max_steps)
    empty = Sampled(tokens=jnp.zeros(shape, jnp.int32), logprobs=jnp.zeros(shape, jnp.float32),
                    versions=jnp.zeros(shape, jnp.int32), valid=jnp.zeros(shape, bool), num_steps=jnp.zeros((slots,), jnp.int32))

    def going(carry):
        step, state, _ = carry
        return (step < num_steps) & jnp.any(state.remaining > 0)

    def one_step(carry):
        step, state, sampled = carry
        active = state.remaining > 0
        positions = jnp.where(active, state.lengths, model.config.max_length)
        logits, cache = decode.decode_step(model, policy.weights, state.cache, state.next_tokens, positions=positions, span=span)
        tokens, logprobs = sample(logits, key, request_ids=state.request_ids, positions=state.lengths + 1, greedy=state.greedy,
                                  temperature=temperature, top_k=top_k, top_p=top_p)
        remaining = jnp.where(is_stop[tokens], 0, state.remaining - 1)
        one = active.astype(jnp.int32)
        sampled = Sampled(tokens=sampled.tokens.at[:, step].set(tokens), logprobs=sampled.logprobs.at[:, step].set(logprobs),
                          versions=sampled.versions.at[:, step].set(policy.version), valid=sampled.valid.at[:, step].set(active),
                          num_steps=sampled.num_steps + 1)
        state = state.replace(cache=cache, next_tokens=jnp.where(active, tokens, state.next_tokens),
                              lengths=state.lengths + one, num_sampled=state.num_sampled + one,
                              remaining=jnp.where(active, remaining, 0))
        return step + 1, state, sampled

    _, state, sampled = jax.lax.while_loop(going, one_step, (jnp.int32(0), state, empty))
    return state, sampled


def prefill(model: Model, weights: Params, existing: Prefix | None, tokens: jax.Array, *, true_length: jax.Array,
            request_id: jax.Array, remaining: jax.Array, greedy: jax.Array, room: int) -> Prefix:
    """The context of `existing`, if any, and `true_length` of int32 tokens [n]. All but the last go into the cache, of `room`."""
    last = tokens[true_length - 1]
    if existing is None:
        fed, count, start = tokens, true_length - 1, jnp.zeros((), jnp.int32)
        cache = decode.init_cache(model.config, 1, room)
    else:
        fed, count, start = jnp.concatenate([existing.next_token[None], tokens[:-1]]), true_length, existing.length
        cache = existing.cache.head(room)
    _, cache = decode.extend(model, weights, cache, fed[None], starts=start[None], counts=count[None])
    return Prefix(cache=cache, next_token=last, length=start + count, request_id=request_id, remaining=remaining, greedy=greedy)


def insert(prefix: Prefix, state: DecodeState, slot: jax.Array) -> DecodeState:
    """Puts a prefix into a slot."""
    return insert_group(prefix, state, slot[None], request_ids=prefix.request_id[None], remaining=prefix.remaining[None],
                        greedy=prefix.greedy[None])


def insert_group(prefix: Prefix, state: DecodeState, slots: jax.Array, *, request_ids: jax.Array, remaining: jax.Array,
                 greedy: jax.Array) -> DecodeState:
    """Puts a prefix into R slots, for a request each; all arrays [R]. A slot number of S stands for no slot."""
    room = min(prefix.cache.room, state.cache.room)  # a prefix that others extended may have padding beyond the slot
    cache = prefix.cache.head(room).rows(jnp.zeros_like(slots))
    return _fill(state, slots, cache, next_tokens=jnp.full_like(slots, prefix.next_token),
                 lengths=jnp.full_like(slots, prefix.length), request_ids=request_ids, remaining=remaining, greedy=greedy)


def refill(model: Model, weights: Params, state: DecodeState, slots: jax.Array, *, contexts: jax.Array, counts: jax.Array,
           request_ids: jax.Array, remaining: jax.Array, greedy: jax.Array) -> DecodeState:
    """Computes R slots afresh: contexts int32 [R, T] of counts[r] >= 1 tokens each, the rest [R].

    A slot number of S stands for no slot.
    """
    cache = decode.prefill(model, weights, contexts, counts=counts - 1)
    last = jnp.take_along_axis(contexts, counts[:, None] - 1, axis=1)[:, 0]
    return _fill(state, slots, cache, next_tokens=last, lengths=counts - 1, request_ids=request_ids, remaining=remaining,
                 greedy=greedy)


def append(model: Model, weights: Params, state: DecodeState, slots: jax.Array, *, tokens: jax.Array, counts: jax.Array,
           remaining: jax.Array, span: int) -> DecodeState:
    """Appends counts[r] of int32 tokens [R, T] to R slots and lets each sample `remaining[r]`; what they hold then fits `span`.

    A slot number of S stands for no slot.
    """
    starts, first = (leaf.at[slots].get(mode="clip") for leaf in (state.lengths, state.next_tokens))
    fed = jnp.concatenate([first[:, None], tokens[:, :-1]], axis=1)
    _, cache = decode.extend(model, weights, state.cache.rows(slots).head(span), fed, starts=starts, counts=counts)
    last = jnp.take_along_axis(tokens, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]

    def put(leaf, new):
        return leaf.at[slots].set(new, mode="drop")

    return state.replace(cache=state.cache.with_rows(slots, cache), next_tokens=put(state.next_tokens, last),
                         lengths=put(state.lengths, starts + counts), remaining=put(state.remaining, remaining))


def free(state: DecodeState, slot: jax.Array) -> DecodeState:
    """Makes a slot idle."""
    return state.replace(remaining=state.remaining.at[slot].set(0))


def _fill(state: DecodeState, slots: jax.Array, cache: decode.Cache, *, next_tokens: jax.Array, lengths: jax.Array,
          request_ids: jax.Array, remaining: jax.Array, greedy: jax.Array) -> DecodeState:
    """Overwrites R slots."""
    def put(leaf, new):
        return leaf.at[slots].set(new, mode="drop")

    return DecodeState(cache=state.cache.with_rows(slots, cache),
                       next_tokens=put(state.next_tokens, next_tokens), lengths=put(state.lengths, lengths),
                       num_sampled=put(state.num_sampled, jnp.zeros_like(lengths)),
                       request_ids=put(state.request_ids, request_ids), remaining=put(state.remaining, remaining),
                       greedy=put(state.greedy, greedy))


def raise_if_too_long(length: int, room: int) -> None:
    """Raises ValueError when a context does not leave room for one sampled token."""
    if length >= room:
        raise ValueError(f"a context of {length} tokens leaves no room to sample: a slot holds {room}; "
                         "shorten the prompt or raise --model.max-length")
