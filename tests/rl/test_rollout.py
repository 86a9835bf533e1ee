"""Rollouts: what is trained is what was sampled, and what the environment wrote is read but never trained."""

import dataclasses
import functools
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from models.config import ModelConfig
from models.tokenizer import ByteTokenizer
from models.transformer import Model
from rl.engine import PolicyEngine
from rl.environments import Environment, EnvironmentName, Fault, Split, Step, make
from rl.logprobs import score
from rl.requests import SampledTokens, Swap
from rl.rollout import Rollouts
from rl.sampler import Sampler
from rl.types import NO_POLICY, FinishReason
from tests.tiny import BYTES, CONTRACT

BOS, EOS = ByteTokenizer.bos, ByteTokenizer.eos


def ids(text):
    return list(text.encode())


class Parrot(Environment):
    """Repeats what it hears. A turn that holds `!` wins the game; each turn earns 0.25."""

    stop, max_turns, max_turn_tokens, max_observation_tokens = None, 4, 4, 8

    def __init__(self, reward=0.25):
        super().__init__()
        self.reward = reward
        self.heard = []

    def _begin(self, seed):
        self.heard = []
        return f"say {seed}:"

    def _advance(self, action):
        self.heard.append(action)
        won = "!" in action
        return Step("" if won else f"[{len(self.heard)}]", self.reward, done=won, success=won)

    def _instance_state(self):
        return {"heard": list(self.heard)}

    def _restore_instance(self, state):
        self.heard = list(state["heard"])


def logprobs_of(tokens):
    """What the scripted sampler says that its tokens had."""
    return np.float32(-0.5) - tokens.astype(np.float32) / 256


class ScriptedSampler:
    """Says, for each request, the parts of a script: lists of (token, policy version), a turn ending where the script says so."""

    def __init__(self, scripts):
        self.scripts = {request_id: list(parts) for request_id, parts in scripts.items()}
        self.submitted, self.extensions, self.released = {}, [], []

    def submit(self, request):
        self.submitted[request.request_id] = request

    def extend(self, request_id, tokens):
        self.extensions.append((request_id, tokens.tolist()))

    def release(self, request_id):
        self.released.append(request_id)

    def step(self, num_steps):
        parts = []
        for request_id in self.submitted:
            if request_id in self.released or not self.scripts[request_id]:
                continue
            part, turn_over = self.scripts[request_id].pop(0)
            tokens, versions = np.array(part, np.int32).T
            parts.append(SampledTokens(request_id, tokens, logprobs_of(tokens), versions, versions - 1, turn_over,
                                       dataclasses.replace(CONTRACT, greedy=self.submitted[request_id].greedy)))
        return parts


def say(text_or_ids, version=0, turn_over=True):
    tokens = ids(text_or_ids) if isinstance(text_or_ids, str) else text_or_ids
    versions = [version] * len(tokens) if isinstance(version, int) else version
    return list(zip(tokens, versions, strict=True)), turn_over


def play(scripts, *, environment=Parrot, max_length=100, greedy=False, seed=3):
    sampler = ScriptedSampler(scripts)
    rollouts = Rollouts(sampler, environment, BYTES, max_length=max_length)
    rollouts.start(9, list(scripts), seed=seed, greedy=greedy)
    return sampler, rollouts


def run(rollouts):
    """Trajectories by request id, and all versions that were called new."""
    finished, new_versions = {}, []
    for _ in range(100):
        step = rollouts.step(1)
        finished |= {trajectory.request_id: trajectory for trajectory in step.finished}
        new_versions.extend(step.new_versions)
    return finished, new_versions


# --- tokens ---


def test_a_trajectory_is_the_conversation_token_for_token():
    sampler, rollouts = play({5: [say("ab"), say("cd!")]})
    [trajectory] = run(rollouts)[0].values()
    prompt, heard, won = [BOS, *ids("say 3:")], ids("[1]"), ids("cd!")
    assert sampler.submitted[5].prompt.tolist() == prompt
    assert sampler.submitted[5].max_turn_tokens == 4 and sampler.submitted[5].group_id == 9
    assert sampler.extensions == [(5, heard)] and sampler.released == [5]
    assert trajectory.tokens.tolist() == [*prompt, *ids("ab"), *heard, *won]
    mask = [False] * 7 + [True] * 2 + [False] * 3 + [True] * 3
    assert trajectory.loss_mask.tolist() == mask
    assert trajectory.policy_versions.tolist() == [0 if sampled else NO_POLICY for sampled in mask]
    assert trajectory.context_versions.tolist() == [-1] * 15
    assert trajectory.turn_starts.tolist() == [7, 12]
    np.testing.assert_array_equal(np.isnan(trajectory.sampler_logprobs), ~np.array(mask))
    np.testing.assert_array_equal(trajectory.sampler_logprobs[mask], logprobs_of(trajectory.tokens[mask]))
    assert (trajectory.request_id, trajectory.group_id) == (5, 9)
    assert trajectory.tokens.dtype == trajectory.policy_versions.dtype == trajectory.turn_starts.dtype == np.int32
    assert trajectory.sampler_logprobs.dtype == np.float32 and trajectory.loss_mask.dtype == bool


