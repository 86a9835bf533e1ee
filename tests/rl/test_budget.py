"""The arithmetic of memory: what arrays and snapshots take, and a ring that does not fit is refused with the sum."""

import dataclasses

import jax
import pytest

from launch.build import Foundation
from launch.config import MeshOptions
from models.config import Precision
from rl.budget import check_ring_fits, device_bytes, host_copy_bytes, num_persisted
from rl.learner import publish_cast
from rl.old_logprobs import SourceName
from rl.old_logprobs.approximate import SamplerSource
from rl.snapshot_store import host_copy
from rl.snapshots import SnapshotRing
from tests.tiny import tiny_config


def published(devices=(1, 1, 1), precision=Precision.FLOAT32) -> Foundation:
    config = tiny_config(mesh=MeshOptions(*devices))
    return Foundation.of(dataclasses.replace(config, snapshots=dataclasses.replace(config.snapshots, publish_dtype=precision)))


@pytest.mark.parametrize("devices", [(1, 1, 1), (1, 8, 1), (2, 2, 2), (8, 1, 1)])
def test_a_snapshot_takes_what_was_reckoned_however_it_is_sharded(devices):
    foundation = published(devices)
    params = foundation.initial_params()
    assert host_copy_bytes(foundation.published_shapes) == host_copy(params).nbytes
    assert host_copy_bytes(foundation.published_shapes) == sum(leaf.nbytes for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("devices", [(1, 8, 1), (2, 2, 2)])
def test_a_device_holds_what_was_reckoned_however_it_is_sharded(devices):
    foundation = published(devices)
    learner = foundation.learner(SamplerSource())
    learner.start(foundation.initial_params())
    state = learner.train_state
    arrays = {"params": state.params, "optimizer": state.optimizer, "published": learner.published()}
    shapes = {**learner.state_shapes, "published": foundation.published_shapes}
    for name, tree in arrays.items():
        for index in range(foundation.mesh.size):
            held = sum(leaf.addressable_shards[index].data.nbytes for leaf in jax.tree.leaves(tree))
            assert device_bytes(shapes[name]) == held, name


def test_weights_and_moments_are_twelve_bytes_a_parameter_divided_among_the_devices():
    foundation = published((1, 8, 1))
    shapes = foundation.learner(SamplerSource()).state_shapes
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(foundation.model.shapes))
    assert device_bytes(shapes) == pytest.approx(12 * num_parameters / 8, rel=0.02)


def test_half_the_precision_is_half_the_memory():
    assert 2 * host_copy_bytes(published(precision=Precision.BFLOAT16).published_shapes) == host_copy_bytes(
        published().published_shapes
    )


@pytest.mark.parametrize(
    ("source", "held", "replay"),  # in bytes a parameter, of bfloat16
    [("snapshot", 0, 4), ("dedicated", 0, 4), ("interrupt", 0, 0), ("lagged", 2, 4), ("ewma", 6, 4), ("recompute", 0, 4),
     ("interpolate", 0, 4), ("sampler", 0, 4)],
)  # fmt: skip
@pytest.mark.parametrize("decompose_every", [0, 1])
def test_anchors_by_tier(source, held, replay, decompose_every):
    config = tiny_config(mesh=MeshOptions(1, 4, 1))
    snapshots = dataclasses.replace(
        config.snapshots,
        old_logprobs=SourceName(source),
        scorer_devices=4 if source == "dedicated" else 0,
        publish_dtype=Precision.BFLOAT16,
        decompose_every=decompose_every,
    )
    foundation = Foundation.of(dataclasses.replace(config, snapshots=snapshots, steps=9))
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(foundation.published_shapes))
    found = foundation.anchor_bytes()
    assert found.held == held * num_parameters / 4
    replays = bool(decompose_every) and source != "interrupt" or source in ("snapshot", "dedicated")
    assert found.replay == (replay * num_parameters / 4 if replays else 0)
    assert found.host == (9 if replays else 2) * 2 * num_parameters
    assert found.disk == 6 * 2 * num_parameters  # versions 0, 2, 4, 6, 8 and the last


@pytest.mark.parametrize("source", ["ewma", "lagged"])
def test_a_source_holds_what_was_reckoned(source):
    config = tiny_config(mesh=MeshOptions(1, 4, 1))
    config = dataclasses.replace(config, snapshots=dataclasses.replace(config.snapshots, old_logprobs=SourceName(source)))
    foundation = Foundation.of(config)
    made = foundation.source(SnapshotRing(1), foundation.scorer())
    first, second = (publish_cast(foundation.initial_params(), config.snapshots.publish_dtype) for _ in range(2))
    made.published(0, first, first)
    made.published(1, second, second)
    trees = {"ewma": lambda: (made._anchor, made._state), "lagged": lambda: made._previous}[source]()
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(trees) if leaf.ndim)
    assert foundation.anchor_bytes().held == held


@pytest.mark.parametrize(("num_publishes", "persist_every"), [(0, 4), (1, 4), (8, 4), (9, 4), (11, 4), (5, 1), (3, 100)])
def test_versions_on_disk_are_counted_as_the_ring_persists_them(num_publishes, persist_every):
    persisted = [version for version in range(num_publishes + 1) if version % persist_every == 0]
    assert num_persisted(num_publishes, persist_every) == len(persisted) + (num_publishes not in persisted)


def test_a_ring_needs_room_for_its_versions_and_one_being_saved():
    shapes = published().published_shapes
    each = host_copy_bytes(shapes)
    check_ring_fits(shapes, capacity=8, available=9 * each)
    with pytest.raises(ValueError, match=r"a ring of 8 versions, .* takes 9 x .* GiB of host memory, but .*--ring-capacity"):
        check_ring_fits(shapes, capacity=8, available=9 * each - 1)


def test_this_machine_holds_a_small_ring_and_no_endless_one():
    shapes = published().published_shapes
    check_ring_fits(shapes, capacity=8)
    with pytest.raises(ValueError, match="a ring of 1000000000 versions"):
        check_ring_fits(shapes, capacity=10**9)
