"""Corrections against golden vectors of verl, ROLL, a fork of ROLL, and slime: weights, masks, metrics.

The mapping from a reference's options to ours is the point of each test. Both precisions in which the references ran are compared
with the same program of ours: float32 at 1e-5, float64 at 1e-9, and masks exactly.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.corrections import Correction, CorrectionOptions, Discrepancy, Policies, Statistic, correct, correction_statistics, within
from rl.loss_metrics import finalize_metrics, metric_sums
from rl.ratios import Level, pool
from tests.golden_cases import Case, assert_near, cases, cropped

DTYPES = {"f32": np.float32, "f64": np.float64}
TOLERANCES = {"f32": 1e-5, "f64": 1e-9}
ROUGH = {"f32": 1e-5, "f64": 2e-5}  # ROLL rounds to float32 inside, even where it ran in float64
METRICS = {"f32": 1e-5, "f64": 1e-6}  # verl takes means of indicators in float32, and adds 1e-8 to denominators
PRECISIONS = pytest.mark.parametrize("precision", [pytest.param("f32", marks=pytest.mark.slow), "f64"])

UNUSED = CorrectionOptions(discrepancy=Discrepancy.NONE)
WEIGHTED = CorrectionOptions(discrepancy=Discrepancy.WEIGHT, weight_cap=math.inf)
BANDED = dataclasses.replace(WEIGHTED, discrepancy=Discrepancy.BOTH)
LEVELS = {"token": Level.TOKEN, "sequence": Level.SEQUENCE, "geometric": Level.GEOMETRIC, "segment": Level.SEGMENT}


def evaluate(case: Case, precision: str, options: CorrectionOptions, *rejections: dict) -> tuple[Correction, np.ndarray]:
    """Of all data sets at once: the correction of tokens that all of the filters keep, and the mean of the weights.

    Weights are times that mean again where they are divided by it: the references count for it each in their own way, so it is
    compared for itself, and the weights without it.
    """

    def one(proximal, sampler, mask):
        zeros = jnp.zeros_like(proximal)
        policies = Policies(proximal, proximal, sampler, mask)
        found, factor = correct(policies, zeros, zeros, options), jnp.ones((), proximal.dtype)
        if options.normalize_weights:
            factor = correction_statistics(policies, options).weight_mean[0, 0]
            found = found._replace(weights=jnp.where(mask, found.weights * factor, 1))
        for rejection in rejections:
            found = found._replace(kept=found.kept & within(proximal, sampler, mask, **rejection))
        return found, factor

    with jax.enable_x64(precision == "f64"):
        return jax.device_get(jax.vmap(one)(*logprobs_of(case, precision), case.mask))


def metrics_of(case: Case, precision: str, found: Correction) -> dict[str, np.ndarray]:
    """Of all data sets at once."""

    def one(found, mask):
        counted = dict.fromkeys(("clipped_tokens", "dual_clipped_tokens", "active_tokens"), jnp.zeros_like(mask))
        counted |= {"tokens": mask, "finite_tokens": mask, "kept_tokens": found.kept}
        return finalize_metrics(metric_sums(counted, found, jnp.zeros_like(found.log_ratio)))

    with jax.enable_x64(precision == "f64"):
        return jax.device_get(jax.vmap(one)(found, case.mask))


def logprobs_of(case: Case, precision: str) -> list[np.ndarray]:
    """Of the proximal policy and of the sampler, [datasets, 8, 32]; what lies under the mask is not finite everywhere."""
    return [case.inputs(case.arguments[name]).astype(DTYPES[precision]) for name in ("train", "behave")]


def assert_all_near(case: Case, precision: str, tolerance: float, name: str, ours: np.ndarray) -> None:
    for dataset, (mine, theirs) in zip(case.datasets, cropped(ours, case.expected(name, precision)), strict=True):
        assert_near(mine, theirs, tolerance, f"{name} on {dataset}")


def assert_all_equal(case: Case, precision: str, name: str, ours: np.ndarray) -> None:
    for dataset, (mine, theirs) in zip(case.datasets, cropped(ours, case.expected(name, precision)), strict=True):
        np.testing.assert_array_equal(mine, theirs.astype(bool), err_msg=f"{name} on {dataset}")


def verl_weights(options: dict) -> CorrectionOptions:
    if options["rollout_is"] is None:
        return UNUSED
    threshold, shared = options["rollout_is_threshold"], {
        "discrepancy_level": LEVELS[options["rollout_is"]], "normalize_weights": options.get("rollout_is_batch_normalize", False)
    }  # fmt: skip
    if isinstance(threshold, str):
        low, high = map(float, threshold.split("_"))
        return dataclasses.replace(BANDED, discrepancy_low=low, discrepancy_bound=high, **shared)
    return dataclasses.replace(WEIGHTED, weight_cap=threshold, **shared)


def verl_rejections(options: dict) -> list[dict]:
    """verl's k1 is minus the log ratio, its bounds are ratios, and one bound alone is the upper one."""
    levels = {"token": Level.TOKEN, "seq_sum": Level.SEQUENCE, "seq_mean": Level.GEOMETRIC, "seq_max": Level.MAXIMUM}
    rejections = []
    if options.get("rollout_rs"):
        for name, threshold in zip(options["rollout_rs"].split(","), options["rollout_rs_threshold"].split(","), strict=True):
            level, _, statistic = name.rpartition("_")
            rejections.append({"statistic": Statistic(statistic), "level": levels[level]})
            high = float(threshold.split("_")[-1])
            if statistic == "k1":
                low = float(threshold.split("_")[0]) if "_" in threshold else 1 / high
                rejections[-1] |= {"low": -math.log(high), "high": -math.log(low)}
            else:
                rejections[-1]["high"] = high
    return rejections


