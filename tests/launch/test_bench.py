"""Benchmarks: found by name, refused in a sentence, their figures written as one flat object."""

import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from launch import bench
from launch.benches import _training, losses, old_logprobs
from launch.display import Display
from rl import presets
from rl.old_logprobs import SourceName


def test_names_and_help(capsys):
    assert bench.names() == ["dedicated", "losses", "old_logprobs", "ring", "sampler", "threads"]
    assert bench.main([]) == 0
    printed = capsys.readouterr().out
    assert "usage" in printed and "threads" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nosuch"], ["nosuch", "old_logprobs", "threads"]),
        (["threads", "--json", "no/such/place.json"], ["--json", "no/such"]),
        (["old_logprobs", "--plot", "no/such/place.png"], ["--plot", "no/such"]),
        (["old_logprobs", "--learner-steps", "3"], ["--learner-steps is 3", "wanted 8"]),
        (["ring", "--shape", "huge"], ["--shape is 'huge'", "smollm2_135m"]),
        (["ring", "--versions", "1"], ["at least 2 --versions"]),
        (["losses", "--shape", "huge"], ["--shape is 'huge'", "smollm2_135m"]),
        (["losses", "--repeats", "0"], ["at least 1 --rows and 1 --repeats"]),
        (["losses", "--shape", "small_3m", "--length", "513"], ["--length of 2 to 512"]),
        (["sampler", "--conversations", "16"], ["--conversations for more than all slots", "groups of 8"]),
        (["sampler", "--conversations", "20"], ["--conversations for more than all slots", "groups of 8"]),
    ],
)
def test_what_cannot_be_run_is_refused(capsys, arguments, words):
    assert bench.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and all(word in error for word in words)


