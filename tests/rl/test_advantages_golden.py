"""Advantages and returns against golden vectors of verl, ROLL, SkyRL, NeMo RL, AReaL and ppo-ewma.

How a reference's function is put together from ours is the point of each test. Values are compared relative to themselves, or to
the largest entry times a floor: differences of large numbers keep the rounding of the large ones.
"""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest

from rl import returns
from rl.admission import Admission, DropReason, StalePolicy
from rl.advantages import (
    AdvantageEstimator,
    AdvantageNormalization,
    AdvantageOptions,
    group_advantages,
    overlong_penalty,
    step_advantages,
    token_advantages,
)
from rl.types import NO_POLICY, FinishReason, Trajectory

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "advantages"
FILES = ("verl_advantages", "roll_gigpo", "dapo")
CASES = [(file, case) for file in FILES for case in json.loads((GOLDEN / f"{file}.json").read_text())["cases"]]
ARRAYS = {file: np.load(GOLDEN / f"{file}.npz") for file in FILES}
ESTIMATORS = {
    "adv_grpo": AdvantageEstimator.GROUP_RELATIVE,
    "adv_dr_grpo": AdvantageEstimator.MEAN_CENTERED,
    "adv_rloo": AdvantageEstimator.LEAVE_ONE_OUT,
    "adv_opo": AdvantageEstimator.LENGTH_WEIGHTED,
    "adv_gpg": AdvantageEstimator.SCALED_BY_NONZERO,
    "adv_maxrl": AdvantageEstimator.MEAN_NORMALIZED,
}
BEST_ONLY = {True: AdvantageEstimator.BEST_ONLY_RELATIVE, False: AdvantageEstimator.BEST_ONLY}
TOLERANCE = {"f32": (1e-5, 3e-7), "f64": (1e-9, 1e-12)}  # relative; floor
SHAPE = (10, 20)  # that of the largest case: all in one shape, so that few programs are compiled


def cases_of(*functions):
    """One parameter a case, with its inputs and its outputs by precision."""
    parameters = []
    for file, case in CASES:
        if case["fn"] in functions:
            prefix = case["id"] + "/in/"
            inputs = {name.removeprefix(prefix): ARRAYS[file][name] for name in ARRAYS[file].files if name.startswith(prefix)}
            if "mask" in inputs:
                inputs["mask"] = inputs["mask"].astype(bool)
            outputs = {kind: {name: ARRAYS[file][f"{case['id']}/{kind}/{name}"] for name in names}
                       for kind, names in case["outputs"].items()}  # fmt: skip
            parameters.append(pytest.param(case, inputs, outputs, id=f"{case['id']}-{case['fn']}"))
    return parameters


def assert_near(actual, expected, tolerance):
    relative, floor = tolerance
    np.testing.assert_allclose(actual, expected, rtol=relative, atol=floor * np.max(np.abs(expected), initial=0.0))


def test_no_case_is_forgotten():
    tested = {*ESTIMATORS, *BY_TOKEN, "adv_grpo_passk", "gigpo_roll", "dapo_overlong", "dapo_dynamic_sampling"}
    assert {case["fn"] for _, case in CASES} == tested and len(CASES) == 98


def row_advantages(inputs, estimator, epsilon=1e-6):
    """Ours, and which rows are alone in their group."""
    rewards, lengths = inputs["rewards"].sum(1, dtype=np.float64), inputs["mask"].sum(1)
    everyone = np.ones(len(rewards), bool)
    values = group_advantages(rewards, inputs["group"], everyone, estimator=estimator, epsilon=epsilon, lengths=lengths)
    alone = np.sum(inputs["group"][:, None] == inputs["group"][None], axis=1) == 1
    return values, alone


@pytest.mark.parametrize(("case", "inputs", "outputs"), cases_of(*ESTIMATORS, "adv_grpo_passk"))
def test_comparison_with_the_group(case, inputs, outputs):
    hyper = case["hyper"]
    estimator = BEST_ONLY[hyper["norm_by_std"]] if case["fn"] == "adv_grpo_passk" else ESTIMATORS[case["fn"]]
    advantages, alone = row_advantages(inputs, estimator)
    np.testing.assert_array_equal(advantages[alone], 0)  # theirs: the reward, times the scale of GPG
    compared = inputs["mask"] & ~alone[:, None]
    assert np.any(compared)
    for expected in outputs.values():  # ours is computed in float64 and rounded once; their float32 is rounded on the way
        spread = np.broadcast_to(advantages[:, None], compared.shape)[compared]
        np.testing.assert_allclose(spread, expected["advantages"][compared], rtol=2e-5, atol=2e-6)
        np.testing.assert_array_equal(expected["advantages"][~inputs["mask"]], 0)


def test_their_lone_member_gets_its_reward():
    """The disagreement, stated: a group of one teaches nothing here."""
    seen = 0
    for parameter in cases_of("adv_grpo", "adv_dr_grpo", "adv_rloo", "adv_opo"):
        case, inputs, outputs = parameter.values
        advantages, alone = row_advantages(inputs, ESTIMATORS[case["fn"]])
        for row in np.flatnonzero(alone & inputs["mask"].any(1)):
            seen += 1
            theirs = outputs["f64"]["advantages"][row, inputs["mask"][row]]
            np.testing.assert_allclose(theirs, inputs["rewards"][row].sum(dtype=np.float64), rtol=2e-5)
            assert advantages[row] == 0
    assert seen


