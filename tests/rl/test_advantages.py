"""Advantages: numbers by hand, golden vectors of verl, who counts in the baseline, and what a token gets of its trajectory's."""

import json
import pathlib

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from rl.advantages import (
    RELATIVE,
    AdvantageEstimator,
    AdvantageNormalization,
    AdvantageOptions,
    group_advantages,
    overlong_penalty,
    step_advantages,
    token_advantages,
)
from rl.types import NO_POLICY, FinishReason, Trajectory

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
CASES = json.loads((GOLDEN / "group_advantages.json").read_text())["cases"]
ESTIMATORS = {
    "adv_grpo": AdvantageEstimator.GROUP_RELATIVE,
    "adv_dr_grpo": AdvantageEstimator.MEAN_CENTERED,
    "adv_rloo": AdvantageEstimator.LEAVE_ONE_OUT,
}
COMPARING = [estimator for estimator in AdvantageEstimator if estimator is not AdvantageEstimator.RAW]
# Where zero lies means something to these: it counts successes, or is their rate.
ABSOLUTE = {AdvantageEstimator.RAW, AdvantageEstimator.SCALED_BY_NONZERO, AdvantageEstimator.MEAN_NORMALIZED}


def advantages_of(rewards, group_ids, has_reward=None, *, estimator=AdvantageEstimator.MEAN_CENTERED, **options):
    has_reward = np.ones(len(rewards), bool) if has_reward is None else np.asarray(has_reward, bool)
    options = {"lengths": np.ones(len(rewards), int)} | options
    return group_advantages(np.asarray(rewards), np.asarray(group_ids), has_reward, estimator=estimator, **options)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (AdvantageEstimator.MEAN_CENTERED, [-1.0, 0.5, 2.0, -0.5, -1.0]),
        (AdvantageEstimator.LEAVE_ONE_OUT, [-1.5, 1.0, 3.0, -1.0, -1.5]),
        # Group 7: deviations -1, 2, -1, standard deviation sqrt(6 / 2). Group -3: +-0.5, standard deviation sqrt(0.5 / 1).
        (AdvantageEstimator.GROUP_RELATIVE, [-0.57735027, 0.70710678, 1.15470054, -0.70710678, -0.57735027]),
        # Lengths 1, 1, 2, 3, 5. Group 7: (1 + 8 + 5) / 8. Group -3: 1 / 4.
        (AdvantageEstimator.LENGTH_WEIGHTED, [-0.75, 0.75, 2.25, -0.25, -0.75]),
        (AdvantageEstimator.SCALED_BY_NONZERO, [-1.25, 0.625, 2.5, -0.625, -1.25]),  # four rewards of five are not 0
        (AdvantageEstimator.BEST_ONLY, [0.0, 1.0, 3.0, 0.0, 0.0]),
        (AdvantageEstimator.BEST_ONLY_RELATIVE, [0.0, 1.41421356, 1.73205081, 0.0, 0.0]),
        (AdvantageEstimator.MEAN_NORMALIZED, [-0.5, 1.0, 1.0, -1.0, -0.5]),
        (AdvantageEstimator.RAW, [1.0, 1.0, 4.0, 0.0, 1.0]),
    ],
)
def test_two_interleaved_groups_by_hand(estimator, expected):
    lengths = np.array([1, 1, 2, 3, 5])
    advantages = advantages_of([1.0, 1.0, 4.0, 0.0, 1.0], [7, -3, 7, -3, 7], estimator=estimator, lengths=lengths)
    np.testing.assert_allclose(advantages, expected, rtol=3e-6)
    assert advantages.dtype == np.float32


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['id']}-{case['function']}")
def test_golden(case):
    advantages = advantages_of(case["rewards"], case["group_ids"], estimator=ESTIMATORS[case["function"]], epsilon=1e-6)
    alone = np.array([case["group_ids"].count(group_id) == 1 for group_id in case["group_ids"]])
    expected = np.array(case["advantages"], float)  # NaN for a row without tokens, of which the reference says nothing
    compared = ~alone & ~np.isnan(expected)
    assert np.any(compared)
    # The GRPO reference rounds to float32 inside, hence not tighter.
    np.testing.assert_allclose(advantages[compared], expected[compared], rtol=2e-5, atol=1e-6)
    np.testing.assert_array_equal(advantages[alone], 0)


