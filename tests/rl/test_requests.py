"""Requests with limits, in chunks, aborted: what happens to one of them does not change a token of the others."""

import copy
import functools
import weakref

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from rl.admission import Admission, DropReason, StalePolicy
from rl.budget import NUM_PREFIXES
from rl.engine import PolicyEngine
from rl.requests import Swap
from rl.rollout import Rollouts
from rl.sampler import Sampler
from rl.types import FinishReason
from tests.rl import test_rollout
from tests.rl.test_sampler import (
    MAX_STEPS,
    MODEL,
    ROOM,
    STOP,
    TEMPERATURE,
    Log,
    count_calls,
    params_of,
    request,
    through_a_file,
)
from tests.tiny import BYTES

SLOTS = 3

LONG = np.arange(24) % 30
"""A prompt of many chunks."""

STEADY = 77
"""A request id that samples ten tokens after `PROMPT`, none of which ends its turn."""


def engine_with(slots, model=MODEL, **options):
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
    return PolicyEngine(model, mesh, slots=slots, **{"max_steps": MAX_STEPS, "temperature": TEMPERATURE, "seed": 7, **options})


@pytest.fixture(scope="module")
def engine_of():
    """An engine by its number of slots."""
    return functools.cache(functools.partial(engine_with, stop_tokens=(STOP,)))


@pytest.fixture(scope="module")
def engine(engine_of):
    return engine_of(SLOTS)


@pytest.fixture(scope="module")
def text_engine():
    return engine_with(6, test_rollout.MODEL, max_steps=4, temperature=1.0)


def sampler_of(engine, *, version=0, lengths=(ROOM,), swap=Swap.REPREFILL, **options):
    sampler = Sampler(engine, lengths=lengths, refill_rows=2, swap=swap, **options)
    if version is not None:
        sampler.publish(version, params_of(version))
    return sampler


class Record(Log):
    """A log of requests, which it submits; it also notes who has expired, and after how many decode steps."""

    def __init__(self, sampler, requests=()):
        super().__init__(sampler, ())
        self.budgets = {}
        self.expired = []
        self.over = []  # whose environment is to answer
        for r in requests:
            self.submit(r)

    def submit(self, r):
        self.contexts[r.request_id], self.sampled[r.request_id], self.turns[r.request_id] = r.prompt.tolist(), [], 0
        self.budgets[r.request_id] = r.max_tokens
        self.sampler.submit(r)

    def restarted(self, sampler):
        """The same of a sampler that goes on from this one's state."""
        sampler.restore(through_a_file(self.sampler.state()), params_of(self.sampler.version))
        other = copy.deepcopy({name: value for name, value in self.__dict__.items() if name != "sampler"})
        record = Record(sampler)
        record.__dict__.update(other)
        return record

    def step(self, num_steps):
        begun = self.sampler.num_decode_steps
        parts = self.sampler.step(num_steps)
        for part in parts:
            assert part.request_id not in [request_id for request_id, _ in self.expired]
            lengths = {len(array) for array in (part.tokens, part.logprobs, part.policy_versions, part.context_versions)}
            if part.expired:
                assert lengths == {0} and not part.turn_over
                self.expired.append((part.request_id, begun))
                continue
            assert len(lengths) == 1 and 0 not in lengths
            for row in zip(part.tokens, part.logprobs, part.policy_versions, part.context_versions, strict=True):
                self.sampled[part.request_id].append((len(self.contexts[part.request_id]), *(value.item() for value in row)))
                self.contexts[part.request_id].append(row[0].item())
            self.turns[part.request_id] += part.turn_over
            self.over += [part.request_id] * part.turn_over
        return parts

    def extend(self, request_id, tokens):
        super().extend(request_id, tokens)
        self.over.remove(request_id)

    def answer(self, turns):
        """The environments' answers to turns that are over."""
        for request_id in list(self.over):
            line = line_of(request_id, self.turns[request_id])
            has_tokens = len(self.sampled[request_id]) != self.budgets[request_id]
            if has_tokens and self.turns[request_id] < turns and len(self.contexts[request_id]) + len(line) < ROOM:
                self.extend(request_id, line)
            else:
                self.over.remove(request_id)
                self.sampler.release(request_id)

    def finish(self, num_steps=MAX_STEPS, *, turns=1):
        """Steps until everyone is done with so many turns; each environment has its own lines."""
        for _ in range(1000):
            self.answer(turns)
            if not self.sampler.num_running and not self.sampler.num_waiting:
                return self
            self.step(num_steps)
        raise AssertionError("it never ends")


def line_of(request_id, turn):
    rng = np.random.default_rng((request_id, turn))
    return rng.integers(30, size=rng.integers(1, 6)).tolist()


