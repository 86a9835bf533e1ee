"""What must not matter to the loss: the anchor without bounds, padding, values outside the mask, missing values inside it."""

import functools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from rl.corrections import Discrepancy
from rl.denominators import CONSTANT_DENOMINATORS, Denominator, row_weights
from rl.losses import decoupled_ppo_loss
from rl.surrogates import clipped_objective

CLIP = {"clip_low": 0.2, "clip_high": 0.2}
UNBOUNDED = {"clip_low": 1.0, "clip_high": math.inf}


def row(values, dtype=np.float32):
    return np.array([values], dtype)


def random_batch(seed, shape=(8, 6)):
    """logprobs, proximal, sampler, advantages, mask with holes and an empty row, entropy."""
    generator = np.random.default_rng(seed)
    sampler = generator.uniform(-3, -0.1, shape).astype(np.float32)
    proximal = sampler + generator.normal(0, 0.5, shape).astype(np.float32)
    logprobs = proximal + generator.normal(0, 0.5, shape).astype(np.float32)
    advantages, entropy = generator.normal(0, 1, shape).astype(np.float32), generator.uniform(0, 2, shape).astype(np.float32)
    mask = generator.random(shape) < 0.7
    mask[shape[0] // 2] = False
    return logprobs, proximal, sampler, advantages, mask, entropy


@functools.partial(jax.jit, static_argnames="discrepancy")
def evaluate(logprobs, *others, discrepancy, **options):
    loss_of = functools.partial(decoupled_ppo_loss, discrepancy=discrepancy, **options)
    return jax.value_and_grad(loss_of, has_aux=True)(logprobs, *others)


def gradient_of(batch, *, discrepancy=Discrepancy.MASK, **options):
    """The loss, its metrics and its gradient by logprobs, in numpy.

    An option not given has a neutral value, and a small batch is padded with NaN outside the mask, so that one program per
    treatment is compiled.
    """
    num_rows, num_tokens = batch[0].shape
    padding = [(0, max(0, 8 - num_rows)), (0, max(0, 6 - num_tokens))]
    arrays = [np.pad(array, padding, constant_values=np.nan) for array in batch[:-1]]
    mask = np.pad(batch[-1], padding)
    neutral = {"dual_clip": math.inf, "discrepancy_bound": 2.0, "weight_cap": 2.0, "entropy_coefficient": 0.0}
    neutral |= {"entropy": np.zeros(mask.shape, np.float32), "weights": np.full(len(mask), 1 / max(1, mask.sum()), np.float32)}
    options = neutral | CLIP | options
    (loss, metrics), gradient = jax.device_get(evaluate(*arrays, mask, discrepancy=discrepancy, **options))
    return loss, metrics, gradient[:num_rows, :num_tokens]


# Properties.

seeds = st.integers(0, 2**31)


@hypothesis.given(seeds, seeds)
def test_the_two_ratios_multiply_to_the_whole_whatever_the_anchor(seed, other_seed):
    """r_d r_s = p / mu: without bounds the anchor changes neither loss nor gradient."""
    *batch, _ = random_batch(seed)
    logprobs, _, sampler, advantages, mask = batch
    anchor = random_batch(other_seed)[1]
    options = {**UNBOUNDED, "discrepancy": Discrepancy.WEIGHT, "weight_cap": math.inf}
    loss, _, gradient = gradient_of(batch, **options)
    other_loss, _, other_gradient = gradient_of((logprobs, anchor, sampler, advantages, mask), **options)
    np.testing.assert_allclose(loss, other_loss, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient, other_gradient, rtol=1e-5, atol=1e-7)
    whole = np.exp(np.float64(logprobs) - sampler)
    np.testing.assert_allclose(gradient, np.where(mask, -advantages * whole, 0) / mask.sum(), rtol=1e-5, atol=1e-7)


@hypothesis.given(seeds)
def test_the_sampler_as_anchor_is_plain_ppo_and_the_current_policy_is_importance_sampling(seed):
    logprobs, _, sampler, advantages, mask, _ = random_batch(seed)
    ratio = np.exp(np.float64(logprobs) - sampler)
    loss, metrics, _ = gradient_of((logprobs, sampler, sampler, advantages, mask), discrepancy=Discrepancy.BOTH)
    plain = np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
    np.testing.assert_allclose(loss, -plain[mask].mean(), rtol=1e-5, atol=1e-6)
    assert metrics["discrepancy_ratio_max"] == metrics["discrepancy_ratio_min"] == 1
    options = {"discrepancy": Discrepancy.WEIGHT, "weight_cap": math.inf}
    _, metrics, gradient = gradient_of((logprobs, logprobs, sampler, advantages, mask), **options)
    assert metrics["clip_fraction"] == 0
    np.testing.assert_allclose(gradient, np.where(mask, -advantages * ratio, 0) / mask.sum(), rtol=1e-5, atol=1e-7)


compiled_objective = jax.jit(clipped_objective)


@hypothesis.given(seeds, st.floats(0.0, 4.0))
def test_a_weight_may_multiply_before_or_after_the_clip(seed, weight):
    """w min(x, y) = min(w x, w y) for w >= 0, so a weight on the objective is a weight on the advantage. Dual clip too."""
    logprobs, proximal, _, advantages, _, _ = random_batch(seed)
    ratio, weight = np.exp(logprobs - proximal), np.float32(weight)
    objective, *_ = jax.device_get(compiled_objective(ratio, advantages, **CLIP, dual_clip=1.5))
    weighted, *_ = jax.device_get(compiled_objective(ratio, weight * advantages, **CLIP, dual_clip=1.5))
    np.testing.assert_allclose(weight * objective, weighted, rtol=1e-6, atol=1e-7)


@hypothesis.given(seeds, st.sampled_from(Denominator))
def test_padding_and_foreign_tokens_change_nothing(seed, denominator):
    """More columns, a row without trained tokens, and other garbage outside the mask: the same loss, metrics and gradient."""
    *batch, entropy = random_batch(seed)
    *arrays, mask, entropy = (np.pad(array, ((0, 1), (2, 2))) for array in (*batch, entropy))
    garbage = np.random.default_rng(seed + 1).choice(np.float32([np.nan, np.inf, -np.inf, -1000.0, 80.0]), (5, *mask.shape))
    *wide, wide_entropy = (np.where(mask, array, garbage[i]) for i, array in enumerate((*arrays, entropy)))
    options = {"discrepancy": Discrepancy.BOTH, "entropy_coefficient": 0.1}
    constant = 7.0 if denominator in CONSTANT_DENOMINATORS else None
    weights, wide_weights = (row_weights(m, denominator=denominator, constant=constant) for m in (batch[-1], mask))
    loss, metrics, gradient = gradient_of(batch, entropy=entropy[:-1, 2:-2], weights=weights, **options)
    wide_loss, wide_metrics, wide_gradient = gradient_of((*wide, mask), entropy=wide_entropy, weights=wide_weights, **options)
    np.testing.assert_allclose(wide_loss, loss, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(wide_gradient, np.pad(gradient, ((0, 1), (2, 2))), rtol=1e-6)
    for name in metrics:
        np.testing.assert_allclose(wide_metrics[name], metrics[name], rtol=1e-5, atol=1e-6, err_msg=name)


# Hostile values.


class Scene:
    """A random batch of which one value is replaced."""

    def __init__(self, seed):
        names = ("logprobs", "proximal", "sampler", "advantages", "mask", "entropy")
        self.arrays = dict(zip(names, random_batch(seed), strict=True))
        self.weights = row_weights(self.arrays["mask"], denominator=Denominator.TOKENS)

    def evaluate(self, discrepancy):
        *batch, entropy = self.arrays.values()
        options = {"discrepancy": discrepancy, "entropy": entropy, "entropy_coefficient": 0.1, "weights": self.weights}
        return gradient_of(batch, **options)


@pytest.mark.parametrize("value", [-1000.0, -np.inf, np.inf, np.nan])
@pytest.mark.parametrize("argument", ["logprobs", "proximal", "sampler", "advantages", "entropy"])
@pytest.mark.parametrize("discrepancy", Discrepancy)
def test_a_value_outside_the_mask_reaches_nothing(value, argument, discrepancy):
    scene = Scene(6)
    position = tuple(np.argwhere(~scene.arrays["mask"])[0])
    expected = scene.evaluate(discrepancy)
    scene.arrays[argument][position] = value
    actual = scene.evaluate(discrepancy)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(actual)) and actual[2][position] == 0


@pytest.mark.parametrize("value", [-np.inf, np.inf, np.nan])
@pytest.mark.parametrize("argument", ["logprobs", "proximal", "sampler", "advantages", "entropy"])
@pytest.mark.parametrize("discrepancy", Discrepancy)
def test_a_token_of_the_mask_with_a_non_finite_value_is_dropped_and_counted(value, argument, discrepancy):
    """As if the token were not in the mask, except that the denominators still count it."""
    scene = Scene(7)
    mask = scene.arrays["mask"]
    position, num_tokens = tuple(np.argwhere(mask)[0]), mask.sum()
    scene.arrays[argument][position] = value
    loss, metrics, gradient = scene.evaluate(discrepancy)
    mask[position] = False
    expected_loss, expected_metrics, expected_gradient = scene.evaluate(discrepancy)
    np.testing.assert_array_equal(loss, expected_loss)
    np.testing.assert_array_equal(gradient, expected_gradient)
    assert metrics["tokens"] == num_tokens and metrics["nonfinite_fraction"] == np.float32(1 / num_tokens)
    for name in set(metrics) - {"tokens", "nonfinite_fraction"}:
        of_all_tokens = name.endswith("_fraction")
        expected = expected_metrics[name] * ((num_tokens - 1) / num_tokens if of_all_tokens else 1)
        np.testing.assert_allclose(metrics[name], expected, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_extremes_are_those_of_the_tokens_in_the_mask(sign):
    """All ratios on one side of 1, where the ratio of a token that does not exist would be an extreme."""
    logprobs, proximal, sampler = row([sign * 0.3, sign * 0.5]), row([sign * 0.2, sign * 0.2]), row([0.0, sign * 0.1])
    _, metrics, _ = gradient_of((logprobs, proximal, sampler, row([1.0, 1.0]), row([1, 1], bool)))
    for name, log_ratios in (("discrepancy", [sign * 0.2, sign * 0.1]), ("staleness", [sign * 0.1, sign * 0.3])):
        extremes = [metrics[f"{name}_ratio_min"], metrics[f"{name}_ratio_max"]]
        np.testing.assert_allclose(extremes, np.sort(np.exp(log_ratios)), rtol=1e-6)


def test_a_batch_without_sampler_logprobs_trains_nothing_and_says_so():
    logprobs, proximal, sampler, *others, _ = random_batch(8)
    loss, metrics, gradient = gradient_of((logprobs, proximal, np.full_like(sampler, np.nan), *others))
    assert loss == 0 and not np.any(gradient)
    assert metrics["nonfinite_fraction"] == 1 and metrics["active_fraction"] == 0
    assert all(np.isfinite(value) for value in metrics.values())


def test_an_empty_mask_gives_finite_zeros():
    *arrays, _, entropy = random_batch(9)
    loss, metrics, gradient = gradient_of((*arrays, np.zeros((8, 6), bool)), entropy=entropy)
    assert loss == 0 and not np.any(gradient)
    for name, value in metrics.items():
        assert value == 0, name


def test_a_huge_ratio_is_clamped_and_has_no_gradient():
    batch = row([-0.1, -200.0]), row([-200.0, -0.1]), row([-200.0, -0.1]), row([-1.0, 1.0]), row([1, 1], bool)
    loss, _, gradient = gradient_of(batch, **UNBOUNDED)
    np.testing.assert_allclose(loss, math.exp(20) / 2, rtol=1e-5)
    np.testing.assert_array_equal(gradient, 0)