@pytest.mark.slow
def test_threads_writes_its_figures(tmp_path, capsys):
    path = tmp_path / "figures.json"
    assert bench.main(["threads", "--seconds", "0.02", "--steps", "4", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert list(found) == ["share_of_ideal/0.02/0.02", "share_of_ideal/0.01/0.02", "share_of_ideal/0.02/0.01"]
    assert all(isinstance(value, float) and value > 0 for value in found.values())
    assert "share of ideal" in capsys.readouterr().out


@pytest.mark.slow
def test_the_sampler_is_timed_beside_the_machine(tmp_path, capsys):
    path = tmp_path / "figures.json"
    options = ["--shape", "small_3m", "--slots", "2", "--conversations", "0", "--calls", "4"]
    assert bench.main(["sampler", *options, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["fraction_of_limit"] == pytest.approx(found["static_tokens_per_second"] / found["limit_tokens_per_second"])
    assert found["static_tokens_per_second"] > 0 and -0.9 < found["logprobs_overhead"] < 10
    assert "the machine's limit" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_small_ring_is_filled_and_walked(tmp_path, capsys, dtype):
    path = tmp_path / "figures.json"
    options = ["--shape", "small_3m", "--versions", "3", "--warmup-updates", "2", "--rows", "1", "--length", "8"]
    assert bench.main(["ring", *options, "--publish-dtype", dtype, "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["params"] == 3_000_000 and found["versions"] == 3 and found["learning_rate"] == 1e-6
    assert found["bit_exact"] is True and found["mirror_over_copy"] == 1
    if dtype == "bfloat16":
        assert found["changed_fraction"] < 0.02 and found["host_bytes_over_copy"] < 0.05
    else:
        assert found["changed_fraction"] > 0.5 and found["host_bytes_over_copy"] < 2 * 0.6
    for name in ("step_back", "oldest_get", "put", "orbax_save", "orbax_load"):
        assert found[f"{name}_over_memcpy"] > 0
    assert "every version came back bit for bit" in capsys.readouterr().out


class FakeTraining:
    """Steps that compile nothing: real ones compile for longer than all else that the benchmark does with two presets."""

    def __init__(self, shape, *, rows, length, **options):
        assert (shape, rows, length) == ("small_3m", 1, 8)
        self.trained = []

    def change(self, objective):
        self.objective = objective

    def step(self):
        self.trained.append(self.objective)

    def published(self):
        assert self.trained == 2 * [presets.ppo(), presets.m2po()]  # once to compile, once timed
        return {"weights": np.ones((2, 3))}


@pytest.mark.parametrize("training", [FakeTraining, pytest.param(_training.Training, marks=pytest.mark.slow)])
def test_losses_are_timed_beside_the_train_step(tmp_path, monkeypatch, capsys, training):
    """Two presets: one with a reference, and one that looks at the whole minibatch."""
    monkeypatch.setattr(losses, "Training", training)
    names = ["grpo", "m2po"]
    monkeypatch.setattr(losses, "PRESETS", {name: losses.PRESETS[name] for name in names})
    path = tmp_path / "figures.json"
    options = ["--shape", "small_3m", "--rows", "1", "--length", "8", "--repeats", "1", "--json", str(path)]
    assert bench.main(["losses", *options]) == 0
    found = json.loads(path.read_text())
    shares = [f"loss_over_step_{name}" for name in names]
    assert list(found) == ["params", "rows", "length", "step_seconds", "worst_preset", "worst_loss_over_step", *shares,
                           "batch_statistics_step_over_plain"]  # fmt: skip
    assert found["params"] == (6 if training is FakeTraining else 3_000_000) and found["rows"] == 1 and found["length"] == 8
    assert all(math.isfinite(value) and value > 0 for name, value in found.items() if name != "worst_preset")
    worst = max(found[name] for name in shares)
    assert found["worst_loss_over_step"] == worst == found[f"loss_over_step_{found['worst_preset']}"]
    printed = capsys.readouterr().out
    assert "share of a step" in printed and "a forward more (m2po)" in printed


def test_old_logprobs_are_shown_drawn_and_written(tmp_path, monkeypatch, capsys):
    """What the figures themselves must be, the test of the ablation notebook says: it runs this benchmark."""
    pytest.importorskip("matplotlib", reason="matplotlib is missing; pip install -e '.[notebooks]'")
    sources = [source.value for source in SourceName]
    exact = ("snapshot", "dedicated", "interrupt")
    errors = {(name, age): 0.0 if name in exact else 0.125 * age for name in sources for age in old_logprobs.STALENESS}
    costs = {f"{name}/{count}": 1.25 for name in ("replay_over_recompute", "padded_over_scored") for count in (1, 5)}
    monkeypatch.setattr(old_logprobs, "_play", lambda options, display: SimpleNamespace(foundation=SimpleNamespace(learner=str)))
    monkeypatch.setattr(old_logprobs, "_make", lambda past, name: SimpleNamespace(inside=None))
    monkeypatch.setattr(old_logprobs, "_costs", lambda past, repetitions: costs)
    monkeypatch.setattr(
        old_logprobs,
        "_errors",
        lambda past, name, learner: {f"error_{kind}/{name}/{age}": errors.get((name, age), 0.0)
                                     for kind in ("mean", "max") for age in old_logprobs.STALENESS},
    )  # fmt: skip
    path, plot = tmp_path / "figures.json", tmp_path / "errors.png"
    assert bench.main(["old_logprobs", "--json", str(path), "--plot", str(plot)]) == 0
    found = json.loads(path.read_text())
    assert found["error_mean/lagged/8"] == 1.0 and found["error_max/ewma_w0/8"] == 0.0
    assert found["replay_over_recompute/5"] == 1.25
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["recompute", "0", "1.2e-01", "2.5e-01", "5.0e-01", "1.0e+00"] in rows and ["5", "1.25", "1.25"] in rows
    assert plot.stat().st_size > 1000
    figure = old_logprobs.draw(found)
    labels = {line.get_label(): line.get_ydata() for line in figure.axes[0].lines}
    assert list(labels) == ["\n".join(exact), *(name for name in sources if name not in exact)]
    assert list(labels["ewma"]) == [0.125 * age for age in old_logprobs.STALENESS]


@pytest.mark.slow
def test_a_dedicated_scorer_works_while_the_learner_trains(tmp_path):
    """In a process of its own: XLA's pool of threads is made when JAX starts. How long anything takes is no test's business."""
    path, command = tmp_path / "figures.json", [sys.executable, "-m", "launch.bench", "dedicated", "--steps", "3"]
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "NPROC": "32"}
    subprocess.run([*command, "--json", str(path)], env=environment, check=True, timeout=600)
    found = json.loads(path.read_text())
    assert found["wait_over_score"] >= 0 and found["score_over_train"] > 0 and found["seconds_step"] > 0


@pytest.mark.slow
def test_an_exact_source_that_is_none_is_found_out(monkeypatch):
    options = old_logprobs.Options(episodes=8, warm_start_updates=1, learner_steps=8)
    past = old_logprobs._play(options, Display(0, Console(quiet=True)))
    learner = past.foundation.learner(old_logprobs._make(past, "snapshot"))
    assert {old_logprobs._errors(past, "snapshot", learner)[f"error_max/snapshot/{age}"] for age in (0, 8)} == {0.0}
    live = past.live
    monkeypatch.setattr(past.ring, "get", lambda version: live)
    found = old_logprobs._errors(past, "snapshot", learner)
    assert found["error_max/snapshot/0"] == 0.0 and found["error_max/snapshot/8"] > 1e-4
