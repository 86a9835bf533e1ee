"""The arithmetic of memory: what arrays and snapshots take, and a ring that does not fit is refused with the sum."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from launch.build import Foundation
from launch.config import MeshOptions
from models.config import Precision
from rl.budget import (
    NUM_PREFIXES,
    RingOptions,
    check_disk_fits,
    check_ring_fits,
    check_sampler_fits,
    device_bytes,
    host_copy_bytes,
    num_keyframes,
    num_persisted,
)
from rl.host_copy import host_copy
from rl.learner import publish_cast
from rl.old_logprobs import SourceName
from rl.old_logprobs.approximate import SamplerSource
from rl.snapshot_store import SnapshotStore
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
    each = 2 * num_parameters
    assert found.host == (5 + 7 if replays else 3 + 1) * each and found.differences == (7 if replays else 1) * each
    assert found.disk == found.keyframes == 6 * each  # versions 0, 2, 4, 6, 8 and the last


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


@pytest.mark.parametrize(("num_publishes", "keyframe_every"), [(0, 4), (3, 4), (4, 4), (9, 1), (9, 100)])
def test_where_every_version_is_persisted_few_are_whole(tmp_path, num_publishes, keyframe_every):
    store = SnapshotStore(tmp_path, keyframe_every=keyframe_every)
    ring = SnapshotRing(2, store=store, persist_every=1)
    for version in range(num_publishes + 1):
        ring.put(version, {"w": jnp.arange(3.0) + version})
    store.wait()
    keyframes = [version for version in store.versions() if (store.path(version) / "keyframe").exists()]
    assert len(keyframes) == num_keyframes(num_publishes, RingOptions(2, True, 1, keyframe_every))
    assert len(keyframes) == -(-(num_publishes + 1) // keyframe_every)


def test_a_ring_takes_no_more_than_was_reckoned():
    foundation, ring = published(), SnapshotRing(8)
    params = foundation.initial_params()
    for version in range(12):
        params = jax.tree.map(lambda leaf: leaf * 1.5, params)
        ring.put(version, params)
        most = host_copy_bytes(foundation.published_shapes) * len(ring.versions)
        assert ring.nbytes <= most + 8 * 200 * len(jax.tree.leaves(foundation.published_shapes))  # headers


def test_a_ring_needs_room_for_whole_versions_and_for_differences():
    shapes = published().published_shapes
    each = host_copy_bytes(shapes)
    unlimited = RingOptions(8, replays=True, persist_every=4, keyframe_every=16)
    check_ring_fits(shapes, unlimited, available=12 * each)
    with pytest.raises(ValueError, match=r"a ring of 8 versions takes 5 x .* at most .* differences, but .*--ring-host-gib"):
        check_ring_fits(shapes, unlimited, available=12 * each - 1)
    limited = dataclasses.replace(unlimited, persist_every=1, host_bytes=3 * each)
    check_ring_fits(shapes, limited, available=7 * each)
    with pytest.raises(ValueError, match=r"set --persist-every 1 and --ring-host-gib \d"):
        check_ring_fits(shapes, limited, available=7 * each - 1)
    with pytest.raises(ValueError, match="--publish-dtype bfloat16, or take more hosts"):
        check_ring_fits(shapes, limited, available=5 * each - 1)
    with pytest.raises(ValueError, match=r"--ring-host-gib allows .* wanted at least"):
        check_ring_fits(shapes, dataclasses.replace(limited, host_bytes=each - 1), available=100 * each)


def test_a_disk_needs_room_for_keyframes():
    anchors = published().anchor_bytes()
    check_disk_fits(anchors, available=anchors.keyframes)
    with pytest.raises(ValueError, match="keyframes take .* GiB of disk, .* --keyframe-every"):
        check_disk_fits(anchors, available=anchors.keyframes - 1)


def test_this_machine_holds_a_small_ring_and_no_endless_one():
    shapes, small = published().published_shapes, RingOptions(8, replays=True, persist_every=1, keyframe_every=16)
    check_ring_fits(shapes, small)
    with pytest.raises(ValueError, match="a ring of 1000000000 versions"):
        check_ring_fits(shapes, dataclasses.replace(small, capacity=10**9))


@pytest.mark.parametrize("devices", [(1, 1, 1), (2, 1, 2)])
def test_slots_need_room_for_their_caches_and_for_two_versions(devices):
    foundation = published(devices)
    programs = foundation.sampling_programs(foundation.sampler_mesh)
    cache, weights = device_bytes(programs.state), device_bytes(programs.weights)
    prompts = NUM_PREFIXES * device_bytes(programs.prefix_cache)
    slots_a_device = 40 // (devices[0] * devices[1])
    assert device_bytes(programs.prefix_cache) * slots_a_device == device_bytes(programs.state.cache), "each is as long as a slot"
    held = jax.jit(lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), programs.state),
                   out_shardings=jax.tree.map(lambda leaf: leaf.sharding, programs.state))()
    assert cache == sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(held))

    def check(available, slots=40, num_samplers=2):
        check_sampler_fits(programs.weights, programs.state, programs.prefix_cache, num_slots=slots, num_samplers=num_samplers,
                           available=available)

    check(2 * weights + 2 * (cache + prompts))
    check(2 * weights + cache + prompts, num_samplers=1)
    with pytest.raises(ValueError, match="KV cache of 40 sampler slots takes .* about 39 slots would fit: lower --slots"):
        check(2 * weights + 2 * (cache + prompts) - 1)
    with pytest.raises(ValueError, match="not even one slot would fit"):
        check(2 * weights + 2 * prompts)


def test_endless_slots_are_refused_before_anything_is_made():
    config = tiny_config()
    config = dataclasses.replace(config, sampler=dataclasses.replace(config.sampler, slots=10**9))
    with pytest.raises(ValueError, match="KV cache of 1000000000 sampler slots"):
        Foundation.of(config).check()
