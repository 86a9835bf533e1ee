"""Continuous batching over an engine's slots, across policy versions.

A request waits, gets a slot, and keeps it for its whole episode: turn after turn its environment appends tokens, and the cache
goes on from where it was. `step` makes one device call of several decode steps and hands out what was sampled, each token with
its logprob and its version. A `publish` may come between any two steps; what it does to the running contexts is `Swap`.

A prompt that is longer than a chunk is prefilled a chunk a step, while the others decode. A group shares it, and the last one is
kept as long as others of its group wait for a slot.

Rows remember their contexts on the host. A row whose cache does not belong to the present policy, or was never there, is
*stale*: the next step recomputes it. That is how a publish with `REPREFILL`, and a restored sampler, get their caches back.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
import numpy as np

from models.transformer import Params
from rl.batching import bucket_length, pad_rows
from rl.requests import Request, Row, SampledTokens, Swap
from rl.sampling import LoadedPolicy, Prefix, raise_if_too_long
from rl.types import NO_POLICY, SamplingContract

if TYPE_CHECKING:  # it is handed in, so that a process without a sampler never imports JetStream
    from rl.engine import PolicyEngine


@dataclasses.dataclass
class _Prefill:
    """A prompt on its way into the cache, and the slots of those who share it."""

    slots: list[int]
    prompt: np.ndarray
    group_id: int
    chunk: int  # tokens at a time
    prefix: Prefix | None = None
    done: int = 0  # tokens

    @property
    def is_over(self) -> bool:
        return self.done == len(self.prompt)

    def is_of(self, request: Request) -> bool:
        """Whether a request may share it."""
        return self.group_id == request.group_id and np.array_equal(self.prompt, request.prompt)


class Sampler:
    """Samples requests with the published policy.

    Args:
      engine: where the device work happens.
      lengths: buckets that recomputed contexts are padded to, and that attention looks at in a decode call. Prompts and what
        environments write may be far shorter: they are padded to powers of two up to the largest bucket.
      refill_rows: slots filled, recomputed or appended to in one device call; where most want something appended, it is all.
      swap: what a publish does to running contexts.
      prefill_chunk: tokens of a prompt, or of what an environment wrote, that the others wait for at a time.
    """

    def __init__(self, engine: "PolicyEngine", *, lengths: tuple[int, ...], refill_rows: int, swap: Swap,
                 prefill_chunk: int | None = None):
        self._engine = engine
        self._lengths = lengths
        self._short_lengths = (*(2**power for power in range(3, (lengths[-1] - 1).bit_length())), lengths[-1])
        self._refill_rows = min(refill_rows, engine.max_concurrent_decodes)
        self._room = engine.room
        self._chunk = self._room if prefill_chunk is None else prefill_chunk
        self._swap = swap
        self.contract = SamplingContract(temperature=engine.temperature, compute_dtype=engine.compute_dtype, swap=swap.value,
                                         top_k=engine.top_k, top_p=engine.top_p)
        self._policy: LoadedPolicy | None = None
        self._state = engine.init_decode_state()
        self._waiting: dict[int, tuple[Request, int]] = {}  # by request id, in order of arrival: with the decode steps until then
        self._rows: dict[int, Row] = {}  # by slot
        self._slot_of: dict[int, int] = {}  # by request id
        self._prefills: list[_Prefill] = []
        self._last_prefill: _Prefill | None = None  # that came in whole under this policy
        self._interrupted: set[int] = set()  # request ids whose prompts a publish threw away half-read
        self._paused = False
        self.version = NO_POLICY
        self.num_decode_steps = 0
        self.num_sampled_tokens = 0
        self.num_prefilled_tokens = 0

    # --- requests ---

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises:
          ValueError: a prompt that leaves no room to sample, or a request id in use.
        """
        raise_if_too_long(len(request.prompt), self._room)
        if request.request_id in self._slot_of or request.request_id in self._waiting:
            raise ValueError(f"request {request.request_id} is already being sampled; request ids name the sampling noise, "
                             "so give each request of a run its own")
        self._waiting[request.request_id] = request, self.num_decode_steps

    def extend(self, request_id: int, tokens: np.ndarray, *, max_turn_tokens: int | None = None) -> None:
        """Appends an environment's tokens to a request whose turn is over, and starts its next turn, of as many tokens as others
        or of some other number.

        Raises:
          ValueError: no such request, the turn is not over, no tokens, too many to leave room for sampling, or all that the
            request may sample has been sampled.
        """
        if request_id not in self._slot_of:
            raise ValueError(f"request {request_id} has no slot to be extended in: it waits, was released, or has expired")
        row = self._rows[self._slot_of[request_id]]
        if row.remaining:
            raise ValueError(f"request {request_id} is in the middle of a turn and may sample {row.remaining} more tokens; "
                             "extend it when its turn is over")
        if not len(tokens):
            raise ValueError(f"request {request_id} is extended by 0 tokens, wanted at least 1; "
                             "release it if its episode is over")
        if row.num_sampled == row.request.max_tokens:
            raise ValueError(f"request {request_id} has sampled all of its {row.num_sampled} tokens; release it")
        raise_if_too_long(len(row.context) + len(tokens), self._room)
        row.context.extend(tokens.tolist())
        row.pending = tokens
        row.begin_turn(self._room, max_turn_tokens)

    def release(self, request_id: int) -> None:
        """Ends a request and frees its slot, wherever it is: aborts it, if it is running. Any other id is none of ours."""
        self._waiting.pop(request_id, None)
        self._interrupted.discard(request_id)
        slot = self._slot_of.pop(request_id, None)
        if slot is None:
            return
        row = self._rows.pop(slot)
        if not row.is_filled:
            self._prefills = [prefill for prefill in self._prefills if prefill.slots != [slot]]
            for prefill in self._prefills:
                prefill.slots = [other for other in prefill.slots if other != slot]
        elif row.remaining:
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
        self._requeue_prefills()  # first, so that their memory is free for the policy
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

        A request whose deadline has come is ended first, and says so.

        Raises:
          RuntimeError: nothing was published yet, so there is no policy to sample from.
        """
        if self._policy is None:
            raise RuntimeError("the sampler has no policy yet; publish version 0 before the first step")
        if self._paused:
            return []
        collected = self._expire()
        self._admit()
        self._refill_stale()
        self._append_pending()
        running = {slot: row for slot, row in self._rows.items() if row.is_running}
        if not running:
            return collected
        steps_left = (self._steps_left(row.request, row.submitted) for row in running.values())
        num_steps = min(num_steps, self._engine.max_steps, *steps_left)
        longest = max(len(row.context) for row in running.values())
        span = bucket_length(min(longest + num_steps, self._room), self._lengths)
        self._state, sampled = self._engine.decode(self._policy, self._state, num_steps, span=span)
        sampled, remaining = jax.device_get((sampled, self._state.remaining))
        self.num_decode_steps += int(sampled.num_steps[0])
        self.num_sampled_tokens += int(sampled.valid.sum())
        context_versions = np.zeros((len(remaining), 1), np.int32)
        context_versions[list(running), 0] = [row.context_version for row in running.values()]
        context_versions = np.broadcast_to(context_versions, sampled.tokens.shape)
        # A row is valid until its turn ends, and then no more: a slice is enough.
        counts, remaining = sampled.valid.sum(axis=1).tolist(), remaining.tolist()
        for slot, row in running.items():
            there = (slot, slice(counts[slot]))
            tokens = sampled.tokens[there]
            row.context.extend(tokens.tolist())
            row.remaining = remaining[slot]
            row.num_sampled += len(tokens)
            collected.append(SampledTokens(row.request.request_id, tokens, sampled.logprobs[there], sampled.versions[there],
                                           context_versions[there], row.remaining == 0, self._contract(row.request)))
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

    def _contract(self, request: Request) -> SamplingContract:
        return dataclasses.replace(self.contract, greedy=True) if request.greedy else self.contract

    def _steps_left(self, request: Request, submitted: int) -> int:
        """Decode steps until its deadline."""
        return self._engine.max_steps if request.deadline is None else submitted + request.deadline - self.num_decode_steps

    def _expire(self) -> list[SampledTokens]:
        """Ends the requests whose deadline has come; returns their last words."""
        there = [*self._waiting.values(), *((row.request, row.submitted) for row in self._rows.values())]
        expired = [request for request, submitted in there if self._steps_left(request, submitted) <= 0]
        for request in expired:
            self.release(request.request_id)
        nothing = np.zeros(0, np.int32)
        return [SampledTokens(request.request_id, nothing, np.zeros(0, np.float32), nothing, nothing, turn_over=False,
                              contract=self._contract(request), expired=True) for request in expired]

    def _mark_stale(self) -> None:
        for row in self._rows.values():
            row.is_stale = True

    # --- prompts ---

    def _admit(self) -> None:
        """Gives free slots to waiting requests in order, and goes on with their prefills."""
        free = [slot for slot in range(self._engine.max_concurrent_decodes) if slot not in self._rows] if self._waiting else []
        admitted = [self._waiting.pop(request_id) for request_id in list(self._waiting)[:len(free)]]
        pairs = zip(free, admitted, strict=False)
        for _, members in itertools.groupby(pairs, lambda pair: (pair[1][0].group_id, pair[1][0].prompt.tobytes())):
            members = list(members)
            for slot, (request, submitted) in members:
                row = Row(request, submitted, request.prompt.tolist(), self.version, remaining=0, is_stale=False, is_filled=False)
                row.begin_turn(self._room)
                self._place(slot, row)
            self._prefill_for([slot for slot, _ in members], [request for _, (request, _) in members])
        self._advance_prefills()

    def _prefill_for(self, slots: list[int], requests: list[Request]) -> None:
        """A prefill for requests of one group and prompt: one under way, the last one again, or a new one."""
        first = requests[0]
        under_way = next((prefill for prefill in self._prefills if prefill.is_of(first)), None)
        if under_way is not None:
            under_way.slots += slots
        elif self._last_prefill is not None and self._last_prefill.is_of(first):
            self._prefills.append(dataclasses.replace(self._last_prefill, slots=slots))
        else:
            # Once interrupted, a prompt is read in one go: where publishes are frequent, it would never come in.
            is_whole = any(request.request_id in self._interrupted for request in requests)
            chunk = len(first.prompt) if is_whole else self._chunk
            self._prefills.append(_Prefill(slots, first.prompt, first.group_id, chunk))

    def _advance_prefills(self) -> None:
        """The next chunk of the first long prompt, and all short ones; what is whole goes into its slots."""
        has_advanced = False
        for prefill in list(self._prefills):
            if len(prefill.prompt) > prefill.chunk and not prefill.is_over:
                if has_advanced:
                    continue
                has_advanced = True
            if not prefill.is_over:
                self._prefill_chunk(prefill)
            if prefill.is_over:
                self._insert(prefill)

    def _prefill_chunk(self, prefill: _Prefill) -> None:
        """The next tokens of a prompt, as many as the others wait for; neighbours in a group share it."""
        tokens = prefill.prompt[prefill.done:prefill.done + prefill.chunk]
        room = bucket_length(len(prefill.prompt), self._short_lengths)
        padded = pad_rows([tokens], bucket_length(len(tokens), self._short_lengths), fill=0)[0]
        prefill.prefix = self._engine.prefill(params=self._policy, existing_prefix=prefill.prefix, padded_tokens=padded,
                                              true_length=len(tokens), room=room)
        prefill.done += len(tokens)
        self.num_prefilled_tokens += len(tokens)

    def _insert(self, prefill: _Prefill) -> None:
        self._prefills.remove(prefill)
        # Moved, for whoever still holds the prefill must not keep its prefix in memory, too.
        prefix, prefill.prefix = prefill.prefix, None
        is_wanted = any(prefill.is_of(request) for request, _ in self._waiting.values())
        self._last_prefill = dataclasses.replace(prefill, prefix=prefix) if is_wanted else None
        for slots in self._calls(prefill.slots):
            padded_slots, facts = self._describe(slots)
            self._state = self._engine.insert_group(prefix, self._state, padded_slots, **facts)
        for slot in prefill.slots:
            self._rows[slot].is_filled = True
            self._interrupted.discard(self._rows[slot].request.request_id)

    def _requeue_prefills(self) -> None:
        """Half a prompt of an older policy is worth nothing: whoever waits for it goes back to the head of the queue."""
        slots = [slot for prefill in self._prefills for slot in prefill.slots]
        self._prefills, self._last_prefill = [], None
        requeued = {}
        for row in (self._rows.pop(slot) for slot in slots):
            del self._slot_of[row.request.request_id]
            requeued[row.request.request_id] = row.request, row.submitted
        self._interrupted.update(requeued)
        self._waiting = requeued | self._waiting

    def _place(self, slot: int, row: Row) -> None:
        self._rows[slot] = row
        self._slot_of[row.request.request_id] = slot

    # --- contexts ---

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
        """Feeds what environments wrote, a chunk of it at a time; slots with as much to read share a call."""
        by_width: dict[int, list[int]] = {}
        for slot, row in self._rows.items():
            if row.pending is not None:
                width = bucket_length(min(len(row.pending), self._chunk), self._short_lengths)
                by_width.setdefault(width, []).append(slot)
        for width, width_slots in sorted(by_width.items()):
            are_most = 2 * len(width_slots) > self._engine.max_concurrent_decodes
            for slots in [width_slots] if are_most else self._calls(width_slots):
                self._append(slots, width)

    def _append(self, slots: list[int], width: int) -> None:
        # One of three programs, not one for each number of rows.
        num_rows = bucket_length(len(slots), (1, self._refill_rows, self._engine.max_concurrent_decodes))
        padded_slots = np.full(num_rows, self._engine.max_concurrent_decodes, np.int32)
        padded_slots[:len(slots)] = slots
        tokens = np.zeros((num_rows, width), np.int32)
        counts, remaining = np.zeros(num_rows, np.int32), np.zeros(num_rows, np.int32)
        for index, row in enumerate(self._rows[slot] for slot in slots):
            part = row.pending[:self._chunk]
            tokens[index, :len(part)], counts[index] = part, len(part)
            row.pending = row.pending[len(part):] if len(part) < len(row.pending) else None
            remaining[index] = row.remaining if row.pending is None else 0
            self.num_prefilled_tokens += len(part)
        span = bucket_length(max(len(self._rows[slot].context) for slot in slots), self._lengths)
        self._state = self._engine.append(self._policy, self._state, padded_slots, tokens=tokens, counts=counts,
                                          remaining=remaining, span=span)

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
        self._requeue_prefills()
        self._mark_stale()
        return {"version": self.version, "paused": self._paused, "num_decode_steps": self.num_decode_steps,
                "num_sampled_tokens": self.num_sampled_tokens, "num_prefilled_tokens": self.num_prefilled_tokens,
                "waiting": [{"request": dict(request.__dict__), "submitted": submitted}
                            for request, submitted in self._waiting.values()],
                "interrupted": sorted(self._interrupted),
                "rows": [{"slot": slot, **row.state()} for slot, row in self._rows.items()]}

    def restore(self, state: dict, params: Params) -> None:
        """Takes a `state` back; `params` are the published parameters of its version."""
        self._policy = self._engine.load_params(params, state["version"])
        self._state = self._engine.init_decode_state()
        self.version = state["version"]
        self.num_decode_steps, self.num_sampled_tokens = state["num_decode_steps"], state["num_sampled_tokens"]
        self.num_prefilled_tokens = state["num_prefilled_tokens"]
        self._paused = state["paused"]
        requests = [(Request(**waiting["request"]), waiting["submitted"]) for waiting in state["waiting"]]
        self._waiting = {request.request_id: (request, submitted) for request, submitted in requests}
        self._rows, self._slot_of, self._prefills = {}, {}, []
        self._last_prefill = None
        self._interrupted = set(state["interrupted"])
        for saved in state["rows"]:
            self._place(saved["slot"], Row.from_state({name: value for name, value in saved.items() if name != "slot"}))
