"""Returns and value targets: numbers by hand, the definitions written out as sums, and what must not matter."""

import functools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl import returns

SHAPE = (4, 9)
seeds = st.integers(0, 2**32 - 1)
rates = st.sampled_from([0.0, 0.5, 0.9, 1.0])


@functools.cache
def compiled(function, window=None):
    return jax.jit(function if window is None else functools.partial(function, window=window))


def call(function, *arrays, window=None, **options):
    return np.asarray(compiled(function, window)(*arrays, **options))


def draw(seed):
    """Rewards, values, log ratios, a mask with holes and an empty row, final values and outcomes; NaN outside the mask."""
    rng = np.random.default_rng(seed)
    mask = rng.random(SHAPE) < 0.6
    mask[-1] = False
    arrays = [np.where(mask, rng.normal(size=SHAPE), np.nan).astype(np.float32) for _ in range(3)]
    return *arrays, mask, *rng.normal(size=(2, SHAPE[0])).astype(np.float32)


def row_by_row(formula, mask, *arrays):
    """The formula, a function of plain lists, for the masked tokens of each row; 0 elsewhere."""
    result = np.zeros(mask.shape)
    for row in np.flatnonzero(mask.any(axis=1)):
        columns = [array[row, mask[row]].tolist() for array in arrays]
        result[row, mask[row]] = formula(row, *columns)
    return result


def product(numbers):
    return math.prod(numbers)  # 1 for none


