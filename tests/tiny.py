"""A run small enough for tests: one layer of width 16 on short FrozenLake games."""

import dataclasses
import json
import pathlib

import jax
import numpy as np

from launch.benches._small import small_config
from launch.build import Foundation, build_loop
from launch.config import Config, MeshOptions, SnapshotOptions
from models.config import Precision
from models.conversation import ByteConversation
from rl.learner import StepOptions
from rl.loop import Loop
from rl.snapshot_store import SnapshotStore
from rl.types import SamplingContract

CONTRACT = SamplingContract(temperature=1.0, compute_dtype="float32", swap="reprefill")
"""How tokens of no particular origin were sampled."""

BYTES = ByteConversation(None)
"""How a policy of bytes talks, whatever the environment."""

MAX_LENGTH = small_config().model.max_length


def tiny_config(**changes) -> Config:
    """Games of five turns of a token each; every group of options may be replaced.

    An untrained policy always plays out its turns, so the schedule is plain: the slots hold five batches, which finish together;
    from then on each learner step comes with one decode step, and a trajectory has five versions.
    """
    small = small_config()
    config = dataclasses.replace(
        small,
        step=StepOptions(minibatches=2),
        loop=dataclasses.replace(small.loop, max_staleness=4),
        snapshots=SnapshotOptions(ring_capacity=8, persist_every=2, score_rows=1, publish_dtype=Precision.FLOAT32),
        evaluation_episodes=8,
        steps=8,
    )
    return dataclasses.replace(config, **changes)


TINY_OPTIONS = [
    "--model.num-layers", "1", "--model.d-model", "16", "--model.d-ff", "32",
    "--model.num-heads", "2", "--model.num-kv-heads", "2", "--model.head-dim", "8",
    "--model.max-length", "40", "--frozen-lake.max-turns", "5", "--warm-start.updates", "2",
    "--warm-start.rows", "8", "--warm-start.microbatches", "1", "--warm-start.episodes", "8",
    "--groups-per-step", "4", "--group-size", "2", "--slots", "40",
    "--decode-steps", "1", "--score-rows", "2", "--microbatches", "1",
    "--length-buckets", "1", "--evaluation-episodes", "16", "--persist-every", "2",
    "--steps", "8",
]  # fmt: skip
"""The same for `launch.train quickstart`: eight learner steps in seconds."""

_shared: dict = {}
"""Compiled programs by what decides them: most of a tiny run's time is compilation, and most tests want the same programs."""


def tiny_loop(run_dir: pathlib.Path, config: Config | None = None, *, devices: tuple[int, int, int] = (1, 1, 1)) -> Loop:
    """A started loop; `devices` along data, fsdp and tensor."""
    loop = tiny_rooms(run_dir, config, devices=devices)
    config = dataclasses.replace(config or tiny_config(), mesh=MeshOptions(*devices))
    loop.start(Foundation.of(config).initial_params())
    return loop


def tiny_rooms(run_dir: pathlib.Path, config: Config | None = None, *, devices: tuple[int, int, int] = (1, 1, 1)) -> Loop:
    """A loop that wants its weights, or a state to go on from."""
    config = dataclasses.replace(config or tiny_config(), mesh=MeshOptions(*devices))
    foundation = Foundation.of(config)
    foundation.check()
    run_dir.mkdir(parents=True, exist_ok=True)
    precision = config.snapshots.publish_dtype
    sampler = _share(("sampler", foundation.model, devices, config.sampler, config.seed, precision), foundation.sampler_factory)
    scorer = _share(("scorer", foundation.model, devices, config.snapshots, config.sampler.sampler_devices), foundation.scorer)
    loop = build_loop(foundation, run_dir, sampler(), scorer)
    learner = loop._rooms.learner
    programs = ("_update", "_publish", "_start", "_copy")
    options = (config.optimizer, config.objective, config.step, loop.source.inside)
    key = ("learner", foundation.model, devices, *options, precision)
    learner.__dict__.update(_share(key, lambda: {name: learner.__dict__[name] for name in programs}))
    return loop


def _share(key, make):
    if key not in _shared:
        _shared[key] = make()
    return _shared[key]


def rows_of(run_dir: pathlib.Path) -> list[dict]:
    """The metrics of a run."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def without_times(rows: list[dict]) -> list[dict]:
    """What two equal runs have in common."""
    return [{name: value for name, value in row.items() if not name.startswith("seconds")} for row in rows]


def weights(loop: Loop) -> list[np.ndarray]:
    """The learner's master weights."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(loop._rooms.learner.train_state.params)]


def assert_same_weights(first, second) -> None:
    for left, right in zip(weights(first), weights(second), strict=True):
        np.testing.assert_array_equal(left, right)


def assert_same_run(first: pathlib.Path, second: pathlib.Path) -> None:
    """Final parameters, metrics and ledger, bit by bit."""
    assert without_times(rows_of(first)) == without_times(rows_of(second))
    ledgers = [(run / "ledger" / "segments.jsonl").read_bytes() for run in (first, second)]
    assert ledgers[0] == ledgers[1]
    stores = [SnapshotStore(run / "snapshots") for run in (first, second)]
    assert stores[0].versions() == stores[1].versions()
    for version in stores[0].versions():
        assert stores[0].digest(version) == stores[1].digest(version)
