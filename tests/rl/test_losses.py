"""The decoupled PPO loss: numbers by hand, a plain loop, gradients, denominators and microbatches, refusals."""

import functools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.corrections import CorrectionOptions, Discrepancy
from rl.denominators import CONSTANT_DENOMINATORS, Denominator, row_weights
from rl.loss_metrics import combine_metrics, finalize_metrics
from rl.losses import LossInputs, decoupled_ppo_loss, loss_terms
from rl.objective import Objective
from rl.surrogates import Clip

CLIP = {"clip_low": 0.2, "clip_high": 0.2}

# Probabilities of four tokens.
SAMPLER, CURRENT = [0.5, 0.2, 0.1, 0.4], [0.6, 0.15, 0.05, 0.43]
EXACT, LATER = [0.45, 0.22, 0.04, 0.41], [0.52, 0.18, 0.045, 0.42]  # anchors: the version that sampled, and one after it
ADVANTAGES = [1.0, -1.0, 1.0, -1.0]
DISCREPANCY_RATIOS = np.array([0.9, 1.1, 0.4, 1.025])  # exact anchor over sampler
STALENESS_RATIOS = np.array([4 / 3, 15 / 22, 1.25, 43 / 41])  # current over exact anchor


def row(values, dtype=np.float32):
    return np.array([values], dtype)


OPTIONS = ("clip_low", "clip_high", "dual_clip", "discrepancy", "discrepancy_bound", "weight_cap", "entropy_coefficient")
loss_of_python_numbers = jax.jit(decoupled_ppo_loss, static_argnames=OPTIONS)


def loss_of_probabilities(anchor, mask=(1, 1, 1, 1), **options):
    """The options stay Python numbers, so that they are validated."""
    arrays = [np.log(row(probabilities)) for probabilities in (CURRENT, anchor, SAMPLER)]
    options = {**CLIP, "discrepancy_bound": 1.5, **options}
    return jax.device_get(loss_of_python_numbers(*arrays, row(ADVANTAGES), row(mask, bool), **options))


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


# By hand.


def test_exact_anchor_by_hand():
    """With clip 0.2 and band 1.5 three tokens are clipped, one is dropped, and one is active."""
    loss, metrics = loss_of_probabilities(EXACT)
    np.testing.assert_allclose(loss, 0.1621951, rtol=1e-5)  # (-1.2 + .8 + 1.048780) / 4: the dropped token is counted
    expected = {"tokens": 4, "clip_fraction": 0.75, "discrepancy_masked_fraction": 0.25, "active_fraction": 0.25}
    expected |= {"nonfinite_fraction": 0, "dual_clip_fraction": 0, "effective_sample_fraction": 0.75}
    expected |= {"discrepancy_weight_mean": 1, "discrepancy_weight_max": 1, "kept_fraction": 0.75}
    for name, ratios in (("discrepancy", DISCREPANCY_RATIOS), ("staleness", STALENESS_RATIOS)):
        expected |= {f"{name}_kl": -np.log(ratios).mean(), f"{name}_kl_k3": (ratios - 1 - np.log(ratios)).mean()}
        expected |= {f"{name}_ratio_mean": ratios.mean(), f"{name}_ratio_max": ratios.max(), f"{name}_ratio_min": ratios.min()}
        expected |= {f"{name}_log_ratio_max": np.log(ratios.max()), f"{name}_log_ratio_min": np.log(ratios.min())}
    assert set(metrics) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-5, err_msg=name)


def test_exact_anchor_with_weights_by_hand():
    """Row weights of one over the kept tokens give the mean over those: of -1.2 * .9, .8 * 1.1 and 1.048780 * 1.025."""
    loss, metrics = loss_of_probabilities(EXACT, discrepancy=Discrepancy.BOTH, weights=np.full(1, 1 / 3, np.float32))
    np.testing.assert_allclose(loss, 0.2916667, rtol=1e-5)
    np.testing.assert_allclose(metrics["discrepancy_weight_mean"], (0.9 + 1.1 + 1.025) / 3, rtol=1e-6)
    effective = (0.9 + 1.1 + 1.025) ** 2 / (4 * (0.9**2 + 1.1**2 + 1.025**2))
    np.testing.assert_allclose(metrics["effective_sample_fraction"], effective, rtol=1e-6)


