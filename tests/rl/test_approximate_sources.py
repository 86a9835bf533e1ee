"""What is used in place of the old logits: each against its definition, the numbers of its authors' code, and its limits."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.config import Precision
from rl.old_logprobs import EwmaAverage, EwmaOptions, Interpolation, SourceName
from rl.old_logprobs.approximate import EwmaSource, LaggedSource
from rl.old_logprobs.interpolation import interpolate
from rl.scorer import Bucket, RowScore
from rl.types import NO_POLICY, FinishReason, Trajectory
from tests.tiny import assert_same_weights, rows_of, tiny_config, tiny_loop, tiny_rooms, without_times

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
INPUTS = np.load(GOLDEN / "inputs.npz")


def golden(name):
    return json.loads((GOLDEN / f"{name}.json").read_text())["cases"], np.load(GOLDEN / f"{name}.npz")


# --- interpolation ---


def anchor(form, sampler, current, versions, learner_version):
    arrays = (np.atleast_2d(np.asarray(array, np.float32)) for array in (current, sampler))
    return np.asarray(interpolate(*arrays, np.atleast_2d(np.asarray(versions, np.int32)), np.int32(learner_version), form=form))


@pytest.mark.parametrize("case", golden("losses/prox_approx")[0], ids=lambda case: case["id"])
def test_areal_s_numbers(case):
    arrays, version, mask = golden("losses/prox_approx")[1], case["hyper"]["current_version"], True
    if "dataset" in case:  # outside the mask of a data set the reference saw other values
        names = ("rollout_logp", "logp", "versions", "mask")
        sampler, current, versions, mask = (INPUTS[f"{case['dataset']}/{name}"] for name in names)
    else:
        sampler, current, versions = (arrays[f"{case['id']}/in/{name}"] for name in ("behave", "theta", "versions"))
    names = {Interpolation.AREAL_LOGLINEAR: "loglinear", Interpolation.AREAL_LINEAR: "linear"}
    expected = {form: arrays[f"{case['id']}/f32/{name}"] for form, name in names.items()}
    for form, theirs in expected.items():
        found = anchor(form, sampler, current, versions, version)
        np.testing.assert_allclose(np.where(mask, found, 0), np.where(mask, np.atleast_2d(theirs), 0), rtol=2e-6, atol=2e-6)


def test_numbers_by_hand():
    """Of AReaL's own unit tests: half way at an age of two versions, three quarters at four."""
    found = anchor(Interpolation.AREAL_LOGLINEAR, [-1, -2, -3], [-1.5, -2.5, -3.5], [0, 0, 0], 2)
    np.testing.assert_allclose(found, [[-1.25, -2.25, -3.25]])
    found = anchor(Interpolation.A3PO, [-1, -2, -1, -1], [-1.5, -2.2, -3, -3], [0, 2, 3, 4], 4)
    np.testing.assert_allclose(found, [[-1.375, -2.1, -1, -1]], rtol=1e-6)  # one version old, and fresh: the sampler's
    found = anchor(Interpolation.AREAL_LINEAR, np.log([0.5]), np.log([0.25]), [0], 2)
    np.testing.assert_allclose(found, [[np.log(0.375)]], rtol=1e-6)


LOGPROBS = st.floats(-12, 0, width=32)


@given(st.lists(st.tuples(LOGPROBS, LOGPROBS, st.integers(-1, 12)), min_size=1, max_size=8), st.integers(0, 10))
def test_an_interpolation_lies_between_and_a3po_is_areal_s_log_linear_one(tokens, learner_version):
    sampler, current, versions = zip(*tokens, strict=True)
    found = {form: anchor(form, sampler, current, versions, learner_version) for form in Interpolation}
    np.testing.assert_allclose(found[Interpolation.A3PO], found[Interpolation.AREAL_LOGLINEAR], rtol=1e-5, atol=1e-5)
    low, high = np.minimum(sampler, current), np.maximum(sampler, current)
    for rows in found.values():
        assert (rows >= low - 1e-4).all() and (rows <= high + 1e-4).all()
    fresh = np.asarray(versions) >= learner_version
    np.testing.assert_array_equal(found[Interpolation.A3PO][0][fresh], np.asarray(sampler, np.float32)[fresh])


def test_a_token_that_no_policy_sampled_meets_no_infinity():
    found = anchor(Interpolation.A3PO, [np.nan, -1], [-np.inf, -np.inf], [NO_POLICY, 3], 3)
    assert np.isnan(found[0, 0]) and found[0, 1] == -1


