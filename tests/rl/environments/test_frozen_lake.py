"""FrozenLake: the maps, the text, the rules, and how far the scripted expert gets."""

import collections
import hashlib
import json

import gymnasium
import numpy as np
import pytest

from models.tokenizer import ByteTokenizer
from rl import environments
from rl.environments import EnvironmentName, FrozenLakeOptions, Split, frozen_lake

MAP = ["SFFF",
       "FHFH",
       "FFFH",
       "HFFG"]


def make(split=Split.TRAIN, **options):
    return environments.make(EnvironmentName.FROZEN_LAKE, split, FrozenLakeOptions(**options))


def on_map(rows, **options):
    """A game at the start of the given map."""
    game = make(**options)
    game.restore({"episode": {"turns_taken": 0, "instance": {"map": rows, "position": 0}}})
    return game


def map_of(game):
    return tuple(game.state()["episode"]["instance"]["map"])


def shortest_path(rows):
    """Breadth-first search: the shortest word over `LDRU` from start to goal, None without one."""
    paths = collections.deque([((0, 0), "")])
    seen = {(0, 0)}
    while paths:
        (row, column), path = paths.popleft()
        if rows[row][column] == "G":
            return path
        for letter, (down, right) in {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}.items():
            cell = (row + down, column + right)
            if cell in seen or not all(0 <= index < len(rows) for index in cell) or rows[cell[0]][cell[1]] == "H":
                continue
            seen.add(cell)
            paths.append((cell, path + letter))


def play(game, policy):
    steps = []
    while not steps or not steps[-1].done:
        steps.append(game.step(policy()))
    return steps


def test_held_out_maps_are_256_and_never_change():
    maps = frozen_lake.held_out_maps(4, 0.8)
    assert len(set(maps)) == len(maps) == 256
    digest = hashlib.sha256("\n".join("/".join(rows) for rows in maps).encode()).hexdigest()
    assert digest[:16] == "e5d782bd78f84aa8", (
        "old and new evaluations cannot be compared: numpy or gymnasium draws other maps from the same seeds")


@pytest.mark.parametrize("options", [{}, {"size": 6}, {"frozen_probability": 0.9}])
def test_training_never_meets_a_held_out_map(options):
    training, held_out = make(Split.TRAIN, **options), make(Split.HELD_OUT, **options)
    held_out_maps = set()
    for seed in range(256):
        held_out.reset(seed)
        held_out_maps.add(map_of(held_out))
    assert len(held_out_maps) == 256
    for seed in range(600):
        training.reset(seed)
        assert map_of(training) not in held_out_maps


def test_held_out_seeds_wrap_around():
    game = make(Split.HELD_OUT)
    game.reset(3)
    third = map_of(game)
    game.reset(3 + 256)
    assert map_of(game) == third == frozen_lake.held_out_maps(4, 0.8)[3]
    game.reset(4)
    assert map_of(game) != third


def test_a_game_by_hand():
    game = on_map(MAP)
    assert game.step("L") == environments.Step("a#FF#>", 0.0, done=False)
    assert game.step("D") == environments.Step("e#FHF>", 0.0, done=False)
    assert game.step("D") == environments.Step("i#HFF>", 0.0, done=False)
    assert game.step("R") == environments.Step("jFFFH>", 0.0, done=False)
    assert game.step("R") == environments.Step("kFFHF>", 0.0, done=False)
    assert game.step("D") == environments.Step("oF#GF>", 0.0, done=False)
    assert game.step("R") == environments.Step("", 1.0, done=True, success=True)


def test_a_hole_ends_the_episode_without_reward():
    game = on_map(MAP)
    assert not game.step("R").done
    assert game.step("D") == environments.Step("", 0.0, done=True)


def test_the_first_observation():
    game = make(Split.HELD_OUT)
    for seed in range(256):
        observation = game.reset(seed)
        rows = map_of(game)
        assert observation == f"a#{rows[1][0]}{rows[0][1]}#>"


@pytest.mark.parametrize("action", ["x", "", "l", "LD", "L\n", "\ufffd", ">"])
def test_an_invalid_action_wastes_a_turn(action):
    game = on_map(MAP, max_turns=3)
    game.step("D")
    assert game.step(action) == environments.Step("e#FHF>", 0.0, done=False)
    assert game.step(action) == environments.Step("", 0.0, done=True, truncated=True)


@pytest.mark.parametrize("word", ["L" * 12, "DU" * 6, "x" * 12])
def test_turns_run_out(word):
    game = on_map(MAP)
    steps = [game.step(action) for action in word]
    assert [step.done for step in steps] == 11 * [False] + [True]
    assert steps[-1] == environments.Step("", 0.0, done=True, truncated=True)


