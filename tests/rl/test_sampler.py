"""The sampler: versions and logprobs stay true through publishes, turns, queues, pauses and restarts."""

import contextlib
import functools
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from models.config import ModelConfig
from models.transformer import Model
from rl.engine import PolicyEngine
from rl.logprobs import score
from rl.requests import Request, Swap
from rl.sampler import Sampler
from rl.types import NO_POLICY

MODEL = Model(ModelConfig(vocab_size=32, num_layers=1, d_model=16, d_ff=24, num_heads=2, num_kv_heads=1, head_dim=8,
                          max_length=32))
ROOM, SLOTS, MAX_STEPS, TEMPERATURE, STOP = 32, 4, 8, 0.8, 31
PROMPT = np.array([1, 2, 3], np.int32)


@pytest.fixture(scope="module")
def engine():
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
    return PolicyEngine(MODEL, mesh, slots=SLOTS, max_steps=MAX_STEPS, temperature=TEMPERATURE, seed=7, stop_tokens=(STOP,))


@functools.cache
def params_of(version):
    """Parameters that move with each version, far more than an optimizer step would."""
    rng = np.random.default_rng(0)
    shapes, structure = jax.tree.flatten(MODEL.shapes)
    start = [rng.normal(scale=0.4, size=leaf.shape) for leaf in shapes]
    moved = [leaf + 0.05 * version * rng.normal(scale=0.4, size=leaf.shape) for leaf in start]
    return jax.tree.unflatten(structure, [jnp.asarray(leaf, jnp.float32) for leaf in moved])


def make_sampler(engine, *, swap=Swap.REPREFILL, version=0, lengths=(16, 32), refill_rows=2):
    sampler = Sampler(engine, lengths=lengths, refill_rows=refill_rows, swap=swap)
    if version is not None:
        sampler.publish(version, params_of(version))
    return sampler


def request(request_id, prompt=PROMPT, *, group_id=None, max_turn_tokens=10, **facts):
    group_id = request_id if group_id is None else group_id
    return Request(request_id, group_id, np.asarray(prompt, np.int32), max_turn_tokens, **facts)


class Log:
    """Everything that a sampler says of some requests, and the contexts that follow from it."""

    def __init__(self, sampler, requests):
        self.sampler = sampler
        self.contexts = {r.request_id: r.prompt.tolist() for r in requests}
        self.sampled = {r.request_id: [] for r in requests}  # (position, token, logprob, policy version, context version)
        self.turns = {r.request_id: 0 for r in requests}  # finished ones

    def step(self, num_steps):
        steps = self.sampler.step(num_steps)
        for part in steps:
            assert len(part.tokens) == len(part.logprobs) == len(part.policy_versions) == len(part.context_versions) > 0
            for row in zip(part.tokens, part.logprobs, part.policy_versions, part.context_versions, strict=True):
                self.sampled[part.request_id].append((len(self.contexts[part.request_id]), *(value.item() for value in row)))
                self.contexts[part.request_id].append(row[0].item())
            self.turns[part.request_id] += part.turn_over
        return steps

    def extend(self, request_id, tokens):
        self.contexts[request_id].extend(tokens)
        self.sampler.extend(request_id, np.array(tokens, np.int32))

    def column(self, request_id, index):
        return [row[index] for row in self.sampled[request_id]]

    def tokens(self, request_id):
        return self.column(request_id, 1)

    def versions(self, request_id):
        return self.column(request_id, 3)

    def gaps(self):
        """|learner's score under the version that sampled it - sampler's logprob|, by (policy version, context version)."""
        gaps = {}
        for request_id, rows in self.sampled.items():
            for version in {row[3] for row in rows}:
                scores = score_row(params_of(version), self.contexts[request_id])
                for position, _, logprob, policy_version, context_version in rows:
                    if policy_version == version:
                        gaps.setdefault((policy_version, context_version), []).append(abs(logprob - scores[position]))
        return {versions: max(values) for versions, values in gaps.items()}


@jax.jit
def _score(params, tokens, valid, temperature):
    return score(MODEL, params, tokens, valid, temperature=temperature).logprobs