def test_a_later_anchor_tangles_the_two_ratios():
    """The same tokens anchored to a later version: nothing is clipped and three tokens are active, where one should be."""
    _, metrics = loss_of_probabilities(LATER)
    np.testing.assert_allclose([metrics["clip_fraction"], metrics["active_fraction"]], [0, 0.75])


@pytest.mark.parametrize(
    ("logprobs", "proximal", "advantages", "dual_clip", "losses"),
    [
        ([-1.6931472, -1, -0.5945349], [-1, -1, -1], [1, -1, 2], math.inf, [-0.5, 1, -2.4]),  # mean -.63333
        ([-1.6931472, -1, -0.6974149], [-1, -1, -3], [1, -1, -4], 3.0, [-0.5, 1, 12]),  # mean 4.1667
        ([-1.6931472, -1, -0.6974149], [-1, -1, -3], [1, -1, -4], math.inf, [-0.5, 1, 40]),
    ],
)
def test_clip_and_dual_clip_by_hand(logprobs, proximal, advantages, dual_clip, losses):
    batch = row(logprobs), row(proximal), row(proximal), row(advantages), row([1, 1, 1], bool)
    loss, metrics, _ = gradient_of(batch, dual_clip=dual_clip)
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-5)
    assert metrics["dual_clip_fraction"] == np.float32(1 / 3 if dual_clip == 3 else 0)


def test_a_ratio_of_one_on_the_end_of_the_band_has_its_whole_gradient():
    batch = row([-1.0, -1.0]), row([-1.0, -1.0]), row([-1.0, -1.0]), row([1.0, -1.0]), row([1, 1], bool)
    _, metrics, gradient = gradient_of(batch, clip_low=0.0, clip_high=0.0)
    np.testing.assert_array_equal(gradient, [[-0.5, 0.5]])
    assert metrics["clip_fraction"] == 0 and metrics["active_fraction"] == 1


# Against a plain loop.


def plain_loss(logprobs, proximal, sampler, advantages, mask, entropy, options):
    """Token by token in Python numbers: the loss of the token mean, and how many tokens are clipped, kept, active."""
    total, num_clipped, num_kept, num_active = 0.0, 0, 0, 0
    for t in zip(*np.nonzero(mask), strict=True):
        advantage = float(advantages[t])
        staleness_ratio = math.exp(float(logprobs[t]) - float(proximal[t]))
        discrepancy_ratio = math.exp(float(proximal[t]) - float(sampler[t]))
        clipped_ratio = min(max(staleness_ratio, 1 - options["clip_low"]), 1 + options["clip_high"])
        objective = min(staleness_ratio * advantage, clipped_ratio * advantage)
        clipped = objective < staleness_ratio * advantage
        dual = advantage < 0 and staleness_ratio > options["dual_clip"]
        if dual:
            objective = max(objective, options["dual_clip"] * advantage)
        if options["discrepancy"] in (Discrepancy.WEIGHT, Discrepancy.BOTH):
            objective *= min(discrepancy_ratio, options["weight_cap"])
        in_band = 1 / options["discrepancy_bound"] <= discrepancy_ratio <= options["discrepancy_bound"]
        kept = in_band or options["discrepancy"] in (Discrepancy.NONE, Discrepancy.WEIGHT)
        total -= kept * (objective + options["entropy_coefficient"] * float(entropy[t]))
        num_clipped, num_kept = num_clipped + clipped, num_kept + kept
        num_active += kept and not clipped and not dual
    return total / mask.sum(), num_clipped, num_kept, num_active


def plain_gradient(logprobs, *others, step=1e-6):
    """Central differences of the plain loss by each logprob."""
    gradient = np.zeros(logprobs.shape)
    for t in np.ndindex(logprobs.shape):
        difference = np.zeros(logprobs.shape)
        difference[t] = step
        gradient[t] = (plain_loss(logprobs + difference, *others)[0] - plain_loss(logprobs - difference, *others)[0]) / (2 * step)
    return gradient