def test_the_goal_on_the_last_turn_counts():
    game = on_map(MAP, max_turns=6)
    assert [game.step(action) for action in "DDRRDR"][-1] == environments.Step("", 1.0, done=True, success=True)


def test_a_turn_is_seven_bytes_and_the_longest_episode_85_tokens():
    game = make(Split.HELD_OUT)
    tokenizer = ByteTokenizer()
    assert game.max_episode_tokens == 85
    text = game.reset(0)
    for turn in range(1, 13):
        text += "L"
        assert len(tokenizer.encode(text)) == 7 * turn
        text += game.step("L").observation
    assert 1 + len(tokenizer.encode(text)) == game.max_episode_tokens
    assert set(text[0::7]) == {"a"} and set(text[5::7]) == {">"}


@pytest.mark.parametrize("size", [4, 8])
def test_the_rules_are_gymnasium_s(size):
    rng = np.random.default_rng(size)
    ours = make(Split.TRAIN, size=size, max_turns=100)
    for seed in range(20):
        ours.reset(seed)
        theirs = gymnasium.make("FrozenLake-v1", desc=list(map_of(ours)), is_slippery=False, max_episode_steps=100)
        theirs.reset(seed=seed)
        done = False
        while not done:
            action = rng.integers(4)
            position, reward, terminated, truncated, _ = theirs.step(action)
            step = ours.step("LDRU"[action])
            done = terminated or truncated
            assert (step.reward, step.done, step.success, step.truncated) == (reward, done, reward == 1, truncated)
            if not done:
                assert ours.state()["episode"]["instance"]["position"] == position


def test_every_position_has_its_own_byte():
    game = make(size=8)
    game.reset(0)
    state = game.state()
    letters = []
    for position in range(64):
        state["episode"]["instance"]["position"] = position
        game.restore(state)
        letters.append(game.step("x").observation[0])
    assert len(set(letters)) == 64 and all(letter.isascii() for letter in letters)


def test_knowing_the_map_wins_in_time():
    game = make(Split.HELD_OUT)
    for seed in range(256):
        game.reset(seed)
        path = shortest_path(map_of(game))
        steps = [game.step(action) for action in path]
        assert steps[-1].success and sum(step.reward for step in steps) == 1.0


def test_training_maps_have_a_way():
    game = make(Split.TRAIN)
    for seed in range(200):
        game.reset(seed)
        assert shortest_path(map_of(game)) is not None


def test_the_expert_survives_but_rarely_arrives():
    game = make(Split.HELD_OUT)
    rng = np.random.default_rng(0)
    endings = []
    for seed in range(256):
        game.reset(seed)
        endings.append(play(game, lambda: game.expert(rng))[-1])
    assert 0.01 < np.mean([ending.success for ending in endings]) < 0.12
    assert np.mean([ending.truncated for ending in endings]) > 0.7


def test_without_noise_the_expert_never_falls():
    game = make(Split.HELD_OUT, expert_noise=0.0)
    rng = np.random.default_rng(0)
    for seed in range(256):
        game.reset(seed)
        ending = play(game, lambda: game.expert(rng))[-1]
        assert ending.success or ending.truncated


def test_the_expert_prefers_the_way_home():
    game = on_map(["SFFF", "HFFF", "FFFF", "FFFG"], expert_noise=0.2, expert_homesickness=2.0)
    rng = np.random.default_rng(0)
    counts = collections.Counter(game.expert(rng) for _ in range(8000))
    # Three safe moves: L and U, into the wall but homeward, and R; below is a hole.
    expected = {"L": 0.8 * 2 / 5 + 0.05, "D": 0.05, "R": 0.8 / 5 + 0.05, "U": 0.8 * 2 / 5 + 0.05}
    for action, probability in expected.items():
        assert counts[action] / 8000 == pytest.approx(probability, abs=0.02)


@pytest.mark.parametrize("options", [{"size": 3}, {"size": 9}, {"frozen_probability": 1.0}, {"frozen_probability": 0.1},
                                     {"max_turns": 0}, {"expert_noise": 1.5}])
def test_options_out_of_range_are_refused(options):
    [(name, value)] = options.items()
    with pytest.raises(ValueError, match=f"{name} is {value}, wanted"):
        FrozenLakeOptions(**options)


def test_a_state_of_another_size_is_refused():
    large, small = make(size=5), make(size=4)
    large.reset(0)
    small.reset(0)
    before = json.dumps(small.state())
    with pytest.raises(ValueError, match="5 rows, wanted 4"):
        small.restore(large.state())
    assert json.dumps(small.state()) == before