def assert_same(record, other, request_ids=None):
    """Tokens, and logprobs as far as one program computes what another does."""
    for request_id in record.sampled if request_ids is None else request_ids:
        assert record.tokens(request_id) == other.tokens(request_id), request_id
        np.testing.assert_allclose(record.column(request_id, 2), other.column(request_id, 2), atol=1e-5)


def alone(engine, r, **options):
    """What a request samples when nothing else is there."""
    return Record(sampler_of(engine, **options), [r]).finish()


def assert_empty(sampler):
    assert (sampler.num_running, sampler.num_waiting) == (0, 0)
    assert not np.asarray(sampler._state.remaining).any()


# --- budgets ---


@pytest.mark.parametrize("num_steps", [1, 3, 8])
def test_a_budget_is_spent_turn_by_turn_and_then_nothing_is_left(engine, num_steps):
    requests = [request(i, max_turn_tokens=4, max_tokens=10) for i in range(12)]
    record = Record(sampler_of(engine), requests)
    turn_lengths = {i: [] for i in range(12)}
    turn = dict.fromkeys(turn_lengths, 0)
    while record.sampler.num_running or record.sampler.num_waiting:
        for part in record.step(num_steps):
            i = part.request_id
            turn[i] += len(part.tokens)
            if not part.turn_over:
                continue
            turn_lengths[i].append(turn[i])
            left, turn[i] = 10 - sum(turn_lengths[i]), 0
            assert turn_lengths[i][-1] == min(4, left + turn_lengths[i][-1]) or record.tokens(i)[-1] == STOP
            if left:
                record.extend(i, [5])
                continue
            with pytest.raises(ValueError, match=f"request {i} has sampled all of its 10 tokens; release it"):
                record.sampler.extend(i, np.array([5], np.int32))
            record.sampler.release(i)
    assert all(sum(lengths) == 10 for lengths in turn_lengths.values())
    assert [4, 4, 2] in turn_lengths.values() and len({tuple(lengths) for lengths in turn_lengths.values()}) > 1
    assert_empty(record.sampler)


def test_a_budget_cuts_and_changes_nothing_before(engine):
    whole = alone(engine, request(STEADY)).tokens(STEADY)
    assert len(whole) == 10  # and none of them ends the turn: the others here rely on it
    for budget in (1, 4, 9, 10, 11):
        assert alone(engine, request(STEADY, max_tokens=budget)).tokens(STEADY) == whole[:budget]


@pytest.mark.parametrize(("max_tokens", "turns"), [(1, [1]), (4, [4]), (6, [4, 2]), (8, [4, 4]), (16, [4] * 4), (99, [4] * 4)])
def test_an_episode_without_budget_ends_truncated_and_keeps_what_it_earned(text_engine, max_tokens, turns):
    rollouts = rollouts_of(text_engine, max_tokens=max_tokens)
    rollouts.start(0, [0, 1], seed=3)
    finished = play(rollouts)
    assert sorted(finished) == [0, 1]
    for trajectory in finished.values():
        assert trajectory.finish_reason is FinishReason.LENGTH and trajectory.reward == 0.25 * len(turns)
        assert trajectory.loss_mask.sum() == sum(turns) and trajectory.loss_mask[-1]
        assert [int(trajectory.loss_mask[start:start + 4].sum()) for start in trajectory.turn_starts] == turns
    assert_empty(rollouts._sampler)


class Listener(test_rollout.Parrot):
    """Four turns of four tokens each, which earn a quarter each, and there is nothing to win."""

    def _advance(self, action):
        return super()._advance(action.replace("!", "?"))


def rollouts_of(text_engine, **limits):
    sampler = Sampler(text_engine, lengths=(88,), refill_rows=4, swap=Swap.REPREFILL)
    sampler.publish(0, test_rollout.params_of(0))
    return Rollouts(sampler, Listener, BYTES, max_length=88, **limits)


def play(rollouts, num_steps=2):
    finished = {}
    for _ in range(100):
        finished |= {trajectory.request_id: trajectory for trajectory in rollouts.step(num_steps).finished}
    assert not rollouts.num_running
    return finished


# --- deadlines ---


@pytest.mark.parametrize("num_steps", [1, 3, 8])
@pytest.mark.parametrize("deadline", [1, 4, 8, 9])
def test_a_deadline_in_the_middle_of_a_turn_is_kept_to_the_step(engine, deadline, num_steps):
    neighbour = request(5)
    record = Record(sampler_of(engine), [request(STEADY, deadline=deadline), neighbour]).finish(num_steps)
    assert record.expired == [(STEADY, deadline)]
    assert record.tokens(STEADY) == alone(engine, request(STEADY)).tokens(STEADY)[:deadline] and not record.turns[STEADY]
    assert_same(record, alone(engine, neighbour), [5])
    assert_empty(record.sampler)


