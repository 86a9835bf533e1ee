"""The metrics file is valid JSON at every moment, complete, and never says a step twice."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from rl.metrics import MetricsWriter, staleness_metrics
from rl.types import NO_POLICY, FinishReason, Trajectory


def make_trajectory(versions, trained=None) -> Trajectory:
    """A prompt token, then one token per version; NO_POLICY makes an environment token."""
    policy_versions = np.array([NO_POLICY, *versions], np.int32)
    sampled = policy_versions != NO_POLICY
    loss_mask = sampled if trained is None else np.array([False, *trained])
    return Trajectory(
        request_id=0, group_id=0, tokens=np.arange(len(policy_versions), dtype=np.int32), loss_mask=loss_mask,
        sampler_logprobs=np.where(sampled, -1.0, np.nan).astype(np.float32), policy_versions=policy_versions,
        context_versions=policy_versions, turn_starts=np.array([1], np.int32), reward=1.0, success=True,
        finish_reason=FinishReason.ENVIRONMENT,
    )  # fmt: skip


def strict_rows(path):
    """The rows of a file, read by a parser that refuses NaN and Infinity."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_scalars_of_every_kind_become_plain_json_values(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(1, {
            "float": 0.1, "numpy": np.float32(0.1), "zero_dimensional": np.array(2, np.int64), "jax": jnp.asarray(0.5),
            "bfloat16": jnp.asarray(1.5, jnp.bfloat16), "bool": np.bool_(True), "text": "drop", "none": None,
        })  # fmt: skip
    (row,) = strict_rows(path)
    assert row == {"step": 1, "float": 0.1, "numpy": float(np.float32(0.1)), "zero_dimensional": 2, "jax": 0.5, "bfloat16": 1.5,
                   "bool": True, "text": "drop", "none": None}
    assert row["bool"] is True and isinstance(row["zero_dimensional"], int)


def test_floats_are_written_in_full(tmp_path):
    values = np.random.default_rng(0).normal(size=50) * 1e-7
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write(0, {f"value_{index}": value for index, value in enumerate(values)})
    (row,) = strict_rows(tmp_path / "metrics.jsonl")
    assert [row[f"value_{index}"] for index in range(len(values))] == values.tolist()


def test_values_that_are_not_finite_become_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(1, {"a": math.nan, "b": -math.inf, "c": np.float32(np.inf), "d": jnp.asarray(np.nan, jnp.bfloat16)})
    assert strict_rows(path) == [{"step": 1, "a": None, "b": None, "c": None, "d": None}]


def test_a_row_can_be_read_before_the_file_is_closed(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write(1, {"loss": 2.0})
    assert strict_rows(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": 2.0}]
    writer.close()


@pytest.mark.parametrize("step", [3, 2, -1])
def test_a_step_that_does_not_increase_is_refused(tmp_path, step):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write(3, {})
        with pytest.raises(ValueError, match=f"got step {step} after step 3"):
            writer.write(step, {})
    assert len(strict_rows(tmp_path / "metrics.jsonl")) == 1


@pytest.mark.parametrize("value", [np.zeros(2), [1, 2], {"nested": 1}, object()])
def test_what_is_no_scalar_is_refused_by_name(tmp_path, value):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        with pytest.raises(ValueError, match="metric ratios is a"):
            writer.write(1, {"ratios": value})
        writer.write(1, {"ratios": 1.0})
    assert strict_rows(tmp_path / "metrics.jsonl") == [{"step": 1, "ratios": 1.0}]


def test_metrics_may_not_rename_the_step(tmp_path):
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer, pytest.raises(ValueError, match="name step 7 in the row of step 1"):
        writer.write(1, {"step": 7})


def test_a_resumed_run_writes_the_file_of_an_unbroken_one(tmp_path):
    broken, unbroken = tmp_path / "broken.jsonl", tmp_path / "unbroken.jsonl"
    with MetricsWriter(unbroken) as writer:
        for step in range(1, 7):
            writer.write(step, {"loss": step / 7})
    with MetricsWriter(broken) as writer:
        for step in range(1, 6):
            writer.write(step, {"loss": step / 7})
            if step == 3:
                state = json.loads(json.dumps(writer.state()))
    with MetricsWriter(broken) as writer:
        writer.restore(state)
        assert writer.state() == state
        for step in range(4, 7):
            writer.write(step, {"loss": step / 7})
    assert broken.read_bytes() == unbroken.read_bytes()


def test_a_half_written_row_is_cut_off_and_the_steps_go_on(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 4, "loss": 1.0}\n{"step": 5, "lo')
    with MetricsWriter(path) as writer:
        with pytest.raises(ValueError, match="after step 4"):
            writer.write(4, {})
        writer.write(5, {"loss": 2.0})
    assert strict_rows(path) == [{"step": 4, "loss": 1.0}, {"step": 5, "loss": 2.0}]


@pytest.mark.parametrize("state", [{"num_rows": 3, "last_step": 3}, {"num_rows": 1, "last_step": 2}])
def test_restore_refuses_another_file_and_leaves_it_alone(tmp_path, state):
    path = tmp_path / "metrics.jsonl"
    text = '{"step": 1}\n{"step": 2}\n'
    path.write_text(text)
    with MetricsWriter(path) as writer, pytest.raises(ValueError, match="not the file of the checkpointed run"):
        writer.restore(state)
    assert path.read_text() == text


def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("dear diary\nunfinished")
    with pytest.raises(ValueError, match="the last row is b'dear diary"):
        MetricsWriter(path)
    assert path.read_text() == "dear diary\nunfinished"


def test_staleness_of_mixed_lags_has_a_minimum_a_mean_and_a_maximum():
    metrics = staleness_metrics([make_trajectory([5]), make_trajectory([4]), make_trajectory([2])], learner_version=5)
    assert (metrics["staleness_min"], metrics["staleness_max"]) == (0.0, 3.0)
    assert metrics["staleness_mean"] == pytest.approx(4 / 3, abs=1e-12)
    assert metrics["versions_per_trajectory_max"] == 1.0 and metrics["fraction_multi_version"] == 0.0


def test_staleness_is_weighted_by_trained_tokens():
    # Trained lags: 0, 0, 0 and 3. Neither the environment's tokens nor the untrained token of version 0 count.
    trajectories = [
        make_trajectory([5, NO_POLICY, 5, 5]),
        make_trajectory([0, 2], trained=[False, True]),
        make_trajectory([1, 1], trained=[False, False]),
    ]
    metrics = staleness_metrics(trajectories, learner_version=5)
    assert [metrics[f"staleness_{name}"] for name in ("min", "mean", "max")] == [0.0, 0.75, 3.0]
    assert (metrics["versions_per_trajectory_mean"], metrics["fraction_multi_version"]) == (1.0, 0.0)


def test_versions_are_counted_per_trajectory():
    trajectories = [make_trajectory([1, 2, NO_POLICY, 3, 3]), make_trajectory([3, NO_POLICY, 3]), make_trajectory([2, 3])]
    metrics = staleness_metrics(trajectories, learner_version=3)
    assert metrics["versions_per_trajectory_mean"] == pytest.approx(2.0)
    assert metrics["versions_per_trajectory_max"] == 3.0
    assert metrics["fraction_multi_version"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("trajectories", [[], [make_trajectory([1], trained=[False])]])
def test_without_a_trained_token_staleness_is_missing_not_zero(trajectories):
    metrics = staleness_metrics(trajectories, learner_version=3)
    assert len(metrics) == 6 and all(math.isnan(value) for value in metrics.values())
