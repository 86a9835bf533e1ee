"""Continuous batching over an engine's slots, across policy versions.

A request waits, gets a slot, and keeps it for its whole episode: turn after turn its environment appends tokens, and the cache
goes on from where it was. `step` makes one device call of several decode steps and hands out what was sampled, each token with
its logprob and its version. A `publish` may come between any two steps; what it does to the running contexts is `Swap`.

Rows remember their contexts on the host. A row whose cache does not belong to the present policy, or was never there, is
*stale*: the next step recomputes it. That is how a publish with `REPREFILL`, and a restored sampler, get their caches back.
"""

import dataclasses
import enum
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from models.transformer import Params
from rl.batching import bucket_length, pad_rows
from rl.sampling import LoadedPolicy, raise_if_too_long
from rl.types import NO_POLICY

if TYPE_CHECKING:  # it is handed in, so that a process without a sampler never imports JetStream
    from rl.engine import PolicyEngine


class Swap(enum.Enum):
    """What a publish does to the KV caches of running contexts."""

    REPREFILL = "reprefill"  # recomputed: the behaviour policy of each token is exactly one version
    KEEP_KV = "keep_kv"  # kept, as PipelineRL does (arXiv 2509.19128): tokens see keys and values of older versions


@dataclasses.dataclass(frozen=True)
class Request:
    """An episode to sample. Requests of one group with one prompt share its prefill.

    `request_id` names the sampling noise, so it must be unique in a run.
    """

    request_id: int
    group_id: int
    prompt: np.ndarray  # int32 [n]
    max_turn_tokens: int
    greedy: bool = False


class SampledTokens(NamedTuple):
    """New tokens of one request; arrays [n]."""

    request_id: int
    tokens: np.ndarray
    logprobs: np.ndarray
    policy_versions: np.ndarray
    context_versions: np.ndarray  # the oldest version in the cache that each token was sampled from
    turn_over: bool


@dataclasses.dataclass
class _Row:
    """A request in a slot."""

    request: Request
    context: list[int]
    context_version: int
    remaining: int  # tokens this turn may still sample; 0: waiting for its environment
    is_stale: bool = True  # the cache must be computed before the row may decode
    pending: np.ndarray | None = None  # tokens at the end of the context that the engine has not seen yet


