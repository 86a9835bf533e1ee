"""The discrepancy ratio: weights and bands against pencil and paper, golden vectors of verl, hostile values under the mask."""

import json
import pathlib

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.corrections import LOG_RATIO_LIMIT, Correction, Discrepancy, discrepancy

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
CASES = json.loads((GOLDEN / "corrections.json").read_text())["cases"]
INPUTS, EXPECTED = np.load(GOLDEN / "token_inputs.npz"), np.load(GOLDEN / "corrections.npz")

PROXIMAL, SAMPLER = np.log([[0.45, 0.22, 0.04, 0.41]]), np.log([[0.5, 0.2, 0.1, 0.4]])
RATIOS = np.array([[0.9, 1.1, 0.4, 1.025]])


def correct(proximal, sampler, mask=None, *, treatment=Discrepancy.BOTH, bound=2.0, weight_cap=2.0) -> Correction:
    proximal, sampler = np.asarray(proximal, np.float32), np.asarray(sampler, np.float32)
    mask = np.ones(proximal.shape, bool) if mask is None else np.asarray(mask)
    return discrepancy(proximal, sampler, mask, treatment=treatment, bound=bound, weight_cap=weight_cap)


@pytest.mark.parametrize(
    ("treatment", "weights", "kept"),
    [
        (Discrepancy.NONE, [1, 1, 1, 1], [1, 1, 1, 1]),
        (Discrepancy.MASK, [1, 1, 1, 1], [1, 1, 0, 1]),
        (Discrepancy.WEIGHT, [0.9, 1.05, 0.4, 1.025], [1, 1, 1, 1]),
        (Discrepancy.BOTH, [0.9, 1.05, 0.4, 1.025], [1, 1, 0, 1]),
    ],
)
def test_weights_by_hand(treatment, weights, kept):
    correction = correct(PROXIMAL, SAMPLER, treatment=treatment, bound=1.5, weight_cap=1.05)
    np.testing.assert_allclose(correction.weights, [weights], rtol=1e-6)
    np.testing.assert_array_equal(correction.kept, np.array([kept], bool))
    np.testing.assert_allclose(correction.log_ratio, np.log(RATIOS), rtol=2e-6)
    assert correction.weights.dtype == correction.log_ratio.dtype == jnp.float32


def test_the_numerator_is_the_proximal_policy_and_not_the_sampler():
    """Pencil and paper: sampler 0.5, 0.2, 0.8; proximal 0.25, 0.3, 0.8."""
    correction = correct(np.log([[0.25, 0.3, 0.8]]), np.log([[0.5, 0.2, 0.8]]), treatment=Discrepancy.WEIGHT, weight_cap=10.0)
    np.testing.assert_allclose(correction.weights, [[0.5, 1.5, 1.0]], rtol=1e-6)


def test_icepop_by_hand():
    """Weight and band together. The published numbers are for the band [0.5, 5], and [0.5, 2] decides alike on them."""
    ratios = np.exp(-1 - np.array([[-0.5, -3.5, -0.8]]))  # 0.6065, 12.18, 0.8187
    correction = correct(np.log(ratios), np.zeros((1, 3)), bound=2.0)
    np.testing.assert_allclose(np.where(correction.kept, correction.weights, 0), [[0.6065307, 0, 0.8187308]], rtol=1e-6)
    correction = correct(np.log([[0.4, 0.8, 6.0]]), np.zeros((1, 3)))
    np.testing.assert_allclose(np.where(correction.kept, correction.weights, 0), [[0, 0.8, 0]], rtol=1e-6)


@pytest.mark.parametrize(
    ("log_ratios", "kept"), [([0, 1, 0], [1, 0, 1]), ([0, -1, 0], [1, 0, 1]), ([0.69, -0.69, 0.7], [1, 1, 0])]
)
def test_the_band_is_symmetric_in_log_space(log_ratios, kept):
    correction = correct([log_ratios], np.zeros((1, 3)), treatment=Discrepancy.MASK, bound=2.0)
    np.testing.assert_array_equal(correction.kept, np.array([kept], bool))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_golden(case):
    proximal, sampler, mask = (INPUTS[f"{case['dataset']}/{name}"] for name in ("proximal_logprobs", "sampler_logprobs", "mask"))
    expected = {name.partition("/")[2]: EXPECTED[name] for name in EXPECTED.files if name.startswith(case["id"] + "/")}
    if case["hyper"]["rollout_is"] == "token":
        cap = case["hyper"]["rollout_is_threshold"]
        correction = correct(proximal, sampler, mask, treatment=Discrepancy.WEIGHT, weight_cap=cap)
        np.testing.assert_allclose(correction.weights[mask], expected["weights"][mask], rtol=1e-5, atol=1e-8)
        np.testing.assert_array_equal(correction.kept, mask)
    else:
        bound = float(case["hyper"]["rollout_rs_threshold"].split("_")[-1])  # "0.5_2.0", or the upper end alone
        correction = correct(proximal, sampler, mask, treatment=Discrepancy.MASK, bound=bound)
        np.testing.assert_array_equal(correction.kept, expected["modified_mask"])
        np.testing.assert_array_equal(correction.weights, 1)