@pytest.mark.parametrize("estimator", AdvantageEstimator)
def test_a_member_without_reward_is_out_of_the_baseline_and_gets_zero(estimator):
    advantages = advantages_of([1.0, np.nan, 3.0, 0.0], [5, 5, 5, 5], [True, False, True, True], estimator=estimator)
    without = advantages_of([1.0, 3.0, 0.0], [5, 5, 5], estimator=estimator)
    np.testing.assert_array_equal(advantages, [without[0], 0, without[1], without[2]])
    assert np.any(without != 0)


@pytest.mark.parametrize("estimator", COMPARING)
@pytest.mark.parametrize("has_reward", [[True, False, False], [False, False, False]])
def test_fewer_than_two_rewards_give_zero(estimator, has_reward):
    np.testing.assert_array_equal(advantages_of([5.0, 1.0, 2.0], [0, 0, 0], has_reward, estimator=estimator), 0)


@pytest.mark.parametrize("estimator", COMPARING)
@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, 1e6 + 0.1, -1e-6])
def test_equal_rewards_give_exactly_zero(estimator, reward):
    np.testing.assert_array_equal(advantages_of([reward] * 7, [2] * 7, estimator=estimator), 0)


def test_an_empty_batch():
    assert advantages_of([], np.zeros(0, int)).shape == (0,)


few = hypothesis.settings(max_examples=12)  # for each estimator
members = st.lists(st.tuples(st.integers(-8, 8), st.integers(0, 2), st.booleans()), min_size=1, max_size=12)


def expected_advantage(estimator, reward, length, others, *, nonzero_scale, epsilon):
    """From the definition; `others` are the rewards and lengths of the group's other members, at least one."""
    rewards = [reward, *(r for r, _ in others)]
    mean = sum(rewards) / len(rewards)
    deviation = (sum((r - mean) ** 2 for r in rewards) / len(others)) ** 0.5
    if deviation == 0:
        return 0.0
    lead = max(0.0, reward - max(rewards[1:]))
    return {
        AdvantageEstimator.GROUP_RELATIVE: (reward - mean) / (deviation + epsilon),
        AdvantageEstimator.LEAVE_ONE_OUT: reward - sum(rewards[1:]) / len(others),
        AdvantageEstimator.MEAN_CENTERED: reward - mean,
        AdvantageEstimator.LENGTH_WEIGHTED: reward
        - (reward * length + sum(r * n for r, n in others)) / (length + sum(n for _, n in others)),
        AdvantageEstimator.SCALED_BY_NONZERO: (reward - mean) * nonzero_scale,
        AdvantageEstimator.BEST_ONLY: lead,
        AdvantageEstimator.BEST_ONLY_RELATIVE: lead / (deviation + epsilon),
        AdvantageEstimator.MEAN_NORMALIZED: (reward - mean) / (mean + epsilon),
    }[estimator]