def call(function, *arrays, kind, **options):
    """One of `rl.returns`, compiled, in the precision `kind`, rows padded to one shape, NaN outside the mask, which is last."""
    *floats, mask = arrays
    dtype = {"f32": np.float32, "f64": np.float64}[kind]
    padding = [(0, size - length) for size, length in zip(SHAPE, mask.shape, strict=True)]
    floats = [np.pad(np.where(mask, array, np.nan), padding, constant_values=np.nan).astype(dtype) for array in floats]
    options = {
        name: np.pad(value, padding[: value.ndim]) if isinstance(value, np.ndarray) else value for name, value in options.items()
    }
    with jax.enable_x64(kind == "f64"):
        result = np.asarray(compiled(function)(*floats, np.pad(mask, padding), **options))
    assert result.dtype == dtype
    return result[tuple(map(slice, mask.shape))]


@functools.cache
def compiled(function):
    return jax.jit(function)


def reinforce_pp(inputs, hyper, kind):
    mask = inputs["mask"]
    values = call(returns.discounted_returns, inputs["rewards"], mask, discount=hyper["gamma"], kind=kind)
    return {"returns": values, "advantages": call(returns.whiten, values, mask, kind=kind)}


def gae(inputs, hyper, kind):
    mask = inputs["mask"]
    rates = {"discount": hyper["gamma"], "trace_decay": hyper["lam"]}
    advantages = call(returns.generalized_advantages, inputs["rewards"], inputs["values"], mask, **rates, kind=kind)
    return {"returns": advantages + inputs["values"], "advantages": call(returns.whiten, advantages, mask, kind=kind)}


def openai_gae(inputs, hyper, kind):
    """Rows of several episodes: an episode ends before the first token of the next."""
    values, ends = inputs["vpred"][:, :-1], inputs["first"][:, 1:].astype(bool)
    options = {"discount": hyper["gamma"], "trace_decay": hyper["lam"], "final_values": inputs["vpred"][:, -1], "ends": ends}
    everywhere = np.ones(values.shape, bool)
    advantages = call(returns.generalized_advantages, inputs["rewards"], values, everywhere, **options, kind=kind)
    return {"advantages": advantages, "vtarg": advantages + values}


def segment_return(inputs, hyper, kind):
    return {"returns": call(returns.segment_returns, inputs["rewards"], inputs["mask"], discount=hyper["gamma"], kind=kind)}


def remax(inputs, hyper, kind):
    values = call(returns.discounted_returns, inputs["rewards"], inputs["mask"], discount=1.0, kind=kind)
    return {"returns": values, "advantages": values - inputs["reward_baselines"][:, None].astype(values.dtype)}


def rpp_baseline(inputs, hyper, kind):
    """The batch is whitened as a whole, so their lone members, who keep their reward, are put in first."""
    advantages, alone = row_advantages(inputs, AdvantageEstimator.MEAN_CENTERED)
    advantages = np.where(alone, inputs["rewards"].sum(1), advantages)
    spread = np.broadcast_to(advantages[:, None], inputs["mask"].shape)
    return {"advantages": call(returns.whiten, spread, inputs["mask"], kind=kind)}


BY_TOKEN = {
    "adv_reinforce_pp": reinforce_pp,
    "adv_gae": gae,
    "adv_openai_gae": openai_gae,
    "adv_roll_segment_return": segment_return,
    "adv_remax": remax,
    "adv_rpp_baseline": rpp_baseline,
}


WHITENED = {  # in float64: they divide sums by N + 1e-8, which moves the mean; ours of groups are float32 before
    "adv_reinforce_pp": (1e-9, 1e-9),
    "adv_gae": (1e-9, 1e-9),
    "adv_rpp_baseline": (1e-6, 1e-7),
}


@pytest.mark.parametrize(("case", "inputs", "outputs"), cases_of(*BY_TOKEN))
def test_token_by_token(case, inputs, outputs):
    # Outside the mask theirs is garbage or what the next token has.
    mask = inputs.get("mask", np.ones(inputs["rewards"].shape, bool))
    for kind, expected in outputs.items():
        for name, values in BY_TOKEN[case["fn"]](inputs, case["hyper"], kind).items():
            tolerance = TOLERANCE[kind]
            if kind == "f64" and name == "advantages" and case["fn"] in WHITENED:
                tolerance = WHITENED[case["fn"]]
            assert_near(values[mask], expected[name][mask], tolerance)