def near(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@hypothesis.given(seeds, rates, rates)
def test_generalized_advantages_are_the_discounted_sum_of_differences(seed, discount, trace_decay):
    rewards, values, _, mask, final, _ = draw(seed)

    def formula(row, rewards, values):
        following = [*values[1:], float(final[row])]
        differences = [r + discount * after - v for r, v, after in zip(rewards, values, following, strict=True)]
        return [
            sum((discount * trace_decay) ** (t - s) * differences[t] for t in range(s, len(values))) for s in range(len(values))
        ]

    rates = {"discount": discount, "trace_decay": trace_decay}
    actual = call(returns.generalized_advantages, rewards, values, mask, final_values=final, **rates)
    near(actual, row_by_row(formula, mask, rewards, values))


@hypothesis.given(seeds, rates)
def test_discounted_returns_skip_what_is_masked(seed, discount):
    rewards, _, _, mask, _, _ = draw(seed)

    def formula(_, rewards):
        return [sum(discount ** (t - s) * rewards[t] for t in range(s, len(rewards))) for s in range(len(rewards))]

    near(call(returns.discounted_returns, rewards, mask, discount=discount), row_by_row(formula, mask, rewards))


@hypothesis.given(seeds, rates, rates, st.sampled_from([(1.0, 1.0), (1.2, 1.1), (np.inf, 0.5)]))
def test_vtrace_is_the_sum_of_its_definition(seed, discount, trace_decay, caps):
    rewards, values, log_ratios, mask, final, _ = draw(seed)

    def formula(row, rewards, values, log_ratios):
        following = [*values[1:], float(final[row])]
        weights, traces = ([min(cap, math.exp(ratio)) for ratio in log_ratios] for cap in caps)
        return [
            values[s] + sum(
                discount ** (t - s) * product(trace_decay * c for c in traces[s:t])
                * weights[t] * (rewards[t] + discount * following[t] - values[t])
                for t in range(s, len(values))
            )
            for s in range(len(values))
        ]  # fmt: skip

    options = {"discount": discount, "trace_decay": trace_decay, "weight_cap": caps[0], "trace_cap": caps[1]}
    actual = call(returns.vtrace_targets, rewards, values, mask, log_ratios=log_ratios, final_values=final, **options)
    near(actual, row_by_row(formula, mask, rewards, values, log_ratios))


@hypothesis.given(seeds, rates, rates, st.sampled_from([0, 1, 3, 100]))
def test_brace_is_the_sum_of_its_definition(seed, discount, trace_decay, window):
    _, values, log_ratios, mask, final, outcomes = draw(seed)

    def formula(row, values, log_ratios):
        length, outcome = len(values), float(outcomes[row])
        states = [*values, float(final[row])]
        weights, traces = ([min(cap, math.exp(ratio)) for ratio in log_ratios] for cap in (1.2, 1.1))
        targets = []
        for s in range(length):
            stop = min(s + window, length)
            carried = [product(trace_decay * c for c in traces[s:t]) for t in range(s, stop + 1)]
            corrections = (
                discount ** (t - s) * carried[t - s] * weights[t] * (discount * states[t + 1] - states[t]) for t in range(s, stop)
            )
            rest = discount ** (length - s) * outcome - discount ** (stop - s) * states[stop]
            targets.append(states[s] + sum(corrections) + carried[-1] * rest)
        return targets

    options = {"outcomes": outcomes, "final_values": final, "discount": discount, "trace_decay": trace_decay}
    actual = call(returns.brace_targets, values, log_ratios, mask, window=window, **options)
    near(actual, row_by_row(formula, mask, values, log_ratios))


def row(*numbers):
    return np.asarray([numbers], np.float32)


EVERYWHERE = np.ones((1, 3), bool)
BRACE = {"outcomes": np.float32([1.0]), "final_values": np.float32([0.9]), "discount": 1.0}


@pytest.mark.parametrize(("window", "expected"), [(0, 1.0), (1, 1.1), (2, 0.88), (3, 0.9625), (100, 0.9625)])
def test_brace_by_hand(window, expected):
    """values .3 .6 .2 and then .9, ratios 1.5 .5 2; window 1: .3 + 1.2 (.6 - .3) + 1.1 (1 - .6)."""
    targets = call(returns.brace_targets, row(0.3, 0.6, 0.2), np.log(row(1.5, 0.5, 2.0)), EVERYWHERE, window=window, **BRACE)
    np.testing.assert_allclose(targets[0, 0], expected, rtol=1e-6)


@pytest.mark.parametrize("window", [0, 1, 2, 3])
def test_brace_on_policy_is_the_outcome(window):
    targets = call(returns.brace_targets, row(0.3, 0.6, 0.2), row(0.0, 0.0, 0.0), EVERYWHERE, window=window, **BRACE)
    np.testing.assert_allclose(targets, row(1.0, 1.0, 1.0), rtol=1e-6)


@hypothesis.given(seeds)
def test_brace_with_a_long_window_is_vtrace_with_one_more_step(seed):
    """The last state becomes a step of ratio 1 that earns the outcome."""
    _, values, log_ratios, mask, final, outcomes = draw(seed)
    options = {"discount": 0.9, "trace_decay": 0.95, "weight_cap": 1.2, "trace_cap": 1.1}
    brace = call(returns.brace_targets, values, log_ratios, mask, window=9, outcomes=outcomes, final_values=final, **options)
    extend = functools.partial(np.append, axis=1)
    rewards = extend(np.zeros(SHAPE, np.float32), outcomes[:, None])
    values, log_ratios = extend(values, final[:, None]), extend(log_ratios, np.zeros((SHAPE[0], 1), np.float32))
    mask = extend(mask, np.ones((SHAPE[0], 1), bool))
    near(brace, call(returns.vtrace_targets, rewards, values, mask, log_ratios=log_ratios, **options)[:, :-1])


@hypothesis.given(seeds, rates)
def test_values_drop_out_with_trace_decay_one(seed, discount):
    rewards, values, _, mask, _, _ = draw(seed)
    rest = call(returns.discounted_returns, rewards, mask, discount=discount)
    advantages = call(returns.generalized_advantages, rewards, values, mask, discount=discount, trace_decay=1.0)
    near(advantages[mask], (rest - values)[mask])


@hypothesis.given(seeds, rates, rates)
def test_on_policy_vtrace_is_values_plus_generalized_advantages(seed, discount, trace_decay):
    rewards, values, _, mask, final, _ = draw(seed)
    options = {"discount": discount, "trace_decay": trace_decay, "final_values": final}
    targets = call(returns.vtrace_targets, rewards, values, mask, log_ratios=np.where(mask, 0, np.nan), **options)
    near((targets - values)[mask], call(returns.generalized_advantages, rewards, values, mask, **options)[mask])


def every_function(rewards, values, log_ratios, mask, final, outcomes, *, discount=0.9):
    """All results, under the names of the functions."""
    shared, trace = {"discount": discount, "final_values": final}, {"trace_decay": 0.8}
    return {
        "discounted": returns.discounted_returns(rewards, mask, discount=discount),
        "segments": returns.segment_returns(rewards, mask, discount=discount),
        "differences": returns.temporal_differences(rewards, values, mask, **shared, targets=log_ratios),
        "gae": returns.generalized_advantages(rewards, values, mask, **shared, **trace),
        "vtrace": returns.vtrace_targets(rewards, values, mask, log_ratios=log_ratios, **shared, **trace),
        "brace": returns.brace_targets(values, log_ratios, mask, outcomes=outcomes, window=2, **shared, **trace),
        "whiten": returns.whiten(values, mask),
    }


@hypothesis.given(seeds, st.sampled_from([np.nan, np.inf, -np.inf, 1e30]))
def test_what_is_masked_reaches_nothing(seed, garbage):
    *arrays, mask, final, outcomes = draw(seed)
    clean, dirty = ([np.where(mask, array, np.float32(value)) for array in arrays] for value in (0.0, garbage))
    expected, actual = (jax.device_get(compiled(every_function)(*each, mask, final, outcomes)) for each in (clean, dirty))
    for name in expected:
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)
        np.testing.assert_array_equal(actual[name][~mask], 0, err_msg=name)
        assert np.all(np.isfinite(actual[name])), name


