"""The commands as a user meets them: a small run is trained, audited, evaluated, tampered with; and what is refused."""

import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest

from launch import audit, evaluate, train
from rl.ledger import ROWS


@pytest.fixture
def copy(tiny_run, tmp_path) -> pathlib.Path:
    """A run to tamper with."""
    return pathlib.Path(shutil.copytree(tiny_run, tmp_path / "copy"))


def test_a_run_leaves_what_it_promises(tiny_run):
    summary = json.loads((tiny_run / "summary.json").read_text())
    for name in ("success_before", "success_after", "sampled_success_before", "sampled_success_after"):
        assert 0 <= summary[name] <= 1
    assert summary["exactness_max_error"] == 0.0
    assert summary["exactness_compared_tokens"] > 0
    assert summary["exactness"]["replay"] == "bitwise"
    assert summary["fraction_multi_version"] > 0
    assert summary["staleness_mean"] > 0
    assert summary["seconds"] > 0
    rows = [json.loads(line) for line in (tiny_run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [row["version"] for row in rows] == list(range(8))
    for name in (
        "reward_mean",
        "loss",
        "staleness_min",
        "staleness_mean",
        "staleness_max",
        "versions_per_trajectory_mean",
        "versions_per_trajectory_max",
        "clip_fraction",
        "discrepancy_masked_fraction",
        "active_fraction",
        "discrepancy_kl",
        "staleness_kl",
        "engine_numerics",
        "dropped_stale",
        "skipped_publishes",
        "ring_versions",
        "ring_bytes",
        "anchor_held_bytes",
        "anchor_replay_bytes",
        "anchor_host_bytes",
        "anchor_disk_bytes",
        "anchor_differences_bytes",
        "anchor_keyframes_bytes",
        "scored_tokens",
        "padded_tokens",
        "seconds_fetch",
        "seconds_score",
        "seconds_stall",
        "seconds_rollout",
        "seconds_replay",
        "seconds_train",
        "seconds_publish",
        "tokens_generated",
        "tokens_trained",
    ):
        assert name in rows[-1]
    assert (tiny_run / "report.html").read_text().startswith("<!DOCTYPE html>")
    (events,) = (tiny_run / "tensorboard").iterdir()
    assert events.read_bytes().count(b"learning/reward_mean") == 8
    config = json.loads((tiny_run / "config.json").read_text())
    assert config["versions"]["jax"]
    assert config["config"]["loop"]["groups_per_step"] == 4


def test_every_room_numbers_steps_and_versions_alike(tiny_run):
    """Metrics, ledger and snapshots must speak of the same step and the same version."""
    rows = [json.loads(line) for line in (tiny_run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in map(json.loads, (tiny_run / "ledger" / ROWS).read_text().splitlines()) if row["kind"] == "step"]
    assert [(row["step"], row["learner_version"]) for row in steps] == [(row["step"], row["version"]) for row in rows]
    assert sorted(path.name for path in (tiny_run / "snapshots").iterdir()) == [
        f"version-{version:06d}" for version in (0, 2, 4, 6, 8)
    ]


def test_the_audit_passes_and_scores_again(tiny_run, capsys):
    assert audit.main([str(tiny_run), "--replay", "50"]) == 0
    printed = capsys.readouterr().out
    assert "audit passed" in printed
    assert "50 of 50 segments scored again" in printed


def test_the_audit_passes_in_another_process(tiny_run):
    done = subprocess.run(
        [sys.executable, "-m", "launch.audit", str(tiny_run), "--replay", "20"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_altered_ledger_row_fails_the_audit(copy, capsys):
    path = copy / "ledger" / ROWS
    lines = path.read_text().splitlines()
    number = next(number for number, line in enumerate(lines) if '"segment"' in line)
    row = json.loads(lines[number])
    row["version"] += 1
    lines[number] = json.dumps(row)
    path.write_text("\n".join(lines) + "\n")
    assert audit.main([str(copy)]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_an_altered_token_fails_the_audit(copy, capsys):
    path = sorted((copy / "ledger").glob("step-*.npz"))[3]
    with np.load(path) as saved:
        arrays = dict(saved)
    arrays["tokens"][3] ^= 1
    np.savez(path, **arrays)
    assert audit.main([str(copy)]) == 1
    assert path.name in capsys.readouterr().out


def test_an_altered_snapshot_byte_fails_the_audit(copy, capsys):
    path = max(
        (path for path in (copy / "snapshots" / "version-000004").rglob("*") if path.is_file()),
        key=lambda path: path.stat().st_size,
    )
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert audit.main([str(copy)]) == 1
    assert "version 4" in capsys.readouterr().out


def test_evaluate_repeats_the_run_s_own_figures(tiny_run, tmp_path):
    figures = tmp_path / "figures.json"
    assert evaluate.main([str(tiny_run), "--json", str(figures)]) == 0
    summary, found = json.loads((tiny_run / "summary.json").read_text()), json.loads(figures.read_text())
    assert found["version"] == 8
    assert found["greedy_success"] == summary["success_after"]
    assert found["sampled_success"] == summary["sampled_success_after"]


def test_evaluate_takes_top_p_and_names_missing_versions(tiny_run, capsys):
    assert evaluate.main([str(tiny_run), "--top-p", "0.5", "--episodes", "4", "--version", "4"]) == 0
    assert evaluate.main([str(tiny_run), "--version", "5"]) == 2
    assert "0, 2, 4, 6, 8" in capsys.readouterr().err


def test_only_the_number_of_steps_may_change(tiny_run, capsys):
    assert sorted(path.name for path in (tiny_run / "checkpoints").iterdir()) == ["3", "6"]
    assert train.main(["--resume", "--run-dir", str(tiny_run), "--steps", "10", "--seed", "1"]) == 2
    assert "seed is 1, but that run has 0; only --steps may change" in capsys.readouterr().err


def test_a_finished_run_is_left_alone(tiny_run, capsys):
    before = {path: path.read_bytes() for path in tiny_run.rglob("*") if path.is_file()}
    assert train.main(["--resume", "--run-dir", str(tiny_run)]) == 2
    assert "has ended after 8 learner steps; raise --steps" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tiny_run.rglob("*") if path.is_file()} == before


def test_a_run_in_lockstep_has_no_order_to_repeat(tiny_run, tmp_path, capsys):
    assert train.main(["--repeat", str(tiny_run), "--run-dir", str(tmp_path / "again")]) == 2
    assert "interleaving.txt" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["nosuch"], ["nosuch", "quickstart"]),
        (["--top-p", "0.9"], ["--top-p", "0.9", "1"]),
        (["--ring-capacity", "4", "--max-staleness", "4"], ["4", "5", "--ring-capacity"]),
        (["--ring-capacity", "1000000"], ["1000000", "GiB", "--ring-capacity"]),
        (["--old-logprobs", "dedicated"], ["dedicated", "--scorer-devices", "--old-logprobs snapshot"]),
        (["--old-logprobs", "dedicated", "--scorer-devices", "8"], ["8", "--scorer-devices"]),
        (["--old-logprobs", "dedicated", "--scorer-devices", "1", "--ring-capacity", "4"], ["4", "5", "--ring-capacity"]),
        (["--old-logprobs", "ewma", "--ring-capacity", "2"], ["2", "5", "--ring-capacity", "--decompose-every 0"]),
        (["--old-logprobs", "dedicated", "--fsdp", "4", "--scorer-devices", "4"], ["4", "NPROC=32"]),
        (["--ring-full", "evict", "--ring-capacity", "2"], ["2", "5", "--ring-capacity"]),
        (
            ["--old-logprobs", "dedicated", "--scorer-devices", "1", "--ring-full", "evict", "--version-gone", "mask",
             "--ring-capacity", "3"],
            ["--ring-capacity is 3", "5", "chance"],
        ),
        (["--scorer-devices", "1"], ["--scorer-devices", "snapshot", "dedicated"]),
        (["--old-logprobs", "interrupt", "--ring-capacity", "0"], ["--ring-capacity", "0", "1"]),
        (["--old-logprobs", "ewma", "--ewma.decay", "1"], ["--ewma.decay", "1"]),
        (["--fsdp", "8", "--groups-per-step", "3"], ["24", "8"]),
        (["--minibatches", "7"], ["64", "7"]),
        (["--fsdp", "16"], ["16", "8"]),
        (["--tensor", "8"], ["8", "kv_heads"]),
        (["--model.max-length", "80"], ["80", "85"]),
        (["--group-size", "1"], ["1", "2"]),
        (["--model.vocab-size", "200"], ["200", "259"]),
        (["--ring-capacity", "1", "--max-staleness", "0"], ["--ring-capacity is 1", "2"]),
        (["--max-staleness", "-1"], ["--max-staleness", "-1", "0"]),
        (["--steps", "0"], ["--steps", "0"]),
        (["--temperature", "0"], ["temperature", "0"]),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(tmp_path, capsys, options, words):
    directory = tmp_path / "refused"
    assert train.main([*options, "--run-dir", str(directory)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    for word in words:
        assert word in error
    assert not directory.exists()


def test_an_unknown_option_is_refused(capsys):
    with pytest.raises(SystemExit) as exit_info:
        train.main(["--no-such-option", "3"])
    assert exit_info.value.code == 2
    assert "no-such-option" in capsys.readouterr().err


def test_a_directory_with_something_in_it_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    assert train.main(["--run-dir", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    "command", ["train", *(pytest.param(name, marks=pytest.mark.slow) for name in ("audit", "evaluate", "plan", "bench"))]
)
def test_help_works_without_a_sampler(command):
    done = subprocess.run([sys.executable, "-m", f"launch.{command}", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "usage" in done.stdout
    assert done.stderr == ""


def test_an_audit_of_nothing_says_so(tmp_path, capsys):
    assert audit.main([str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err
