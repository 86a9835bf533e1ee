"""The quickstart as a user runs it, in processes of its own and with no flags but theirs: does it learn, and is it exact?"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def run(*command: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(run_dir: pathlib.Path, *options: str) -> tuple[dict, list[dict]]:
    """The summary and the metrics of a run."""
    run("launch.train", *options, "--run-dir", str(run_dir))
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return json.loads((run_dir / "summary.json").read_text()), rows


def test_the_quickstart_learns_across_versions_and_replays_exactly(tmp_path):
    summary, rows = train(tmp_path / "run", "--seed", "0")
    assert summary["success_after"] >= 0.70
    assert summary["success_after"] - summary["success_before"] >= 0.50
    assert summary["sampled_success_after"] - summary["sampled_success_before"] >= 0.40
    assert summary["fraction_multi_version"] >= 0.50 and summary["staleness_mean"] > 1
    assert summary["exactness"]["replay"] == "bitwise"
    assert summary["exactness_max_error"] == 0.0 and summary["exactness_compared_tokens"] > 10_000
    assert max(row["engine_numerics_max"] for row in rows) < 1e-4
    assert "audit passed" in run("launch.audit", str(tmp_path / "run"), "--replay", "50")


def test_without_a_learning_rate_nothing_is_learned_and_nothing_is_clipped(tmp_path):
    summary, rows = train(tmp_path / "run", "--seed", "0", "--learning-rate", "0", "--steps", "20")
    assert summary["success_after"] == summary["success_before"]
    for row in rows:
        assert row["clip_fraction"] == 0
        assert row["staleness_ratio_min"] == pytest.approx(1, abs=1e-5)
        assert row["staleness_ratio_max"] == pytest.approx(1, abs=1e-5)