class Sampler:
    """Samples requests with the published policy.

    Args:
      engine: where the device work happens.
      lengths: buckets that recomputed contexts are padded to. Prompts and what environments write may be far shorter: they are
        padded to powers of two up to the largest bucket.
      refill_rows: slots filled or recomputed in one device call.
      swap: what a publish does to running contexts.
    """

    def __init__(self, engine: "PolicyEngine", *, lengths: tuple[int, ...], refill_rows: int, swap: Swap):
        self._engine = engine
        self._lengths = lengths
        self._short_lengths = (*(2**power for power in range(3, (lengths[-1] - 1).bit_length())), lengths[-1])
        self._refill_rows = min(refill_rows, engine.max_concurrent_decodes)
        self._room = engine.room
        self._swap = swap
        self._policy: LoadedPolicy | None = None
        self._state = engine.init_decode_state()
        self._waiting: dict[int, Request] = {}  # by request id, in order of arrival
        self._rows: dict[int, _Row] = {}  # by slot
        self._slot_of: dict[int, int] = {}  # by request id
        self._paused = False
        self.version = NO_POLICY
        self.num_decode_steps = 0
        self.num_sampled_tokens = 0
        self.num_prefilled_tokens = 0

    # --- requests ---

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
          ValueError: an empty prompt, one that leaves no room to sample, or a request id in use.
        """
        if not len(request.prompt):
            raise ValueError(f"request {request.request_id} has an empty prompt; wanted at least one token to sample after")
        raise_if_too_long(len(request.prompt), self._room)
        if request.max_turn_tokens < 1:
            raise ValueError(f"request {request.request_id} may sample {request.max_turn_tokens} tokens a turn, wanted at least "
                             "1; look at the environment's max_turn_tokens")
        if request.request_id in self._slot_of or request.request_id in self._waiting:
            raise ValueError(f"request {request.request_id} is already being sampled; request ids name the sampling noise, "
                             "so give each request of a run its own")
        self._waiting[request.request_id] = request

    def extend(self, request_id: int, tokens: np.ndarray) -> None:
        """Appends an environment's tokens to a request whose turn is over, and starts its next turn.

        Raises:
          ValueError: the turn is not over, no tokens, or too many to leave room for sampling.
        """
        row = self._rows[self._slot_of[request_id]]
        if row.remaining:
            raise ValueError(f"request {request_id} is in the middle of a turn and may sample {row.remaining} more tokens; "
                             "extend it when its turn is over")
        if not len(tokens):
            raise ValueError(f"request {request_id} is extended by 0 tokens, wanted at least 1; "
                             "release it if its episode is over")
        raise_if_too_long(len(row.context) + len(tokens), self._room)
        row.context.extend(tokens.tolist())
        row.pending = tokens
        row.remaining = self._turn_budget(row.request, len(row.context))

    def release(self, request_id: int) -> None:
        """Ends a request and frees its slot, wherever it is."""
        self._waiting.pop(request_id, None)
        slot = self._slot_of.pop(request_id, None)
        if slot is not None and self._rows.pop(slot).remaining:
            self._state = self._engine.free_resource(self._state, slot)

    # --- policy ---

    def publish(self, version: int, params: Params) -> None:
        """Makes a policy the one that samples from the next step on.

        Raises:
          ValueError: a version that is not newer than the present one.
        """
        if version <= self.version:
            raise ValueError(f"publish of version {version} after version {self.version}, wanted a larger one: "
                             "versions count publishes")
        self._policy = self._engine.load_params(params, version)
        self.version = version
        if self._swap is Swap.REPREFILL:
            self._mark_stale()

    def pause(self) -> None:
        """Steps do nothing until `resume`."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    # --- sampling ---

    def step(self, num_steps: int) -> list[SampledTokens]:
        """Up to `num_steps` decode steps, at most one device call of them; returns what each running request sampled.

        Raises:
          RuntimeError: nothing was published yet, so there is no policy to sample from.
        """
        if self._policy is None:
            raise RuntimeError("the sampler has no policy yet; publish version 0 before the first step")
        if self._paused:
            return []
        self._admit()
        self._refill_stale()
        self._append_pending()
        running = {slot: row for slot, row in self._rows.items() if row.remaining}
        if not running:
            return []
        self._state, sampled = self._engine.decode(self._policy, self._state, min(num_steps, self._engine.max_steps))
        sampled, remaining = jax.device_get((sampled, self._state.remaining))
        self.num_decode_steps += int(sampled.num_steps[0])
        self.num_sampled_tokens += int(sampled.valid.sum())
        context_versions = np.zeros((len(remaining), 1), np.int32)
        context_versions[list(running), 0] = [row.context_version for row in running.values()]
        context_versions = np.broadcast_to(context_versions, sampled.tokens.shape)
        # A row is valid until its turn ends, and then no more: a slice is enough.
        counts, remaining = sampled.valid.sum(axis=1).tolist(), remaining.tolist()
        collected = []
        for slot, row in running.items():
            there = (slot, slice(counts[slot]))
            tokens = sampled.tokens[there]
            row.context.extend(tokens.tolist())
            row.remaining = remaining[slot]
            collected.append(SampledTokens(row.request.request_id, tokens, sampled.logprobs[there], sampled.versions[there],
                                           context_versions[there], row.remaining == 0))
        return collected

    @property
    def is_paused(self) -> bool:
        """Whether steps do nothing."""
        return self._paused

    @property
    def max_steps(self) -> int:
        """Most decode steps in one `step`."""
        return self._engine.max_steps

    @property
    def num_running(self) -> int:
        """Requests with a slot."""
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        """Requests without one."""
        return len(self._waiting)

    def _turn_budget(self, request: Request, context_length: int) -> int:
        return min(request.max_turn_tokens, self._room - context_length)

    def _mark_stale(self) -> None:
        for row in self._rows.values():
            row.is_stale = True

    def _admit(self) -> None:
        """Gives free slots to waiting requests in order, with one prefill for neighbours that share a group and a prompt."""
        if not self._waiting:
            return
        free = [slot for slot in range(self._engine.max_concurrent_decodes) if slot not in self._rows]
        admitted = [self._waiting.pop(request_id) for request_id in list(self._waiting)[:len(free)]]
        pairs = zip(free, admitted, strict=False)
        for _, members in itertools.groupby(pairs, lambda pair: (pair[1].group_id, pair[1].prompt.tobytes())):
            members = list(members)
            prompt = members[0][1].prompt
            padded = pad_rows([prompt], bucket_length(len(prompt), self._short_lengths), fill=0)[0]
            prefix = self._engine.prefill(params=self._policy, padded_tokens=padded, true_length=len(prompt))
            self.num_prefilled_tokens += len(prompt)
            for slot, request in members:
                remaining = self._turn_budget(request, len(prompt))
                self._place(slot, _Row(request, prompt.tolist(), self.version, remaining, is_stale=False))
            for slots in self._calls([slot for slot, _ in members]):
                padded_slots, facts = self._describe(slots)
                self._state = self._engine.insert_group(prefix, self._state, padded_slots, **facts)

    def _place(self, slot: int, row: _Row) -> None:
        self._rows[slot] = row
        self._slot_of[row.request.request_id] = slot

    def _refill_stale(self) -> None:
        """Recomputes the contexts of stale rows that are about to decode, rows of one length bucket together."""
        by_bucket: dict[int, list[int]] = {}
        for slot, row in self._rows.items():
            if row.is_stale and row.remaining:
                by_bucket.setdefault(bucket_length(len(row.context), self._lengths), []).append(slot)
        for length, bucket_slots in sorted(by_bucket.items()):
            for slots in self._calls(bucket_slots):
                self._refill(slots, length)

    def _refill(self, slots: list[int], length: int) -> None:
        rows = [self._rows[slot] for slot in slots]
        contexts = pad_rows([np.asarray(row.context, np.int32) for row in rows], length, fill=0, num_rows=self._refill_rows)
        counts = np.ones(self._refill_rows, np.int32)
        counts[:len(rows)] = [len(row.context) for row in rows]
        padded_slots, facts = self._describe(slots)
        self._state = self._engine.refill(self._policy, self._state, padded_slots, contexts=contexts, counts=counts, **facts)
        for row in rows:
            row.is_stale, row.pending, row.context_version = False, None, self.version
            self.num_prefilled_tokens += len(row.context)

    def _append_pending(self) -> None:
        """Feeds what environments wrote since the last step, for all slots in one call."""
        pending = {slot: row for slot, row in self._rows.items() if row.pending is not None}
        if not pending:
            return
        slots = self._engine.max_concurrent_decodes
        width = bucket_length(max(len(row.pending) for row in pending.values()), self._short_lengths)
        tokens = np.zeros((slots, width), np.int32)
        counts, remaining = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
        for slot, row in pending.items():
            counts[slot], remaining[slot] = len(row.pending), row.remaining
            tokens[slot, :len(row.pending)] = row.pending
            row.pending = None
        self._state = self._engine.append(self._policy, self._state, tokens, counts=counts, remaining=remaining)

    def _calls(self, slots: list[int]) -> Iterator[list[int]]:
        """Parts of at most as many slots as one device call takes."""
        return (slots[first:first + self._refill_rows] for first in range(0, len(slots), self._refill_rows))

    def _describe(self, slots: list[int]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Slot numbers [R] and what the engine must know of their requests, padded with a slot that does not exist."""
        padded = np.full(self._refill_rows, self._engine.max_concurrent_decodes, np.int32)
        padded[:len(slots)] = slots
        request_ids, remaining, greedy = np.zeros_like(padded), np.zeros_like(padded), np.zeros(len(padded), bool)
        for index, slot in enumerate(slots):
            row = self._rows[slot]
            request_ids[index], remaining[index], greedy[index] = row.request.request_id, row.remaining, row.request.greedy
        return padded, {"request_ids": request_ids, "remaining": remaining, "greedy": greedy}

    # --- state ---

    def state(self) -> dict:
        """Everything but the caches, as plain arrays and JSON values.

        Taking it makes every cache stale: a checkpoint is a version boundary whether or not the run goes on from it, so that a
        resumed run and a straight one are the same run.
        """
        self._mark_stale()
        return {"version": self.version, "paused": self._paused, "num_decode_steps": self.num_decode_steps,
                "num_sampled_tokens": self.num_sampled_tokens, "num_prefilled_tokens": self.num_prefilled_tokens,
                "waiting": [dict(request.__dict__) for request in self._waiting.values()],
                "rows": [{"slot": slot, "request": dict(row.request.__dict__), "context": np.asarray(row.context, np.int32),
                          "context_version": row.context_version, "remaining": row.remaining}
                         for slot, row in self._rows.items()]}

    def restore(self, state: dict, params: Params) -> None:
        """Takes a `state` back; `params` are the published parameters of its version."""
        self._policy = self._engine.load_params(params, state["version"])
        self._state = self._engine.init_decode_state()
        self.version = state["version"]
        self.num_decode_steps, self.num_sampled_tokens = state["num_decode_steps"], state["num_sampled_tokens"]
        self.num_prefilled_tokens = state["num_prefilled_tokens"]
        self._paused = state["paused"]
        self._waiting = {request["request_id"]: Request(**request) for request in state["waiting"]}
        self._rows, self._slot_of = {}, {}
        for saved in state["rows"]:
            row = _Row(Request(**saved["request"]), saved["context"].tolist(), saved["context_version"], saved["remaining"])
            self._place(saved["slot"], row)