@pytest.mark.parametrize("case", cases("corrections/verl_rollout_corr"), ids=repr)
@PRECISIONS
def test_verl(case, precision):
    options, rejections = verl_weights(case.options), verl_rejections(case.options)
    weighted, factor = evaluate(case, precision, options)
    metrics = metrics_of(case, precision, weighted)
    compared = {"kl": metrics["discrepancy_kl"], "k3_kl": metrics["discrepancy_kl_k3"], "rollout_is_batch_norm_factor": factor}
    if case.has("metric/rollout_is_mean"):  # of weights before normalisation and rejection
        compared["rollout_is_mean"] = metrics["discrepancy_weight_mean"] * metrics["kept_fraction"]
        compared["rollout_is_eff_sample_size"] = metrics["effective_sample_fraction"]
        compared["rollout_is_oob_ratio"] = metrics["discrepancy_masked_fraction"]
        if options.discrepancy_level is Level.TOKEN:  # of a sequence, verl's is before the cap
            compared["rollout_is_max"] = metrics["discrepancy_weight_max"]
    mask = case.mask
    if rejections:
        found, _ = evaluate(case, precision, UNUSED, *rejections)
        mask = found.kept
        compared["rollout_rs_masked_fraction"] = metrics_of(case, precision, found)["discrepancy_masked_fraction"]
    assert_all_equal(case, precision, "modified_mask", mask)
    for name, ours in compared.items():
        if case.has(f"metric/{name}"):
            assert_all_near(case, precision, METRICS[precision], f"metric/{name}", ours)
    if case.has("weights"):  # verl's IcePop has a weight of 0 for what leaves our mask; its counts are larger by 1e-8
        theirs = case.expected("metric/rollout_is_batch_norm_factor", precision) if options.normalize_weights else np.ones(5)
        weights = np.where(weighted.kept, weighted.weights, 0) / np.asarray(theirs)[:, None, None]
        assert_all_near(case, precision, TOLERANCES[precision], "weights", weights)


def roll_rejections(options: dict) -> list[dict]:
    """A filter is up to two of ours, one of the ratio and one of the difference of probabilities, at one level."""
    return [
        {"statistic": statistic, "level": LEVELS[entry["agg_type"]], "low": entry[f"{name}_low"], "high": entry[f"{name}_high"]}
        for entry in options["filters"]
        for name, statistic in (("ratio", Statistic.RATIO), ("diff", Statistic.DIFFERENCE))
        if entry["enabled"] and entry[f"{name}_enabled"]
    ]


@pytest.mark.parametrize("case", cases("corrections/roll_train_infer"), ids=repr)
@PRECISIONS
def test_roll(case, precision):
    weight = case.options["is_weight"]
    options = UNUSED
    if weight["enabled"]:
        cap = math.inf if weight["upper_bound"] is None else weight["upper_bound"]
        options = dataclasses.replace(WEIGHTED, weight_cap=cap, discrepancy_level=LEVELS[weight["weight_type"]])
    found, _ = evaluate(case, precision, options, *roll_rejections(case.options))
    assert_all_near(case, precision, ROUGH[precision], "is_weight", np.where(case.mask, found.weights, 0))
    assert_all_equal(case, precision, "final_mask", found.kept)
    if case.has("metric/final_mask_mean"):
        kept_fraction = metrics_of(case, precision, found)["kept_fraction"]
        assert_all_near(case, precision, METRICS[precision], "metric/final_mask_mean", kept_fraction)


