"""Taxi, cliff walking and blackjack: gymnasium's rules in our words, the splits, and experts that know what to do."""

import json

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.toy_text.blackjack import BlackjackEnv
from gymnasium.envs.toy_text.cliffwalking import CliffWalkingEnv
from gymnasium.envs.toy_text.taxi import TaxiEnv
from hypothesis import example, given
from hypothesis import strategies as st

from models.tokenizer import ByteTokenizer
from rl import environments
from rl.environments import EnvironmentName, Game, Split, Step, ToyTextOptions, toy_text

EVERY_GAME = pytest.mark.parametrize("game", Game)
EVERY_SPLIT = pytest.mark.parametrize("split", Split)
OPEN = {Game.TAXI: 221, Game.CLIFF_WALKING: 18}  # no wall beside row 2, column 1, nor row 1, column 6
LETTERS = {Game.TAXI: "SNEWPD", Game.CLIFF_WALKING: "URDL", Game.BLACKJACK: "SH"}


def make(game, split=Split.TRAIN, **options):
    return environments.make(EnvironmentName.TOY_TEXT, split, ToyTextOptions(game=game, **options))


def at(game, instance, **options):
    """A game in the given place."""
    environment = make(game, **options)
    instance = instance if game is Game.BLACKJACK else {"game": game.value, **instance}
    environment.restore({"episode": {"turns_taken": 0, "instance": instance}})
    return environment


def play(environment, policy):
    steps = []
    while not steps or not steps[-1].done:
        steps.append(environment.step(policy()))
    return steps


def instance_of(environment):
    return environment.state()["episode"]["instance"]


# --- what every environment promises, for each game ---


@EVERY_GAME
@EVERY_SPLIT
@given(data=st.data(), seed=st.integers(0, 2**63 - 1), stop=st.integers(0, 12))
def test_equal_seeds_and_restored_states_go_on_identically(game, split, data, seed, stop):
    actions = data.draw(st.text(LETTERS[game] + "x", max_size=12))
    first, second, restored = (make(game, split) for _ in range(3))
    second.reset(seed + 1)
    restored.reset(seed + 2)
    assert first.reset(seed) == second.reset(seed) != ""
    for index, action in enumerate(actions):
        if index == min(stop, len(actions) - 1):
            restored.restore(json.loads(json.dumps(first.state())))
        step = first.step(action)
        assert second.step(action) == step
        if index >= min(stop, len(actions) - 1):
            assert restored.step(action) == step
        if step.done:
            break
    assert first.state() == second.state()


@EVERY_GAME
@given(action=st.text(max_size=5))
@example("")
@example("\ud800")
@example("SN")
@example("UR")
@example("s")
def test_arbitrary_text_never_raises_and_nonsense_wastes_a_turn(game, action):
    """Where no move leads into a wall, or nonsense might pass for one."""
    environment = at(game, {"deal": 3, "hits": 0} if game is Game.BLACKJACK else {"position": OPEN[game]})
    observation = environment.step("nonsense").observation
    step = environment.step(action)
    if action not in LETTERS[game] or len(action) != 1:
        assert step == Step(observation, 0.0, done=False)
        steps = play(environment, lambda: action)
        assert len(steps) + 2 == environment.max_turns
        assert steps[-1] == Step("", 0.0, done=True, truncated=True)


@EVERY_GAME
@EVERY_SPLIT
def test_observations_are_bounded_and_say_where_one_is(game, split):
    environment = make(game, split)
    rng = np.random.default_rng(0)
    seen = {}
    for seed in range(60):
        observations = [environment.reset(seed)]
        instances = [instance_of(environment)]
        done = False
        while not done:
            step = environment.step(str(rng.choice(list(LETTERS[game]))))
            done = step.done
            if not done:
                observations.append(step.observation)
                instances.append(instance_of(environment))
        assert all(len(ByteTokenizer().encode(text)) == environment.max_observation_tokens for text in observations)
        assert all(text.endswith(">") for text in observations)
        if game is not Game.BLACKJACK:  # there, cards to come are hidden
            for text, instance in zip(observations, instances, strict=True):
                assert seen.setdefault(text, instance) == instance