# --- EWMA, and the previous version ---


class RecordingScorer:
    """Keeps the parameters that it is asked to score with."""

    params = None

    def start(self, params, rows):
        self.params = params
        return lambda: [RowScore(np.zeros(len(row), np.float32), Bucket(len(rows), 8)) for row in rows]


TRAJECTORY = Trajectory(
    request_id=0, group_id=0, tokens=np.arange(3, dtype=np.int32), loss_mask=np.array([False, True, True]),
    sampler_logprobs=np.array([np.nan, -1, -1], np.float32), policy_versions=np.array([NO_POLICY, 0, 1], np.int32),
    context_versions=np.array([NO_POLICY, 0, 1], np.int32), turn_starts=np.array([], np.int32), reward=0.0, success=False,
    finish_reason=FinishReason.LENGTH)  # fmt: skip


def anchor_params(source, scorer, version=0):
    """What a source scores with."""
    anchored = source.anchor([TRAJECTORY], version, None)
    np.testing.assert_array_equal(anchored.proximal_logprobs[0], np.array([np.nan, 0, 0], np.float32))
    assert anchored.trajectories[0].old_logprobs is None
    return scorer.params


def ewma(scorer=None, *, max_staleness=4, precision=Precision.FLOAT32, **options):
    return EwmaSource(scorer or RecordingScorer(), EwmaOptions(**options), max_staleness=max_staleness, precision=precision)


def publish(source, version, theta, master=None):
    theta = jax.tree.map(jnp.asarray, theta)
    source.published(version, theta, theta if master is None else jax.tree.map(jnp.asarray, master))


@pytest.mark.parametrize("decay", sorted({case["decay"] for case in golden("ewma")[0]}))
def test_openai_s_numbers_with_resets(decay):
    cases, arrays = golden("ewma")
    scorer = RecordingScorer()
    source = ewma(scorer, decay=decay)
    num_resets = 0
    for case in (case for case in cases if case["decay"] == decay):
        theta = {name: arrays[f"{case['theta']}/{name}"] for name in "wbs"}
        resets = {0, *case["resets"]}  # the first one ends the case before it
        for step in range(len(theta["w"])):
            source.trained(0.5 if step in resets else 1.0)
            publish(source, step, {name: leaf[step] for name, leaf in theta.items()})
            for name, leaf in anchor_params(source, scorer).items():
                np.testing.assert_allclose(leaf, arrays[f"{case['id']}/{name}"][step], rtol=2e-5, atol=2e-6)
        num_resets += len(resets)
    assert source.metrics()["ewma_resets"] == num_resets


@pytest.mark.parametrize(
    ("window", "wanted"),
    [
        (0, [0, 1, 2, 3, 4]),
        (2, [0, 0.6666667, 1.4285714, 2.2666667, 3.1612903]),
        (4, [0, 0.6, 1.2631579, 1.9846154, 2.7582938]),
        (8, [0, 0.5555556, 1.147541, 1.7750678, 2.4369348]),
    ],
)
def test_the_closed_form_lags_in_the_middle_of_the_window(window, wanted):
    scorer = RecordingScorer()
    source = ewma(scorer, max_staleness=window)
    found = []
    for version in range(5):
        publish(source, version, {"w": np.float32(version)})
        found.append(float(anchor_params(source, scorer)["w"]))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    for version in range(5, 200):
        publish(source, version, {"w": np.float32(version)})
    assert float(anchor_params(source, scorer)["w"]) == pytest.approx(199 - window / 2, abs=1e-3)


def test_the_average_is_kept_in_float32_and_scores_as_a_policy_does():
    scorer = RecordingScorer()
    source = ewma(scorer, decay=0.5, precision=Precision.BFLOAT16)
    for version in range(400):  # steps that bfloat16 cannot hold
        publish(source, version, {"w": np.float32(1 + version * 1e-5)})
    assert anchor_params(source, scorer)["w"].dtype == jnp.bfloat16
    restored = ewma(scorer, decay=0.5, precision=Precision.FLOAT32)
    restored.restore(source.state(), {"w": jnp.zeros((), jnp.bfloat16)})
    publish(restored, 400, {"w": np.float32(1)})  # it went on from 1.00398, which bfloat16 would call 1.00781 or 1
    assert float(anchor_params(restored, scorer)["w"]) == pytest.approx((1.00398 + 1) / 2, abs=1e-5)