def test_a_turn_that_ends_with_its_deadline_is_whole(engine):
    record = Record(sampler_of(engine), [request(STEADY, deadline=10)])
    parts = [*record.step(8), *record.step(8)]
    assert [(len(part.tokens), part.turn_over) for part in parts] == [(8, False), (2, True)]
    record.extend(STEADY, [4])  # its environment is a step too late
    assert [part.expired for part in record.step(8)] == [True]
    assert record.step(8) == [] and len(record.tokens(STEADY)) == 10
    assert_empty(record.sampler)


@pytest.mark.parametrize("deadline", [5, 6, 7, 9])
def test_a_deadline_counts_all_turns(engine, deadline):
    record = Record(sampler_of(engine), [request(STEADY, max_turn_tokens=3, deadline=deadline)]).finish(turns=9)
    free = Record(sampler_of(engine), [request(STEADY, max_turn_tokens=3)]).finish(turns=9)
    assert record.expired == [(STEADY, deadline)] and len(free.tokens(STEADY)) > deadline
    assert record.tokens(STEADY) == free.tokens(STEADY)[:deadline]


def test_a_deadline_comes_while_a_request_waits(engine):
    sampler = sampler_of(engine)
    record = Record(sampler, [*(request(i + 100, LONG[:9]) for i in range(3)), request(STEADY, deadline=3), request(1)])
    record.step(2)
    assert (sampler.num_running, sampler.num_waiting) == (3, 2)
    record.step(2)
    assert record.expired == []
    record.step(2)
    assert record.expired == [(STEADY, 4)]  # the first step that begins after it
    assert sampler.num_prefilled_tokens == 27
    record.finish()
    assert len(record.expired) == 1 and record.tokens(1) == alone(engine, request(1)).tokens(1)
    assert_empty(sampler)


def test_a_deadline_counts_the_time_that_a_request_waited(engine):
    sampler = sampler_of(engine)
    record = Record(sampler, [*(request(i, max_turn_tokens=2) for i in range(3)), request(STEADY, deadline=6)]).finish()
    assert record.expired == [(STEADY, 6)]
    assert record.tokens(STEADY) == alone(engine, request(STEADY)).tokens(STEADY)[:4]


def test_a_deadline_comes_between_two_turns(engine):
    record = Record(sampler_of(engine), [request(STEADY, max_turn_tokens=3, deadline=5), request(5)])
    record.step(3)
    assert record.turns[STEADY] == 1
    record.step(1)
    record.step(1)
    assert record.expired == [] and record.sampler.num_running == 2
    record.step(1)
    assert record.expired == [(STEADY, 5)] and record.sampler.num_running == 1
    with pytest.raises(ValueError, match=f"request {STEADY} has no slot to be extended in: .* or has expired"):
        record.sampler.extend(STEADY, np.array([1], np.int32))
    assert_same(record.finish(), alone(engine, request(5)), [5])


def test_a_deadline_comes_in_the_middle_of_a_prompt_that_others_share(engine):
    members = [request(1, LONG, group_id=1, deadline=3), request(2, LONG, group_id=1)]
    record = Record(sampler_of(engine, prefill_chunk=4), [request(STEADY), *members])
    record.finish(1)
    assert record.expired == [(1, 3)] and not record.tokens(1)
    assert_same(record, alone(engine, members[1]), [2])
    assert_same(record, alone(engine, request(STEADY)), [STEADY])


def test_who_comes_while_the_prompt_is_being_read_shares_it_too(engine):
    record, members = Record(sampler_of(engine, prefill_chunk=4)), [request(i, LONG, group_id=1) for i in range(3)]
    for member in members:
        record.submit(member)
        record.step(1)
    record.finish(1)
    assert record.sampler.num_prefilled_tokens == len(LONG)
    for member in members:
        assert_same(record, alone(engine, member), [member.request_id])


def test_a_deadline_comes_in_the_middle_of_an_observation(engine):
    record = Record(sampler_of(engine, prefill_chunk=4), [request(1, max_turn_tokens=2, deadline=5), request(STEADY)])
    record.step(2)
    record.extend(1, LONG[:20].tolist())
    record.finish(1)
    assert record.expired == [(1, 5)] and len(record.tokens(1)) == 2
    assert_same(record, alone(engine, request(STEADY)), [STEADY])
    assert_empty(record.sampler)


def test_a_pause_stops_the_clock(engine):
    record = Record(sampler_of(engine), [request(STEADY, deadline=4)])
    record.step(3)
    record.sampler.pause()
    assert all(record.step(8) == [] for _ in range(5))
    record.sampler.resume()
    record.finish()
    assert record.expired == [(STEADY, 4)] and len(record.tokens(STEADY)) == 4