@pytest.mark.parametrize(("game", "number"), [(Game.TAXI, 300), (Game.CLIFF_WALKING, 37)])
def test_training_never_meets_a_held_out_start(game, number):
    starts = {split: {environment.reset(seed) for seed in range(3000)}
              for split, environment in ((split, make(game, split)) for split in Split)}
    assert not starts[Split.TRAIN] & starts[Split.HELD_OUT]
    assert len(starts[Split.TRAIN]) + len(starts[Split.HELD_OUT]) == number
    assert 0.15 < len(starts[Split.HELD_OUT]) / number < 0.35


def test_training_never_opens_with_a_held_out_hand():
    openings = {split: set() for split in Split}
    for split, hands in openings.items():
        environment = make(Game.BLACKJACK, split)
        for seed in range(300):
            environment.reset(seed)
            hands.add((*sorted(environment._game.player), environment._game.dealer[0]))
    assert not openings[Split.TRAIN] & openings[Split.HELD_OUT]
    assert all(len(hands) > 50 for hands in openings.values())


def test_instances_never_change():
    """Or old and new evaluations could not be compared."""
    first = {game: [make(game, Split.HELD_OUT).reset(seed) for seed in range(7)] for game in Game}
    assert first == {
        Game.TAXI: ["04YB>", "13GY>", "02YB>", "33BY>", "21RB>", "22YG>", "31YG>"],
        Game.CLIFF_WALKING: ["0f>", "0g>", "0l>", "1f>", "1i>", "1d>", "0e>"],  # all of them
        Game.BLACKJACK: ["18h2>", "13h4>", "08h4>", "16h2>", "19s2>", "17hA>", "13hT>"],
    }


def test_held_out_seeds_cover_the_held_out_starts_evenly():
    environment = make(Game.CLIFF_WALKING, Split.HELD_OUT)
    number = len(toy_text.starts(Game.CLIFF_WALKING, Split.HELD_OUT))
    assert len({environment.reset(seed) for seed in range(number)}) == number
    assert environment.reset(number + 2) == environment.reset(2)


@EVERY_GAME
def test_rewards_are_for_success(game):
    environment = make(game)
    rng = np.random.default_rng(1)
    outcomes = set()
    for seed in range(80):
        environment.reset(seed)
        steps = play(environment, lambda: environment.expert(rng))
        assert all(step.reward == 0 and not step.success for step in steps[:-1])
        outcomes.add((steps[-1].reward, steps[-1].success))
    assert outcomes <= {(1.0, True), (0.0, False), (0.5, False)}
    assert (1.0, True) in outcomes


@pytest.mark.parametrize(("options", "message"), [
    ({"max_turns": 0}, "max_turns is 0, wanted 1 or more"),
    ({"expert_noise": 1.5}, "expert_noise is 1.5, wanted 0 to 1"),
])
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ToyTextOptions(**options)


@pytest.mark.parametrize(("game", "instance"), [
    (Game.TAXI, {"game": "cliff_walking", "position": 3}), (Game.CLIFF_WALKING, {"game": "cliff_walking", "position": 400}),
    (Game.TAXI, {"deal": 1, "hits": 0}), (Game.BLACKJACK, {"game": "taxi", "position": 3})])
def test_a_state_of_another_game_is_refused(game, instance):
    environment = make(game)
    environment.reset(0)
    before = json.dumps(environment.state())
    with pytest.raises(ValueError, match="restore into an environment with the options that made the state"):
        environment.restore({"episode": {"turns_taken": 0, "instance": instance}})
    assert json.dumps(environment.state()) == before


# --- taxi and cliff walking ---


@pytest.mark.parametrize(("game", "theirs"), [(Game.TAXI, TaxiEnv), (Game.CLIFF_WALKING, CliffWalkingEnv)])
def test_the_rules_are_gymnasium_s(game, theirs):
    rng = np.random.default_rng(0)
    theirs = theirs()
    theirs.reset(seed=0)
    ours = make(game, max_turns=60)
    for seed in range(30):
        ours.reset(seed)
        theirs.s = instance_of(ours)["position"]
        done = False
        for _ in range(59):
            action = int(rng.integers(len(LETTERS[game])))
            position, reward, done, _, _ = theirs.step(action)
            step = ours.step(LETTERS[game][action])
            assert (step.done, step.success, step.reward) == (done, done, float(done))
            if done:
                assert reward == (20 if game is Game.TAXI else -1)
                break
            assert instance_of(ours)["position"] == position