@pytest.mark.parametrize("nonsense", [
    [0xC3, 0x28],  # a broken two-byte character
    [0xE2, 0x82],  # the head of a three-byte one
    [EOS, BOS, ByteTokenizer.pad, 33],  # special ids, then `!`
    [0xEF, 0xBF, 0xBD],  # U+FFFD itself
])
def test_what_would_encode_differently_is_trained_as_sampled(nonsense):
    _, rollouts = play({0: [say(nonsense), say("!")]})
    [trajectory] = run(rollouts)[0].values()
    start = trajectory.turn_starts[0]
    assert trajectory.tokens[start : start + len(nonsense)].tolist() == nonsense
    assert trajectory.loss_mask[start : start + len(nonsense)].all()


def test_a_character_split_over_two_steps_of_a_turn_reaches_the_environment_whole():
    environments = []
    sampler, rollouts = play({0: [say([0xC3], turn_over=False), say([0xA9]), say("!")]},
                             environment=lambda: environments.append(Parrot()) or environments[-1])
    [trajectory] = run(rollouts)[0].values()
    assert environments[-1].heard == ["é", "!"]
    assert trajectory.turn_starts.tolist() == [7, 12]


def test_members_of_a_group_play_one_instance_on_their_own():
    _, rollouts = play({0: [say("a"), say("b"), say("!")], 1: [say("!")], 2: [say("cc"), say("!")]}, seed=44)
    finished, _ = run(rollouts)
    prompt = [BOS, *ids("say 44:")]
    assert [finished[i].tokens[:8].tolist() for i in range(3)] == [prompt] * 3
    assert [len(finished[i].turn_starts) for i in range(3)] == [3, 1, 2]
    assert [finished[i].reward for i in range(3)] == [0.75, 0.25, 0.5]


# --- endings ---


def test_an_environment_ends_an_episode():
    _, rollouts = play({0: [say("x"), say("!")]})
    [trajectory] = run(rollouts)[0].values()
    assert trajectory.finish_reason is FinishReason.ENVIRONMENT and trajectory.success and trajectory.reward == 0.5
    assert rollouts.num_running == 0


def test_running_out_of_turns_is_a_truncation():
    _, rollouts = play({0: [say("x")] * 9})
    [trajectory] = run(rollouts)[0].values()
    assert trajectory.finish_reason is FinishReason.LENGTH and not trajectory.success and trajectory.reward == 1.0
    assert len(trajectory.turn_starts) == 4


@pytest.mark.parametrize(("max_length", "turns"), [(11, 1), (12, 2), (15, 2), (16, 3)])
def test_an_observation_that_leaves_no_room_ends_the_episode(max_length, turns):
    """The prompt has 7 tokens, a turn 1, an observation 3; after each the policy needs room for one more."""
    sampler, rollouts = play({0: [say("x")] * 9}, max_length=max_length)
    [trajectory] = run(rollouts)[0].values()
    assert trajectory.finish_reason is FinishReason.LENGTH
    assert len(trajectory.turn_starts) == turns and len(trajectory) == 7 + turns + 3 * (turns - 1) <= max_length
    assert sampler.released == [0] and trajectory.loss_mask[-1]


@pytest.mark.parametrize(("reward", "turns"), [(float("nan"), 1), (float("inf"), 1), (1e308, 2)])
def test_a_reward_that_is_no_number_costs_its_trajectory(reward, turns):
    sampler, rollouts = play({4: [say("x")] * 9}, environment=lambda: Parrot(reward))
    steps = [rollouts.step(1) for _ in range(9)]
    [(failure, trajectory)] = [(*step.failures, *step.finished) for step in steps if step.finished]
    assert failure.fault is Fault.INVALID and "reward" in failure.message
    assert trajectory.finish_reason is FinishReason.FAILED and trajectory.reward is None and not trajectory.success
    assert len(trajectory.turn_starts) == turns and trajectory.loss_mask[-1]
    assert sampler.released == [4] and rollouts.num_running == 0


class Wordy(Parrot):
    """Of one character in two bytes."""

    def __init__(self, first, later):
        super().__init__()
        self.first, self.later = first, later

    def _begin(self, seed):
        return "é" * self.first

    def _advance(self, action):
        return Step("é" * self.later, 0.0, done=False)