@pytest.mark.parametrize("level", LEVELS)
def test_levels_of_roll(level):
    """What its filters look at, whatever their bounds; it clamps no log ratio.

    In float64 alone: where the difference of two float32 probabilities is small, its digits are those of their rounding.
    """
    case, precision = cases("corrections/roll_train_infer")[0], "f64"
    proximal, sampler = (np.where(case.mask, logprobs, 0) for logprobs in logprobs_of(case, precision))
    with jax.enable_x64(True):
        pooled = jax.vmap(lambda values, mask: pool(values, mask, LEVELS[level]))
        ratio = np.where(case.mask, np.exp(pooled(proximal - sampler, case.mask)), 0)
        difference = pooled(np.exp(proximal) - np.exp(sampler), case.mask)
    assert_all_near(case, precision, ROUGH[precision], f"ratio_{level}", ratio)
    assert_all_near(case, precision, ROUGH[precision], f"diff_{level}", difference)
    counts = case.mask.sum(axis=2)
    of_rows = ratio.sum(axis=2) / np.maximum(counts, 1)
    of_datasets = of_rows.sum(axis=1) / np.count_nonzero(counts, axis=1)
    assert_all_near(case, precision, ROUGH[precision], f"metric/ratio_{level}_seqmean", of_datasets)


@pytest.mark.parametrize("case", cases("corrections/roll_infer_correction_fork"), ids=repr)
@PRECISIONS
def test_fork_of_roll(case, precision):
    given, options, rejections = case.options, UNUSED, []
    if given["infer_is_mode"] != "None":
        options = CorrectionOptions(
            discrepancy=Discrepancy.WEIGHT, discrepancy_level=LEVELS[given["infer_is_mode"]],
            weight_floor=given["infer_is_threshold_min"], weight_cap=given["infer_is_threshold_max"],
        )  # fmt: skip
    if given["enable_catastrophic_reject"]:
        options = dataclasses.replace(options, veto=given["infer_catastrophic_threshold"])
    for level, name in ((given["enable_token_reject"] and "token", "token"), (given["enable_seq_reject"], "seq")):
        if level:
            ends = {end: given[f"infer_{name}_mask_threshold_{side}"] for end, side in (("low", "min"), ("high", "max"))}
            rejections.append({"statistic": Statistic.RATIO, "level": LEVELS[level], **ends})
    found, _ = evaluate(case, precision, options, *rejections)
    assert_all_near(case, precision, ROUGH[precision], "is_weight", np.where(case.mask, found.weights, 0))
    assert_all_equal(case, precision, "keep_mask", found.kept)


@pytest.mark.parametrize("case", cases("corrections/slime_mis"), ids=repr)
@PRECISIONS
def test_slime(case, precision):
    given = case.options
    low, high = given["tis_lower_bound"], given["tis_upper_bound"]
    options = {
        "truncate": dataclasses.replace(WEIGHTED, weight_cap=high),
        "clip": dataclasses.replace(WEIGHTED, weight_cap=high, weight_floor=low),
        "mask": dataclasses.replace(BANDED, discrepancy_bound=high, discrepancy_low=low),
    }[given["tis_mode"]]
    options = dataclasses.replace(
        options, discrepancy_level=LEVELS[given["tis_level"]], normalize_weights=given["tis_batch_normalize"],
        veto=given["rs_veto_threshold"],
    )  # fmt: skip
    if given["use_rs"]:
        options = dataclasses.replace(options, rejection=Statistic.RATIO, rejection_level=LEVELS[given["rs_level"]],
                                      rejection_low=given["rs_lower_bound"], rejection_high=given["rs_upper_bound"])  # fmt: skip
    found, factor = evaluate(case, precision, options)
    assert_all_equal(case, precision, "modified_mask", found.kept)
    if given["tis_batch_normalize"]:
        if options.discrepancy_level is not Level.TOKEN:  # slime counts rows without tokens, with a weight of 0
            num_rows = [len(theirs) for theirs in case.expected("weights", precision)]
            factor = factor * np.count_nonzero(case.mask.any(axis=2), axis=1) / num_rows
        assert_all_near(case, precision, TOLERANCES[precision], "metric/batch_norm_factor", factor)
    weights = np.where(case.mask, found.weights, 0) / factor[:, None, None]
    assert_all_near(case, precision, TOLERANCES[precision], "weights", weights)