def test_the_master_weights_can_be_averaged_instead():
    scorer = RecordingScorer()
    source = ewma(scorer, window=0, average=EwmaAverage.MASTER)
    publish(source, 0, {"w": np.float32(1)}, {"w": np.float32(2)})
    assert float(anchor_params(source, scorer)["w"]) == 2


def test_a_reset_waits_for_the_next_publish_and_only_the_threshold_decides():
    scorer = RecordingScorer()
    source = ewma(scorer, decay=0.5, reset_below=0.9)
    publish(source, 0, {"w": np.float32(0)})
    source.trained(0.9)  # not below
    publish(source, 1, {"w": np.float32(3)})
    assert float(anchor_params(source, scorer)["w"]) == pytest.approx(2)
    for fraction in (0.89, 0.2):  # two learner steps without a publish between them: one reset
        source.trained(fraction)
    assert float(anchor_params(source, scorer)["w"]) == pytest.approx(2)
    publish(source, 2, {"w": np.float32(9)})
    assert float(anchor_params(source, scorer)["w"]) == 9 and source.metrics()["ewma_resets"] == 1
    never = ewma(scorer, decay=0.5, reset_below=0.0)
    publish(never, 0, {"w": np.float32(0)})
    never.trained(0.0)
    publish(never, 1, {"w": np.float32(3)})
    assert float(anchor_params(never, scorer)["w"]) == pytest.approx(2) and never.metrics()["ewma_resets"] == 0


@pytest.mark.parametrize("options", [{"decay": 1.0}, {"decay": -0.1}, {"window": -1}, {"reset_below": 1.5}])
def test_options_out_of_range_are_refused(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"--ewma.{name.replace('_', '-')} is .* wanted"):
        EwmaOptions(**options).check()


def test_lagged_is_the_version_before():
    scorer = RecordingScorer()
    source = LaggedSource(scorer)
    found = []
    for version in range(3):
        publish(source, version, {"w": np.float32(version)})
        found.append(float(anchor_params(source, scorer)["w"]))
    assert found == [0, 0, 1]


# --- in a run ---


def config_of(name, **changes):
    config = tiny_config(**changes)
    snapshots = dataclasses.replace(config.snapshots, old_logprobs=name, ring_capacity=1, decompose_every=0)
    return dataclasses.replace(config, snapshots=snapshots)


@pytest.mark.slow
@pytest.mark.parametrize("name", [SourceName.EWMA, SourceName.LAGGED])
def test_a_resumed_run_goes_on_with_the_same_anchor(tmp_path, name):
    config = config_of(name)
    straight = tiny_loop(tmp_path / "straight", config)
    straight.run(4)
    state = straight.state()
    straight.run(7)
    straight._rooms.store.wait()
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    resumed = tiny_rooms(tmp_path / "resumed", config)
    resumed.restore(state)
    resumed.run(7)
    assert_same_weights(straight, resumed)
    assert without_times(rows_of(tmp_path / "straight")) == without_times(rows_of(tmp_path / "resumed"))


@pytest.mark.slow
def test_too_old_an_anchor_resets_the_average(tmp_path):
    config = config_of(SourceName.EWMA)
    config = dataclasses.replace(
        config,
        optimizer=dataclasses.replace(config.optimizer, learning_rate=3e-2),
        ewma=EwmaOptions(decay=0.95),
        steps=12,
    )
    loop = tiny_loop(tmp_path, config)
    loop.run(12)
    rows = rows_of(tmp_path)
    assert rows[-1]["ewma_resets"] > 0
    first = next(index for index, row in enumerate(rows) if row["ewma_resets"])
    assert rows[first]["active_fraction"] < 0.9 and all(row["active_fraction"] >= 0.9 for row in rows[:first])
    assert rows[first]["ewma_publishes"] == 1  # begun anew


def test_a_source_without_a_ring_keeps_one_version_and_skips_no_publish(tmp_path):
    tiny_loop(tmp_path, config_of(SourceName.RECOMPUTE)).run(8)
    rows = rows_of(tmp_path)
    assert {row["ring_versions"] for row in rows} == {1} and rows[-1]["skipped_publishes"] == 0
    assert rows[-1]["versions_per_trajectory_max"] == 5
    assert rows[-1]["padded_tokens"] >= rows[-1]["scored_tokens"] > 0
