"""Group advantages: numbers by hand, golden vectors of verl, and who counts in the baseline."""

import json
import pathlib

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from rl.advantages import AdvantageEstimator, group_advantages

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
CASES = json.loads((GOLDEN / "group_advantages.json").read_text())["cases"]
ESTIMATORS = {
    "adv_grpo": AdvantageEstimator.GROUP_RELATIVE,
    "adv_dr_grpo": AdvantageEstimator.MEAN_CENTERED,
    "adv_rloo": AdvantageEstimator.LEAVE_ONE_OUT,
}


def advantages_of(rewards, group_ids, has_reward=None, *, estimator=AdvantageEstimator.MEAN_CENTERED, **options):
    has_reward = np.ones(len(rewards), bool) if has_reward is None else np.asarray(has_reward, bool)
    return group_advantages(np.asarray(rewards), np.asarray(group_ids), has_reward, estimator=estimator, **options)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (AdvantageEstimator.MEAN_CENTERED, [-1.0, 0.5, 2.0, -0.5, -1.0]),
        (AdvantageEstimator.LEAVE_ONE_OUT, [-1.5, 1.0, 3.0, -1.0, -1.5]),
        # Group 7: deviations -1, 2, -1, standard deviation sqrt(6 / 2). Group -3: +-0.5, standard deviation sqrt(0.5 / 1).
        (AdvantageEstimator.GROUP_RELATIVE, [-0.57735027, 0.70710678, 1.15470054, -0.70710678, -0.57735027]),
    ],
)
def test_two_interleaved_groups_by_hand(estimator, expected):
    advantages = advantages_of([1.0, 1.0, 4.0, 0.0, 1.0], [7, -3, 7, -3, 7], estimator=estimator)
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
    assert np.all(without != 0)


@pytest.mark.parametrize("estimator", AdvantageEstimator)
@pytest.mark.parametrize("has_reward", [[True, False, False], [False, False, False]])
def test_fewer_than_two_rewards_give_zero(estimator, has_reward):
    np.testing.assert_array_equal(advantages_of([5.0, 1.0, 2.0], [0, 0, 0], has_reward, estimator=estimator), 0)


@pytest.mark.parametrize("estimator", AdvantageEstimator)
@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, 1e6 + 0.1])
def test_equal_rewards_give_exactly_zero(estimator, reward):
    np.testing.assert_array_equal(advantages_of([reward] * 7, [2] * 7, estimator=estimator), 0)


def test_an_empty_batch():
    assert advantages_of([], np.zeros(0, int)).shape == (0,)


members = st.lists(st.tuples(st.integers(-8, 8), st.integers(0, 2), st.booleans()), min_size=1, max_size=12)


@hypothesis.given(members, st.sampled_from(AdvantageEstimator))
def test_matches_a_plain_loop(members, estimator):
    rewards, group_ids, has_reward = (list(column) for column in zip(*members, strict=True))
    advantages = advantages_of(np.array(rewards, float), group_ids, has_reward, estimator=estimator, epsilon=0.5)
    for row, (reward, group_id, exists) in enumerate(members):
        others = [r for i, (r, g, e) in enumerate(members) if e and g == group_id and i != row]
        if not exists or not others:
            expected = 0.0
        elif estimator is AdvantageEstimator.LEAVE_ONE_OUT:
            expected = reward - sum(others) / len(others)
        else:
            mean = (reward + sum(others)) / (len(others) + 1)
            variance = sum((r - mean) ** 2 for r in [reward, *others]) / len(others)
            expected = (reward - mean) / (variance**0.5 + 0.5 if estimator is AdvantageEstimator.GROUP_RELATIVE else 1)
        np.testing.assert_allclose(advantages[row], expected, rtol=1e-6, atol=1e-6)


@hypothesis.given(members, st.sampled_from(AdvantageEstimator), st.integers(-5, 5))
def test_a_shift_of_all_rewards_changes_nothing(members, estimator, shift):
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
