"""The snapshot ring: what does it cost to keep every version exactly?

Real AdamW steps on random weights of a shape; each step's policy is put into a ring. Times are medians, as ratios to a plain copy
of the same bytes from memory to memory, measured in between; and Orbax writes and reads a version whole, for comparison.
"""

import concurrent.futures
import contextlib
import dataclasses
import pathlib
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
import numpy as np
import psutil
from orbax.checkpoint import v1 as ocp

from launch.benches._training import Training, check_shape
from launch.config import ConfigError
from launch.display import Display
from models.config import Precision
from models.transformer import Params
from rl.host_copy import host_copy, params_digest
from rl.snapshot_store import SnapshotStore
from rl.snapshots import SnapshotRing

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Options:
    """What is kept, and how many versions of it."""

    shape: str = "smollm2_135m"  # or small_3m
    learning_rate: float = 1e-6
    versions: int = 8
    warmup_updates: int = 8  # optimizer steps before the first version; Adam's first ones are its largest
    rows: int = 2  # sequences in a learner step
    length: int = 128  # tokens in each
    publish_dtype: Precision = Precision.BFLOAT16
    seed: int = 0


def run(options: Options, display: Display) -> dict[str, float | int | bool]:
    """Figures; bytes are over those of one version, times over those of copying it in memory."""
    check_shape(options.shape)
    if options.versions < 2 or options.rows < 1 or options.length < 2 or options.warmup_updates < 0:
        raise ConfigError("wanted at least 2 --versions, 1 --rows, a --length of 2 and no negative --warmup-updates")
    training = Training(
        options.shape,
        rows=options.rows,
        length=options.length,
        learning_rate=options.learning_rate,
        publish_dtype=options.publish_dtype,
        seed=options.seed,
    )
    display.phase(f"compiling, and {options.warmup_updates} steps before the first version")
    for _ in range(max(options.warmup_updates, 1)):
        training.step()
    meter = _Meter(training.published())
    with tempfile.TemporaryDirectory() as directory:
        store = SnapshotStore(pathlib.Path(directory) / "snapshots")
        ring = SnapshotRing(options.versions, store=store, persist_every=1)
        figures, digests = _fill(ring, store, training, meter, display, options.versions)
        display.phase("walking from the newest version to the oldest, and fetching single ones")
        figures |= _fetch(ring, digests, meter)
        figures["disk_bytes_over_copy"] = _disk_bytes(store) / meter.nbytes
        del ring
        display.phase("Orbax writes and reads one version whole")
        figures |= _plain_orbax(pathlib.Path(directory) / "orbax", training.published(), meter)
    display.phase("learner steps with the ring and without")
    figures |= _steps(training, options.versions)
    num_params = sum(leaf.size for leaf in jax.tree.leaves(training.published()))
    figures = {"params": num_params, "versions": options.versions, "learning_rate": options.learning_rate, **figures}
    _show(figures, display, meter)
    return figures