@pytest.mark.parametrize("estimator", AdvantageEstimator)
@hypothesis.given(members)
@few
def test_matches_a_plain_loop(estimator, members):
    epsilon = 0.123  # no mean of a few integers is its negative
    rewards, group_ids, has_reward = (list(column) for column in zip(*members, strict=True))
    lengths = [1 + row % 3 for row in range(len(members))]
    options = {"estimator": estimator, "epsilon": epsilon, "lengths": np.array(lengths)}
    advantages = advantages_of(np.array(rewards, float), group_ids, has_reward, **options)
    nonzero_scale = sum(has_reward) / max(1, sum(exists and reward != 0 for reward, _, exists in members))
    for row, (reward, group_id, exists) in enumerate(members):
        others = [(r, lengths[i]) for i, (r, g, e) in enumerate(members) if e and g == group_id and i != row]
        if exists and estimator is AdvantageEstimator.RAW:
            expected = reward
        elif exists and others:
            expected = expected_advantage(estimator, reward, lengths[row], others, nonzero_scale=nonzero_scale, epsilon=epsilon)
        else:
            expected = 0.0
        np.testing.assert_allclose(advantages[row], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("estimator", [each for each in AdvantageEstimator if each not in ABSOLUTE])
@hypothesis.given(members, st.sampled_from([-5, 3, 2**50]))
@few
def test_a_shift_of_all_rewards_changes_nothing(estimator, members, shift):
    rewards, group_ids, has_reward = (np.array(column) for column in zip(*members, strict=True))
    advantages = advantages_of(rewards, group_ids, has_reward, estimator=estimator)
    np.testing.assert_array_equal(advantages_of(rewards + shift, group_ids, has_reward, estimator=estimator), advantages)


def test_a_missing_reward_that_claims_to_exist_is_refused():
    with pytest.raises(ValueError, match=r"rewards \[nan\] at rows \[1\], wanted finite"):
        advantages_of([1.0, np.nan], [0, 0])


def test_wrong_shapes_and_epsilon_are_refused():
    with pytest.raises(ValueError, match=r"shapes \(2,\), \(3,\), \(2,\), wanted one shape \[B\]"):
        advantages_of([1.0, 2.0], [0, 0, 0])
    with pytest.raises(ValueError, match="epsilon is 0.0, wanted above 0"):
        advantages_of([1.0, 2.0], [0, 0], epsilon=0.0)


@pytest.mark.parametrize(("lengths", "shape"), [(None, "None"), (np.ones(3), r"\(3,\)")])
def test_missing_lengths_are_refused(lengths, shape):
    with pytest.raises(ValueError, match=f"lengths has shape {shape}, wanted "):
        advantages_of([1.0, 2.0], [0, 0], lengths=lengths, estimator=AdvantageEstimator.LENGTH_WEIGHTED)


def test_nonzero_rewards_are_counted_in_the_whole_batch():
    """Two rewards here, one of them not 0; four elsewhere, one of them not 0."""
    options = {"estimator": AdvantageEstimator.SCALED_BY_NONZERO, "total": lambda sums: sums + [4, 1]}
    np.testing.assert_array_equal(advantages_of([0.0, 2.0], [0, 0], **options), [-3, 3])


def test_a_group_without_trained_tokens_weighs_its_members_equally():
    options = {"lengths": np.zeros(2, int), "estimator": AdvantageEstimator.LENGTH_WEIGHTED}
    np.testing.assert_array_equal(advantages_of([0.0, 1.0], [0, 0], **options), [-0.5, 0.5])


# Overlong responses.


def test_overlong_penalty_by_hand():
    lengths = [0, 16000, 16384, 18432, 20480, 22528]
    penalties = overlong_penalty(lengths, max_length=20480, buffer=4096, penalty=1.0)
    np.testing.assert_array_equal(penalties, [0, 0, 0, -0.5, -1, -1.5])


@pytest.mark.parametrize(("buffer", "penalty"), [(0, 1.0), (4, -1.0), (4, np.nan), (4, np.inf)])
def test_senseless_shaping_is_refused(buffer, penalty):
    with pytest.raises(ValueError, match=f"buffer {buffer} and penalty {penalty}, wanted"):
        overlong_penalty([1], max_length=8, buffer=buffer, penalty=penalty)


# Steps.


def test_steps_are_compared_within_prompt_and_state():
    """State a of prompt 0: 1, 3, 8; of prompt 1: 5, alone. State b of prompt 0: 2, 2."""
    arguments = [1, 2, 3, 5, 8, 2], [0, 0, 0, 1, 0, 0], ["a", "b", "a", "a", "a", "b"]
    centered = step_advantages(*arguments, divide_by_std=False)
    np.testing.assert_allclose(centered, [-3, 0, -1, 0, 4, 0])
    np.testing.assert_allclose(step_advantages(*arguments, divide_by_std=True), centered / np.sqrt(13), rtol=1e-6)


def test_steps_that_differ_by_rounding_are_equal():
    arguments = [1.0, 1.0 + 1e-6], [0, 0], ["a", "a"]
    np.testing.assert_array_equal(step_advantages(*arguments, divide_by_std=True), 0)
    assert np.all(step_advantages(*arguments, divide_by_std=False) != 0)


def test_steps_without_a_state_are_refused():
    with pytest.raises(ValueError, match="got 2 returns, 2 group ids, 1 states, wanted as many of each"):
        step_advantages([1.0, 2.0], [0, 0], ["a"], divide_by_std=True)


# Tokens.


def make_trajectory(turns, *, reward=1.0, group_id=0, prompt=(1, 2), stale=()):
    """The prompt, then for each turn its number of tokens and what the environment answers; trained but for the `stale` turns."""
    tokens, turn_starts, trained = list(prompt), [], [False] * len(prompt)
    for number, (length, answer) in enumerate(turns):
        turn_starts.append(len(tokens))
        tokens += [100 + number] * length + list(answer)
        trained += [number not in stale] * length + [False] * len(answer)
    sampled = np.asarray(tokens) >= 100
    return Trajectory(
        request_id=0, group_id=group_id, tokens=np.asarray(tokens, np.int32), loss_mask=np.asarray(trained, bool),
        sampler_logprobs=np.where(sampled, -1.0, np.nan).astype(np.float32),
        policy_versions=np.where(sampled, 0, NO_POLICY).astype(np.int32), context_versions=np.zeros(len(tokens), np.int32),
        turn_starts=np.asarray(turn_starts, np.int32), reward=reward, success=True, finish_reason=FinishReason.ENVIRONMENT,
    )  # fmt: skip


def of_length(length, reward, group_id=0):
    return make_trajectory([(length, ())], reward=reward, group_id=group_id)


def test_every_trained_token_has_its_trajectorys_advantage():
    trajectories = [make_trajectory([(2, (7,)), (1, ())], reward=1.0), make_trajectory([(1, ())], reward=0.0)]
    first, second = token_advantages(trajectories, AdvantageOptions(advantages=AdvantageEstimator.MEAN_CENTERED))
    np.testing.assert_array_equal(first, [0, 0, 0.5, 0.5, 0, 0.5])
    np.testing.assert_array_equal(second, [0, 0, -0.5])
    assert first.dtype == np.float32


@pytest.mark.parametrize("estimator", AdvantageEstimator)
@hypothesis.given(members)
@few
def test_without_options_tokens_have_the_groups_advantages(estimator, members):
    rewards, group_ids, has_reward = (np.array(column) for column in zip(*members, strict=True))
    trajectories = [
        of_length(1 + row % 3, float(reward) if exists else None, group_id)
        for row, (reward, group_id, exists) in enumerate(members)
    ]
    lengths = np.array([1 + row % 3 for row in range(len(members))])
    expected = group_advantages(rewards, group_ids, has_reward, estimator=estimator, epsilon=0.123, lengths=lengths)
    tokens = token_advantages(trajectories, AdvantageOptions(advantages=estimator, advantage_epsilon=0.123))
    np.testing.assert_array_equal([values[-1] for values in tokens], expected)
    assert all(np.all(values[:2] == 0) and np.all(values[2:] == values[-1]) for values in tokens)


def test_given_rewards_replace_the_trajectories_own():
    trajectories = [of_length(1, 5.0), of_length(1, 7.0), of_length(1, None)]
    options = AdvantageOptions(advantages=AdvantageEstimator.MEAN_CENTERED)
    tokens = token_advantages(trajectories, options, rewards=np.array([0.0, 4.0, np.nan]))
    np.testing.assert_array_equal([values[-1] for values in tokens], [-2, 2, 0])
    with pytest.raises(ValueError, match="wanted one shape"):
        token_advantages(trajectories, options, rewards=np.zeros(2))


@pytest.mark.parametrize("normalization", [AdvantageNormalization.TOKEN_MEASURE, AdvantageNormalization.WHITEN])
def test_normalisation_by_hand(normalization):
    """Lengths 2, 3, 5 and advantages 1, 0, -1: mean -.3, variance 6.1 / 9; advantages that are one per trajectory agree."""
    trajectories = [of_length(length, reward, row) for row, (length, reward) in enumerate([(2, 1.0), (3, 0.0), (5, -1.0)])]
    options = AdvantageOptions(advantages=AdvantageEstimator.RAW, advantage_normalization=normalization)
    values = np.array([tokens[-1] for tokens in token_advantages(trajectories, options)])
    np.testing.assert_allclose(values, [1.5790638, 0.3643993, -0.8502651], rtol=1e-6)
    np.testing.assert_allclose(np.dot([2, 3, 5], values), 0, atol=1e-6)


@pytest.mark.parametrize(
    ("normalization", "expected"),
    [
        # The mean of four tokens 1 and two tokens -2 is 0, their variance 12 / 5; the first turn is halved afterwards.
        (AdvantageNormalization.TOKEN_MEASURE, np.array([0.5, 1, -2]) / np.sqrt(12 / 5)),
        # Two tokens each of 0.5, 1 and -2: mean -1/6, sum of squares 10.5 - 6 / 36.
        (AdvantageNormalization.WHITEN, (np.array([0.5, 1, -2]) + 1 / 6) / np.sqrt((10.5 - 1 / 6) / 5)),
    ],
)
def test_a_token_measure_precedes_the_turns_and_whitening_follows_them(normalization, expected):
    trajectories = [make_trajectory([(2, (7,)), (2, ())], reward=1.0), of_length(2, -2.0)]
    options = AdvantageOptions(advantages=AdvantageEstimator.RAW, advantage_normalization=normalization, turn_discount=0.5)
    first, second = token_advantages(trajectories, options)
    np.testing.assert_allclose([first[2], first[5], second[2]], expected, rtol=1e-6)


@pytest.mark.parametrize("normalization", AdvantageNormalization)
def test_only_counted_tokens_are_normalised_over(normalization):
    """A trajectory without reward, one without trained tokens, and what the environment wrote change nothing."""
    options = AdvantageOptions(advantages=AdvantageEstimator.RAW, advantage_normalization=normalization)
    plain = [of_length(2, 1.0), of_length(3, 0.0)]
    failed = make_trajectory([(4, ())], reward=None)
    stale = make_trajectory([(4, ())], reward=9.0, stale=(0,))
    expected = token_advantages(plain, options)
    actual = token_advantages([make_trajectory([(2, (5, 5))], reward=1.0), failed, stale, plain[1]], options)
    np.testing.assert_array_equal(actual[0][:4], expected[0])
    np.testing.assert_array_equal(actual[3], expected[1])
    np.testing.assert_array_equal(np.concatenate([actual[0][4:], actual[1], actual[2]]), 0)


@pytest.mark.parametrize("normalization", AdvantageNormalization)
def test_equal_rewards_stay_zero(normalization):
    options = AdvantageOptions(advantage_normalization=normalization, step_weight=1.0)
    for values in token_advantages([of_length(2, 0.1), of_length(3, 0.1)], options):
        np.testing.assert_array_equal(values, 0)


def test_turns_are_discounted_from_the_last():
    trajectories = [make_trajectory([(2, (7,)), (1, (7,)), (2, ())], reward=4.0)]
    (values,) = token_advantages(trajectories, AdvantageOptions(advantages=AdvantageEstimator.RAW, turn_discount=0.5))
    np.testing.assert_array_equal(values, [0, 0, 1, 1, 0, 2, 0, 4, 4])
    (values,) = token_advantages(trajectories, AdvantageOptions(advantages=AdvantageEstimator.RAW, turn_discount=0.0))
    np.testing.assert_array_equal(values, [0, 0, 0, 0, 0, 0, 0, 4, 4])


GAMES = [
    make_trajectory([(1, (7,)), (1, ())], reward=8.0),  # prompt, then state 7
    make_trajectory([(2, (9,)), (1, (7,)), (1, ())], reward=4.0),  # prompt, state 9, state 7
    make_trajectory([(1, (7,)), (1, ())], reward=None),  # failed: compared with nobody
    make_trajectory([(1, (7,)), (1, ())], reward=2.0, group_id=1),  # another prompt
]


def test_step_advantages_by_hand():
    """Returns 4, 8 and 1, 2, 4 in group 0. At the prompt 4 and 1 meet, in state 7 it is 8 and 4, in state 9 nobody."""
    options = AdvantageOptions(advantages=AdvantageEstimator.MEAN_CENTERED, step_weight=0.1, step_discount=0.5)
    first, second, failed, lone = token_advantages(GAMES, options)
    np.testing.assert_allclose(first, [0, 0, 2 + 0.15, 0, 2 + 0.2])
    np.testing.assert_allclose(second, [0, 0, -2 - 0.15, -2 - 0.15, 0, -2, 0, -2 - 0.2])
    np.testing.assert_array_equal(np.concatenate([failed, lone]), 0)


def test_step_advantages_are_in_the_estimators_units():
    for estimator in (AdvantageEstimator.GROUP_RELATIVE, AdvantageEstimator.LEAVE_ONE_OUT):
        with_steps, without = (
            token_advantages(GAMES, AdvantageOptions(advantages=estimator, step_weight=weight)) for weight in (1.0, 0.0)
        )
        step = with_steps[0][-1] - without[0][-1]  # 8 against 4
        np.testing.assert_allclose(step, 2 / np.sqrt(8) if estimator in RELATIVE else 2, rtol=1e-6)


def test_a_stale_turn_still_separates_states():
    """What the policy wrote is told from what the environment said by its author and not by the loss mask."""
    options = AdvantageOptions(advantages=AdvantageEstimator.MEAN_CENTERED, step_weight=1.0)
    fresh = [make_trajectory([(1, (7,)), (1, ())], reward=8.0), make_trajectory([(2, (7,)), (1, ())], reward=4.0)]
    stale = [fresh[0], make_trajectory([(2, (7,)), (1, ())], reward=4.0, stale=(0,))]
    np.testing.assert_array_equal(token_advantages(stale, options)[1][-1], token_advantages(fresh, options)[1][-1])
    assert token_advantages(fresh, options)[1][-1] == -4


@pytest.mark.parametrize("estimator", AdvantageEstimator)
@hypothesis.given(members, st.sampled_from(AdvantageNormalization), st.sampled_from([0.0, 0.5]), st.booleans())
@few
def test_processes_that_share_a_batch_compute_what_one_would(estimator, members, normalization, step_weight, one_is_empty):
    """Two processes of whole groups in lockstep: each sum that one asks for is added to the other's."""
    options = AdvantageOptions(
        advantages=estimator,
        advantage_epsilon=0.123,
        advantage_normalization=normalization,
        turn_discount=0.5,
        step_weight=step_weight,
    )
    batch = [
        make_trajectory([(1 + row % 2, (row % 3,)), (1, ())], reward=float(reward) if exists else None, group_id=group_id)
        for row, (reward, group_id, exists) in enumerate(members)
    ]
    shares = [[each for each in batch if (each.group_id == 0 and not one_is_empty) == side] for side in (True, False)]
    rounds = []  # the sums known so far, in the order in which they are asked for

    class Unknown(Exception):
        pass

    def ask(share):
        """Runs a process until it asks for a sum that is not known; returns its own part of it, or its result."""
        known = iter(rounds)
        asked = []

        def total(sums):
            both = next(known, None)
            if both is None:
                asked.append(sums)
                raise Unknown
            return both

        try:
            return None, token_advantages(share, options, total=total)
        except Unknown:
            return asked[0], None

    while True:
        (mine, mine_done), (yours, yours_done) = map(ask, shares)
        if mine is None:
            break
        rounds.append(mine + yours)
    assert yours is None  # both asked equally often
    expected = dict(zip(map(id, batch), token_advantages(batch, options), strict=True))
    for share, results in zip(shares, (mine_done, yours_done), strict=True):
        for trajectory, values in zip(share, results, strict=True):
            np.testing.assert_allclose(values, expected[id(trajectory)], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("normalization", AdvantageNormalization)
def test_a_process_without_trajectories(normalization):
    assert token_advantages([], AdvantageOptions(advantage_normalization=normalization, step_weight=1.0)) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantage_epsilon": 0.0}, "epsilon is 0.0, wanted above 0"),
        ({"turn_discount": 1.5}, r"turn_discount is 1.5, wanted within \[0, 1\]"),
        ({"step_discount": -0.1}, r"step_discount is -0.1, wanted within \[0, 1\]"),
        ({"step_weight": -1.0}, "step_weight is -1.0, wanted finite and at least 0"),
        ({"step_weight": np.nan}, "step_weight is nan, wanted finite and at least 0"),
    ],
)
def test_options_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        AdvantageOptions(**changes)