def test_deadlines_and_budgets_outlive_a_restart(engine):
    """One between two turns, one on its second turn, one in the middle of its prompt, one that waits."""
    requests = [request(1, max_turn_tokens=2, deadline=8), request(2, max_turn_tokens=4, max_tokens=6),
                request(3, LONG, deadline=11), request(4, deadline=7)]

    def begin():
        record = Record(sampler_of(engine, prefill_chunk=4), requests)
        record.step(2)
        record.step(2)
        record.extend(2, [9])
        record.step(1)
        return record

    straight, stopped = begin(), begin()
    restored = stopped.restarted(sampler_of(engine, version=None, prefill_chunk=4))
    for record in (straight, stopped, restored):
        assert record.turns == {1: 1, 2: 1, 3: 0, 4: 0} and not record.expired and not record.tokens(3)
        record.finish(1, turns=9)
        assert record.expired == [(4, 7), (1, 8), (3, 11)] and len(record.tokens(2)) == 6
    assert stopped.sampled == restored.sampled
    assert_same(restored, straight, [1, 2, 4])  # whoever was in the middle of its prompt begins that anew


def test_an_episode_past_its_deadline_is_cancelled_and_its_credit_comes_back(text_engine):
    """Eight episodes in six slots: two never get one."""
    rollouts = rollouts_of(text_engine, deadline=6)
    admission = Admission(4, 2, max_staleness=0, publish_every=1, stale_policy=StalePolicy.DROP)
    assert admission.credit(0) == 4
    for group in range(4):
        admission.start(group, [2 * group, 2 * group + 1])
        rollouts.start(group, [2 * group, 2 * group + 1], seed=group)
    assert admission.credit(0) == 0
    finished = play(rollouts, num_steps=4)
    assert [len(finished[i].versions) for i in range(8)] == [1] * 6 + [0] * 2
    for i, trajectory in finished.items():
        assert trajectory.finish_reason is FinishReason.CANCELLED and trajectory.reward is None and not trajectory.success
        assert trajectory.loss_mask.sum() == (6 if i < 6 else 0)
        admission.finish(trajectory)
    assert rollouts._runner._host._episodes == {}
    assert admission.counts.cancelled_members == 8 and admission.counts.failed_members == 0
    assert admission.dropped[DropReason.TOO_FEW_REWARDS] == 4 and admission.credit(0) == 4
    assert sorted(trajectory.request_id for trajectory in admission.discarded()) == list(range(8))
    assert_empty(rollouts._sampler)


@pytest.mark.parametrize("deadline", [11, 12])
def test_restored_episodes_keep_their_deadline_and_their_budget(text_engine, deadline):
    """The first group has its tenth token after twelve steps: it was idle for two. The second begins three steps later."""
    def begin():
        rollouts = rollouts_of(text_engine, deadline=deadline, max_tokens=10)
        rollouts.start(0, [0, 1], seed=3)
        rollouts.step(3)
        rollouts.start(1, [2, 3], seed=4)
        rollouts.step(3)
        return rollouts

    stopped = begin()
    state = through_a_file({"rollouts": stopped.state(), "sampler": stopped._sampler.state()})
    restored = rollouts_of(text_engine, deadline=deadline, max_tokens=10)
    restored._sampler.restore(state["sampler"], test_rollout.params_of(0))
    restored.restore(state["rollouts"])
    runs = [play(rollouts, num_steps=1) for rollouts in (begin(), stopped, restored)]
    truncated, cancelled = (FinishReason.LENGTH, 10), (FinishReason.CANCELLED, 9)
    for finished in runs:
        endings = [(finished[i].finish_reason, int(finished[i].loss_mask.sum())) for i in range(4)]
        assert endings == [truncated if deadline == 12 else cancelled] * 2 + [truncated] * 2
        assert all(finished[i].tokens.tolist() == runs[0][i].tokens.tolist() for i in range(4))


# --- prompts in chunks ---


@pytest.fixture(scope="module")
def unchunked(engine):
    return Record(sampler_of(engine), ragged()).finish(3, turns=2)


def ragged():
    """Groups of up to three, with prompts of 1 to 24 tokens."""
    rng = np.random.default_rng(3)
    lengths = [24, 1, 9, 17, 2, 23]
    prompts = [rng.integers(30, size=length) for length in lengths]
    return [request(3 * group + member, prompt, group_id=group, max_turn_tokens=4)
            for group, prompt in enumerate(prompts) for member in range(1 + group % 3)]