@pytest.mark.parametrize(("case", "inputs", "outputs"), cases_of("gigpo_roll"))
def test_gigpo(case, inputs, outputs):
    hyper, expected = case["hyper"], outputs["f32"]
    options = {"divide_by_std": hyper["method"] == "mean_std"}
    # Theirs groups steps by state alone, so one id for all: among ours a state would be compared within its prompt.
    one_group = np.zeros(len(inputs["state"]), int)
    steps = step_advantages(inputs["step_rewards"], one_group, inputs["state"].tolist(), **options)
    episodes = step_advantages(inputs["episode_scores"], one_group, inputs["traj_group"].tolist(), **options)
    assert_near(steps, expected["step_norm"], TOLERANCE["f32"])
    assert_near(episodes, expected["episode_norm"], TOLERANCE["f32"])
    both = hyper["episode_weight"] * episodes + hyper["step_weight"] * steps
    assert_near(both, expected["response_level_rewards"], TOLERANCE["f32"])
    _, prompts = np.unique(inputs["traj_group"], return_inverse=True)
    apart = step_advantages(inputs["step_rewards"], prompts, inputs["state"].tolist(), **options)
    assert np.allclose(apart, steps) != hyper["state_hash_shared_across_groups"]


@pytest.mark.parametrize(("case", "inputs", "outputs"), cases_of("dapo_overlong"))
def test_overlong_penalty(case, inputs, outputs):
    hyper = case["hyper"]
    options = {"max_length": hyper["max_response_length"], "buffer": hyper["buffer"], "penalty": hyper["penalty"]}
    shaped = inputs["rewards"] + overlong_penalty(inputs["lengths"], **options)
    assert_near(shaped, outputs["f32"]["shaped"], TOLERANCE["f32"])
    assert np.any(inputs["lengths"] > hyper["max_response_length"])


def make_trajectory(request_id, group_id, reward, mask=(True,)):
    """A prompt token, then one of the policy wherever the mask is True."""
    trained = np.append(False, mask)
    authors = np.where(trained, 0, NO_POLICY).astype(np.int32)
    return Trajectory(
        request_id=request_id, group_id=int(group_id), tokens=np.zeros(len(trained), np.int32), loss_mask=trained,
        sampler_logprobs=np.where(trained, -1.0, np.nan).astype(np.float32), policy_versions=authors, context_versions=authors,
        turn_starts=np.flatnonzero(np.diff(trained.astype(int)) == 1) + 1, reward=float(reward), success=True,
        finish_reason=FinishReason.ENVIRONMENT,
    )  # fmt: skip


WITHOUT_LONE_MEMBERS = [case for case in cases_of("adv_rpp_baseline") if np.all(np.bincount(case.values[1]["group"]) != 1)]


@pytest.mark.parametrize(("case", "inputs", "outputs"), WITHOUT_LONE_MEMBERS)
def test_the_same_from_trajectories(case, inputs, outputs):
    """REINFORCE++ with a baseline on the host, where no lone member's reward is in the mean."""
    columns = zip(inputs["group"], inputs["rewards"].sum(1, dtype=np.float64), inputs["mask"], strict=True)
    trajectories = [make_trajectory(row, *column) for row, column in enumerate(columns)]
    options = AdvantageOptions(advantages=AdvantageEstimator.MEAN_CENTERED, advantage_normalization=AdvantageNormalization.WHITEN)
    advantages = np.stack(token_advantages(trajectories, options))[:, 1:]
    assert_near(advantages, outputs["f64"]["advantages"], TOLERANCE["f32"])


@pytest.mark.parametrize(("case", "inputs", "outputs"), cases_of("dapo_dynamic_sampling"))
def test_dynamic_sampling(case, inputs, outputs):
    """Groups finish in order, two generation batches of them; the learner takes the first that are not uniform."""
    hyper, expected, groups = case["hyper"], outputs["f32"], inputs["group_rewards"].astype(np.float64).tolist()
    size, needed = hyper["group_size"], hyper["prompts_needed"]
    options = {"max_staleness": len(groups), "publish_every": 1, "stale_policy": StalePolicy.DROP, "drop_uniform": True}
    if size == 1:
        # NeMo RL keeps no group of one, for its deviation is 0; verl keeps them all; here there are none.
        assert not np.any(expected["keep_group_nonzero_std"]) and np.all(expected["keep_group_verl"])
        with pytest.raises(ValueError, match="group_size is 1, wanted at least 2"):
            Admission(needed, size, **options)
        return
    admission = Admission(needed, size, **options)
    kept, complete_after, taken = [], -1, None
    for group_id, rewards in enumerate(groups):
        assert admission.credit(0 if taken is None else 1) > 0
        admission.start(group_id, range(group_id * size, (group_id + 1) * size))
        dropped = admission.dropped[DropReason.UNIFORM]
        for member, reward in enumerate(rewards):
            admission.finish(make_trajectory(group_id * size + member, group_id, reward))
        kept.append(admission.dropped[DropReason.UNIFORM] == dropped)
        if taken is None and (taken := admission.take(0)):
            complete_after = 1 + group_id // hyper["groups_per_batch"]
    np.testing.assert_array_equal(kept, expected["keep_group_nonzero_std"])
    np.testing.assert_array_equal(kept, expected["keep_group_verl"])
    assert complete_after == expected["complete_after_batch"]
    selected = [member.request_id for members in taken or [] for member in members]
    np.testing.assert_array_equal(selected, expected["selected_samples"])
