"""Benchmarks: found by name, refused in a sentence, their figures written as one flat object."""

import json
import os
import subprocess
import sys

import pytest
from rich.console import Console

from launch import bench
from launch.benches import old_logprobs
from launch.display import Display


def test_names_and_help(capsys):
    assert bench.names() == ["dedicated", "old_logprobs", "threads"]
    assert bench.main([]) == 0
    printed = capsys.readouterr().out
    assert "usage" in printed and "threads" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["nosuch"], ["nosuch", "old_logprobs", "threads"]), (["threads", "--json", "no/such/place.json"], ["--json", "no/such"])],
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
def test_old_logprobs_are_exact_where_they_claim_to_be(tmp_path):
    figures, plot = tmp_path / "figures.json", tmp_path / "errors.png"
    options = ["--episodes", "16", "--warm-start-updates", "10", "--learner-steps", "9", "--repetitions", "1"]
    assert bench.main(["old_logprobs", *options, "--json", str(figures), "--plot", str(plot)]) == 0
    found = json.loads(figures.read_text())
    assert plot.stat().st_size > 1000
    ages = (0, 1, 2, 4, 8)
    for age in ages:
        for source in ("snapshot", "dedicated", "interrupt"):
            assert found[f"error_max/{source}/{age}"] == 0.0
        assert found[f"error_mean/sampler/{age}"] == pytest.approx(found[f"engine_numerics/{age}"], rel=1e-6)
        assert found[f"error_mean/ewma_w0/{age}"] == found[f"error_mean/recompute/{age}"]
    assert found["error_max/recompute/0"] == 0.0 and found["error_max/lagged/1"] == 0.0
    assert found["error_mean/interpolate/0"] == pytest.approx(found["engine_numerics/0"], rel=1e-6)
    for source in ("recompute", "ewma", "interpolate", "lagged"):
        assert found[f"error_mean/{source}/8"] > found[f"error_mean/{source}/2"] > 1e-4
    assert found["error_mean/lagged/0"] > 1e-4
    assert 1 <= found["padded_over_scored/1"] <= found["padded_over_scored"] <= 1.3 and found["replay_over_recompute"] > 0


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
