"""A run that was stopped, killed or repeated is the same run."""

import json
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from launch import audit, train
from tests.tiny import TINY_OPTIONS, assert_same_run, rows_of

EIGHT_STEPS = ["quickstart", *TINY_OPTIONS]


def untimed(summary: dict) -> dict:
    return {name: value for name, value in summary.items() if name != "seconds" and not name.endswith("_per_second")}


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_it_had_not_been(tiny_run, tmp_path, stop_after, capsys):
    directory = tmp_path / "stopped"
    stop_after(4, signal.SIGTERM)
    assert train.main([*EIGHT_STEPS, "--checkpoint-every", "3", "--run-dir", str(directory)]) == 0
    assert "stopped after learner step 4" in capsys.readouterr().out
    assert not (directory / "summary.json").exists() and len(rows_of(directory)) == 4
    assert train.main(["--resume", "--run-dir", str(directory)]) == 0
    assert "going on after learner step 4" in capsys.readouterr().out
    assert_same_run(tiny_run, directory)
    first, second = (untimed(json.loads((run / "summary.json").read_text())) for run in (tiny_run, directory))
    assert first == second
    assert audit.main([str(directory), "--replay", "20"]) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--resume"], ["--resume", "--run-dir"]),
        (["--resume", "--run-dir", "nothing"], ["nothing", "config.json"]),
        (["--repeat", "nothing"], ["nothing", "config.json"]),
        (["--resume", "--run-dir", "nothing", "--repeat", "nothing"], ["--resume", "--repeat"]),
    ],
)
def test_what_cannot_be_gone_on_with_is_refused(tmp_path, monkeypatch, capsys, options, words):
    monkeypatch.chdir(tmp_path)
    assert train.main(options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    for word in words:
        assert word in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_threads_are_repeated_bit_by_bit(tmp_path):
    options = [*EIGHT_STEPS, "--schedule", "threads", "--fsdp", "2", "--sampler-devices", "2", "--warm-start.microbatches", "1"]
    assert train.main([*options, "--run-dir", str(tmp_path / "threads")]) == 0
    assert train.main(["--repeat", str(tmp_path / "threads"), "--run-dir", str(tmp_path / "again")]) == 0
    assert_same_run(tmp_path / "threads", tmp_path / "again")
    for run in ("threads", "again"):
        assert audit.main([str(tmp_path / run), "--replay", "20"]) == 0


def killed_and_resumed(directory: pathlib.Path, options: list[str], delays: list[float]) -> None:
    """Runs `launch.train` in processes of its own, each killed after a delay, until one ends by itself."""
    command = [sys.executable, "-m", "launch.train", *options, "--run-dir", str(directory)]
    for delay in delays:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(delay)
        process.kill()
        process.wait()
        if (directory / "summary.json").exists():  # it was faster than its killer
            return
        if (directory / "config.json").exists():
            command = [sys.executable, "-m", "launch.train", "--resume", "--run-dir", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_is_the_unbroken_run(tmp_path):
    options = [*EIGHT_STEPS, "--steps", "40", "--checkpoint-every", "4"]
    started = time.monotonic()
    killed_and_resumed(tmp_path / "straight", options, [])
    whole = time.monotonic() - started
    rng = random.Random(0)
    killed_and_resumed(tmp_path / "killed", options, [rng.uniform(0.3, 0.8) * whole for _ in range(4)])
    assert_same_run(tmp_path / "straight", tmp_path / "killed")
    assert [row["step"] for row in rows_of(tmp_path / "killed")] == list(range(1, 41))