def score_row(params, tokens, temperature=TEMPERATURE):
    padded = np.zeros((1, ROOM), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(_score(params, padded, np.arange(ROOM)[None] < len(tokens), temperature))[0]


def play(engine, *, swap, num_versions, seed=0):
    """Six multi-turn requests in four slots, with a publish every second call; calls are of random length."""
    rng = np.random.default_rng(seed)
    requests = [request(i, rng.integers(30, size=rng.integers(1, 7)), max_turn_tokens=int(rng.integers(2, 7))) for i in range(6)]
    sampler = make_sampler(engine, swap=swap)
    log = Log(sampler, requests)
    for r in requests:
        sampler.submit(r)
    version, calls = 0, 0
    while sampler.num_running or sampler.num_waiting:
        for part in log.step(int(rng.integers(1, 5))):
            if not part.turn_over:
                continue
            observation = rng.integers(30, size=rng.integers(1, 5)).tolist()
            if len(log.contexts[part.request_id]) + len(observation) < ROOM:
                log.extend(part.request_id, observation)
            else:
                sampler.release(part.request_id)
        calls += 1
        if calls % 2 == 0 and version + 1 < num_versions:
            version += 1
            sampler.publish(version, params_of(version))
    assert version == num_versions - 1
    return log


# --- versions and logprobs ---


@pytest.mark.parametrize("swap", Swap)
@pytest.mark.parametrize("calls", [[[3], [4], [3]], [[1, 2], [1, 1, 2], [1, 2]], [[1], [8], [1]]])
def test_a_publish_between_two_tokens_of_a_turn_shows_in_their_versions(engine, swap, calls):
    sampler = make_sampler(engine, swap=swap)
    log = Log(sampler, [request(9)])
    sampler.submit(request(9))
    for version, steps in enumerate(calls):
        if version:
            sampler.publish(version, params_of(version))
        for num_steps in steps:
            log.step(num_steps)
    first, second, third = (sum(steps) for steps in calls)
    assert log.versions(9) == [0] * first + [1] * second + [2] * third
    assert log.turns[9] == 1


def test_versions_follow_any_numbering_that_grows(engine):
    sampler = make_sampler(engine, version=3)
    log = Log(sampler, [request(5)])
    sampler.submit(request(5))
    log.step(2)
    sampler.publish(11, params_of(11))
    sampler.publish(12, params_of(12))
    log.step(2)
    assert log.versions(5) == [3, 3, 12, 12]


@pytest.mark.parametrize("seed", range(3))
def test_reprefill_makes_each_token_the_work_of_one_version(engine, seed):
    log = play(engine, swap=Swap.REPREFILL, num_versions=5, seed=seed)
    gaps = log.gaps()
    assert {policy for policy, _ in gaps} == set(range(5))
    assert all(policy == context for policy, context in gaps)
    assert max(gaps.values()) < 1e-4, gaps  # the last version's no less than the first's
    assert any(len(set(log.versions(i))) > 1 for i in log.sampled)


def test_keep_kv_leaves_old_contexts_and_says_how_old(engine):
    log = play(engine, swap=Swap.KEEP_KV, num_versions=5)
    gaps = log.gaps()
    assert all(context <= policy for policy, context in gaps)
    for (policy, context), gap in gaps.items():
        assert gap < 1e-4 if policy == context else gap > 1e-3, gaps  # an old context shows, a fresh one does not
    for request_id in log.sampled:  # the context is as old as the oldest version in it
        assert set(log.column(request_id, 4)) == {log.versions(request_id)[0]}
    assert len({context for _, context in gaps}) > 1


def test_logprobs_are_those_of_the_temperature_and_visibly_of_no_other(engine):
    sampler = make_sampler(engine)
    log = Log(sampler, [request(6)])
    sampler.submit(request(6))
    log.step(8)
    scores = {temperature: score_row(params_of(0), log.contexts[6], temperature) for temperature in (TEMPERATURE, 1.0)}
    gaps = {temperature: [abs(row[2] - values[row[0]]) for row in log.sampled[6]] for temperature, values in scores.items()}
    assert max(gaps[TEMPERATURE]) < 1e-5 and np.mean(gaps[1.0]) > 0.02


def test_turns_go_on_from_the_cache(engine):
    log = play(engine, swap=Swap.REPREFILL, num_versions=1)
    assert min(log.turns.values()) >= 2
    assert max(log.gaps().values()) < 1e-4


def test_greedy_requests_take_the_likeliest_and_report_the_policy_at_temperature_one(engine):
    sampler = make_sampler(engine)
    log = Log(sampler, [request(1, greedy=True), request(2, greedy=True)])
    for i in (1, 2):
        sampler.submit(request(i, greedy=True))
    log.step(8)
    assert log.tokens(1) == log.tokens(2)
    for position, token, logprob, *_ in log.sampled[1]:
        contexts = [[*log.contexts[1][:position], other] for other in range(32)]
        others = [score_row(params_of(0), context, temperature=1.0)[position] for context in contexts]
        assert int(np.argmax(others)) == token and logprob == pytest.approx(max(others), abs=1e-4)
        assert abs(logprob - score_row(params_of(0), contexts[token])[position]) > 1e-3


@pytest.mark.parametrize("num_steps", [1, 3, 8])
def test_a_request_samples_the_same_whatever_is_around_it(engine, num_steps):
    """Submitted late, behind others, into another slot, in other calls."""
    alone = make_sampler(engine)
    expected = Log(alone, [request(77)])
    alone.submit(request(77))
    expected.step(8)
    expected.step(8)
    assert len(expected.tokens(77)) == 10

    crowded = make_sampler(engine)
    others = [request(i, [i, 9], max_turn_tokens=1 + i % 5) for i in range(9)]
    log = Log(crowded, [*others, request(77)])
    for r in others:
        crowded.submit(r)
    for i in range(60):
        if i == 2:
            crowded.submit(request(77))
        for part in log.step(num_steps):
            if part.turn_over:
                crowded.release(part.request_id)
    assert log.tokens(77) == expected.tokens(77)
    np.testing.assert_allclose(log.column(77, 2), expected.column(77, 2), atol=1e-5)
    assert not crowded.num_running and not crowded.num_waiting and all(log.turns.values())


# --- groups, slots, turns ---


def count_calls(monkeypatch, engine, name):
    calls = []
    function = getattr(engine, name)
    monkeypatch.setattr(engine, name, lambda *args, **kwargs: (calls.append(kwargs), function(*args, **kwargs))[1])
    return calls


def test_a_group_shares_one_prefill_and_its_members_differ(engine, monkeypatch):
    prefills = count_calls(monkeypatch, engine, "prefill")
    sampler = make_sampler(engine)
    requests = [request(i, [1 + i // 2, 2, 3], group_id=i // 2) for i in range(4)]
    log = Log(sampler, requests)
    for r in requests:
        sampler.submit(r)
    log.step(8)
    assert len(prefills) == 2
    assert sampler.num_prefilled_tokens == 6
    assert log.tokens(0) != log.tokens(1) and log.tokens(2) != log.tokens(3)
    assert max(log.gaps().values()) < 1e-4


def test_a_group_larger_than_a_device_call_still_shares_it(engine, monkeypatch):
    prefills = count_calls(monkeypatch, engine, "prefill")
    inserts = count_calls(monkeypatch, engine, "insert_group")
    sampler = make_sampler(engine, refill_rows=2)
    requests = [request(i, group_id=0) for i in range(3)]
    log = Log(sampler, requests)
    for r in requests:
        sampler.submit(r)
    log.step(4)
    assert (len(prefills), len(inserts)) == (1, 2)
    assert len({tuple(log.tokens(i)) for i in range(3)}) == 3


def test_who_gets_a_slot_later_shares_the_prefill_of_its_group_and_policy(engine, monkeypatch):
    prefills = count_calls(monkeypatch, engine, "prefill")
    sampler = make_sampler(engine)
    requests = [request(i, group_id=0, max_turn_tokens=3) for i in range(6)]
    log = Log(sampler, requests)
    for r in requests:
        sampler.submit(r)
    log.step(3)
    sampler.release(0)
    log.step(3)
    assert log.tokens(4) and len(prefills) == 1
    sampler.publish(1, params_of(1))
    sampler.release(1)
    log.step(3)
    assert log.versions(5) == [1] * 3 and len(prefills) == 2
    assert max(log.gaps().values()) < 1e-4


def test_a_prefill_is_kept_only_for_those_who_wait(engine):
    sampler = make_sampler(engine)
    for i in range(5):  # one more than slots
        sampler.submit(request(i, group_id=0, max_turn_tokens=3))
    sampler.step(1)
    assert sampler._last_prefill is not None
    sampler.release(0)
    sampler.step(1)
    assert sampler._last_prefill is None


@pytest.mark.parametrize("different", [{"group_id": 1}, {"prompt": [1, 2, 4]}])
def test_another_group_or_prompt_is_another_prefill(engine, monkeypatch, different):
    prefills = count_calls(monkeypatch, engine, "prefill")
    sampler = make_sampler(engine)
    sampler.submit(request(0, group_id=0))
    sampler.submit(request(1, **{"group_id": 0, **different}))
    sampler.step(1)
    assert len(prefills) == 2


def test_requests_wait_for_a_slot_in_order(engine):
    sampler = make_sampler(engine)
    for i in range(7):
        sampler.submit(request(i, max_turn_tokens=2))
    assert (sampler.num_running, sampler.num_waiting) == (0, 7)
    assert [part.request_id for part in sampler.step(8)] == [0, 1, 2, 3]
    assert (sampler.num_running, sampler.num_waiting) == (4, 3)
    assert sampler.step(8) == []  # turns are over, the environments have not answered, and no slot is free
    sampler.release(2)
    assert [part.request_id for part in sampler.step(8)] == [4]
    sampler.release(6)  # while it waits
    assert (sampler.num_running, sampler.num_waiting) == (4, 1)
    sampler.release(0)
    sampler.release(1)
    assert [part.request_id for part in sampler.step(8)] == [5]


def test_release_in_the_middle_of_a_turn_idles_the_slot(engine):
    sampler = make_sampler(engine)
    sampler.submit(request(0))
    sampler.submit(request(1, max_turn_tokens=2))
    assert {part.request_id: len(part.tokens) for part in sampler.step(1)} == {0: 1, 1: 1}
    sampler.release(0)
    assert sampler.num_running == 1
    before = sampler.num_decode_steps
    assert [part.request_id for part in sampler.step(8)] == [1]
    assert sampler.num_decode_steps - before == 1  # a ghost in slot 0 would have kept the device decoding
    assert sampler.step(8) == []


def test_decode_steps_and_tokens_are_counted_as_they_happen(engine):
    sampler = make_sampler(engine)
    sampler.submit(request(0, max_turn_tokens=3))
    sampler.submit(request(1, [5], max_turn_tokens=1))
    sampler.step(100)  # one device call holds 8, and the turns are over after 3
    assert (sampler.num_decode_steps, sampler.num_sampled_tokens, sampler.num_prefilled_tokens) == (3, 4, 4)
    sampler.extend(1, np.array([3, 4], np.int32))
    sampler.step(1)
    assert (sampler.num_decode_steps, sampler.num_sampled_tokens, sampler.num_prefilled_tokens) == (4, 5, 6)


def test_a_turn_ends_with_its_budget_and_the_next_begins_with_a_full_one(engine):
    sampler = make_sampler(engine)
    log = Log(sampler, [request(0, max_turn_tokens=3)])
    sampler.submit(request(0, max_turn_tokens=3))
    assert [(len(part.tokens), part.turn_over) for part in log.step(2)] == [(2, False)]
    assert [(len(part.tokens), part.turn_over) for part in log.step(8)] == [(1, True)]
    log.extend(0, [4])
    assert [(len(part.tokens), part.turn_over) for part in log.step(8)] == [(3, True)]
    assert max(log.gaps().values()) < 1e-4


def test_a_stop_token_ends_the_turn_and_is_kept(engine):
    sampler = make_sampler(engine)
    log = Log(sampler, [request(i) for i in range(40)])
    for i in range(40):
        sampler.submit(request(i))
    for _ in range(100):
        for part in log.step(4):
            if part.turn_over:
                sampler.release(part.request_id)
    assert not sampler.num_running
    stopped = [i for i in range(40) if STOP in log.tokens(i)]
    assert 0 < len(stopped) < 40
    for i in range(40):
        assert (log.tokens(i)[-1] == STOP and STOP not in log.tokens(i)[:-1]) if i in stopped else len(log.tokens(i)) == 10
    assert any(len(log.tokens(i)) < 10 for i in stopped)


def test_a_full_context_ends_the_turn(engine):
    sampler = make_sampler(engine)
    prompt = np.arange(27) % 30
    log = Log(sampler, [request(0, prompt)])
    sampler.submit(request(0, prompt))
    parts = log.step(8)
    assert [(len(part.tokens), part.turn_over) for part in parts] == [(5, True)]
    assert max(log.gaps().values()) < 1e-4
    with pytest.raises(ValueError, match="a context of 33 tokens leaves no room to sample: a slot holds 32"):
        sampler.extend(0, np.array([1], np.int32))


def test_pause_holds_everything_and_resume_goes_on(engine):
    logs = []
    for pauses in (False, True):
        sampler = make_sampler(engine)
        log = Log(sampler, [request(0)])
        sampler.submit(request(0))
        log.step(3)
        if pauses:
            sampler.pause()
            assert sampler.is_paused and log.step(8) == [] and sampler.num_decode_steps == 3
            sampler.publish(1, params_of(1))  # as the interrupt source does
            assert log.step(8) == []
            sampler.resume()
            assert not sampler.is_paused
        else:
            sampler.publish(1, params_of(1))
        log.step(8)
        logs.append(log)
    assert logs[0].sampled == logs[1].sampled
    assert logs[0].versions(0) == [0] * 3 + [1] * 7


# --- compilations and memory ---


@contextlib.contextmanager
def compilations():
    """A list that grows by one with each program that XLA compiles."""
    compiled = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(kwargs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_ragged_rounds_compile_once_a_bucket_and_leave_nothing_behind(engine):
    rng = np.random.default_rng(0)
    sampler = make_sampler(engine)

    def one_round(number, *, prompt_lengths, observation_lengths):
        for i, length in enumerate(prompt_lengths):
            sampler.submit(request(100 * number + i, rng.integers(30, size=length), max_turn_tokens=int(rng.integers(1, 6))))
        observations = list(observation_lengths)
        while sampler.num_running or sampler.num_waiting:
            for part in sampler.step(int(rng.integers(1, 9))):
                if part.turn_over and observations:
                    sampler.extend(part.request_id, rng.integers(30, size=observations.pop()).astype(np.int32))
                elif part.turn_over:
                    sampler.release(part.request_id)
            sampler.publish(sampler.version + 1, params_of(sampler.version % 3))

    for number in range(3):  # each bucket at least once
        one_round(number, prompt_lengths=[3, 12, 20, 8, 2, 2], observation_lengths=[3, 3, 2, 2, 2])
    sampler.submit(request(50))
    sampler.step(1)
    sampler.release(50)
    with compilations() as compiled:
        for number in range(3, 22):
            one_round(number, prompt_lengths=rng.integers(1, 22, size=6), observation_lengths=rng.integers(1, 4, size=3))
            if number == 6:
                num_arrays = len(jax.live_arrays())
    assert not compiled
    assert len(jax.live_arrays()) <= num_arrays
    programs = engine._programs
    assert programs.decode._cache_size() == 2  # spans of 16 and 32
    assert programs.append._cache_size() <= 6  # one slot, two or all, in either span
    assert programs.refill._cache_size() == 2 and programs.prefill._cache_size() == 3  # 16, 32 and 8, 16, 32


# --- state ---


def through_a_file(tree):
    """What a checkpoint does to a state: numbers and text as JSON, arrays as npz."""
    arrays = {}

    def strip(value):
        if isinstance(value, np.ndarray):
            arrays[str(len(arrays))] = value
            return {"array": str(len(arrays) - 1)}
        if isinstance(value, dict):
            return {key: strip(child) for key, child in value.items()}
        return [strip(child) for child in value] if isinstance(value, list) else value

    def fill(value):
        if isinstance(value, dict):
            return loaded[value["array"]] if set(value) == {"array"} else {key: fill(child) for key, child in value.items()}
        return [fill(child) for child in value] if isinstance(value, list) else value

    text = json.dumps(strip(tree), allow_nan=False)
    file = io.BytesIO()
    np.savez(file, **arrays)
    file.seek(0)
    loaded = dict(np.load(file))
    return fill(json.loads(text))


@pytest.mark.parametrize("swap", Swap)
def test_a_restored_sampler_goes_on_like_the_one_it_was_taken_from(engine, swap):
    requests = [request(i, [i + 1, 2], max_turn_tokens=4 + i, greedy=i == 1) for i in range(6)]
    sampler = make_sampler(engine, swap=swap)
    for r in requests:
        sampler.submit(r)
    sampler.step(2)
    sampler.publish(1, params_of(1))
    sampler.step(2)
    sampler.extend(0, np.array([7, 8, 9], np.int32))  # not seen by the engine yet; 1, 2 and 3 are in the middle of a turn
    state = through_a_file(sampler.state())

    restored = make_sampler(engine, swap=swap, version=None)
    restored.restore(state, params_of(1))
    assert (restored.version, restored.num_running, restored.num_waiting) == (1, 4, 2)

    parts = []
    for each in (sampler, restored):
        taken = []
        for number in range(12):
            for part in each.step(3):
                taken.append((part.request_id, part.tokens.tolist(), part.logprobs.tobytes(), part.policy_versions.tolist(),
                              part.context_versions.tolist(), part.turn_over))
                if part.turn_over:
                    each.release(part.request_id)
            if number == 1:
                each.publish(2, params_of(2))
        parts.append((taken, each.num_decode_steps, each.num_sampled_tokens, each.num_prefilled_tokens, each.num_running))
    assert parts[0] == parts[1]
    assert {part[0] for part in parts[0][0]} == set(range(6))


def test_restore_forgets_what_the_sampler_did_before(engine):
    sampler = make_sampler(engine)
    sampler.submit(request(0, max_turn_tokens=5))
    sampler.step(3)
    state = sampler.state()
    used = make_sampler(engine, version=9)
    for i in range(6):
        used.submit(request(i))
    used.step(1)
    used.restore(state, params_of(0))
    assert (used.version, used.num_running, used.num_waiting) == (0, 1, 0)
    assert [(part.request_id, len(part.tokens)) for part in used.step(8)] == [(0, 2)]
    assert used.num_decode_steps == 5  # a ghost in another slot would have kept the device decoding


def test_a_paused_sampler_is_restored_paused(engine):
    sampler = make_sampler(engine)
    sampler.pause()
    restored = make_sampler(engine, version=None)
    restored.restore(through_a_file(sampler.state()), params_of(0))
    assert restored.is_paused


def test_a_state_does_not_change_with_the_sampler(engine):
    sampler = make_sampler(engine)
    sampler.submit(request(0))
    sampler.step(2)
    state = sampler.state()
    text = repr(state)
    sampler.step(3)
    sampler.release(0)
    assert repr(state) == text


# --- refusals ---


def test_no_policy_no_step(engine):
    sampler = make_sampler(engine, version=None)
    assert sampler.version == NO_POLICY
    sampler.submit(request(0))
    with pytest.raises(RuntimeError, match="no policy yet; publish version 0 before the first step"):
        sampler.step(1)


@pytest.mark.parametrize("version", [-1, 1, 2])
def test_versions_must_grow(engine, version):
    sampler = make_sampler(engine, version=2)
    with pytest.raises(ValueError, match=f"publish of version {version} after version 2, wanted a larger one"):
        sampler.publish(version, params_of(0))
    assert sampler.version == 2


@pytest.mark.parametrize(("bad", "message"), [
    (request(3, np.ones(32)), "a context of 32 tokens leaves no room to sample: a slot holds 32; shorten the prompt"),
    (request(1), "request 1 is already being sampled"),
    (request(2), "request 2 is already being sampled"),
])
def test_a_request_that_cannot_be_sampled_is_refused(engine, bad, message):
    sampler = make_sampler(engine)
    sampler.submit(request(1))
    sampler.step(1)
    sampler.submit(request(2))
    with pytest.raises(ValueError, match=message):
        sampler.submit(bad)
    assert (sampler.num_running, sampler.num_waiting) == (1, 1)


@pytest.mark.parametrize(("facts", "message"), [
    ({"prompt": []}, "request 3 has an empty prompt"),
    ({"max_turn_tokens": 0}, "request 3 may sample 0 tokens a turn, wanted at least 1"),
    ({"max_tokens": 0}, "request 3: max_tokens is 0, wanted at least 1, or None for no limit"),
    ({"deadline": 0}, "request 3: deadline is 0, wanted at least 1, or None for no limit"),
])
def test_a_request_without_meaning_is_refused(facts, message):
    with pytest.raises(ValueError, match=message):
        request(3, **facts)


@pytest.mark.parametrize(("steps", "num_tokens", "message"), [
    (2, 1, "request 0 is in the middle of a turn and may sample 8 more tokens"),
    (8, 0, "request 0 is extended by 0 tokens, wanted at least 1"),
    (8, 19, "a context of 32 tokens leaves no room to sample: a slot holds 32"),
])
def test_an_extension_that_cannot_be_is_refused(engine, steps, num_tokens, message):
    sampler = make_sampler(engine)
    sampler.submit(request(0))
    for _ in range(steps // 2):
        sampler.step(2)
    sampler.step(8) if steps == 8 else None
    with pytest.raises(ValueError, match=message):
        sampler.extend(0, np.ones(num_tokens, np.int32))