@pytest.mark.parametrize("chunk", [1, 8, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in (2, 3, 13, 23, 24, 32))])
def test_chunks_of_any_size_change_no_token(engine, unchunked, chunk):
    record = Record(sampler_of(engine, prefill_chunk=chunk), ragged()).finish(3, turns=2)
    assert_same(record, unchunked)
    assert max(record.turns.values()) == 2
    assert record.sampler.num_sampled_tokens == unchunked.sampler.num_sampled_tokens
    assert_empty(record.sampler)


def test_others_decode_while_a_long_prompt_comes_in_and_short_ones_pass_it(engine):
    sampler = sampler_of(engine, prefill_chunk=4)
    late = request(1, LONG, greedy=True), request(3, LONG[:4], greedy=True)  # of full length, each
    record = Record(sampler, [request(STEADY)])
    record.step(1)
    record.submit(late[0])
    for step in range(5):
        if step == 2:
            record.submit(late[1])
        before = sampler.num_prefilled_tokens
        assert [part.request_id for part in record.step(1)] == [STEADY] + [3] * (step >= 2)
        assert sampler.num_prefilled_tokens - before == 4 + 4 * (step == 2)
    assert [part.request_id for part in record.step(1)] == [STEADY, 1, 3]  # in the step of its last chunk
    record.finish()
    for r in (request(STEADY), *late):
        assert_same(record, alone(engine, r), [r.request_id])


def test_one_long_prompt_a_step_advances(engine):
    requests = [request(i, LONG, greedy=True) for i in (1, 2)]
    record = Record(sampler_of(engine, prefill_chunk=4), [request(STEADY), *requests])
    for step in range(1, 14):
        before = record.sampler.num_prefilled_tokens
        decoding = {part.request_id for part in record.step(1)}
        assert decoding == {i for i, is_in in ((STEADY, step <= 10), (1, step >= 6), (2, step >= 12)) if is_in}
        assert record.sampler.num_prefilled_tokens - before == 4 * (step <= 12) + 3 * (step == 1)
    record.finish()
    for r in requests:
        assert_same(record, alone(engine, r), [r.request_id])


def count_prefixes(engine, monkeypatch):
    """The number of prefixes in memory after each prefill call, and how many of them are as long as a slot."""
    prefill, made, counts = engine.prefill, [], []

    def counting(**facts):
        prefix = prefill(**facts)
        made.append(weakref.ref(prefix.cache.keys[0]))
        rooms = [keys.shape[-1] for keys in (reference() for reference in made) if keys is not None]
        counts.append((len(rooms), rooms.count(ROOM)))
        return prefix

    monkeypatch.setattr(engine, "prefill", counting)
    return counts


def test_no_more_long_prompts_are_in_memory_than_the_budget_counts(engine, monkeypatch):
    counts = count_prefixes(engine, monkeypatch)
    other = LONG[::-1].copy()
    order = [request(1, LONG, group_id=1), request(2, other, group_id=2), request(STEADY), request(3, LONG, group_id=1),
             request(4, other, group_id=2), request(5, LONG[:20], group_id=3), request(6, other, group_id=2)]
    Record(sampler_of(engine, prefill_chunk=4), order).finish(1)
    assert max(num_long for _, num_long in counts) == NUM_PREFIXES


def test_short_prompts_that_come_in_together_leave_the_memory_one_by_one(engine, monkeypatch):
    counts = count_prefixes(engine, monkeypatch)
    Record(sampler_of(engine), [request(i, LONG[i:i + 3]) for i in range(SLOTS)]).step(1)
    assert [num for num, _ in counts] == [1] * SLOTS


@pytest.mark.parametrize("swap", Swap)
@pytest.mark.parametrize("chunks", [1, 3, 5])
def test_a_publish_in_the_middle_of_a_prompt_begins_it_anew(engine, swap, chunks):
    members = [request(i, LONG, group_id=1) for i in (STEADY, 1)]
    record = Record(sampler_of(engine, prefill_chunk=4, swap=swap), members)
    for _ in range(chunks):
        assert record.step(8) == []
    assert record.sampler.num_prefilled_tokens == 4 * chunks
    record.sampler.publish(3, params_of(3))
    assert {part.request_id for part in record.step(8)} == {STEADY, 1}  # in one go now: it has waited enough
    assert record.sampler.num_prefilled_tokens == 4 * chunks + 24
    record.finish()
    for i in (STEADY, 1):
        assert set(record.versions(i)) == set(record.column(i, 4)) == {3}
        assert_same(record, alone(engine, request(i, LONG), version=3), [i])
    gaps = record.gaps()
    assert set(gaps) == {(3, 3)} and gaps[3, 3] < 1e-5


