"""Frozen arrays are kept once, identified by digest, and part of every version that is got."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rl.host_copy import params_digest
from rl.snapshot_store import SnapshotStore
from rl.snapshots import SnapshotRing

MESH = Mesh(np.array(jax.devices()), ("fsdp",))
SHARDING, WHOLE = NamedSharding(MESH, P("fsdp")), NamedSharding(MESH, P())


def is_adapter(path):
    return "adapter" in path


@functools.partial(jax.jit, static_argnums=0)
def base(seed):
    return jax.random.normal(jax.random.key(seed), (64, 32), jnp.bfloat16)


FROZEN = jax.device_put(base(0), SHARDING)


def params(version, frozen=FROZEN):
    adapter = jax.device_put(jnp.full((8, 2), version, jnp.bfloat16), SHARDING)
    return {"layer": {"kernel": frozen, "adapter": {"a": adapter}}, "adapter": jax.device_put(jnp.arange(3.0) * version, WHOLE)}


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def filled(num_versions=3, **options):
    ring = SnapshotRing(4, trainable=is_adapter, **options)
    for version in range(num_versions):
        ring.put(version, params(version))
    return ring


def describe(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)


def test_only_trained_arrays_are_kept_and_whole_versions_are_got():
    ring = filled()
    trained = 8 * 2 * 2 + 3 * 4  # bytes
    assert ring.nbytes < trained + 2 * 2 * 200 < FROZEN.nbytes
    for version in (2, 0, 1):
        got = ring.get(version)
        assert bits(got) == bits(params(version)) and jax.tree.structure(got) == jax.tree.structure(params(version))
        assert got["layer"]["kernel"].sharding == SHARDING
        assert ring.digest(version) == params_digest(params(version))
    elsewhere = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[5]), params(0))
    assert bits(ring.get(1, elsewhere)) == bits(params(1))
    assert ring.get(1, elsewhere)["layer"]["kernel"].devices() == {jax.devices()[5]}


def test_a_frozen_array_that_changes_is_refused_and_nothing_has_changed():
    ring = filled()
    with pytest.raises(ValueError, match="layer/kernel has changed, or lies elsewhere, but it is not trained"):
        ring.put(3, params(3, FROZEN.at[5, 5].add(1)))
    assert ring.versions == (0, 1, 2)
    ring.put(3, params(3, FROZEN + 0))  # other memory, the same values
    assert bits(ring.get(3)) == bits(params(3))
    with pytest.raises(ValueError, match="layer/bias is frozen in one version only"):
        ring.put(4, {**params(4), "layer": {**params(4)["layer"], "bias": jnp.ones(2)}})


def test_a_filter_that_names_nothing_is_refused():
    with pytest.raises(ValueError, match="names no array"):
        SnapshotRing(2, trainable=lambda path: False).put(0, params(0))


def test_donating_what_was_got_or_put_does_no_harm():
    ring = SnapshotRing(2, trainable=is_adapter)
    step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
    given = params(0, FROZEN + 0)
    ring.put(0, given)
    jax.block_until_ready(step(given))
    for _ in range(3):
        jax.block_until_ready(step(ring.get(0)))
    given["layer"]["kernel"].delete()
    assert bits(ring.get(0)) == bits(params(0))


def test_a_snapshot_on_disk_has_trained_arrays_and_the_digests_of_the_others(tmp_path):
    store = SnapshotStore(tmp_path, keyframe_every=2)
    ring = filled(4, store=store, persist_every=1)
    store.wait()
    (frozen,) = store.frozen(3)
    assert frozen.path == ("layer", "kernel") and frozen.shape == (64, 32) and frozen.dtype == "bfloat16"
    trained = {"layer": {"adapter": params(3)["layer"]["adapter"]}, "adapter": params(3)["adapter"]}
    assert bits(store.load(3, describe(trained))) == bits(trained)
    assert store.digest(3) == ring.digest(3) == params_digest(params(3))
    size = sum(path.stat().st_size for path in store.path(1).rglob("*"))
    assert size < FROZEN.nbytes


def test_state_and_restore_keep_the_frozen_arrays():
    ring = filled()
    again = SnapshotRing(4, trainable=is_adapter)
    again.restore(ring.state(), describe(params(0)))
    for version in range(3):
        assert bits(again.get(version)) == bits(params(version)) and again.digest(version) == ring.digest(version)
    again.put(3, params(3))
    assert bits(again.get(0)) == bits(params(0))


def test_frozen_scalars_are_arrays_too():
    ring = SnapshotRing(2, trainable=is_adapter)
    for version in range(2):
        ring.put(version, {"adapter": jnp.full(3, version), "scale": jnp.float32(7)})
    assert float(ring.get(0)["scale"]) == 7
    with pytest.raises(ValueError, match="scale has changed"):
        ring.put(2, {"adapter": jnp.zeros(3, jnp.int32), "scale": jnp.float32(8)})
