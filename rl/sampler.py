"""Continuous batching over an engine's slots, across policy versions.

A request waits, gets a slot, and keeps it for its whole episode: turn after turn its environment appends tokens, and the cache
goes on from where it was. `step` makes one device call of several decode steps and hands out what was sampled, each token with
its logprob and its version. A `publish` may come between any two steps; what it does to the running contexts is `Swap`.

Rows remember their contexts on the host. A row whose cache does not belong to the present policy, or was never there, is
*stale*: the next step recomputes it. That is how a publish with `REPREFILL`, and a restored sampler, get their caches back.
"""

import dataclasses
import enum
from collections import deque

import numpy as np

from models.transformer import Params
from rl.batching import bucket_length, pad_rows
from rl.engine import LoadedPolicy, PolicyEngine, raise_if_too_long
from rl.types import NO_POLICY


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


@dataclasses.dataclass(frozen=True)
class SampledTokens:
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
    num_pending: int = 0  # how many tokens at the end of the context are not in the cache yet


class Sampler:
    """Samples requests with the published policy.

    Args:
      engine: where the device work happens.
      lengths: buckets that prompts and contexts are padded to.
      refill_rows: rows recomputed in one device call.
      swap: what a publish does to running contexts.
    """

    def __init__(self, engine: PolicyEngine, *, lengths: tuple[int, ...], refill_rows: int, swap: Swap):
        self._engine = engine
        self._lengths = lengths
        self._refill_rows = min(refill_rows, engine.max_concurrent_decodes)
        self._swap = swap
        self._policy: LoadedPolicy | None = None
        self._state = engine.init_decode_state()
        self._waiting: deque[Request] = deque()
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
            raise ValueError(f"request {request.request_id} has an empty prompt; a policy needs at least one token to sample after")
        raise_if_too_long(len(request.prompt), self._engine.max_prefill_length)
        if request.max_turn_tokens < 1:
            raise ValueError(f"request {request.request_id} may sample {request.max_turn_tokens} tokens a turn, wanted at least 1")
        if request.request_id in self._slot_of or any(request.request_id == other.request_id for other in self._waiting):
            raise ValueError(f"request {request.request_id} is already being sampled; request ids name the sampling noise and must be unique")
        self._waiting.append(request)

    def extend(self, request_id: int, tokens: np.ndarray) -> None:
        """Appends an environment's tokens to a request whose turn is over, and starts its next turn."""
        row = self._rows[self._slot_of[request_id]]
        if row.remaining:
            raise ValueError(f"request {request_id} is in the middle of a turn; extend it when its turn is over")
        raise_if_too_long(len(row.context) + len(tokens), self._engine.max_prefill_length)
        row.context.extend(tokens.tolist())
        row.num_pending = len(tokens)
        row.remaining = self._turn_budget(row.request, len(row.context))

    def release(self, request_id: int) -> None:
        """Ends a request and frees its slot, wherever it is."""
        self._waiting = deque(request for request in self._waiting if request.request_id != request_id)
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
            raise ValueError(f"publish of version {version} after version {self.version}; versions only grow")
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
        tokens, logprobs, versions, valid = (np.asarray(array) for array in (sampled.tokens, sampled.logprobs, sampled.versions, sampled.valid))
        self.num_decode_steps += int(np.asarray(sampled.num_steps)[0])
        remaining = np.asarray(self._state.remaining)
        return [self._collect(row, tokens[slot][valid[slot]], logprobs[slot][valid[slot]], versions[slot][valid[slot]], int(remaining[slot]))
                for slot, row in running.items()]

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

    def _collect(self, row: _Row, tokens, logprobs, versions, remaining: int) -> SampledTokens:
        row.context.extend(tokens.tolist())
        row.remaining = remaining
        self.num_sampled_tokens += len(tokens)
        return SampledTokens(row.request.request_id, tokens, logprobs, versions, np.full_like(versions, row.context_version), remaining == 0)

    def _turn_budget(self, request: Request, context_length: int) -> int:
        return min(request.max_turn_tokens, self._engine.max_prefill_length - context_length)

    def _mark_stale(self) -> None:
        for row in self._rows.values():
            row.is_stale = True

    def _admit(self) -> None:
        """Gives free slots to waiting requests in order, with one prefill for neighbours that share a group and a prompt."""
        free = [slot for slot in range(self._engine.max_concurrent_decodes) if slot not in self._rows]
        shared: tuple | None = None
        prefix = None
        while self._waiting and free:
            request, slot = self._waiting.popleft(), free.pop(0)
            remaining = self._turn_budget(request, len(request.prompt))
            key = (request.group_id, request.prompt.tobytes())
            if key != shared:
                padded = pad_rows([request.prompt], bucket_length(len(request.prompt), self._lengths), fill=0)[0]
                prefix = self._engine.prefill(params=self._policy, padded_tokens=padded, true_length=len(request.prompt))
                self.num_prefilled_tokens += len(request.prompt)
                shared = key
            member = prefix.replace(request_id=np.int32(request.request_id), remaining=np.int32(remaining), greedy=np.bool_(request.greedy))
            self._state = self._engine.insert(member, self._state, slot)
            self._place(slot, _Row(request, request.prompt.tolist(), self.version, remaining, is_stale=False))

    def _place(self, slot: int, row: _Row) -> None:
        self._rows[slot] = row
        self._slot_of[row.request.request_id] = slot

    def _refill_stale(self) -> None:
        """Recomputes the contexts of stale rows that are about to decode, a fixed number of rows of one length bucket at a time."""
        by_bucket: dict[int, list[int]] = {}
        for slot, row in self._rows.items():
            if row.is_stale and row.remaining:
                by_bucket.setdefault(bucket_length(len(row.context), self._lengths), []).append(slot)
        for length, slots in sorted(by_bucket.items()):
            for first in range(0, len(slots), self._refill_rows):
                self._refill(slots[first:first + self._refill_rows], length)

    def _refill(self, slots: list[int], length: int) -> None:
        rows = [self._rows[slot] for slot in slots]
        padding = self._refill_rows - len(slots)
        contexts = pad_rows([np.asarray(row.context, np.int32) for row in rows], length, fill=0, num_rows=self._refill_rows)

        def padded(values, fill):
            return np.asarray([*values, *[fill] * padding], np.int32)

        self._state = self._engine.refill(
            self._policy, self._state, padded(slots, self._engine.max_concurrent_decodes), contexts=contexts,
            counts=padded([len(row.context) for row in rows], 1), request_ids=padded([row.request.request_id for row in rows], 0),
            remaining=padded([row.remaining for row in rows], 0), greedy=padded([row.request.greedy for row in rows], 0).astype(bool))
        for row in rows:
            row.is_stale, row.num_pending, row.context_version = False, 0, self.version
            self.num_prefilled_tokens += len(row.context)

    def _append_pending(self) -> None:
        """Feeds what environments wrote since the last step, for all slots in one call."""
        pending = {slot: row for slot, row in self._rows.items() if row.num_pending}
        if not pending:
            return
        slots = self._engine.max_concurrent_decodes
        width = bucket_length(max(row.num_pending for row in pending.values()), self._lengths)
        tokens = np.zeros((slots, width), np.int32)
        counts, remaining = np.zeros(slots, np.int32), np.zeros(slots, np.int32)
        for slot, row in pending.items():
            counts[slot], remaining[slot] = row.num_pending, row.remaining
            tokens[slot, :row.num_pending] = row.context[-row.num_pending:]
            row.num_pending = 0
        self._state = self._engine.append(self._policy, self._state, tokens, counts, remaining)

    # --- state ---

    def state(self) -> dict:
        """Everything but the caches, as plain arrays and JSON values.

        Taking it makes every cache stale: a checkpoint is a version boundary whether or not the run goes on from it, so that a
        resumed run and a straight one are the same run.
        """
        self._mark_stale()
        return {"version": self.version, "num_decode_steps": self.num_decode_steps, "num_sampled_tokens": self.num_sampled_tokens,
                "num_prefilled_tokens": self.num_prefilled_tokens, "paused": self._paused, "waiting": [_request_state(request) for request in self._waiting],
                "rows": [{"slot": slot, "request": _request_state(row.request), "context": np.asarray(row.context, np.int32),
                          "context_version": row.context_version, "remaining": row.remaining}
                         for slot, row in self._rows.items()]}

    def restore(self, state: dict, params: Params) -> None:
        """Takes a `state` back; `params` are the published parameters of its version."""
        self._policy = self._engine.load_params(params, state["version"])
        self.version = state["version"]
        self.num_decode_steps, self.num_sampled_tokens = state["num_decode_steps"], state["num_sampled_tokens"]
        self.num_prefilled_tokens = state["num_prefilled_tokens"]
        self._paused = state["paused"]
        self._waiting = deque(Request(**request) for request in state["waiting"])
        self._rows, self._slot_of = {}, {}
        for row in state["rows"]:
            self._place(row["slot"], _Row(Request(**row["request"]), row["context"].tolist(), row["context_version"], row["remaining"]))


def _request_state(request: Request) -> dict:
    return dict(request.__dict__)