def test_a_prompt_that_is_begun_anew_keeps_its_place(engine):
    sampler = sampler_of(engine, prefill_chunk=4)
    record = Record(sampler, [request(0, LONG), request(1, LONG[1:]), *(request(i) for i in (3, 4, 5))])
    record.step(1)
    sampler.publish(1, params_of(1))
    assert (sampler.num_running, sampler.num_waiting) == (1, 4)  # 3 had a short prompt, and decodes
    record.submit(request(6))
    firsts = []
    for _ in range(200):
        for part in record.step(1):
            firsts += [part.request_id] * (part.request_id not in firsts)
            if part.turn_over:
                sampler.release(part.request_id)
    assert sorted(firsts) == [0, 1, 3, 4, 5, 6] and firsts.index(0) < firsts.index(1)
    assert firsts.index(0) < firsts.index(4) < firsts.index(5) < firsts.index(6)
    assert_empty(sampler)


def test_a_prompt_comes_in_although_a_publish_follows_each_step(engine):
    record = Record(sampler_of(engine, prefill_chunk=8), [request(STEADY, LONG)])
    for version in range(1, 20):
        record.submit(request(100 + version, max_turn_tokens=1))
        for part in record.step(1):
            record.sampler.release(part.request_id)
        record.sampler.publish(version, params_of(version % 3))
    assert record.tokens(STEADY)


@pytest.mark.parametrize("released", [[1], [2], [1, 2]])
@pytest.mark.parametrize("chunks", [1, 4])
def test_members_leave_in_the_middle_of_their_prompt(engine, monkeypatch, chunks, released):
    prefills = count_calls(monkeypatch, engine, "prefill")
    members = [request(i, LONG, group_id=1) for i in (1, 2)]
    record = Record(sampler_of(engine, prefill_chunk=4), [request(STEADY), *members])
    for _ in range(chunks):
        record.step(1)
    for i in released:
        record.sampler.release(i)
        record.sampler.release(i)
    assert record.sampler.num_running == 3 - len(released)
    for i in range(10, 12):
        record.submit(request(i))
    record.finish(1)
    assert len(prefills) == 3 + (chunks if len(released) == 2 else 6)  # nobody reads on for those who have left
    assert all(not record.tokens(i) for i in released)
    for r in (request(STEADY), request(10), request(11), *(member for member in members if member.request_id not in released)):
        assert_same(record, alone(engine, r), [r.request_id])
    assert_empty(record.sampler)


@pytest.mark.parametrize("chunks", [1, 5])
def test_a_state_in_the_middle_of_a_prompt_begins_it_anew(engine, chunks):
    def begin():
        requests = [request(1), request(STEADY, LONG), request(2), request(3), request(4)]
        record = Record(sampler_of(engine, prefill_chunk=4), requests)
        for _ in range(chunks):
            record.step(1)
        return record

    stopped, straight = begin(), begin()
    restored = stopped.restarted(sampler_of(engine, version=None, prefill_chunk=4))
    assert (restored.sampler.num_running, restored.sampler.num_waiting) == (2, 3)
    for record in (stopped, restored, straight):
        record.finish(2)
    assert stopped.sampled == restored.sampled
    assert_same(restored, straight)
    assert_same(restored, alone(engine, request(STEADY, LONG)), [STEADY])


# --- observations in chunks ---


def test_a_long_observation_comes_in_chunks_while_others_decode(engine, monkeypatch):
    appends = count_calls(monkeypatch, engine, "append")
    record = Record(sampler_of(engine, prefill_chunk=5), [request(1, max_turn_tokens=1), request(STEADY)])
    record.step(1)
    record.extend(1, LONG[:17].tolist())  # four chunks
    for _ in range(3):
        assert [part.request_id for part in record.step(1)] == [STEADY]
    assert {part.request_id for part in record.step(1)} == {1, STEADY}
    assert [call["counts"].tolist() for call in appends] == [[5], [5], [5], [2]]
    assert [call["remaining"].tolist() for call in appends] == [[0], [0], [0], [1]]
    record.finish()

    whole = Record(sampler_of(engine), [request(1, max_turn_tokens=1), request(STEADY)])
    whole.step(1)
    whole.extend(1, LONG[:17].tolist())
    assert_same(record, whole.finish())
    assert max(record.gaps().values()) < 1e-4


@pytest.mark.parametrize("swap", Swap)
def test_a_publish_in_the_middle_of_an_observation(engine, swap):
    record = Record(sampler_of(engine, prefill_chunk=5, swap=swap), [request(1, max_turn_tokens=4)])
    record.step(4)
    assert record.turns[1] == 1
    record.extend(1, LONG[:17].tolist())
    assert record.step(8) == record.step(8) == []
    record.sampler.publish(2, params_of(2))
    parts = [record.step(8) for _ in range(2)]
    is_new = swap is Swap.REPREFILL  # then it is read at once, with all that was there before
    assert [len(part) for part in parts] == ([1, 0] if is_new else [0, 1])
    assert record.versions(1)[:4] == [0] * 4 and set(record.versions(1)[4:]) == {2}
    assert set(record.column(1, 4)[4:]) == {2 if is_new else 0}
    if is_new:
        assert max(record.gaps().values()) < 1e-5


