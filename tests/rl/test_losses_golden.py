"""The decoupled PPO loss against golden vectors of verl and AReaL: loss, gradient and metrics.

The mapping from the options of a reference to ours is the point of each test. Values are compared at 1e-5 of themselves or of a
thousandth of the largest entry, whichever is more: ours is a float32 program, theirs ran in float64.
"""

import functools
import json
import math
import pathlib

import jax
import numpy as np
import pytest

from rl.corrections import Discrepancy
from rl.losses import Denominator, decoupled_ppo_loss, row_weights

SHAPE = (8, 32)  # that of the largest data set
GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
INPUTS, EXPECTED = np.load(GOLDEN / "token_inputs.npz"), np.load(GOLDEN / "losses.npz")
CASES = json.loads((GOLDEN / "losses.json").read_text())["cases"]
CORRECTION_CASES = json.loads((GOLDEN / "corrections.json").read_text())["cases"]
EXPECTED_CORRECTIONS = np.load(GOLDEN / "corrections.npz")


def assert_near(actual, expected, name=""):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-8 * np.max(np.abs(expected)), err_msg=name)


def inputs_of(case):
    """The arrays [B, T] of a data set."""
    inputs = {name.partition("/")[2]: INPUTS[name] for name in INPUTS.files if name.startswith(case["dataset"] + "/")}
    return inputs | {"row_advantages": np.broadcast_to(inputs["row_advantages"][:, None], inputs["mask"].shape)}


def pad(array, value):
    """All data sets in one shape, so that few programs are compiled; what lies outside the mask must not matter."""
    padding = [(0, size - length) for size, length in zip(SHAPE, array.shape, strict=False)]  # weights have rows only
    return np.pad(array, padding, constant_values=value)


@functools.partial(jax.jit, static_argnames="discrepancy")
def evaluate(logprobs, *others, discrepancy, **options):
    loss_of = functools.partial(decoupled_ppo_loss, discrepancy=discrepancy, **options)
    return jax.value_and_grad(loss_of, has_aux=True)(logprobs, *others)


def loss_metrics_and_gradient(inputs, anchor, advantages, **options):
    names = ("logprobs", anchor, "sampler_logprobs", advantages)
    arrays = [pad(inputs[name], np.nan) for name in names]
    options = {"dual_clip": math.inf, "discrepancy_bound": 2.0, "weight_cap": 2.0} | options  # one set of names, one program
    (loss, metrics), gradient = jax.device_get(evaluate(*arrays, pad(inputs["mask"], False), **options))
    return loss, metrics, gradient[tuple(map(slice, inputs["mask"].shape))]


def aggregation_weights(case, mask):
    """Each aggregation of the references is a denominator of ours, or a constant made of the mask."""
    num_rows, num_tokens = int(np.sum(np.any(mask, axis=1))), mask.shape[1]
    constants = {
        "seq-mean-token-sum": num_rows,
        "seq-mean-token-sum-norm": num_rows * case["hyper"].get("loss_scale_factor", num_tokens),
    }
    if case["aggregation"] in constants:
        return row_weights(mask, denominator=Denominator.CONSTANT, constant=constants[case["aggregation"]])
    denominators = {"token-mean": Denominator.TOKENS, "seq-mean-token-mean": Denominator.SEQUENCES}
    return row_weights(mask, denominator=denominators[case["aggregation"]])


def verl_options(case):
    """clip_ratio unless given apart; dual clip always; its precomputed importance weights are truncated at 2."""
    hyper = case["hyper"]
    low, high = (hyper.get(name, hyper["clip_ratio"]) for name in ("clip_ratio_low", "clip_ratio_high"))
    discrepancy = Discrepancy.WEIGHT if case["rollout_is_weights"] else Discrepancy.NONE
    return {"clip_low": low, "clip_high": high, "dual_clip": hyper["clip_ratio_c"], "discrepancy": discrepancy, "weight_cap": 2.0}


def areal_options(case):
    """Dual clip if c_clip is given; `clamp` is a truncated weight; `mask` drops tokens and weights the rest."""
    hyper, rejection = case["hyper"], case["hyper"]["rejection_sampling"]
    options = {"clip_low": hyper["eps_clip"], "clip_high": hyper.get("eps_clip_higher", hyper["eps_clip"])}
    options |= {"dual_clip": hyper.get("c_clip", math.inf), "discrepancy": Discrepancy.NONE}
    if rejection is None:
        return options
    if rejection["action"] == "clamp":
        return options | {"discrepancy": Discrepancy.WEIGHT, "weight_cap": rejection["upper"]}
    assert rejection["lower"] == 1 / rejection["upper"]
    return options | {"discrepancy": Discrepancy.BOTH, "discrepancy_bound": rejection["upper"], "weight_cap": rejection["upper"]}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_loss_gradient_and_metrics(case):
    inputs = inputs_of(case)
    options = verl_options(case) if case["reference"] == "verl" else areal_options(case)
    options |= {"weights": pad(aggregation_weights(case, inputs["mask"]), 0)}
    loss, metrics, gradient = loss_metrics_and_gradient(inputs, case["anchor"], case["advantages"], **options)
    expected = {name.partition("/")[2]: EXPECTED[name] for name in EXPECTED.files if name.startswith(case["id"] + "/")}
    assert_near(loss, expected["loss"], "loss")
    assert_near(gradient, expected["grad"], "gradient")
    theirs = {
        "pg_clipfrac": "clip_fraction",
        "pg_clipfrac_lower": "dual_clip_fraction",
        "ppo_kl": "staleness_kl",
        "filtered_fraction": "discrepancy_masked_fraction",
    }
    for name in set(expected) & set(theirs):
        assert_near(metrics[theirs[name]], expected[name], name)


@pytest.mark.parametrize("case", CORRECTION_CASES, ids=lambda case: case["id"])
def test_metrics_of_the_correction(case):
    inputs, hyper = inputs_of(case), case["hyper"]
    if hyper["rollout_is"] == "token":
        options = {"discrepancy": Discrepancy.WEIGHT, "weight_cap": hyper["rollout_is_threshold"]}
    else:
        options = {"discrepancy": Discrepancy.MASK, "discrepancy_bound": float(hyper["rollout_rs_threshold"].split("_")[-1])}
    options |= {"clip_low": 0.2, "clip_high": 0.2, "weights": np.ones(SHAPE[0], np.float32)}
    _, metrics, _ = loss_metrics_and_gradient(inputs, "proximal_logprobs", "token_advantages", **options)
    theirs = {
        "kl": "discrepancy_kl",
        "k3_kl": "discrepancy_kl_k3",
        "rollout_is_mean": "discrepancy_weight_mean",
        "rollout_is_eff_sample_size": "effective_sample_fraction",
        "rollout_rs_masked_fraction": "discrepancy_masked_fraction",
    }
    prefix = case["id"] + "/"
    names = {name.removeprefix(prefix) for name in EXPECTED_CORRECTIONS.files if name.startswith(prefix)} & set(theirs)
    assert len(names) in (3, 4)
    for name in names:
        assert_near(metrics[theirs[name]], EXPECTED_CORRECTIONS[prefix + name], name)
