"""What every environment promises, whatever its family."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.tokenizer import ByteTokenizer
from rl import environments
from rl.environments import EnvironmentName, Split
from tests.families import FAMILIES

EVERY_FAMILY = pytest.mark.parametrize("name", FAMILIES)
EVERY_SPLIT = pytest.mark.parametrize("split", Split)


class Parrot(environments.Environment):
    """Three turns, no expert: repeats the action, and is content with `stop`."""

    stop = None
    max_turns = 3
    max_turn_tokens = 4
    max_observation_tokens = 5

    def _begin(self, seed):
        return f"say {seed % 10}"

    def _advance(self, action):
        return environments.Step(action, reward=0.5, done=action == "stop", success=action == "stop")

    def _instance_state(self):
        return {}

    def _restore_instance(self, state):
        pass


def play(environment, rng, steps):
    """The next `steps` turns of the expert, or fewer if the episode ends."""
    turns = []
    for _ in range(steps):
        action = environment.expert(rng)
        turns.append((action, environment.step(action)))
        if turns[-1][1].done:
            break
    return turns


@EVERY_SPLIT
@EVERY_FAMILY
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**63 - 1))
def test_seed_and_split_decide_the_episode(name, split, seed):
    first, second = environments.make(name, split), environments.make(name, split)
    second.reset(seed + 1)  # what was played before does not matter
    assert first.reset(seed) == second.reset(seed) != ""
    rng_first, rng_second = np.random.default_rng(0), np.random.default_rng(0)
    assert play(first, rng_first, 100) == play(second, rng_second, 100)


@EVERY_SPLIT
@EVERY_FAMILY
def test_seeds_differ(name, split):
    environment = environments.make(name, split)
    instances = set()
    for seed in range(50):
        environment.reset(seed)
        instances.add(json.dumps(environment.state()))
    assert len(instances) > 25


@EVERY_SPLIT
@EVERY_FAMILY
def test_state_goes_on_identically_through_json(name, split):
    continued, restored = environments.make(name, split), environments.make(name, split)
    num_in_mid_episode = 0
    for seed in range(40):
        restored.reset(seed + 1)
        continued.reset(seed)
        steps_before = seed % continued.max_turns
        turns = play(continued, np.random.default_rng(seed), steps_before)
        if turns and turns[-1][1].done:
            continue
        num_in_mid_episode += 1
        restored.restore(json.loads(json.dumps(continued.state())))
        after = [play(environment, np.random.default_rng(seed), 100) for environment in (continued, restored)]
        assert after[0] == after[1]
        assert after[0][-1][1].done
        assert steps_before + len(after[0]) <= continued.max_turns
    assert num_in_mid_episode > 20


@EVERY_FAMILY
def test_state_without_an_episode(name):
    environment, other = environments.make(name, Split.TRAIN), environments.make(name, Split.TRAIN)
    before_reset = environment.state()
    environment.reset(0)
    play(environment, np.random.default_rng(0), 100)
    for state in (before_reset, environment.state()):
        other.reset(0)
        other.restore(json.loads(json.dumps(state)))
        with pytest.raises(environments.EpisodeError, match="no episode is running"):
            other.step("L")


@EVERY_FAMILY
def test_a_turn_needs_a_running_episode(name):
    environment = environments.make(name, Split.TRAIN)
    for seed in range(2):
        with pytest.raises(environments.EpisodeError, match="no episode is running"):
            environment.step("L")
        with pytest.raises(environments.EpisodeError, match="no episode is running"):
            environment.expert(np.random.default_rng(0))
        environment.reset(seed)
        assert play(environment, np.random.default_rng(0), 100)[-1][1].done


@EVERY_FAMILY
def test_nonsense_earns_nothing_and_breaks_nothing(name):
    environment = environments.make(name, Split.TRAIN)
    tokenizer = ByteTokenizer()
    special = [tokenizer.decode(ids) for ids in ([tokenizer.eos], [tokenizer.pad, 0xC3], [ord("L"), tokenizer.eos])]
    for action in special + ["", "\0", "LL", "\n", "é", "19\ufffd\n"]:
        environment.reset(0)
        steps = []
        while not steps or not steps[-1].done:
            steps.append(environment.step(action))
        assert sum(step.reward for step in steps) == 0 and not any(step.success for step in steps)
        assert len(steps) == environment.max_turns
        assert steps[-1].observation == ""


@EVERY_FAMILY
def test_bounds_hold(name):
    environment = environments.make(name, Split.TRAIN)
    tokenizer = ByteTokenizer()
    rng = np.random.default_rng(0)
    for seed in range(200):
        observations = [environment.reset(seed)]
        turns = play(environment, rng, 1000)
        observations += [step.observation for _, step in turns]
        assert len(turns) <= environment.max_turns
        assert max(len(tokenizer.encode(text)) for text in observations) <= environment.max_observation_tokens
        assert max(len(tokenizer.encode(action)) for action, _ in turns) <= environment.max_turn_tokens
        texts = observations + [action for action, _ in turns]
        assert 1 + sum(len(tokenizer.encode(text)) for text in texts) <= environment.max_episode_tokens
        assert environment.stop is None or all(action.endswith(environment.stop) for action, _ in turns)


@EVERY_FAMILY
def test_expert_only_looks(name):
    environment = environments.make(name, Split.TRAIN)
    environment.reset(0)
    before = json.dumps(environment.state())
    environment.expert(np.random.default_rng(0))
    assert json.dumps(environment.state()) == before
    assert environment.has_expert


def test_running_out_of_turns_truncates():
    parrot = Parrot()
    parrot.reset(7)
    assert parrot.step("a") == environments.Step("a", 0.5, done=False)
    assert parrot.step("b") == environments.Step("b", 0.5, done=False)
    assert parrot.step("c") == environments.Step("", 0.5, done=True, truncated=True)
    assert parrot.max_episode_tokens == 1 + 3 * (5 + 4)


def test_an_ending_on_the_last_turn_is_no_truncation():
    parrot = Parrot()
    parrot.reset(7)
    parrot.step("a")
    parrot.step("b")
    assert parrot.step("stop") == environments.Step("stop", 0.5, done=True, success=True)


def test_turns_count_from_each_reset():
    parrot = Parrot()
    for _ in range(3):
        parrot.reset(0)
        assert not parrot.step("a").done
        assert not parrot.step("b").done


def test_no_expert():
    parrot = Parrot()
    parrot.reset(0)
    assert not parrot.has_expert
    with pytest.raises(environments.NoExpert, match="Parrot has no scripted expert"):
        parrot.expert(np.random.default_rng(0))


def test_refusals():
    with pytest.raises(ValueError, match="seed is -1"):
        Parrot().reset(-1)
    with pytest.raises(ValueError, match="3 turns were taken, but max_turns is 3"):
        Parrot().restore({"episode": {"turns_taken": 3, "instance": {}}})
    with pytest.raises(ValueError, match="frozen_lake got ArithmeticOptions, wanted FrozenLakeOptions"):
        environments.make(EnvironmentName.FROZEN_LAKE, Split.TRAIN, environments.ArithmeticOptions())