# --- aborts ---


@pytest.mark.parametrize("moment", ["waiting", "prefilling", "running", "between turns", "reading"])
def test_an_abort_frees_the_slot_wherever_a_request_is(engine, moment):
    sampler = sampler_of(engine, prefill_chunk=4)
    others = [request(10 + i) for i in range(2)]
    target = request(1, LONG if moment == "prefilling" else LONG[:3], max_turn_tokens=10 if moment == "running" else 2)
    record = Record(sampler, others)
    if moment == "waiting":
        record.submit(request(13))
    record.submit(target)
    record.step(1)
    if moment in ("between turns", "reading"):
        record.step(1)
        assert record.turns[1] == 1
    if moment == "reading":
        record.extend(1, LONG[:9].tolist())
        record.step(1)
    assert (sampler.num_running, sampler.num_waiting) == (3, moment == "waiting")
    slot, before = sampler._slot_of.get(1), list(record.sampled[1])
    assert bool(before) == (moment in ("running", "between turns", "reading"))
    for _ in range(2):
        sampler.release(1)
        sampler.release(12345)
        assert (sampler.num_running, sampler.num_waiting) == (3 if moment == "waiting" else 2, 0)
        assert slot is None or not np.asarray(sampler._state.remaining)[slot]
    with pytest.raises(ValueError, match="request 1 has no slot to be extended in"):
        sampler.extend(1, np.array([3], np.int32))
    record.submit(request(20))
    record.finish(3)
    assert record.sampled[1] == before
    for r in (*others, request(20)):
        assert_same(record, alone(engine, r), [r.request_id])
    assert_empty(sampler)
    again = request(1, LONG[:3])
    assert_same(Record(sampler, [again]).finish(), alone(engine, again))


def test_a_late_release_does_not_hit_the_next_in_the_slot(engine):
    record = Record(sampler_of(engine), [request(1)])
    record.step(1)
    record.sampler.release(1)
    record.submit(request(STEADY))
    record.step(1)
    record.sampler.release(1)
    assert record.sampler.num_running == 1
    assert_same(record.finish(), alone(engine, request(STEADY)), [STEADY])


# --- whatever is around ---


@jax.jit
def _likeliest(params, tokens, lengths):
    hidden = MODEL.hidden(params, tokens)[np.arange(len(tokens)), lengths - 1]
    return MODEL.logits(params, hidden).argmax(axis=-1)


def naive(params, requests):
    """Greedy generation by a forward over whole contexts for each token."""
    contexts = [r.prompt.tolist() for r in requests]
    for _ in range(max(r.max_turn_tokens for r in requests)):
        padded = np.zeros((len(contexts), ROOM), np.int32)
        for row, context in zip(padded, contexts, strict=True):
            row[:len(context)] = context
        tokens = np.asarray(_likeliest(params, padded, np.array([len(context) for context in contexts], np.int32)))
        for context, r, token in zip(contexts, requests, tokens.tolist(), strict=True):
            if len(context) < min(ROOM, len(r.prompt) + r.max_turn_tokens) and STOP not in context[len(r.prompt):]:
                context.append(token)
    return [context[len(r.prompt):] for context, r in zip(contexts, requests, strict=True)]


def prompts_of(seed, count=64):
    rng = np.random.default_rng(seed)
    return [rng.integers(30, size=rng.integers(1, 25)) for _ in range(count)]


def interleaved(engine, requests, *, seed, **options):
    """Requests in any order, at any time, in calls of any length, among others that are aborted at any time."""
    rng = np.random.default_rng(seed)
    record = Record(sampler_of(engine, **options))
    ahead = [requests[i] for i in rng.permutation(len(requests))]
    strangers = []
    while ahead or record.sampler.num_running or record.sampler.num_waiting:
        for _ in range(rng.integers(0, 7)):
            if ahead:
                record.submit(ahead.pop())
        if ahead and rng.random() < 0.3:
            strangers.append(10_000 + len(ahead))
            record.submit(request(strangers[-1], rng.integers(30, size=rng.integers(1, 25))))
        for part in record.step(int(rng.integers(1, 9))):
            if part.turn_over:
                record.sampler.release(part.request_id)
        if strangers and (rng.random() < 0.3 or not ahead):
            record.sampler.release(strangers.pop(0))
    assert_empty(record.sampler)
    return record


