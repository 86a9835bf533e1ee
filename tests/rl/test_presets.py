"""What holds for every objective, whatever its formula: only trained tokens matter, and any split is one update; and by hand."""

import dataclasses
import functools
import inspect
import operator
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl import gates, surrogates
from rl.corrections import CorrectionOptions, Discrepancy
from rl.loss_metrics import combine_metrics, finalize_metrics
from rl.losses import LossInputs, denominator_weights, loss_terms, minibatch_statistics, objective_loss
from rl.objective import Objective
from rl.presets import PRESETS
from rl.ratios import Anchor, Level
from rl.surrogates import Clip, Importance, Reinforce

SHAPE = (8, 6)
FIELDS = ("logprobs", "proximal_logprobs", "sampler_logprobs", "advantages", "entropy", "reference_logprobs")


def random_inputs(seed: int, shape=SHAPE, scale: float = 0.4) -> LossInputs:
    """Rows with holes, an empty one among them."""
    generator = np.random.default_rng(seed)
    sampler = generator.uniform(-3, -0.1, shape)
    proximal = np.minimum(sampler + generator.normal(0, scale, shape), -1e-3)
    current = np.minimum(proximal + generator.normal(0, scale, shape), -1e-3)
    mask = generator.random(shape) < 0.7
    mask[shape[0] // 2] = False
    arrays = (current, proximal, sampler, generator.normal(0, 1, shape), mask, generator.uniform(0, 2, shape),
              current + generator.normal(0, scale, shape))  # fmt: skip
    return LossInputs(*(array if array.dtype == bool else array.astype(np.float32) for array in arrays))


@functools.cache
def program(name: str):
    """(inputs) to (loss, metrics, gradient by logprobs) of a whole minibatch; one of its rows; both compiled once."""
    objective = PRESETS[name]()

    def whole(inputs):
        def loss_of(logprobs):
            return objective_loss(objective, inputs._replace(logprobs=logprobs))

        (loss, metrics), gradient = jax.value_and_grad(loss_of, has_aux=True)(inputs.logprobs)
        return loss, metrics, gradient

    return whole


def telling(*names: str) -> list:
    """All presets; those but these are slow tests."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.slow) for name in PRESETS]


# Rows, turns and minibatches beside tokens, with and without weights; the others differ from them in formulas of single tokens.
TELLING = ("decoupled_ppo", "icepop", "grpo", "gspo", "m2po", "m2po_drop", "kl_cov", "vespo", "ipa")
presets = pytest.mark.parametrize("name", telling(*TELLING))


@presets
def test_nothing_but_trained_tokens_matters(name):
    """Garbage outside the mask, and other tokens before and after: the same loss, metrics and gradient, and none outside."""
    inputs = random_inputs(1)
    inputs.mask[:, -2:] = False
    inputs.mask[-1] = False
    loss, metrics, gradient = jax.device_get(program(name)(inputs))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((loss, metrics, gradient)))
    assert np.any(gradient) == (name != "geometric_mask") and not np.any(gradient[~inputs.mask])  # these rows are all too far off
    garbage = np.random.default_rng(2).choice(np.float32([np.nan, np.inf, -np.inf, -1000, 80]), (len(FIELDS), *SHAPE))
    spoiled = {field: np.where(inputs.mask, getattr(inputs, field), garbage[index]) for index, field in enumerate(FIELDS)}
    found = jax.device_get(program(name)(inputs._replace(**spoiled)))
    jax.tree.map(np.testing.assert_array_equal, found, (loss, metrics, gradient))
    moved = jax.tree.map(lambda array: np.roll(array, (1, 2), (0, 1)), inputs)
    other_loss, other_metrics, other_gradient = jax.device_get(program(name)(moved))
    np.testing.assert_allclose(other_loss, loss, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(other_gradient, np.roll(gradient, (1, 2), (0, 1)), rtol=1e-5, atol=1e-7)
    for key in metrics:
        np.testing.assert_allclose(other_metrics[key], metrics[key], rtol=1e-5, atol=1e-6, err_msg=key)


@presets
@pytest.mark.parametrize("num_rows", [pytest.param(4, marks=pytest.mark.slow), 2, pytest.param(1, marks=pytest.mark.slow)])
def test_microbatches_of_any_size_give_one_update(name, num_rows):
    objective, inputs = PRESETS[name](), random_inputs(3)
    loss, metrics, gradient = jax.device_get(program(name)(inputs))
    statistics = minibatch_statistics(objective, inputs)
    weights = np.asarray(denominator_weights(objective, inputs.mask, statistics, longest=SHAPE[1]))

    def terms(logprobs, rows, weights, known):
        return loss_terms(objective, rows._replace(logprobs=logprobs), weights=weights, statistics=known)

    share_of = jax.value_and_grad(terms, has_aux=True)
    total, sums, gradients = 0.0, None, []
    for start in range(0, 8, num_rows):
        rows, *others = jax.tree.map(operator.itemgetter(slice(start, start + num_rows)), (inputs, weights, statistics))
        (share, share_sums), part = jax.device_get(share_of(rows.logprobs, rows, *others))
        total, sums = total + share, share_sums if sums is None else combine_metrics(sums, share_sums)
        gradients.append(part)
    np.testing.assert_allclose(np.concatenate(gradients), gradient, rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(total, loss, rtol=1e-5, atol=1e-7)
    combined = finalize_metrics(sums)
    for key in metrics:
        np.testing.assert_allclose(combined[key], metrics[key], rtol=1e-5, atol=1e-6, err_msg=key)


@presets
def test_on_policy_every_objective_is_the_policy_gradient(name):
    """All three policies equal: whatever clips, gates and weights, the coefficient of A grad log p is 1."""
    objective = PRESETS[name]()
    current = random_inputs(4).logprobs
    inputs = random_inputs(4)._replace(proximal_logprobs=current, sampler_logprobs=current, reference_logprobs=current)
    loss, metrics, gradient = jax.device_get(program(name)(inputs))
    weights = np.asarray(denominator_weights(objective, inputs.mask, minibatch_statistics(objective, inputs), longest=SHAPE[1]))
    advantages = inputs.advantages
    if isinstance(objective.surrogate, surrogates.GeometricMean) or not objective.token_gradient:  # a row has one advantage
        advantages = (np.where(inputs.mask, advantages, 0).sum(1) / np.maximum(inputs.mask.sum(1), 1))[:, None]
    expected = np.where(inputs.mask, -weights[:, None] * advantages, 0)
    left_out = {"clip_cov": np.abs(gradient) == 0}.get(name, ~inputs.mask)  # Clip-Cov takes tokens out, on policy too
    np.testing.assert_allclose(gradient[~left_out], expected[~left_out], rtol=2e-5, atol=1e-7)
    assert metrics["discrepancy_kl"] == metrics["staleness_kl"] == metrics["discrepancy_masked_fraction"] == 0


@pytest.mark.parametrize("name", telling("vespo", "gmpo"))
def test_extreme_ratios_stay_finite(name):
    """Policies 90 nats apart on either side, in rows of 2,000 tokens of +-0.05 nats beside them."""
    generator = np.random.default_rng(5)
    shape = (4, 2000)
    sampler = np.full(shape, -100.0, np.float32)
    proximal = sampler + np.float32(0.05) * np.sign(np.float32([[1], [-1], [1], [-1]]))
    current = proximal + np.float32(0.05) * np.float32([[1], [-1], [-1], [1]])
    current[2, :10], current[3, :10], proximal[0, :5], sampler[1, :5] = -1e-3, -200, -1e-3, -190
    inputs = LossInputs(current, proximal, sampler, np.repeat(generator.normal(0, 1, (4, 1)), 2000, 1).astype(np.float32),
                        np.ones(shape, bool), np.ones(shape, np.float32), proximal)  # fmt: skip
    result = jax.device_get(program(name)(inputs))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(result))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_where_it_comes_from(name):
    text = inspect.getdoc(PRESETS[name])
    assert re.search(r"\d{4}\.\d{5}|verl|prime-rl|Williams", text.splitlines()[0]), text.splitlines()[0]
    PRESETS[name]().check()
    assert PRESETS[name]() == PRESETS[name]()


# The decoupled loss, for any clip.

seeds = st.integers(0, 2**31)


def gradient_of(objective: Objective, inputs: LossInputs):
    def loss_of(logprobs):
        return objective_loss(objective, inputs._replace(logprobs=logprobs))

    (loss, metrics), gradient = jax.device_get(jax.value_and_grad(loss_of, has_aux=True)(inputs.logprobs))
    return loss, metrics, gradient


UNCORRECTED = CorrectionOptions(discrepancy=Discrepancy.NONE)


SURROGATES = (Clip(), surrogates.GradientPreservingClip(0.2, 0.28, 3.0), surrogates.SoftGate(), surrogates.GeometricMean(),
              Importance(), Reinforce(gates.Clipped()))  # fmt: skip


@hypothesis.settings(max_examples=8)
@hypothesis.given(seeds, st.sampled_from(SURROGATES))
def test_the_sampler_as_proximal_policy_gives_the_plain_method(seed, surrogate):
    inputs = random_inputs(seed)
    inputs = inputs._replace(proximal_logprobs=inputs.sampler_logprobs)
    decoupled = Objective(surrogate, correction=CorrectionOptions(discrepancy=Discrepancy.BOTH))
    plain = Objective(surrogate, ratio_anchor=Anchor.SAMPLER, correction=UNCORRECTED)
    jax.tree.map(np.testing.assert_array_equal, gradient_of(decoupled, inputs), gradient_of(plain, inputs))


@hypothesis.settings(max_examples=8)
@hypothesis.given(seeds, st.floats(0.05, 0.5), st.floats(0.05, 0.5))
def test_the_clip_fraction_is_a_manual_count(seed, low, high):
    inputs = random_inputs(seed)
    _, metrics, gradient = gradient_of(Objective(Clip(low, high), correction=UNCORRECTED), inputs)
    ratio = np.exp(np.float64(inputs.logprobs) - inputs.proximal_logprobs)
    hypothesis.assume(np.abs(ratio - (1 + high)).min() > 1e-5 and np.abs(ratio - (1 - low)).min() > 1e-5)
    count = 0
    for position in np.argwhere(inputs.mask):
        advantage, value = inputs.advantages[tuple(position)], ratio[tuple(position)]
        is_clipped = (advantage > 0 and value > 1 + high) or (advantage < 0 and value < 1 - low)
        count += is_clipped
        assert (gradient[tuple(position)] == 0) == (is_clipped or advantage == 0)
    np.testing.assert_allclose(metrics["clip_fraction"], count / inputs.mask.sum(), rtol=1e-6)


def test_gspo_and_gspo_token_agree_where_a_row_has_one_advantage():
    inputs = random_inputs(6, scale=0.05)
    inputs = inputs._replace(advantages=np.repeat(inputs.advantages[:, :1], SHAPE[1], 1))
    clip = {"surrogate": Clip(0.02, 0.02)}
    one, other = (dataclasses.replace(PRESETS[name](), **clip) for name in ("gspo", "gspo_token"))
    for mine, theirs in zip(jax.tree.leaves(gradient_of(one, inputs)), jax.tree.leaves(gradient_of(other, inputs)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)


def test_the_kept_tokens_as_denominator():
    """Half as many kept tokens, twice the weight of each."""
    inputs = random_inputs(7)
    original, kept = (Objective(correction=CorrectionOptions(discrepancy_bound=1.2), count_kept=count) for count in (False, True))
    (loss, metrics, _), (kept_loss, kept_metrics, _) = gradient_of(original, inputs), gradient_of(kept, inputs)
    assert 0 < metrics["kept_fraction"] < 1 and metrics["kept_fraction"] == kept_metrics["kept_fraction"]
    np.testing.assert_allclose(kept_loss, loss / metrics["kept_fraction"], rtol=1e-6)


def test_what_depends_on_the_minibatch_is_refused_without_it():
    with pytest.raises(ValueError, match="SecondMomentClip depends on the whole minibatch"):
        loss_terms(PRESETS["m2po"](), random_inputs(8), weights=np.ones(8, np.float32), statistics=None)


# By hand.


def terms_by_hand(objective: Objective, current, anchor, advantages):
    """Loss and gradient of one row, summed; probabilities in, of the current policy, and of the sampler and the proximal one."""
    def padded(values, fill):  # to one shape, so that each operation is compiled once
        return np.float32([[*values, *[fill] * (6 - len(values))]])

    logprobs, sampler = np.log(padded(current, 1)), np.log(padded(anchor, 1))
    inputs = LossInputs(logprobs, sampler, sampler, padded(advantages, 0), padded(np.ones(len(current)), 0) > 0)
    weights = np.ones(1, np.float32)

    def loss_of(logprobs):
        statistics = minibatch_statistics(objective, inputs)
        return loss_terms(objective, inputs._replace(logprobs=logprobs), weights=weights, statistics=statistics)[0]

    loss, gradient = jax.device_get(jax.value_and_grad(loss_of)(inputs.logprobs))
    return loss, gradient[:, : len(current)]


@pytest.mark.parametrize(("surrogate", "ratio", "advantage", "loss", "gradient"), [
    (surrogates.GradientPreservingClip(0.2, 0.28), 1.5, 1, -1.28, -1.28),  # PPO's gradient would be 0
    (surrogates.GradientPreservingClip(0.2, 0.28), 0.5, -1, 0.8, 0.8),
    (Clip(0.2, 0.28), 1.5, 1, -1.28, 0),
    (Clip(0.2, 0.28, 3.0), 8.0, -2, 6.0, 0),
    (surrogates.SoftGate(1.0, 1.05), 1.0, 1, -2.0, -1.0),  # (4 / 1) sigmoid(0), with the slope of r at 1
])  # fmt: skip
def test_surrogates_by_hand(surrogate, ratio, advantage, loss, gradient):
    found = terms_by_hand(Objective(surrogate, correction=UNCORRECTED), [0.1 * ratio], [0.1], [advantage])
    np.testing.assert_allclose([found[0], found[1][0, 0]], [loss, gradient], rtol=1e-5, atol=1e-7)


def test_dis_by_hand():
    """Of GLM-5 with 0.3 and 5: the ratio in the band, 0 outside, whatever the sign of the advantage."""
    ratios = np.array([0.5, 0.71, 1, 1.6, 5.9, 7])
    _, gradient = terms_by_hand(PRESETS["dis"](), 0.05 * ratios, [0.05] * 6, [1, -1, 1, -1, 1, -1])
    np.testing.assert_allclose(gradient[0], -np.array([0, 0.71, 1, 1.6, 5.9, 0]) * [1, -1, 1, -1, 1, -1], rtol=1e-5)


def test_dppo_by_hand():
    """A ratio of 10 between rare tokens survives; a ratio of 1.5 between likely ones does not: total variation 0.15."""
    current, sampler = np.array([0.6, 0.01, 0.3]), np.array([0.4, 0.001, 0.5])
    for advantage, coefficients in ((1, [0, 10, 0.6]), (-1, [1.5, 10, 0])):
        _, gradient = terms_by_hand(PRESETS["dppo"](), current, sampler, [advantage] * 3)
        np.testing.assert_allclose(gradient[0], -advantage * np.array(coefficients), rtol=1e-5)
    divergence = gates.binary_kl(np.log(np.float32(sampler)), np.log(np.float32(current)))
    np.testing.assert_allclose(divergence, [0.0810930, 0.0067382, 0.0871767], rtol=1e-5)


@pytest.mark.parametrize(("weight", "advantage", "phi"), [
    (2, 1, 0.1991483), (0.5, 1, 1.1204223), (2 / 3, 1, 1.2081253), (2, -1, 1.0826823), (0.5, -1, 0.3397852), (1.5, -1, 1.2415931),
    (1, 1, 1), (1, -1, 1),
])  # fmt: skip
def test_vespo_s_kernel_by_hand(weight, advantage, phi):
    _, gradient = terms_by_hand(PRESETS["vespo"](), [0.1 * weight], [0.1], [advantage])
    np.testing.assert_allclose(gradient[0, 0], -advantage * phi, rtol=1e-5)


def test_m2po_s_band_by_hand():
    """|log r| of .05, .1, .2, .4, .8, all harmful, budget .04: a band of exp(+-.2), widened to [.7, 1.5]."""
    log_ratios = np.array([0.05, 0.1, 0.2, 0.4, 0.8])
    inputs = random_inputs(0, (1, 5))._replace(mask=np.ones((1, 5), bool), advantages=np.ones((1, 5), np.float32))
    inputs = inputs._replace(logprobs=np.float32([log_ratios - 2]), sampler_logprobs=np.full((1, 5), -2, np.float32))
    tight = dataclasses.replace(PRESETS["m2po"](), surrogate=surrogates.SecondMomentClip(0.04, 0.0, 0.0))
    band = minibatch_statistics(tight, inputs).surrogate
    np.testing.assert_allclose([1 - band.clip_low.item(), 1 + band.clip_high.item()], [0.8187, 1.2214], rtol=1e-4)
    band = minibatch_statistics(PRESETS["m2po"](), inputs).surrogate
    np.testing.assert_allclose([1 - band.clip_low.item(), 1 + band.clip_high.item()], [0.7, 1.5], rtol=1e-5)
    within = inputs._replace(logprobs=np.float32([0.1 * log_ratios - 2]))
    assert minibatch_statistics(tight, within).surrogate.clip_high.item() > 1000


@pytest.mark.parametrize("seed", range(20))
def test_rounding_moves_no_token_across_m2po_s_band(seed):
    """Its end is a token's own ratio, and that token is outside: also where another mesh rounds its logprob otherwise."""
    tight = dataclasses.replace(PRESETS["m2po"](), surrogate=surrogates.SecondMomentClip(0.04, 0.0, 0.0))
    inputs = random_inputs(seed)
    statistics, weights = minibatch_statistics(tight, inputs), np.ones(len(inputs.mask), np.float32)

    def num_clipped(log_shift):
        _, sums = loss_terms(tight, inputs._replace(logprobs=inputs.logprobs + np.float32(log_shift)), weights=weights,
                             statistics=statistics)
        return round(float(finalize_metrics(sums)["clip_fraction"]) * inputs.mask.sum())

    found = {num_clipped(shift) for shift in (-3e-7, 0, 3e-7)}
    log_ratio = (inputs.logprobs - inputs.sampler_logprobs)[inputs.mask]
    harmful = log_ratio[log_ratio * inputs.advantages[inputs.mask] > 0]
    outside = np.abs(harmful) >= np.log1p(statistics.surrogate.clip_high.max())
    assert found == {outside.sum()} and outside.any()


def test_ipa_takes_the_ratio_of_turns():
    """Two turns in one row: the geometric mean of each, at most 1, weighs its negative tokens."""
    objective = PRESETS["ipa"]()
    log_ratios, mask = np.float32([[0.1, -0.5, 9, -0.2, -0.4]]), np.array([[True, True, False, True, True]])
    zeros = np.zeros_like(log_ratios)
    inputs = LossInputs(log_ratios - 2, zeros - 2, zeros - 2, zeros - 1, mask)
    _, _, gradient = gradient_of(objective, inputs)
    expected = np.exp([-0.2, -0.2, -np.inf, -0.3, -0.3]) / 4
    np.testing.assert_allclose(gradient[0], expected, rtol=1e-5)


def test_levels_of_the_ratio():
    log_ratios, mask = np.float32([[0.1, 0.3, 5.0]]), np.array([[True, True, False]])
    expected = {Level.TOKEN: [0.1, 0.3], Level.SEQUENCE: [0.4, 0.4], Level.GEOMETRIC: [0.2, 0.2], Level.SEGMENT: [0.2, 0.2]}
    for level, values in expected.items():
        objective = Objective(Reinforce(gates.Truncated()), ratio_level=level, correction=UNCORRECTED)
        zeros = jnp.zeros((1, 3))
        inputs = LossInputs(log_ratios - 6, zeros - 6, zeros - 6, zeros + 1, mask)
        _, _, gradient = gradient_of(objective, inputs)
        np.testing.assert_allclose(gradient[0, :2], -np.exp(values) / 2, rtol=1e-5)