@pytest.mark.parametrize("treatment", Discrepancy)
@pytest.mark.parametrize(
    "garbage", [(np.nan, 0.0), (0.0, np.nan), (-np.inf, -np.inf), (0.0, -np.inf), (-1000.0, 5.0), (np.inf, 0.0)]
)
def test_nothing_under_the_mask_matters(treatment, garbage):
    proximal, sampler = np.hstack([PROXIMAL, [[garbage[0]]]]), np.hstack([SAMPLER, [[garbage[1]]]])
    correction = correct(proximal, sampler, [[True] * 4 + [False]], treatment=treatment)
    clean = correct(PROXIMAL, SAMPLER, treatment=treatment)
    np.testing.assert_array_equal(correction.weights, np.hstack([clean.weights, [[1]]]))
    np.testing.assert_array_equal(correction.kept, np.hstack([clean.kept, [[False]]]))
    np.testing.assert_array_equal(correction.log_ratio, np.hstack([clean.log_ratio, [[0]]]))


@pytest.mark.parametrize("treatment", Discrepancy)
def test_a_token_of_the_mask_without_a_finite_ratio_is_never_kept(treatment):
    """Nor is it weighted, even by a cap below 1."""
    proximal, sampler = [[-1, -np.inf, np.nan, -1, -np.inf]], [[-np.inf, -1, -1, np.nan, -np.inf]]
    correction = correct(proximal, sampler, treatment=treatment, weight_cap=0.5)
    assert not np.any(correction.kept)
    np.testing.assert_array_equal(correction.weights, 1)
    np.testing.assert_array_equal(correction.log_ratio, 0)


def test_huge_finite_logprobs_stay_finite():
    lowest = np.finfo(np.float32).min
    correction = correct([[lowest, 0.0]], [[0.0, lowest]], treatment=Discrepancy.WEIGHT, weight_cap=np.inf)
    np.testing.assert_array_equal(correction.log_ratio, [[-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT]])
    assert np.all(np.isfinite(correction.weights))


def test_nothing_is_differentiated():
    def total(proximal, sampler):
        mask = jnp.ones((1, 4), bool)
        correction = discrepancy(proximal, sampler, mask, treatment=Discrepancy.BOTH, bound=2.0, weight_cap=2.0)
        return jnp.sum(correction.weights) + jnp.sum(correction.log_ratio)

    gradients = jax.grad(total, argnums=(0, 1))(jnp.asarray(PROXIMAL, jnp.float32), jnp.asarray(SAMPLER, jnp.float32))
    np.testing.assert_array_equal(gradients, 0)


logprob_arrays = hypothesis.extra.numpy.arrays(np.float32, (2, 3), elements=st.floats(-30, 0, width=32))


@hypothesis.given(logprob_arrays, logprob_arrays, st.floats(1, 50))
def test_the_band_treats_both_sides_alike(proximal, sampler, bound):
    kept = correct(proximal, sampler, treatment=Discrepancy.MASK, bound=bound).kept
    np.testing.assert_array_equal(kept, correct(sampler, proximal, treatment=Discrepancy.MASK, bound=bound).kept)


@hypothesis.given(logprob_arrays, logprob_arrays, st.floats(0.1, 10))
def test_a_weight_is_at_most_the_cap_and_exact_below_it(proximal, sampler, weight_cap):
    weights = correct(proximal, sampler, treatment=Discrepancy.WEIGHT, weight_cap=weight_cap).weights
    ratios = np.exp(np.clip(np.float64(proximal) - np.float64(sampler), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    np.testing.assert_allclose(weights, np.minimum(ratios, weight_cap), rtol=1e-5)


def test_an_infinite_bound_keeps_every_ratio():
    assert np.all(correct([[-30.0, 0.0]], [[0.0, -30.0]], treatment=Discrepancy.MASK, bound=np.inf).kept)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bound": 0.5}, "bound is 0.5, wanted at least 1"),
        ({"bound": np.nan}, "bound is nan, wanted at least 1"),
        ({"weight_cap": 0.0}, "cap is 0.0, wanted above 0"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        correct(PROXIMAL, SAMPLER, **options)


def test_arrays_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match=r"'sampler_logprobs': \(1, 1\).*wanted one shape \[B, T\]"):
        correct(PROXIMAL, SAMPLER[:, :1])