class _Meter:
    """Times things, and a copy of one version beside each; and watches the memory."""

    def __init__(self, params: Params):
        shards = host_copy(params).shards.values()
        self._source = np.concatenate([shard.reshape(-1).view(np.uint8) for shard in shards])
        self._target = np.ones_like(self._source)
        self.nbytes = self._source.nbytes
        self._copies: list[float] = []
        self.peak = 0.0  # most resident memory above that at the start, in versions

    @property
    def copy_seconds(self) -> float:
        return statistics.median(self._copies)

    def timed(self, function: Callable[[], T]) -> tuple[T, float]:
        """What it returns, and its seconds."""
        for _ in range(3):
            self._copies.append(_seconds(lambda: np.copyto(self._target, self._source)))
        started = time.perf_counter()
        result = function()
        return result, time.perf_counter() - started

    def seconds(self, function: Callable[[], object]) -> float:
        return self.timed(function)[1]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within it, `peak` grows to the most that is resident."""
        process, stop = psutil.Process(), threading.Event()
        before = process.memory_info().rss

        def watch() -> int:
            most = before
            while not stop.wait(0.001):
                most = max(most, process.memory_info().rss)
            return most

        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            watcher = thread.submit(watch)
            try:
                yield
            finally:
                stop.set()
            self.peak = max(self.peak, (watcher.result() - before) / self.nbytes)


def _seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def _fill(
    ring: SnapshotRing, store: SnapshotStore, training: Training, meter: _Meter, display: Display, num_versions: int
) -> tuple[dict[str, float], list[str]]:
    """Steps and puts, and what the puts cost; and the digest of each version."""
    digests, puts, calls, saves, mirror = [], [], [], [], 0
    for version in range(num_versions):
        display.phase(f"version {version + 1} of {num_versions}")
        if version:
            training.step()
        params = training.published()

        def put(version=version, params=params) -> None:
            calls.append(_seconds(lambda: ring.put(version, params)))
            _ = ring.nbytes  # waits until it is encoded

        with meter.watching():
            puts.append(meter.seconds(put))
        saves.append(_seconds(store.wait))
        mirror = ring.nbytes if version == 0 else mirror
        digests.append(params_digest(params))
    deltas = ring.nbytes - mirror
    changed = [store.difference(version).num_changed for version in range(1, num_versions)]
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    copy = meter.copy_seconds
    return {
        "host_bytes_over_copy": deltas / meter.nbytes,
        "mirror_over_copy": mirror / meter.nbytes,
        "changed_fraction": statistics.mean(changed) / size,
        "put_over_memcpy": statistics.median(puts[1:]) / copy,
        "put_call_over_memcpy": statistics.median(calls[1:]) / copy,
        "put_peak_over_copy": meter.peak,
        "persist_over_memcpy": statistics.median(saves[1:]) / copy,
    }, digests


def _fetch(ring: SnapshotRing, digests: list[str], meter: _Meter) -> dict[str, float | bool]:
    """What versions cost to get, in order and singly; and whether they are what was put."""
    *older, newest = range(len(digests))
    steps, beside, exact = [], [], True
    for times, keeps in ((steps, False), (beside, True)):
        for _ in range(2):
            with ring.walk():
                params = ring.get(newest)
                for version in reversed(older):
                    if not keeps:
                        del params
                    params, seconds = meter.timed(lambda version=version: jax.block_until_ready(ring.get(version)))
                    times.append(seconds)
                    exact &= params_digest(params) == digests[version]
                del params
    exact &= params_digest(ring.get(newest)) == digests[newest]
    meter.peak = 0.0
    with meter.watching():
        oldest = [meter.seconds(lambda: jax.block_until_ready(ring.get(older[0]))) for _ in range(5)]
    copy = meter.copy_seconds
    return {
        "step_back_over_memcpy": statistics.median(steps) / copy,
        "step_beside_over_memcpy": statistics.median(beside) / copy,
        "oldest_get_over_memcpy": statistics.median(oldest) / copy,
        "get_peak_over_copy": meter.peak,
        "bit_exact": bool(exact),
    }


def _plain_orbax(path: pathlib.Path, params: Params, meter: _Meter) -> dict[str, float]:
    """A version written and read as a whole, uncompressed, for comparison."""
    context = ocp.Context()
    context.array.saving.use_compression = False
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), params)
    with context:
        save = meter.seconds(lambda: ocp.save(path, params))
        load = meter.seconds(lambda: jax.block_until_ready(ocp.load(path, shapes)))
    return {"orbax_save_over_memcpy": save / meter.copy_seconds, "orbax_load_over_memcpy": load / meter.copy_seconds}


def _steps(training: Training, count: int) -> dict[str, float]:
    """Learner steps, each after a publish: every other one with a ring that encodes it meanwhile."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    ring = SnapshotRing(count + 1)
    ring.put(0, training.published())
    for number in range(1, 2 * count + 1):
        is_on = number % 2 == 0
        params = training.published()

        def step(version=number, is_on=is_on, params=params) -> None:
            if is_on:
                ring.put(version, params)
            training.step()

        seconds[is_on].append(_seconds(step))
        _ = ring.nbytes
    return {"step_seconds": statistics.median(seconds[False]),
            "step_with_ring_over_without": statistics.median(seconds[True]) / statistics.median(seconds[False])}  # fmt: skip


def _disk_bytes(store: SnapshotStore) -> int:
    return sum(path.stat().st_size for path in store.directory.rglob("*") if path.is_file())


def _show(figures: dict[str, float | int | bool], display: Display, meter: _Meter) -> None:
    def table(title: str, names: dict[str, str], unit: str) -> None:
        display.table(title, [(label, f"{figures[name]:.3g}{unit}") for name, label in names.items()])

    display.table("what was kept", [
        ("parameters", f"{figures['params']:,}"),
        ("versions", f"{figures['versions']}, at learning rate {figures['learning_rate']:g}"),
        ("one version", f"{meter.nbytes / 2**20:,.0f} MiB, copied in memory in {1000 * meter.copy_seconds:.0f} ms"),
        ("weights that change from one to the next", f"{figures['changed_fraction']:.2%}"),
        ("every version came back bit for bit", "yes" if figures["bit_exact"] else "NO"),
    ])  # fmt: skip
    table("bytes, in versions", {
        "host_bytes_over_copy": "differences, in host memory",
        "mirror_over_copy": "the newest version, on the host (on a CPU it is the learner's own memory)",
        "disk_bytes_over_copy": "on disk: one keyframe, and the differences",
        "put_peak_over_copy": "most beside, while a version is put",
        "get_peak_over_copy": "most beside, while one is got, itself included",
    }, "")  # fmt: skip
    table("times, in copies of a version", {
        "put_call_over_memcpy": "put, until it returns",
        "put_over_memcpy": "put, until it is encoded",
        "persist_over_memcpy": "then, until it is on disk",
        "step_back_over_memcpy": "get within a walk: one step back, in place",
        "step_beside_over_memcpy": "the same while the version before is in use",
        "oldest_get_over_memcpy": "get of the oldest by itself",
        "orbax_save_over_memcpy": "Orbax: a version written whole",
        "orbax_load_over_memcpy": "Orbax: a version read whole",
    }, " x")  # fmt: skip
    table("a learner step", {"step_seconds": "seconds", "step_with_ring_over_without": "with the ring / without"}, "")
