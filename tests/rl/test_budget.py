"""The arithmetic of host memory: what a snapshot takes, and a ring that does not fit is refused with the sum."""

import dataclasses

import jax
import pytest

from launch.build import Foundation
from launch.config import MeshOptions
from models.config import Precision
from rl.budget import check_ring_fits, host_copy_bytes
from rl.snapshot_store import host_copy
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


def test_half_the_precision_is_half_the_memory():
    assert 2 * host_copy_bytes(published(precision=Precision.BFLOAT16).published_shapes) == host_copy_bytes(
        published().published_shapes
    )


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
