"""Corrections against pencil and paper, plain loops, and hostile values under the mask."""

import dataclasses
import math

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.corrections import (
    Correction,
    CorrectionOptions,
    Discrepancy,
    Policies,
    Statistic,
    correct,
    correction_statistics,
    discrepancy,
    entropy_normalized,
    off_policy_negatives,
    within,
    within_second_moment,
)
from rl.loss_metrics import finalize_metrics, metric_sums
from rl.ratios import LOG_RATIO_LIMIT, Level, pool

PROXIMAL, SAMPLER = np.log([[0.45, 0.22, 0.04, 0.41]]), np.log([[0.5, 0.2, 0.1, 0.4]])
RATIOS = np.array([[0.9, 1.1, 0.4, 1.025]])

UNUSED = CorrectionOptions(discrepancy=Discrepancy.NONE)
WEIGHTED = CorrectionOptions(discrepancy=Discrepancy.WEIGHT, weight_cap=math.inf)
BANDED = CorrectionOptions(discrepancy=Discrepancy.BOTH, discrepancy_bound=1.5, weight_cap=math.inf)

replace = dataclasses.replace
OPTIONS = {
    **{treatment.value: CorrectionOptions(discrepancy=treatment) for treatment in Discrepancy},
    **{
        f"both-{level.value}": replace(BANDED, discrepancy_level=level, discrepancy_bound=2.2 if level is Level.MAXIMUM else 1.5)
        for level in Level
    },
    **{
        statistic.value: replace(UNUSED, rejection=statistic, rejection_level=level, rejection_low=low, rejection_high=high)
        for statistic, level, low, high in (
            (Statistic.RATIO, Level.TOKEN, 0.7, 1.5),
            (Statistic.K1, Level.SEQUENCE, -1.0, 1.5),
            (Statistic.K2, Level.GEOMETRIC, 0.0, 0.2),
            (Statistic.K3, Level.SEGMENT, 0.05, 0.2),
            (Statistic.K3_REVERSED, Level.MAXIMUM, None, 0.25),
            (Statistic.DIFFERENCE, Level.MINIMUM, -0.1, None),
        )
    },
    "normalized": replace(BANDED, normalize_weights=True, weight_floor=0.5),
    "normalized-sequence": replace(BANDED, normalize_weights=True, discrepancy_level=Level.SEQUENCE),
    "normalized-segment": replace(BANDED, normalize_weights=True, discrepancy_level=Level.SEGMENT),
    "total": replace(WEIGHTED, total_ratio_cap=1.1, normalize_weights=True),
    "veto": replace(UNUSED, veto=0.6),
    "off-policy": replace(UNUSED, off_policy_drift=0.1),
    "entropy": replace(UNUSED, entropy_normalized_bound=0.1),
    "moment": replace(UNUSED, second_moment_budget=0.1),
    "all": CorrectionOptions(
        Discrepancy.BOTH, Level.SEGMENT, 3.0, 0.2, 1.5, 0.5, normalize_weights=True, total_ratio_cap=1.3, rejection=Statistic.K3,
        rejection_level=Level.GEOMETRIC, rejection_high=0.5, veto=0.05, off_policy_drift=0.3, entropy_normalized_bound=2.0,
        second_moment_budget=0.2,
    ),
}  # fmt: skip
BATCHED = {name: options for name, options in OPTIONS.items() if options.needs_batch}
EVERY_OPTION = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def padded(array, fill) -> np.ndarray:
    """In the shape of `Batch`: every new shape costs this file a second of compilation."""
    array = np.asarray(array)
    return np.pad(array, [(0, size - length) for size, length in zip(Batch.mask.shape, array.shape, strict=True)],
                  constant_values=fill)  # fmt: skip