@pytest.mark.parametrize(("first", "later", "fault"), [(9, 1, Fault.OVERSIZED), (19, 1, Fault.OVERSIZED), (8, 18, None),
                                                       (8, 19, Fault.OVERSIZED)])
def test_an_observation_that_no_context_could_hold_costs_its_trajectory(first, later, fault):
    """After a start token, 17 more tokens leave no room in a context of 18. One that does not fit at its place only
    ends the episode; one of more characters than a whole context has tokens is a fault."""
    sampler, rollouts = play({4: [say("x")] * 9}, environment=functools.partial(Wordy, first, later), max_length=18)
    steps = [rollouts.step(1) for _ in range(3)]
    [trajectory] = [trajectory for step in steps for trajectory in step.finished]
    assert [failure.fault for step in steps for failure in step.failures] == ([fault] if fault else [])
    assert trajectory.finish_reason is (FinishReason.FAILED if fault else FinishReason.LENGTH)
    assert sampler.released == [4] and (4 in sampler.submitted) == (first == 8)


def test_nothing_is_kept_of_episodes_that_ended():
    _, rollouts = play({0: [say("x"), say("!")], 1: [say("!")], 2: [say("x")] * 9}, environment=functools.partial(Parrot, 1e308))
    rollouts.cancel([1])
    run(rollouts)
    assert rollouts._runner._host._episodes == {}


def test_greedy_tokens_are_never_trained():
    _, rollouts = play({0: [say("x"), say("!")]}, greedy=True)
    [trajectory] = run(rollouts)[0].values()
    assert not trajectory.loss_mask.any()
    assert trajectory.versions == (0,) and np.isfinite(trajectory.sampler_logprobs).sum() == 2


def test_cancel_returns_what_there_is():
    sampler, rollouts = play({0: [say("x"), say("yz", 1, turn_over=False)], 1: [say("!", 2)], 2: [say("q")]})
    rollouts.step(1)
    rollouts.step(1)
    [two, zero] = rollouts.cancel([2, 0])
    assert (zero.request_id, two.request_id) == (0, 2)
    assert zero.finish_reason is FinishReason.CANCELLED and zero.reward is None and not zero.success
    assert zero.versions == (0, 1) and zero.loss_mask.sum() == 3
    assert sampler.released == [1, 2, 0] and rollouts.num_running == 0
    assert rollouts.partial() == []


def test_partial_is_a_look_at_what_is_under_way():
    _, rollouts = play({0: [say("x"), say("!")], 1: [say("!")]})
    assert [(len(t), t.reward) for t in rollouts.partial()] == [(0, None)] * 2  # nothing was asked for yet
    rollouts.step(1)
    [trajectory] = rollouts.partial()
    assert trajectory.request_id == 0 and len(trajectory) == 11 and not trajectory.loss_mask[-1]
    assert len(run(rollouts)[0][0]) == 12


# --- versions ---


def test_each_version_of_a_trajectory_is_new_once():
    _, rollouts = play({0: [say("ab", [0, 1], turn_over=False), say("cd", [1, 2]), say("e", 2), say("!", 4)],
                        1: [say("ab", [1, 3]), say("!", 3)]})
    steps = [rollouts.step(1).new_versions for _ in range(4)]
    assert steps == [[0, 1, 1, 3], [2], [], [4]]


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


def equal(left, right):
    """Bitwise, NaN included."""
    def plain(trajectory):
        return {name: value.tobytes() if isinstance(value, np.ndarray) else value for name, value in trajectory.state().items()}

    return plain(left) == plain(right)


def test_restored_rollouts_go_on_in_the_middle_of_a_turn():
    scripts = {0: [say("x", 0), say("ab", 1, turn_over=False), say("c", 1), say("!", 2)],
               1: [say("pq", 0, turn_over=False), say("!", 1)]}
    sampler, rollouts = play(scripts)
    rollouts.step(1)
    rollouts.step(1)
    state = through_a_file(rollouts.state())
    text = repr(state)
    rest = ScriptedSampler({0: scripts[0][2:], 1: []})
    rest.submitted = {0: sampler.submitted[0]}
    restored = Rollouts(rest, Parrot, BYTES, max_length=100)
    restored.restore(state)
    original, restored = run(rollouts), run(restored)
    assert equal(original[0][0], restored[0][0]) and original[1] == restored[1] == [2]
    assert original[0][0].turn_starts.tolist() == [7, 11, 17]
    assert repr(state) == text


# --- with a real policy ---

MODEL = Model(ModelConfig(vocab_size=259, num_layers=1, d_model=16, d_ff=24, num_heads=2, num_kv_heads=1, head_dim=8,
                          max_length=88))


