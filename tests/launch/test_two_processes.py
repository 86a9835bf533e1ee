"""One run in two processes: the same training as in one, and the end of both when one dies."""

import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from launch import audit, run_directory
from launch.build import Foundation
from rl.advantages import token_advantages
from rl.batching import make_batch
from rl.learner import Learner
from rl.ledger import read_step
from rl.snapshot_store import SnapshotStore
from rl.types import FinishReason, Trajectory
from tests.tiny import TINY_OPTIONS, rows_of

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
# Of each process two devices for the learner's mesh, two for the sampler.
OPTIONS = [*TINY_OPTIONS, "--minibatches", "1", "--fsdp", "4", "--sampler-devices", "2", "--persist-every", "1"]


def start(run_dir: pathlib.Path, *options: str) -> list[subprocess.Popen]:
    """Both processes of a run, with four devices each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"}
    command = [sys.executable, "-m", "launch.train", *options, "--run-dir", str(run_dir), "--distributed",
               "--coordinator", address, "--num-processes", "2", "--process-id"]
    return [subprocess.Popen([*command, str(number)], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT) for number in (0, 1)]


def outputs(processes: list[subprocess.Popen]) -> list[str]:
    return [process.communicate(timeout=400)[0] for process in processes]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> pathlib.Path:
    run_dir = tmp_path_factory.mktemp("runs") / "straight"
    processes = start(run_dir, "quickstart", *OPTIONS, "--steps", "5")
    printed = outputs(processes)
    assert [process.returncode for process in processes] == [0, 0], printed
    return run_dir


def trajectories(run_dir: pathlib.Path, step: int) -> list[Trajectory]:
    """What a process trained on in a learner step, from its ledger."""
    arrays = read_step(run_dir / "ledger", step)
    parts = [slice(*bounds) for bounds in zip(arrays["offsets"][:-1], arrays["offsets"][1:], strict=True)]
    per_token = ("tokens", "loss_mask", "sampler_logprobs", "policy_versions", "context_versions", "old_logprobs")
    return [
        Trajectory(
            request_id=int(arrays["request_ids"][row]), group_id=int(arrays["group_ids"][row]),
            **{name: arrays[name][part] for name in per_token}, turn_starts=np.array([], np.int32),
            reward=float(arrays["rewards"][row]), success=False, finish_reason=FinishReason.ENVIRONMENT)
        for row, part in enumerate(parts)
    ]  # fmt: skip


def test_two_processes_train_like_one(straight):
    config = run_directory.read_config(straight)
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, fsdp=1))
    foundation = Foundation.of(config)
    store = SnapshotStore(straight / "snapshots")
    learner = Learner(foundation.model, foundation.mesh, optimizer=config.optimizer, objective=config.objective, step=config.step,
                      publish_dtype=config.snapshots.publish_dtype, temperature=config.sampler.temperature, seed=config.seed)
    learner.start(store.load(0, like=foundation.published_shapes))
    for step, row in enumerate(rows_of(straight), 1):
        batch = [trajectory for part in run_directory.parts(straight) for trajectory in trajectories(part, step)]
        assert len(batch) == len({trajectory.request_id for trajectory in batch}) == row["trajectories"] == 8
        advantages = token_advantages(batch, config.objective.advantage)
        learner.step(
            make_batch(batch, proximal_logprobs=[trajectory.old_logprobs for trajectory in batch], advantages=advantages,
                       num_rows=8, length=config.model.max_length),
            version=row["version"])  # fmt: skip
        wanted = store.load(step, like=foundation.published_shapes)
        for ours, theirs in zip(jax.tree.leaves(learner.published()), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_their_counters_and_shared_figures_agree(straight):
    first, second = (rows_of(part) for part in run_directory.parts(straight))
    assert [row["step"] for row in first] == [row["step"] for row in second] == [1, 2, 3, 4, 5]
    own = {name for name in first[0] if name.startswith(("seconds", "exactness", "ring_bytes"))}
    for ours, theirs in zip(first, second, strict=True):
        assert {name: ours[name] for name in ours.keys() - own} == {name: theirs[name] for name in theirs.keys() - own}
        assert ours["exactness_error_max"] in (0.0, None) and theirs["exactness_error_max"] in (0.0, None)


def test_samplers_on_the_learner_s_devices_divide_the_weights_their_own_way(tmp_path, capsys):
    options = [*TINY_OPTIONS, "--minibatches", "1", "--fsdp", "8", "--sampler-tensor", "2", "--steps", "3"]
    processes = start(tmp_path / "run", "quickstart", *options)
    printed = outputs(processes)
    assert [process.returncode for process in processes] == [0, 0], printed
    for part in run_directory.parts(tmp_path / "run"):
        assert [row["exactness_error_max"] for row in rows_of(part)][-1] == 0.0
    assert audit.main([str(tmp_path / "run"), "--replay", "10"]) == 0
    assert "10 of 10 segments scored again" in capsys.readouterr().out


def test_both_ledgers_pass_the_audit_of_one_process(straight, capsys):
    assert audit.main([str(straight), "--replay", "40"]) == 0
    printed = capsys.readouterr().out
    assert "process-001/ledger" in printed and "40 of 40 segments scored again" in printed and "0 differ" in printed


@pytest.mark.parametrize("victim", [0, 1])
def test_the_death_of_one_ends_the_other_and_the_run_goes_on(straight, tmp_path, victim):
    run_dir = tmp_path / "run"
    processes = start(run_dir, "quickstart", *OPTIONS, "--steps", "5", "--checkpoint-every", "2")
    while not (run_dir / "metrics.jsonl").exists() or len(rows_of(run_dir)) < 3:
        assert [process.poll() for process in processes] == [None, None]
        time.sleep(0.1)
    processes[victim].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    survivor = processes[1 - victim].communicate(timeout=60)[0]
    assert time.monotonic() - killed < 60 and processes[1 - victim].returncode != 0
    assert "another process of the run is gone" in survivor or "another task died" in survivor, survivor
    resumed = start(run_dir, "--resume")
    printed = outputs(resumed)
    assert [process.returncode for process in resumed] == [0, 0], printed
    digests = [SnapshotStore(directory / "snapshots").digest(5) for directory in (straight, run_dir)]
    assert digests[0] == digests[1]