@hypothesis.given(seeds)
def test_a_hole_in_the_mask_is_no_step(seed):
    """All of them but the returns by segment, for which a hole is what separates two turns."""
    *arrays, mask, final, outcomes = draw(seed)
    order = np.argsort(~mask, axis=1, kind="stable")
    packed = [np.take_along_axis(array, order, axis=1) for array in [*arrays, mask]]
    expected, actual = (jax.device_get(compiled(every_function)(*each, final, outcomes)) for each in (packed, [*arrays, mask]))
    for name in expected.keys() - {"segments"}:
        near(np.take_along_axis(actual[name], order, axis=1), expected[name])


@pytest.mark.parametrize("function", [returns.generalized_advantages, returns.vtrace_targets])
def test_episodes_that_share_a_row_are_apart(function):
    """Each alone, in a row of its own with everything else masked, gives the same."""
    rewards, values, log_ratios, _, final, _ = draw(0)
    arrays = [np.nan_to_num(array, nan=0.3) for array in (rewards, values)]
    options = {"discount": 0.9, "trace_decay": 0.8}
    if function is returns.vtrace_targets:
        options["log_ratios"] = np.nan_to_num(log_ratios, nan=0.3)
    mask, ends = np.ones(SHAPE, bool), np.zeros(SHAPE, bool)
    mask[:, 5] = False
    ends[1, [2, 5]] = ends[2, [5, 6]] = ends[3, 8] = True  # at tokens of the mask, at the masked one, and at the end of a row
    actual = call(function, *arrays, mask, ends=ends, final_values=final, **options)
    episodes = np.cumsum(ends, axis=1) - ends
    expected = np.zeros(SHAPE)
    for episode in range(3):
        own = mask & (episodes == episode)
        is_cut = np.any(ends & (episodes == episode), axis=1)
        expected += call(function, *arrays, own, ends=np.zeros(SHAPE, bool), final_values=np.where(is_cut, 0, final), **options)
    near(actual, expected)


def test_segments_by_hand():
    """Turns of 2, 1 and 2 tokens with rewards 1, 2, 4 at their ends; the reward 8 inside a turn is not read."""
    mask = np.asarray([[False, True, True, False, True, False, False, True, True]])
    rewards = row(np.nan, 8, 1, np.nan, 2, np.nan, np.nan, 0, 4)
    expected = row(0, 3, 3, 0, 4, 0, 0, 4, 4)
    np.testing.assert_array_equal(call(returns.segment_returns, rewards, mask, discount=0.5), expected)