def test_a_taxi_ride_by_hand():
    """From the second row of the first column, with the passenger at R (top left) who wants to Y (bottom left)."""
    game = at(Game.TAXI, {"position": int(TaxiEnv().encode(1, 0, 0, 2))})
    told = [game.step(action) for action in "WNPSSSSD"]
    assert [step.observation for step in told] == ["10RY>", "00RY>", "00TY>", "10TY>", "20TY>", "30TY>", "40TY>", ""]
    assert told[-1] == Step("", 1.0, done=True, success=True)


def test_picking_up_nobody_wastes_a_turn():
    game = at(Game.TAXI, {"position": int(TaxiEnv().encode(1, 0, 0, 2))})
    assert game.step("P") == game.step("D") == Step("10RY>", 0.0, done=False)


def test_a_walk_along_the_cliff_by_hand():
    game = at(Game.CLIFF_WALKING, {"position": 36})
    told = [game.step(action).observation for action in "URDL"]
    assert told == ["2a>", "2b>", "3a>", "3a>"]  # into the cliff, and back at the start; then into the wall
    told = [game.step(action) for action in "U" + 11 * "R" + "D"]
    assert told[-2].observation == "2l>" and told[-1] == Step("", 1.0, done=True, success=True)


@pytest.mark.parametrize("game", [Game.TAXI, Game.CLIFF_WALKING])
@EVERY_SPLIT
def test_without_noise_the_expert_takes_a_shortest_way(game, split):
    environment = make(game, split, expert_noise=0.0)
    rng = np.random.default_rng(0)
    distances = toy_text.rules(game).distances
    for seed in range(100):
        environment.reset(seed)
        shortest = distances[instance_of(environment)["position"]]
        steps = play(environment, lambda: environment.expert(rng))
        assert steps[-1].success and len(steps) == shortest
        assert shortest < environment.max_turns


def test_with_noise_the_expert_errs():
    environment = make(Game.TAXI, expert_noise=0.6)
    rng = np.random.default_rng(0)
    successes = []
    for seed in range(100):
        environment.reset(seed)
        successes.append(play(environment, lambda: environment.expert(rng))[-1].success)
    assert 0.05 < np.mean(successes) < 0.95


# --- blackjack ---


def test_hands_are_gymnasium_s():
    theirs = BlackjackEnv(**gymnasium.spec("Blackjack-v1").kwargs)
    ours = make(Game.BLACKJACK)
    outcomes = set()
    for seed in range(150):
        observation = ours.reset(seed)
        (total, dealer, soft), _ = theirs.reset(seed=instance_of(ours)["deal"])
        for action in "H" * (seed % 3) + "S":
            assert observation == f"{total:02}{'hs'[soft]}{'A23456789T'[dealer - 1]}>"
            (total, dealer, soft), reward, done, _, _ = theirs.step(int(action == "H"))
            step = ours.step(action)
            observation = step.observation
            assert step.done == done
            if done:
                assert (step.reward, step.success) == ((1 + reward) / 2, reward > 0)
                outcomes.add(reward)
                break
    assert outcomes == {-1, 0, 1}


def test_the_expert_plays_basic_strategy():
    environment = make(Game.BLACKJACK, expert_noise=0.0)
    rng = np.random.default_rng(0)
    for player, dealer, answer in [([10, 2], 3, "H"), ([10, 2], 4, "S"), ([10, 3], 2, "S"), ([10, 6], 7, "H"), ([10, 7], 1, "S"),
                                   ([1, 6], 2, "H"), ([1, 7], 8, "S"), ([1, 7], 9, "H"), ([1, 8], 1, "S"), ([1, 5, 10], 6, "S")]:
        environment.reset(0)
        environment._game.player, environment._game.dealer = player, [dealer, 10]
        assert environment.expert(rng) == answer, (player, dealer)


def test_the_expert_does_better_than_a_coward():
    expert, rng = make(Game.BLACKJACK, expert_noise=0.0), np.random.default_rng(0)
    rewards = {"expert": [], "coward": []}
    for seed in range(600):
        for name, policy in {"expert": lambda: expert.expert(rng), "coward": lambda: "S"}.items():
            expert.reset(seed)
            rewards[name].append(play(expert, policy)[-1].reward)
    # Basic strategy without doubling and splitting loses about 0.05 a game: a reward of 0.475; a standard error is 0.02.
    assert 0.42 < np.mean(rewards["expert"]) < 0.53 and np.mean(rewards["coward"]) < np.mean(rewards["expert"]) - 0.03