def tokens_of(proximal, sampler, mask=None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Padded with NaN under the mask."""
    mask = np.ones(np.shape(proximal), bool) if mask is None else np.asarray(mask, bool)
    return padded(np.float32(proximal), np.nan), padded(np.float32(sampler), np.nan), padded(mask, False)


def by_ratio(proximal, sampler, mask=None, *, treatment=Discrepancy.BOTH, bound=2.0, weight_cap=2.0, **options) -> Correction:
    found = discrepancy(*tokens_of(proximal, sampler, mask), treatment=treatment, bound=bound, weight_cap=weight_cap, **options)
    return Correction(*(np.asarray(array)[tuple(map(slice, np.shape(proximal)))] for array in found))


def keeps(log_ratios, mask=None, **options) -> list[list[int]]:
    """1 where `within` keeps a token of these log ratios."""
    kept = np.int32(within(*tokens_of(log_ratios, np.zeros_like(log_ratios, np.float32), mask), **options))
    return kept[tuple(map(slice, np.shape(log_ratios)))].tolist()


class Batch:
    """Four rows of eight tokens: one full, two with gaps, one empty."""

    mask = np.array([[1, 1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 1, 1, 1, 0], [1, 0, 0, 1, 0, 0, 0, 0], [0] * 8], bool)
    _random = np.random.default_rng(0)
    sampler = np.float32(_random.normal(-1.5, 0.5, mask.shape))
    proximal = np.float32(sampler + _random.normal(0, 0.5, mask.shape))
    current = np.float32(proximal + _random.normal(-0.5, 0.3, mask.shape))
    advantages = np.float32(_random.choice([-1, 1], mask.shape))
    entropy = np.float32(_random.uniform(0, 2, mask.shape))
    arrays = (current, proximal, sampler, advantages, entropy)


def corrected(arrays, mask, options, statistics=None) -> Correction:
    current, proximal, sampler, advantages, entropy = map(jnp.asarray, arrays)
    return correct(Policies(current, proximal, sampler, jnp.asarray(mask)), advantages, entropy, options, statistics)


def by_hand(options, log_ratios, mask=None, *, current=None, advantages=1.0, entropy=1.0) -> Correction:
    """`correct` of a sampler of logprob 0, so that the other policies' logprobs are log ratios; cropped."""
    shape = np.shape(log_ratios)
    proximal, sampler, mask = tokens_of(log_ratios, np.zeros(shape), mask)
    current = proximal if current is None else padded(np.float32(current), np.nan)
    others = (padded(np.broadcast_to(np.float32(array), shape), np.nan) for array in (advantages, entropy))
    found = corrected((current, proximal, sampler, *others), mask, options)
    return Correction(*(np.asarray(array)[tuple(map(slice, shape))] for array in found))


def assert_same(found: Correction, wanted: Correction) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(mine, theirs)


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
    correction = by_ratio(PROXIMAL, SAMPLER, treatment=treatment, bound=1.5, weight_cap=1.05)
    np.testing.assert_allclose(correction.weights, [weights], rtol=1e-6)
    np.testing.assert_array_equal(correction.kept, np.array([kept], bool))
    np.testing.assert_allclose(correction.log_ratio, np.log(RATIOS), rtol=2e-6)
    assert correction.weights.dtype == correction.log_ratio.dtype == jnp.float32


def test_the_numerator_is_the_proximal_policy_and_not_the_sampler():
    """Pencil and paper: sampler 0.5, 0.2, 0.8; proximal 0.25, 0.3, 0.8."""
    correction = by_ratio(np.log([[0.25, 0.3, 0.8]]), np.log([[0.5, 0.2, 0.8]]), treatment=Discrepancy.WEIGHT, weight_cap=10.0)
    np.testing.assert_allclose(correction.weights, [[0.5, 1.5, 1.0]], rtol=1e-6)


def test_icepop_by_hand():
    """Weight and band together, at the published band [0.5, 5]; in the metrics a dropped token weighs nothing."""
    ratios = np.exp(-1 - np.array([[-0.5, -3.5, -0.8]]))  # 0.6065, 12.18, 0.8187
    correction = by_ratio(np.log(ratios), np.zeros((1, 3)), bound=5.0, low=0.5, weight_cap=math.inf)
    np.testing.assert_allclose(np.where(correction.kept, correction.weights, 0), [[0.6065307, 0, 0.8187308]], rtol=1e-6)
    correction = by_ratio(np.log([[0.4, 0.8, 6.0]]), np.zeros((1, 3)), bound=5.0, low=0.5, weight_cap=math.inf)
    np.testing.assert_allclose(np.where(correction.kept, correction.weights, 0), [[0, 0.8, 0]], rtol=1e-6)
    none, every = np.zeros((1, 3), bool), np.ones((1, 3), bool)
    counted = dict.fromkeys(("clipped_tokens", "dual_clipped_tokens", "active_tokens"), none)
    counted |= {"tokens": every, "finite_tokens": every, "kept_tokens": correction.kept}
    metrics = finalize_metrics(metric_sums(counted, correction, np.zeros((1, 3), np.float32)))
    np.testing.assert_allclose(metrics["discrepancy_masked_fraction"], 2 / 3, rtol=1e-6)
    np.testing.assert_allclose(metrics["effective_sample_fraction"], 1 / 3, rtol=1e-6)


@pytest.mark.parametrize(
    ("log_ratios", "kept"),
    [([0, 1, 0], [1, 0, 1]), ([0, -1, 0], [1, 0, 1]), ([0.69, -0.69, 0.7], [1, 1, 0]), ([-1, 0.5, 0.5], [0, 1, 1])],
)
def test_the_band_is_symmetric_in_log_space(log_ratios, kept):
    correction = by_ratio([log_ratios], np.zeros((1, 3)), treatment=Discrepancy.MASK, bound=2.0)
    np.testing.assert_array_equal(correction.kept, np.array([kept], bool))


@pytest.mark.parametrize(
    ("low", "kept"), [(None, [1, 1, 0, 1]), (0.95, [0, 1, 0, 1]), (0.3, [1, 1, 1, 1]), (0.0, [1, 1, 1, 1]), (1.0, [0, 1, 0, 1])]
)
def test_a_lower_end_of_its_own(low, kept):
    correction = by_ratio(PROXIMAL, SAMPLER, treatment=Discrepancy.MASK, bound=1.5, low=low)
    np.testing.assert_array_equal(correction.kept, np.array([kept], bool))


def test_an_open_lower_end_keeps_the_smallest_ratio_and_not_the_largest():
    kept = by_ratio([[-1e4, 1e4]], np.zeros((1, 2)), treatment=Discrepancy.MASK, bound=1.5, low=0.0).kept
    np.testing.assert_array_equal(kept, [[True, False]])


def test_weights_are_raised_to_the_floor():
    """Those of the mask: elsewhere a weight stays 1."""
    correction = by_ratio(PROXIMAL, SAMPLER, [[1, 1, 1, 0]], treatment=Discrepancy.WEIGHT, weight_cap=5.0, weight_floor=1.05)
    np.testing.assert_allclose(correction.weights, [[1.05, 1.1, 1.05, 1]], rtol=1e-6)


@pytest.mark.parametrize(
    ("level", "log_weights"),
    [
        (Level.TOKEN, [0.1, 0.5, 0, -0.3]),
        (Level.SEQUENCE, [0.3, 0.3, 0, 0.3]),
        (Level.GEOMETRIC, [0.1, 0.1, 0, 0.1]),
        (Level.SEGMENT, [0.3, 0.3, 0, -0.3]),
        (Level.MAXIMUM, [0.5, 0.5, 0, 0.5]),
        (Level.MINIMUM, [-0.3, -0.3, 0, -0.3]),
    ],
)
def test_levels_by_hand(level, log_weights):
    """Weights and band are of the level's ratio; `log_ratio` stays that of the token."""
    log_ratios, mask = [[0.1, 0.5, 7.0, -0.3]], [[True, True, False, True]]
    correction = by_ratio(log_ratios, np.zeros((1, 4)), mask, bound=math.exp(0.2), weight_cap=9.0, level=level)
    np.testing.assert_allclose(correction.weights, np.exp([log_weights]), rtol=1e-6)
    np.testing.assert_array_equal(correction.kept, (np.abs([log_weights]) < 0.2) & mask)
    np.testing.assert_allclose(correction.log_ratio, [[0.1, 0.5, 0, -0.3]], rtol=1e-6)


def test_numbers_of_the_unit_tests_of_others():
    """Of AReaL: geometric means, rows next to each other, caps of tokens and of rows. Of NeMo: a mean ratio of e^0.0005."""
    weigh = {"treatment": Discrepancy.WEIGHT, "weight_cap": math.inf}
    weights = by_ratio([[0, 0.5, 1]], np.zeros((1, 3)), level=Level.GEOMETRIC, **weigh).weights
    np.testing.assert_allclose(weights, np.exp([[0.5] * 3]), rtol=1e-6)
    rows, mask = [[0, 0.6, 0.3], [0, 0, 9]], [[1, 1, 1], [1, 1, 0]]
    weights = by_ratio(rows, np.zeros((2, 3)), mask, level=Level.GEOMETRIC, **weigh).weights
    np.testing.assert_allclose(weights, [np.exp([0.3] * 3), [1, 1, 1]], rtol=1e-6)
    assert by_ratio([[2.0]], [[0.0]], treatment=Discrepancy.WEIGHT, weight_cap=5.0).weights == 5
    capped = by_ratio([[0, 4, 0]], np.zeros((1, 3)), treatment=Discrepancy.WEIGHT, weight_cap=3.0, level=Level.GEOMETRIC)
    np.testing.assert_array_equal(capped.weights, [[3, 3, 3]])
    nemo = {"treatment": Discrepancy.MASK, "low": 0.999, "bound": 1.002, "level": Level.GEOMETRIC}
    assert np.all(by_ratio(np.full((1, 3), -1.0), np.full((1, 3), -1.0005), **nemo).kept)
    assert not np.any(by_ratio(np.full((1, 3), -1.0), np.full((1, 3), -1.0025), **nemo).kept)


LN2 = math.log(2)
OF_STATISTICS = {  # by hand, of ratios 2 and 1/2 in one run and 4 in another: tokens, sum, mean, runs, largest, smallest
    Statistic.RATIO: ([2, 0.5, 4], 4, 2 ** (2 / 3), [1, 1, 4], 4, 0.5),
    Statistic.K1: ([LN2, -LN2, 2 * LN2], 2 * LN2, 2 * LN2 / 3, [0, 0, 2 * LN2], 2 * LN2, -LN2),
    Statistic.K2: ([0.240227, 0.240227, 0.960906], 1.44136, 0.480453, [0.240227, 0.240227, 0.960906], 0.960906, 0.240227),
    Statistic.K3: ([0.306853, 0.193147, 1.613706], 2.113706, 0.704569, [0.25, 0.25, 1.613706], 1.613706, 0.193147),
    Statistic.K3_REVERSED: ([0.193147, 0.306853, 0.636294], 1.136294, 0.378765, [0.25, 0.25, 0.636294], 0.636294, 0.193147),
    Statistic.DIFFERENCE: ([0.25, -0.25, 0.3], 0.3, 0.1, [0, 0, 0.3], 0.3, -0.25),
}


@pytest.mark.parametrize("statistic", Statistic)
@pytest.mark.parametrize("level", Level)
def test_statistics_at_levels_by_hand(statistic, level):
    """Proximal 0.5, 0.25, 0.4 and sampler 0.25, 0.5, 0.1, with a token of another between them, and a row without tokens."""
    tokens = tokens_of(np.log([[0.5, 0.25, 0.9, 0.4]] * 2), np.log([[0.25, 0.5, 0.1, 0.1]] * 2), [[1, 1, 0, 1], [0, 0, 0, 0]])
    columns = (Level.TOKEN, Level.SEQUENCE, Level.GEOMETRIC, Level.SEGMENT, Level.MAXIMUM, Level.MINIMUM)
    values = np.broadcast_to(np.float32(OF_STATISTICS[statistic][columns.index(level)]), 3)
    for low, high, is_kept in ((-1e-5, 1e-5, True), (1e-5, 1, False), (-1, -1e-5, False)):
        found = jax.vmap(lambda low, high: within(*tokens, statistic=statistic, level=level, low=low, high=high))(
            np.maximum(values + low, 0) if statistic is Statistic.RATIO else values + low, values + high
        )
        for kept, place in zip(found, (0, 1, 3), strict=True):
            assert kept[0, place] == is_kept, (place, low, high)
            assert not np.any(kept & ~tokens[2])


def test_rejections_of_the_unit_tests_of_others():
    """Of AReaL, and of verl."""
    assert keeps([[0, 1, 0]], statistic=Statistic.RATIO, level=Level.TOKEN, high=2.0) == [[1, 0, 1]]
    assert keeps([[0, -1, 0]], statistic=Statistic.RATIO, level=Level.TOKEN, low=0.5) == [[1, 0, 1]]
    assert keeps([[0, -1, -0.3]], statistic=Statistic.K1, level=Level.TOKEN, low=-0.5, high=0.5) == [[1, 0, 1]]
    assert keeps([[0, 2, 0], [0, 1, 0]], statistic=Statistic.K2, level=Level.GEOMETRIC, high=0.5) == [[0] * 3, [1] * 3]
    assert keeps([[-1, 0.5]], statistic=Statistic.RATIO, level=Level.TOKEN, low=0.5, high=2.0) == [[0, 1]]
    assert keeps([[-1, 9]], statistic=Statistic.K1, level=Level.TOKEN, low=0.0) == [[0, 1]]


@pytest.mark.parametrize("statistic", Statistic)
def test_a_rejected_run_takes_no_other_run_along(statistic):
    """Two runs of a row, one of ratio 1 and one far from it."""
    found = keeps([[3, 3, 9, 0, 0]], [[1, 1, 0, 1, 1]], statistic=statistic, level=Level.SEGMENT, low=0.0, high=1.5)
    assert found == [[0, 0, 0, 1, 1]]


def test_ends_beyond_the_clamp_of_ratios_hold():
    """e^20 is 4.9e8: a ratio above it is still above a bound of 1e9, and one below e^-20 is still below a veto of 1e-12."""
    assert keeps([[20.5, 21]], statistic=Statistic.RATIO, level=Level.TOKEN, high=1e9) == [[1, 0]]
    assert keeps([[-30, 0], [-25, 0]], statistic=Statistic.RATIO, level=Level.MINIMUM, low=1e-12) == [[0, 0], [1, 1]]
    assert by_ratio([[20.5, 21]], np.zeros((1, 2)), treatment=Discrepancy.MASK, bound=1e9).kept.tolist() == [[True, False]]


def test_a_veto_drops_the_row_of_a_token():
    """A token without a ratio says nothing of its row, and is dropped alone."""
    log_ratios = np.log([[1, 1e-5, 1], [1, 2e-4, 1], [1, 1, np.nan]])
    exists = np.isfinite(log_ratios)
    kept = by_hand(replace(UNUSED, veto=1e-4), log_ratios, exists).kept
    np.testing.assert_array_equal(kept, np.array([[0, 0, 0], [1, 1, 1], [1, 1, 0]], bool))
    np.testing.assert_array_equal(kept, keeps(log_ratios, statistic=Statistic.RATIO, level=Level.MINIMUM, low=1e-4))


def test_off_policy_negatives_by_hand():
    """As of TRL, threshold 1: a good row may drift, a bad one by half a nat a token, by its mean, and padding is not counted."""
    gaps = np.array([[2, 2, -99], [0.5, 0.5, 99], [0.1, 2.1, -99], [3, 0.5, np.nan]])
    advantages = np.array([[1] * 3, [-1] * 3, [-1] * 3, [-1, 1, -1]])
    mask, wanted = np.array([[1, 1, 0]] * 4, bool), np.array([[0, 0, 0], [0, 0, 0], [1, 1, 0], [1, 0, 0]], bool)
    tokens = tokens_of(-gaps, np.zeros_like(gaps), mask)
    dropped = off_policy_negatives(*tokens[:2], padded(np.float32(advantages), -1), tokens[2], drift=1.0)
    np.testing.assert_array_equal(dropped, padded(wanted, False))
    options = replace(UNUSED, off_policy_drift=1.0)
    kept = by_hand(options, np.zeros_like(gaps), mask, current=-gaps, advantages=advantages).kept
    np.testing.assert_array_equal(kept, mask & ~wanted)


def test_entropy_normalized_by_hand():
    log_ratios, entropy = np.float32([[0.05, -0.2, 0.5]]), np.float32([[0.01, 1, 2]])
    np.testing.assert_allclose(entropy_normalized(log_ratios, entropy), [[0.125, 0.0396040, 0.1243781]], rtol=1e-6)
    options = replace(UNUSED, entropy_normalized_bound=0.1244)
    kept = by_hand(options, np.full((1, 3), 7.0), current=log_ratios, entropy=entropy).kept
    np.testing.assert_array_equal(kept, [[False, True, True]])  # of current / sampler, not of the proximal policy


@pytest.mark.parametrize(
    ("budget", "largest", "num_kept"), [(0.04, 0.2, 3), (0.0024, 0.05, 1), (0.1, 0.4, 4), (9.0, 0.8, 5), (1e-9, 0.05, 1)]
)
def test_second_moment_by_hand(budget, largest, num_kept):
    """The mean of 0.05^2, 0.1^2, 0.2^2 is 0.0175, and with 0.4^2 it is 0.053; one token stays, whatever the budget."""
    log_ratios, mask = np.array([[0.8, -0.05, 0.1], [9, -0.4, 0.2]]), np.array([[1, 1, 1], [0, 1, 1]], bool)
    found = by_hand(replace(UNUSED, second_moment_budget=budget), log_ratios, mask, current=np.zeros((2, 3))).kept
    np.testing.assert_array_equal(found, mask & (np.abs(log_ratios) < largest + 1e-4))
    assert np.sum(found) == num_kept


@pytest.mark.parametrize(("log_ratios", "budget", "kept"), [
    ([[5.0, 5, 5, 5]], 0.04, [[True, False, False, False]]),
    ([[0.06**0.5, 0, -(0.06**0.5), 0.06**0.5]], 0.035, [[True, True, False, False]]),
])  # fmt: skip
def test_of_equal_squares_the_earlier_stay(log_ratios, budget, kept):
    found = within_second_moment(jnp.asarray(log_ratios), jnp.ones((1, 4), bool), budget=budget)
    np.testing.assert_array_equal(found, kept)


def test_the_total_ratio_is_capped_by_lifting_the_sampler():
    """Current 0.8, proximal 0.4, sampler 0.1: the total ratio is 8; at a cap of 4 the sampler's probability counts as 0.2."""
    options = replace(WEIGHTED, total_ratio_cap=4.0)

    def found(options):
        return by_hand(options, np.log([[4, 1]]), current=np.log([[8, 1]]))

    np.testing.assert_allclose(found(options).weights, [[2, 1]], rtol=1e-6)
    np.testing.assert_allclose(found(replace(options, weight_cap=1.5)).weights, [[1.5, 1]], rtol=1e-6)
    np.testing.assert_allclose(found(replace(options, total_ratio_cap=9.0)).weights, [[4, 1]], rtol=1e-6)
    np.testing.assert_allclose(found(replace(options, normalize_weights=True)).weights, [[4 / 3, 2 / 3]], rtol=1e-6)
    banded = found(replace(options, discrepancy=Discrepancy.BOTH, discrepancy_bound=3.0))
    np.testing.assert_array_equal(banded.kept, [[False, True]])  # the band is of the ratio as it is
    np.testing.assert_allclose(banded.log_ratio, [[math.log(4), 0]], rtol=1e-6)


def test_normalized_weights_by_hand():
    """Tokens are counted, or rows where a row has one weight; a token outside the band counts, with a weight of 0."""

    def weights(**options):
        options = replace(WEIGHTED, normalize_weights=True, **options)
        return by_hand(options, np.log([[2, 2, 2], [1, 1, 1]]), [[1, 1, 1], [0, 1, 0]]).weights

    np.testing.assert_allclose(weights(), [[8 / 7] * 3, [1, 4 / 7, 1]], rtol=1e-6)
    np.testing.assert_allclose(weights(discrepancy_level=Level.GEOMETRIC), [[4 / 3] * 3, [1, 2 / 3, 1]], rtol=1e-6)
    np.testing.assert_allclose(weights(discrepancy_level=Level.MAXIMUM), [[4 / 3] * 3, [1, 2 / 3, 1]], rtol=1e-6)
    banded = weights(discrepancy=Discrepancy.BOTH, discrepancy_bound=1.5)
    np.testing.assert_allclose(banded[1], [1, 4, 1], rtol=1e-6)


def garbage_outside(mask: np.ndarray, arrays) -> list[np.ndarray]:
    values = np.float32([np.nan, np.inf, -np.inf, -1000, 5, 3e38, -3e38])
    random = np.random.default_rng(1)
    return [np.where(mask, array, random.choice(values, mask.shape)) for array in arrays]


@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_under_the_mask_matters(name):
    """For every option: weights, kept tokens and log ratios are the same bit for bit, and say nothing there.

    It says something: each option drops a part of the batch, and not all of it, or it weights it.
    """
    options = OPTIONS[name]
    clean = corrected([np.where(Batch.mask, array, -1) for array in Batch.arrays], Batch.mask, options)
    assert_same(corrected(garbage_outside(Batch.mask, Batch.arrays), Batch.mask, options), clean)
    np.testing.assert_array_equal(clean.weights[~Batch.mask], 1)
    np.testing.assert_array_equal(clean.log_ratio[~Batch.mask], 0)
    assert not np.any(clean.kept & ~Batch.mask)
    assert np.all(np.isfinite(clean.weights))
    dropped = np.sum(Batch.mask & ~clean.kept)
    assert dropped == 0 if name in ("none", "weight", "total") else 0 < dropped < np.sum(Batch.mask)


@pytest.mark.parametrize(
    "garbage", [(np.nan, 0.0), (0.0, np.nan), (-np.inf, -np.inf), (0.0, -np.inf), (-1000.0, 5.0), (np.inf, 0.0)]
)
@pytest.mark.parametrize("treatment", Discrepancy)
def test_nothing_under_the_mask_matters_to_the_ratio(treatment, garbage):
    proximal, sampler = np.hstack([PROXIMAL, [[garbage[0]]]]), np.hstack([SAMPLER, [[garbage[1]]]])
    correction = by_ratio(proximal, sampler, [[True] * 4 + [False]], treatment=treatment)
    clean = by_ratio(PROXIMAL, SAMPLER, treatment=treatment)
    np.testing.assert_array_equal(correction.weights, np.hstack([clean.weights, [[1]]]))
    np.testing.assert_array_equal(correction.kept, np.hstack([clean.kept, [[False]]]))
    np.testing.assert_array_equal(correction.log_ratio, np.hstack([clean.log_ratio, [[0]]]))


@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("treatment", Discrepancy)
def test_a_token_of_the_mask_without_a_finite_ratio_is_never_kept(treatment, level):
    """Nor is it weighted, even by a cap below 1. Its row goes on without it."""
    proximal, sampler = [[-1, -np.inf, np.nan, -1, -np.inf, -1]], [[-np.inf, -1, -1, np.nan, -np.inf, -1.3]]
    correction = by_ratio(proximal, sampler, treatment=treatment, weight_cap=0.5, level=level)
    np.testing.assert_array_equal(correction.kept, [[False] * 5 + [True]])
    weighs = treatment in (Discrepancy.WEIGHT, Discrepancy.BOTH)
    np.testing.assert_array_equal(correction.weights, [[1] * 5 + [0.5 if weighs else 1]])
    np.testing.assert_allclose(correction.log_ratio, [[0] * 5 + [0.3]], rtol=1e-6)


@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("statistic", Statistic)
def test_no_rejection_keeps_a_token_without_a_finite_ratio(statistic, level):
    tokens = tokens_of([[-1, -np.inf, np.nan, -1, -np.inf, -1]], [[-np.inf, -1, -1, np.nan, -np.inf, -1.3]])
    kept = within(*tokens, statistic=statistic, level=level, high=3.0)
    np.testing.assert_array_equal(kept, padded([[False] * 5 + [True]], False))


def test_huge_finite_logprobs_stay_finite():
    """Their log ratio is cut where it means nothing any more, and the weights, of ratios within e^20, far before."""
    lowest = np.finfo(np.float32).min
    for level in Level:
        correction = by_ratio([[lowest, 0.0]], [[0.0, lowest]], treatment=Discrepancy.WEIGHT, weight_cap=np.inf, level=level)
        np.testing.assert_array_equal(correction.log_ratio, [[-1e6, 1e6]])
        assert np.all(np.isfinite(correction.weights))
    weights = by_ratio([[lowest, 0.0]], [[0.0, lowest]], treatment=Discrepancy.WEIGHT, weight_cap=np.inf).weights
    np.testing.assert_allclose(weights, np.exp([[-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT]]), rtol=1e-5)


@pytest.mark.parametrize("log_ratio", [0.05, -0.05])
def test_weights_of_long_sequences_stay_finite(log_ratio):
    """2,000 tokens of 0.05 nats are a ratio of e^100."""
    log_ratios, zeros = np.full((1, 2000), log_ratio, np.float32), np.zeros((1, 2000), np.float32)
    correction = discrepancy(
        log_ratios, zeros, zeros == 0, bound=2.0, treatment=Discrepancy.WEIGHT, weight_cap=np.inf, level=Level.SEQUENCE
    )
    np.testing.assert_allclose(correction.weights, math.exp(math.copysign(LOG_RATIO_LIMIT, log_ratio)), rtol=1e-5)


def test_nothing_is_differentiated():
    """By no option, in no policy."""

    def total(policies):
        corrections = [corrected((*policies, *Batch.arrays[3:]), Batch.mask, options) for options in OPTIONS.values()]
        return sum(jnp.sum(correction.weights) + jnp.sum(correction.log_ratio) for correction in corrections)

    for gradient in jax.grad(total)(tuple(map(jnp.asarray, Batch.arrays[:3]))):
        np.testing.assert_array_equal(gradient, 0)


@EVERY_OPTION
def test_everything_traces(options):
    """With strict dtypes, and with numbers that are traced themselves."""
    numbers = {name: value for name, value in dataclasses.asdict(options).items() if type(value) is float}
    traced = jax.eval_shape(
        lambda arrays, numbers: corrected(arrays, Batch.mask, replace(options, **numbers)), Batch.arrays, numbers
    )
    assert [array.dtype for array in traced] == [jnp.float32, jnp.bool_, jnp.float32]
    assert all(array.shape == Batch.mask.shape for array in traced)


def test_compiled_and_traced_options_compute_the_same():
    options = OPTIONS["all"]
    numbers = {name: value for name, value in dataclasses.asdict(options).items() if type(value) is float}
    compiled = jax.jit(lambda arrays, numbers: corrected(arrays, Batch.mask, replace(options, **numbers)))(Batch.arrays, numbers)
    eager = corrected(Batch.arrays, Batch.mask, options)
    np.testing.assert_array_equal(compiled.kept, eager.kept)
    np.testing.assert_allclose(compiled.weights, eager.weights, rtol=1e-6)


@pytest.mark.parametrize("options", BATCHED.values(), ids=BATCHED)
def test_parts_with_the_statistics_of_the_whole_are_as_the_whole(options):
    whole = corrected(Batch.arrays, Batch.mask, options)
    statistics = correction_statistics(Policies(*Batch.arrays[:3], Batch.mask), options)
    for rows in (slice(0, 2), slice(2, 4)):  # the other rows are there, so that no new shape is compiled, and not in the mask
        mask = np.zeros_like(Batch.mask)
        mask[rows] = Batch.mask[rows]
        part = corrected(Batch.arrays, mask, options, statistics)  # rows of it are these rows' own
        assert_same(Correction(*(array[rows] for array in part)), Correction(*(array[rows] for array in whole)))


def test_which_options_need_what():
    assert set(BATCHED) == {"normalized", "normalized-sequence", "normalized-segment", "total", "moment", "all"}
    policies = Policies(*Batch.arrays[:3], Batch.mask)
    weight_mean, within_budget = correction_statistics(policies, OPTIONS["both"])
    np.testing.assert_array_equal(weight_mean, np.ones((len(Batch.mask), 1)))
    np.testing.assert_array_equal(within_budget, Batch.mask)


logprob_arrays = hypothesis.extra.numpy.arrays(np.float32, Batch.mask.shape, elements=st.floats(-30, 0, width=32))
token_arrays = hypothesis.extra.numpy.arrays(np.float32, Batch.mask.shape, elements=st.floats(-9, 9, width=32))
masks = hypothesis.extra.numpy.arrays(np.bool_, Batch.mask.shape)


def pooled_by_loops(values: np.ndarray, mask: np.ndarray, level: Level) -> np.ndarray:
    """What `pool` says, token by token."""
    found = np.zeros(values.shape)
    for row, (of_row, in_row) in enumerate(zip(np.float64(values), mask, strict=True)):
        for place in np.flatnonzero(in_row):
            first = last = place
            while first > 0 and in_row[first - 1]:
                first -= 1
            while last + 1 < len(in_row) and in_row[last + 1]:
                last += 1
            whole, run = of_row[in_row], of_row[first : last + 1]
            found[row, place] = {
                Level.TOKEN: of_row[place], Level.SEQUENCE: sum(whole), Level.GEOMETRIC: sum(whole) / len(whole),
                Level.SEGMENT: sum(run) / len(run), Level.MAXIMUM: max(whole), Level.MINIMUM: min(whole),
            }[level]  # fmt: skip
    return found


@pytest.mark.parametrize("level", Level)
@hypothesis.example(values=-Batch.entropy, mask=Batch.mask)  # all of one sign, so that no 0 of the padding may be the largest
@hypothesis.example(values=Batch.entropy, mask=Batch.mask)
@hypothesis.given(values=token_arrays, mask=masks)
def test_pool_is_a_loop(level, values, mask):
    np.testing.assert_allclose(pool(values, mask, level), pooled_by_loops(values, mask, level), rtol=1e-5, atol=1e-5)


@hypothesis.given(logprob_arrays, logprob_arrays, st.floats(1, 50))
def test_the_band_treats_both_sides_alike(proximal, sampler, bound):
    kept = by_ratio(proximal, sampler, treatment=Discrepancy.MASK, bound=bound).kept
    np.testing.assert_array_equal(kept, by_ratio(sampler, proximal, treatment=Discrepancy.MASK, bound=bound).kept)


@hypothesis.given(logprob_arrays, logprob_arrays, st.floats(0.1, 10))
def test_a_weight_is_at_most_the_cap_and_exact_below_it(proximal, sampler, weight_cap):
    weights = by_ratio(proximal, sampler, treatment=Discrepancy.WEIGHT, weight_cap=weight_cap).weights
    ratios = np.exp(np.clip(np.float64(proximal) - np.float64(sampler), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    np.testing.assert_allclose(weights, np.minimum(ratios, weight_cap), rtol=1e-5)


@hypothesis.given(token_arrays, masks, st.sampled_from(Level), st.floats(0.5, 10))
def test_normalized_weights_have_mean_one(log_ratios, mask, level, weight_cap):
    """Over tokens, or over rows where a row has one weight; where there are any."""
    options = replace(WEIGHTED, normalize_weights=True, discrepancy_level=level, weight_cap=weight_cap)
    weights = by_hand(options, log_ratios, mask).weights
    if level in (Level.TOKEN, Level.SEGMENT):
        counted = weights[mask]
    else:
        counted = np.array([row[tokens][0] for row, tokens in zip(weights, mask, strict=True) if tokens.any()])
    if counted.size:
        np.testing.assert_allclose(np.mean(counted), 1, rtol=1e-5)
    np.testing.assert_array_equal(weights[~mask], 1)


def test_an_infinite_bound_keeps_every_ratio():
    assert np.all(by_ratio([[-30.0, 0.0]], [[0.0, -30.0]], treatment=Discrepancy.MASK, bound=np.inf).kept)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bound": 0.5}, "bound is 0.5, wanted at least 1"),
        ({"bound": np.nan}, "bound is nan, wanted at least 1"),
        ({"low": 1.5}, r"lower end of the discrepancy band is 1.5, wanted in \[0, 1\]"),
        ({"weight_cap": 0.0}, "cap is 0.0, wanted above 0"),
        ({"weight_floor": 3.0}, "floor is 3.0, wanted from 0 to the cap, 2.0"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        by_ratio(PROXIMAL, SAMPLER, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"discrepancy_bound": 0.5}, "bound is 0.5, wanted at least 1"),
        ({"rejection": Statistic.K1}, "give a statistic and an end, or neither"),
        ({"rejection_high": 1.0}, "rejection is None with the ends None and 1.0"),
        ({"rejection": Statistic.K1, "rejection_low": 2.0, "rejection_high": 1.0}, "keeps from 2.0 to 1.0, which is nothing"),
        ({"rejection": Statistic.RATIO, "rejection_low": -0.7}, "wanted at least 0; give no logarithms"),
        ({"total_ratio_cap": 2.0}, "total_ratio_cap is 2.0 but discrepancy is 'mask', which weights nothing"),
        ({"normalize_weights": True}, "normalize_weights is True but discrepancy is 'mask'"),
        ({"discrepancy": Discrepancy.WEIGHT, "total_ratio_cap": 0.0}, "total_ratio_cap is 0.0, wanted above 0"),
        ({"veto": 0.0}, "veto is 0.0, wanted above 0"),
        ({"off_policy_drift": -0.1}, "off_policy_drift is -0.1, wanted at least 0"),
        ({"entropy_normalized_bound": np.nan}, "entropy_normalized_bound is nan, wanted above 0"),
        ({"second_moment_budget": -1}, "second_moment_budget is -1, wanted above 0"),
    ],
)
def test_corrections_without_a_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CorrectionOptions(**options).check()
    with pytest.raises(ValueError, match=message):
        corrected(Batch.arrays, Batch.mask, CorrectionOptions(**options))


def test_arrays_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match=r"'sampler_logprobs': \(1, 1\).*wanted one shape \[B, T\]"):
        discrepancy(PROXIMAL, SAMPLER[:, :1], np.ones((1, 4), bool), treatment=Discrepancy.MASK, bound=2.0, weight_cap=2.0)
    with pytest.raises(ValueError, match=r"'sampler_logprobs': \(1, 1\).*wanted one shape \[B, T\]"):
        within(PROXIMAL, SAMPLER[:, :1], np.ones((1, 4), bool), statistic=Statistic.K1, level=Level.TOKEN, low=0.0)
    with pytest.raises(ValueError, match=r"'advantages': \(1, 1\).*wanted one shape \[B, T\]"):
        off_policy_negatives(PROXIMAL, SAMPLER, SAMPLER[:, :1], np.ones((1, 4), bool), drift=1.0)