@hypothesis.settings(max_examples=12)  # each compiles
@hypothesis.given(st.integers(0, 2**31), st.sampled_from(Discrepancy), st.sampled_from([1.5, 3.0, 1e9]), st.floats(0.05, 0.5))
def test_matches_a_plain_loop(seed, discrepancy, dual_clip, clip_low):
    *batch, entropy = random_batch(seed)
    options = {"clip_low": clip_low, "clip_high": 0.28, "dual_clip": dual_clip, "discrepancy": discrepancy}
    options |= {"discrepancy_bound": 1.7, "weight_cap": 1.3, "entropy_coefficient": 0.1}
    loss, metrics, gradient = gradient_of(batch, entropy=entropy, **options)
    expected_loss, num_clipped, num_kept, num_active = plain_loss(*batch, entropy, options)
    num_tokens = batch[-1].sum()
    np.testing.assert_allclose(loss, expected_loss, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(gradient, plain_gradient(*batch, entropy, options), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(metrics["clip_fraction"] * num_tokens, num_clipped, rtol=1e-5)
    np.testing.assert_allclose((1 - metrics["discrepancy_masked_fraction"]) * num_tokens, num_kept, rtol=1e-5)
    np.testing.assert_allclose(metrics["active_fraction"] * num_tokens, num_active, rtol=1e-5)
    np.testing.assert_allclose(metrics["entropy"], entropy[batch[-1]].mean(), rtol=1e-5)


def test_the_gradient_flows_through_logprobs_and_entropy_only():
    logprobs, proximal, sampler, advantages, mask, entropy = random_batch(4)

    @jax.jit
    @functools.partial(jax.grad, argnums=range(6))
    def gradients_of(logprobs, proximal, sampler, advantages, weights, entropy):
        options = {"discrepancy": Discrepancy.BOTH, "weights": weights, "entropy": entropy, "entropy_coefficient": 0.1}
        return decoupled_ppo_loss(logprobs, proximal, sampler, advantages, mask, **CLIP, **options)[0]

    weights = np.full(8, 0.25, np.float32)
    by_logprobs, *by_fixed, by_entropy = gradients_of(logprobs, proximal, sampler, advantages, weights, entropy)
    assert np.any(by_logprobs)
    for gradient in by_fixed:
        np.testing.assert_array_equal(gradient, 0)
    kept = mask & (np.abs(proximal - sampler) <= math.log(2))
    np.testing.assert_allclose(by_entropy, np.where(kept, -0.1 * 0.25, 0), rtol=1e-6)


def test_an_anchor_computed_from_the_current_logprobs_is_an_anchor_all_the_same():
    """As the interpolations do inside the step: the gradient is that of the same anchor held fixed."""
    logprobs, _, sampler, advantages, mask, _ = random_batch(4)

    @jax.jit
    @jax.grad
    def tied_gradient_of(logprobs):
        return decoupled_ppo_loss(logprobs, 0.5 * (logprobs + sampler), sampler, advantages, mask, **CLIP)[0]

    _, _, gradient = gradient_of((logprobs, np.float32(0.5) * (logprobs + sampler), sampler, advantages, mask))
    np.testing.assert_allclose(tied_gradient_of(logprobs), gradient, rtol=1e-6)
    assert np.any(gradient)


# Denominators and microbatches.

MASK = np.array([[0, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]], bool)


@pytest.mark.parametrize(
    ("denominator", "constant", "expected"),
    [
        (Denominator.TOKENS, None, [1 / 4, 1 / 4, 1 / 4]),
        (Denominator.SEQUENCES, None, [1 / 6, 0, 1 / 2]),
        (Denominator.SEQUENCE_SUMS, 3.0, [1 / 6, 1 / 6, 1 / 6]),
        (Denominator.CONSTANT, 12.0, [1 / 12, 1 / 12, 1 / 12]),
    ],
)
def test_row_weights_by_hand(denominator, constant, expected):
    weights = row_weights(MASK, denominator=denominator, constant=constant)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert weights.dtype == jnp.float32
    assert np.all(np.isfinite(row_weights(np.zeros((3, 4), bool), denominator=denominator, constant=constant)))


def test_rejected_tokens_stay_in_the_denominator():
    """Five tokens, three of them outside the band: two are summed, five divide."""
    sampler = row(np.log([0.5, 0.5, 0.5, 0.5, 0.5]))
    proximal = sampler + np.log(row([1.0, 3.0, 0.3, 5.0, 1.5]))
    batch = (proximal, proximal, sampler, row([1.0, 10.0, 10.0, 10.0, 3.0]), row([1, 1, 1, 1, 1], bool))
    loss, metrics, gradient = gradient_of(batch)
    np.testing.assert_allclose(loss, -(1 + 3) / 5, rtol=1e-6)
    np.testing.assert_allclose(gradient, row([-1 / 5, 0, 0, 0, -3 / 5]), rtol=1e-6)
    np.testing.assert_allclose(metrics["discrepancy_masked_fraction"], 0.6, rtol=1e-6)


BOTH = Objective(Clip(0.2, 0.2, 1.5), correction=CorrectionOptions(discrepancy=Discrepancy.BOTH), entropy_coefficient=0.1)


@jax.jit
def evaluate_terms(*arrays, weights):
    def terms(logprobs):
        return loss_terms(BOTH, LossInputs(logprobs, *arrays[1:]), weights=weights, statistics=None)

    return jax.value_and_grad(terms, has_aux=True)(arrays[0])


@pytest.mark.parametrize("denominator", Denominator)
def test_microbatches_of_any_size_give_one_update(denominator):
    *batch, entropy = random_batch(5)
    options = {**CLIP, "dual_clip": 1.5, "discrepancy": Discrepancy.BOTH, "entropy_coefficient": 0.1}
    constant = 30.0 if denominator in CONSTANT_DENOMINATORS else None
    weights = np.asarray(row_weights(batch[-1], denominator=denominator, constant=constant))
    loss, metrics, gradient = gradient_of(batch, entropy=entropy, weights=weights, **options)
    for num_rows in (8, 2, 1):
        total, gradients, sums = 0.0, [], None
        for start in range(0, 8, num_rows):
            *arrays, microbatch_weights = (array[start : start + num_rows] for array in (*batch, entropy, weights))
            share = evaluate_terms(*arrays, weights=microbatch_weights)
            (share_loss, share_sums), share_gradient = jax.device_get(share)
            total, sums = total + share_loss, share_sums if sums is None else combine_metrics(sums, share_sums)
            gradients.append(share_gradient)
        np.testing.assert_allclose(np.concatenate(gradients), gradient, rtol=1e-6)
        np.testing.assert_allclose(total, loss, rtol=1e-6)
        combined = finalize_metrics(sums)
        assert set(combined) == set(metrics)
        for name in metrics:
            np.testing.assert_allclose(combined[name], metrics[name], rtol=2e-6, atol=1e-7, err_msg=name)
    assert metrics["entropy"] > 0 and metrics["staleness_ratio_max"] > metrics["staleness_ratio_min"] > 0


def test_the_sums_of_an_empty_mask_are_neutral():
    *arrays, mask, entropy = random_batch(5)
    (_, sums), _ = evaluate_terms(*arrays, mask, entropy, weights=np.ones(8, np.float32))
    (_, nothing), _ = evaluate_terms(*arrays, np.zeros_like(mask), entropy, weights=np.ones(8, np.float32))
    jax.tree.map(np.testing.assert_array_equal, combine_metrics(nothing, sums), sums)


# Refusals.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_low": -0.1}, r"clip_low is -0.1, wanted in \[0, 1\]"),
        ({"clip_low": 1.2}, r"clip_low is 1.2, wanted in \[0, 1\]"),
        ({"clip_high": -0.1}, "clip_high is -0.1, wanted at least 0"),
        ({"clip_high": math.nan}, "clip_high is nan, wanted at least 0"),
        ({"dual_clip": 1.0}, "dual_clip is 1.0, wanted above 1"),
        ({"discrepancy_bound": 0.5}, "bound is 0.5, wanted at least 1"),
        ({"weight_cap": 0.0}, "cap is 0.0, wanted above 0"),
        ({"entropy_coefficient": 0.1}, "entropy_coefficient is 0.1 but entropy is None"),
        ({"weights": np.ones(2, np.float32)}, r"weights have shape \(2,\), wanted \(1,\): one per row"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        loss_of_probabilities(EXACT, **options)


def test_arrays_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match=r"'mask': \(1, 1\)"):
        loss_of_probabilities(EXACT, mask=[1])


@pytest.mark.parametrize(
    ("denominator", "constant", "message"),
    [
        (Denominator.CONSTANT, None, "'constant' got constant None"),
        (Denominator.TOKENS, 8.0, "'tokens' got constant 8.0"),
        (Denominator.CONSTANT, 0.0, "constant is 0.0, wanted above 0"),
    ],
)
def test_a_missing_or_superfluous_constant_is_refused(denominator, constant, message):
    with pytest.raises(ValueError, match=message):
        row_weights(MASK, denominator=denominator, constant=constant)
