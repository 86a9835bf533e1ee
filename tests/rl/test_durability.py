"""A run that is killed at any moment loses nothing it called durable. As a script, this file is such a run."""

import collections
import concurrent.futures
import contextlib
import itertools
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from rl import delta
from rl.host_copy import params_digest
from rl.snapshot_store import Difference, SnapshotStore
from rl.snapshots import SnapshotRing

ROOT = pathlib.Path(__file__).resolve().parents[2]


def params(version: int) -> dict:
    """A few MB that the version alone decides. Of two versions most of the kernel is equal, and nothing of the bias."""
    generator = np.random.default_rng(version)
    kernel = np.arange(1024 * 1536).astype(np.uint16)
    kernel[generator.integers(0, kernel.size, kernel.size // 50)] ^= np.uint16(1 + version % 1000)
    values = {
        "layer": {"kernel": kernel.reshape(1024, 1536).view(jnp.bfloat16),
                  "bias": generator.integers(0, 2**32, 2**16, dtype=np.uint32).view(np.float32)},
        "step": np.array(version, np.int32),
    }  # fmt: skip
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tensor"))
    specs = {"layer": {"kernel": P("fsdp", "tensor"), "bias": P("tensor")}, "step": P()}
    return jax.tree.map(lambda array, part: jax.device_put(array, NamedSharding(mesh, part)), values, specs)


def open_store(directory: pathlib.Path | str) -> SnapshotStore:
    return SnapshotStore(directory, keyframe_every=4)


def run(directory: str) -> None:
    """Puts and persists versions, from the one that it is told on, until it is killed."""

    def persisted(directory: str, versions: Iterable[int]) -> Iterator[int]:
        store = open_store(directory)
        ring = SnapshotRing(4, store=store, persist_every=1)
        for version in versions:
            ring.put(version, params(version))
            store.wait()
            yield version

    warm = f"{directory}-warm-{os.getpid()}"
    list(persisted(warm, range(2)))  # the first saves of a process are slow: most kills would come in them
    shutil.rmtree(warm)
    print("ready", flush=True)
    for version in persisted(directory, itertools.count(int(sys.stdin.readline()))):
        print(f"durable {version}", flush=True)


@contextlib.contextmanager
def started_runs(directory: pathlib.Path, errors: pathlib.Path):
    """Runs that wait to be told where to begin; the next one is started while one is in use, for starting takes seconds."""
    ahead, command = collections.deque(), [sys.executable, __file__, str(directory)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def start():
        with errors.open("a") as file:
            ahead.append(subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                          stderr=file))

    def get():
        start()
        return ahead.popleft()

    start()
    try:
        yield get
    finally:
        for process in ahead:
            process.kill()
            process.communicate()


def killed(process: subprocess.Popen, first: int, seconds: float) -> list[int]:
    """The versions that a run called durable before it was killed."""
    try:
        assert process.stdout.readline() == "ready\n"
        process.stdin.write(f"{first}\n")
        process.stdin.flush()
        time.sleep(seconds)
    finally:
        process.kill()
        printed, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL  # it did not stop by itself
    return [int(line.removeprefix("durable ")) for line in printed.splitlines()]


def check(store: SnapshotStore, version: int) -> None:
    expected = params(version)
    loaded = store.load(version, store.abstract(version, SingleDeviceSharding(jax.devices()[0])))
    assert store.digest(version) == params_digest(loaded) == params_digest(expected)
    for ours, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(expected), strict=True):
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def names(store: SnapshotStore) -> set[str]:
    return {path.name for path in store.directory.iterdir()} if store.directory.exists() else set()


def save_next(store: SnapshotStore, version: int) -> None:
    """A version that is told from the one before."""
    if version == 0:
        store.save(0, params(0))
    else:
        told = concurrent.futures.Future()
        store.save(version, params(version), Difference(version - 1, told))
        told.set_result(delta.encode(params(version), params(version - 1)))
    store.wait()


def kill_again_and_again(tmp_path: pathlib.Path, kills: int, seed: int) -> tuple[int, int]:
    """Kills runs that go on in one directory, and looks at it after each. Returns how many left something, and the versions."""
    moments, directory, first, num_left = random.Random(seed), tmp_path / "store", 0, 0
    with started_runs(directory, tmp_path / "errors") as start:
        for _ in range(kills):
            durable = killed(start(), first, moments.uniform(0.0, 0.6))
            assert durable == list(range(first, first + len(durable))), (tmp_path / "errors").read_text()
            store = open_store(directory)
            versions = store.versions()
            # All that was called durable, and at most one of which there was no time to say it.
            assert versions in (tuple(range(first + len(durable))), tuple(range(first + len(durable) + 1)))
            left = store.incomplete()
            assert names(store) == {store.path(version).name for version in versions} | set(left)
            assert len(left) <= 1
            for version in versions[first:]:
                check(store, version)
            newest = len(versions) - 1
            assert store.discard_after(newest) == left
            assert store.versions() == versions and store.incomplete() == [] and len(names(store)) == len(versions)
            save_next(store, newest + 1)
            check(store, newest + 1)
            num_left, first = num_left + bool(left), newest + 2
    store = open_store(directory)
    assert store.versions() == tuple(range(first)) and store.incomplete() == []
    for version in range(max(0, first - 20), first):  # the later runs have not changed what was there
        check(store, version)
    return num_left, first


def test_what_is_durable_outlives_a_kill(tmp_path):
    kill_again_and_again(tmp_path, kills=1, seed=0)


@pytest.mark.slow
def test_what_is_durable_outlives_thirty_kills(tmp_path):
    num_left, num_versions = kill_again_and_again(tmp_path, kills=30, seed=1)
    assert num_left >= 10 and num_versions >= 60  # most kills came in the middle of a save


if __name__ == "__main__":
    run(sys.argv[1])