def test_differences_towards_targets_by_hand():
    """1 + .5 * 8 - 3, then 2 + .5 * 16 - 1: the target of the next token of the mask, then what comes after the row."""
    mask = np.asarray([[True, False, True]])
    arguments = row(1, np.nan, 2), row(3, np.nan, 1), mask
    targets, final = row(4, np.nan, 8), np.float32([16])
    differences = call(returns.temporal_differences, *arguments, discount=0.5, targets=targets, final_values=final)
    np.testing.assert_array_equal(differences, row(2, 0, 9))


def test_whiten_by_hand():
    """2, 4, 9: mean 5, variance 26 / 2."""
    mask = np.asarray([[True, False], [True, True]])
    values = np.asarray([[2, np.nan], [4, 9]], np.float32)
    expected = np.asarray([[-3, 0], [-1, 4]]) / np.sqrt(13)
    np.testing.assert_allclose(call(returns.whiten, values, mask), expected, rtol=1e-6)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_whiten_without_a_deviation_is_zero(num_tokens):
    mask = np.arange(4)[None] < num_tokens
    np.testing.assert_array_equal(call(returns.whiten, np.full((1, 4), 7, np.float32), mask), 0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.float32), (jnp.float64, jnp.float64)],
    ids=["bfloat16", "float32", "float64"],
)
def test_precision(given, expected):
    with jax.enable_x64(given == jnp.float64):
        *arrays, mask, final, outcomes = draw(1)
        arrays = [jnp.asarray(array, given) for array in arrays]
        # A rate may be traced, in the precision it happens to have.
        results = jax.eval_shape(every_function, *arrays, mask, final, outcomes, discount=jnp.float32(0.9))
        assert {name: result.dtype for name, result in results.items()} == dict.fromkeys(results, expected)


def test_bfloat16_is_computed_in_float32_from_the_first_operation_on():
    *arrays, mask, final, outcomes = draw(1)
    rounded = [jnp.asarray(array, jnp.bfloat16) for array in arrays]
    exact = compiled(every_function)(*(array.astype(jnp.float32) for array in rounded), mask, final, outcomes)
    for name, result in compiled(every_function)(*rounded, mask, final, outcomes).items():
        near(result, exact[name])


def test_one_float64_argument_is_enough():
    with jax.enable_x64(True):
        rewards, values, log_ratios, mask, _, _ = draw(2)
        options = {"log_ratios": jnp.asarray(log_ratios, jnp.float64), "discount": 0.9}
        assert jax.eval_shape(returns.vtrace_targets, rewards, values, mask, **options).dtype == jnp.float64


def test_nothing_is_differentiated():
    *arrays, mask, final, outcomes = draw(3)

    def total(arrays, of_rows):
        return sum(jnp.sum(result) for result in every_function(*arrays, mask, *of_rows).values())

    arguments = [np.nan_to_num(array) for array in arrays], [final, outcomes]
    for gradient in jax.tree.leaves(jax.jit(jax.grad(total, argnums=(0, 1)))(*arguments)):
        np.testing.assert_array_equal(gradient, 0)


def test_large_ratios_stay_finite():
    huge = row(500.0, -500.0, 500.0)
    for targets in (
        call(returns.vtrace_targets, row(0, 0, 1), row(1, 2, 3), EVERYWHERE, log_ratios=huge, discount=1.0),
        call(returns.brace_targets, row(1, 2, 3), huge, EVERYWHERE, window=2, **BRACE),
    ):
        assert np.all(np.isfinite(targets))


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match=r"'values': \(1, 3\).*wanted one shape"):
        returns.generalized_advantages(np.zeros((1, 4)), np.zeros((1, 3)), np.ones((1, 4), bool), discount=1.0, trace_decay=1.0)
    with pytest.raises(ValueError, match=r"'ends': \(3,\).*wanted one shape"):
        returns.temporal_differences(row(1, 2, 3), row(1, 2, 3), EVERYWHERE, discount=1.0, ends=np.zeros(3, bool))
    with pytest.raises(ValueError, match="window is -1, wanted at least 0"):
        returns.brace_targets(row(1, 2, 3), row(1, 2, 3), EVERYWHERE, window=-1, **BRACE)