@pytest.mark.parametrize("slots", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(8, marks=pytest.mark.slow)])
def test_greedy_tokens_are_those_of_naive_generation(engine_of, slots):
    requests = [request(i, prompt, greedy=True, max_turn_tokens=1 + i % 11) for i, prompt in enumerate(prompts_of(1))]
    expected = naive(params_of(0), requests)
    assert len({tuple(tokens) for tokens in expected}) > 32
    for seed in range(2):
        record = interleaved(engine_of(slots), requests, seed=seed, prefill_chunk=5 if slots == SLOTS and seed else None)
        assert [record.tokens(i) for i in range(64)] == expected


def test_sampled_tokens_do_not_depend_on_the_number_of_slots(engine_of):
    requests = [request(i, prompt) for i, prompt in enumerate(prompts_of(2))]
    first, *others = (interleaved(engine_of(slots), requests, seed=slots) for slots in (1, 3, 8))
    for other in others:
        assert_same(first, other, range(64))


@pytest.mark.parametrize("greedy", [False, True])
def test_two_prompts_that_change_places_change_results(engine, greedy):
    """Bit for bit; of a sampled request the id, which names its noise, goes with its prompt."""
    prompts = prompts_of(3, 16)
    swapped = list(prompts)
    swapped[2], swapped[11] = prompts[11], prompts[2]
    ids = list(range(16))
    if not greedy:
        ids[2], ids[11] = 11, 2
    one, two = (Record(sampler_of(engine), [request(i, prompt, greedy=greedy) for i, prompt in pairs]).finish(3)
                for pairs in (enumerate(prompts), zip(ids, swapped, strict=True)))
    exchanged = {2: 11, 11: 2} if greedy else {}
    for i in range(16):
        assert one.sampled[i] == two.sampled[exchanged.get(i, i)]
    assert one.tokens(2) != one.tokens(11)


@pytest.mark.parametrize("num_before", [1, 4, 9])
@pytest.mark.parametrize("greedy", [False, True])
def test_what_follows_a_publish_is_a_cold_start_from_the_same_prefix(engine, num_before, greedy):
    record = Record(sampler_of(engine), [request(STEADY, greedy=greedy), request(5)])
    record.step(num_before if num_before <= MAX_STEPS else MAX_STEPS)
    if num_before > MAX_STEPS:
        record.step(num_before - MAX_STEPS)
    prefix = list(record.contexts[STEADY])
    assert len(prefix) == 3 + num_before and not record.turns[STEADY]
    record.sampler.publish(4, params_of(4))
    record.finish(3)
    cold = alone(engine, request(STEADY, prefix, greedy=greedy, max_turn_tokens=10 - num_before), version=4)
    warm = record.sampled[STEADY][num_before:]
    assert [row[:2] + row[3:] for row in warm] == [row[:2] + row[3:] for row in cold.sampled[STEADY]]
    np.testing.assert_allclose([row[2] for row in warm], cold.column(STEADY, 2), atol=1e-5)


@pytest.mark.parametrize("num_before", [1, 4, 8])
def test_a_publish_of_the_same_policy_changes_no_token(engine, num_before):
    record = Record(sampler_of(engine), [request(STEADY)])
    record.step(num_before)
    record.sampler.publish(1, params_of(0))
    assert_same(record.finish(), alone(engine, request(STEADY)))
    assert record.versions(STEADY) == [0] * num_before + [1] * (10 - num_before)


def test_a_publish_between_two_turns_is_a_cold_start_too(engine):
    record = Record(sampler_of(engine), [request(STEADY, max_turn_tokens=4)])
    record.step(8)
    record.sampler.publish(4, params_of(4))
    record.extend(STEADY, [3, 1, 4])
    prefix = list(record.contexts[STEADY])
    record.finish(3)
    cold = alone(engine, request(STEADY, prefix, max_turn_tokens=4), version=4)
    assert record.tokens(STEADY)[4:] == cold.tokens(STEADY) and record.versions(STEADY) == [0] * 4 + [4] * 4


def test_buckets_of_lengths_change_no_token(engine):
    def played(lengths):
        rng = np.random.default_rng(5)
        requests = [request(i, prompt, max_turn_tokens=4) for i, prompt in enumerate(prompts_of(4, 24))]
        record = Record(sampler_of(engine, lengths=lengths), requests)
        for version in range(1, 9):
            record.step(int(rng.integers(1, 4)))
            record.answer(3)
            record.sampler.publish(version, params_of(version % 3))
        return record.finish(2, turns=3)

    single, several = played((ROOM,)), played((8, 16, ROOM))
    assert_same(several, single)
    assert [several.versions(i) for i in range(24)] == [single.versions(i) for i in range(24)]
    assert len({version for i in range(24) for version in several.versions(i)}) > 4