@pytest.fixture(scope="module")
def engine():
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
    return PolicyEngine(MODEL, mesh, slots=6, max_steps=4, temperature=1.0, seed=7)


@functools.cache
def params_of(version):
    rng = np.random.default_rng(version)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(scale=0.3, size=leaf.shape), jnp.float32), MODEL.shapes)


@jax.jit
def _score(params, tokens, valid):
    return score(MODEL, params, tokens, valid, temperature=1.0).logprobs


def score_row(params, tokens):
    padded = np.zeros((1, 88), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(_score(params, padded, np.arange(88)[None] < len(tokens)))[0, : len(tokens)]


def frozen_lake():
    return make(EnvironmentName.FROZEN_LAKE, Split.TRAIN)


def start(engine, swap=Swap.REPREFILL):
    sampler = Sampler(engine, lengths=(88,), refill_rows=4, swap=swap)
    sampler.publish(0, params_of(0))
    rollouts = Rollouts(sampler, frozen_lake, BYTES, max_length=88)
    for group in range(4):
        rollouts.start(group, [2 * group, 2 * group + 1], seed=group)
    return sampler, rollouts


def go_on(sampler, rollouts, *, num_steps, publishes):
    """Steps, with a publish after some of them; finished trajectories by request id and the versions reported."""
    finished, new_versions = {}, []
    for number in range(num_steps):
        step = rollouts.step(2)
        finished |= {trajectory.request_id: trajectory for trajectory in step.finished}
        new_versions += step.new_versions
        if number in publishes:
            sampler.publish(sampler.version + 1, params_of(sampler.version + 1))
    return finished, new_versions


def test_observations_are_read_but_not_trained(engine):
    """Changing one token of an observation changes the scores of what the policy wrote after it, and of nothing before it."""
    sampler, rollouts = start(engine)
    finished, _ = go_on(sampler, rollouts, num_steps=40, publishes=())
    trajectory = max(finished.values(), key=len)
    assert len(trajectory.turn_starts) > 3
    observed = int(trajectory.turn_starts[2]) - 3
    assert not trajectory.loss_mask[observed]
    changed = trajectory.tokens.copy()
    changed[observed] += 1
    mask, before = trajectory.loss_mask, np.arange(len(trajectory)) < observed
    scores, changed_scores = score_row(params_of(0), trajectory.tokens), score_row(params_of(0), changed)
    np.testing.assert_array_equal(scores[before], changed_scores[before])
    assert np.all(np.abs(scores - changed_scores)[mask & ~before] > 1e-6)
    np.testing.assert_allclose(trajectory.sampler_logprobs[mask], scores[mask], atol=1e-4)  # and the sampler read it too
    assert np.isnan(trajectory.sampler_logprobs[~mask]).all()


@pytest.mark.parametrize("swap", Swap)
def test_a_restored_run_is_the_same_run(engine, swap):
    sampler, rollouts = start(engine, swap)
    early, _ = go_on(sampler, rollouts, num_steps=7, publishes=(3,))
    state = through_a_file({"rollouts": rollouts.state(), "sampler": sampler.state()})
    other_sampler = Sampler(engine, lengths=(88,), refill_rows=4, swap=swap)
    other = Rollouts(other_sampler, frozen_lake, BYTES, max_length=88)
    other_sampler.restore(state["sampler"], params_of(1))
    other.restore(state["rollouts"])
    (left, left_versions), (right, right_versions) = (go_on(*pair, num_steps=40, publishes=(4, 9))
                                                      for pair in ((sampler, rollouts), (other_sampler, other)))
    assert sorted(left) == sorted(right) and len(early) + len(left) == 8 and len(left) >= 4
    assert all(equal(left[i], right[i]) for i in left)
    assert left_versions == right_versions
    assert any(len(trajectory.versions) > 1 for trajectory in left.values())


def test_reported_versions_are_those_of_the_trajectories(engine):
    sampler, rollouts = start(engine)
    finished, new_versions = go_on(sampler, rollouts, num_steps=60, publishes=(1, 4, 8, 9, 13))
    assert len(finished) == 8
    assert sorted(new_versions) == sorted(version for trajectory in finished.values() for version in trajectory.versions)


def test_multi_version_trajectories_are_scored_exactly_by_their_versions(engine):
    sampler, rollouts = start(engine)
    finished, _ = go_on(sampler, rollouts, num_steps=60, publishes=(1, 4, 8, 9, 13))
    assert max(len(trajectory.versions) for trajectory in finished.values()) > 2
    for trajectory in finished.values():
        for version in trajectory.versions:
            where = trajectory.policy_versions == version
            scores = score_row(params_of(version), trajectory.tokens)
            np.testing.assert_allclose(trajectory.sampler_logprobs[where], scores[where], atol=1e-4)
