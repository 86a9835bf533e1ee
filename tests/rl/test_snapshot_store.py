"""Snapshots on disk: whole or as differences, each version comes back bit for bit, on any mesh and in parts."""

import concurrent.futures
import itertools
import os
import pathlib
import socket
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from rl import delta, snapshot_store
from rl.host_copy import host_copy, params_digest
from rl.snapshot_store import Difference, SnapshotCorrupt, SnapshotStore
from tests.params import MESHES, arrays, bits, describe, donating_step, fresh, put, total_bytes

ROOT = pathlib.Path(__file__).resolve().parents[2]
VERSIONS = range(10)


def one_device(index=0):
    return SingleDeviceSharding(jax.devices()[index])


def difference(base, version, mesh="2x4"):
    """What `arrays(version)` is told from `arrays(base)` by."""
    future = concurrent.futures.Future()
    future.set_result(delta.encode(put(arrays(version), mesh), put(arrays(base), mesh)))
    return Difference(base, future)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Ten versions, each told from the one before; tests do not change it."""
    store = SnapshotStore(tmp_path_factory.mktemp("store"), keyframe_every=3)
    store.save(0, put(arrays(0), "2x4"))
    for version in VERSIONS[1:]:
        store.save(version, put(arrays(version), "2x4"), difference(version - 1, version))
    store.wait()
    return store


# --- loading ---


@pytest.mark.parametrize("mesh", MESHES)
def test_every_version_is_loaded_bitwise_onto_any_mesh(store, mesh):
    like = describe(put(arrays(), mesh))
    for version in VERSIONS:
        loaded = store.load(version, like)
        assert bits(loaded) == bits(arrays(version))
        assert jax.tree.map(lambda leaf: leaf.sharding, loaded) == jax.tree.map(lambda leaf: leaf.sharding, like)
        assert jax.tree.structure(loaded) == jax.tree.structure(like)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_difference_has_the_shards_it_was_written_with_and_is_loaded_onto_others(tmp_path, mesh):
    store = SnapshotStore(tmp_path)
    store.save(0, put(arrays(0), "2x4"))  # a keyframe and its differences need not be sharded alike
    store.save(1, put(arrays(1), mesh), difference(0, 1, mesh))
    store.wait()
    assert store.difference(1).records.keys() == host_copy(put(arrays(), mesh)).shards.keys()
    for other in MESHES:
        assert bits(store.load(1, put(arrays(), other))) == bits(arrays(1))


@pytest.mark.parametrize("version", [0, 3, 5])
def test_a_snapshot_is_loaded_without_knowing_the_model(store, version):
    loaded = store.load(version, store.abstract(version, one_device(2)))
    assert bits(loaded) == bits(arrays(version))
    assert loaded["odd"].devices() == {jax.devices()[2]}
    assert store.digest(version) == params_digest(loaded)


@pytest.mark.parametrize("version", [0, 5])
def test_loading_into_another_model_says_what_differs(store, version):
    like = store.abstract(version, one_device())
    for changed, message in [
        ({"scale": jax.ShapeDtypeStruct((5,), jnp.float32)}, r"has \(\(4,\), 'float32'\) at scale, wanted \(\(5,\), 'float32'\)"),
        ({"scale": jax.ShapeDtypeStruct((4,), jnp.bfloat16)}, r"at scale, wanted \(\(4,\), 'bfloat16'\)"),
        ({"extra": jax.ShapeDtypeStruct((4,), jnp.float32)}, "has nothing at extra, wanted"),
        ({"block": {}}, "at block/kernel, wanted nothing"),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            store.load(version, like | changed)
        assert not isinstance(error.value, SnapshotCorrupt)


@pytest.mark.parametrize("version", [0, 3, 5])
def test_an_array_or_a_part_of_it_is_read_without_the_rest(store, version):
    values = arrays(version)
    kernel, odd = values["block"]["kernel"], values["odd"]
    assert store.read(version, ("block", "kernel")).dtype == jnp.bfloat16
    assert store.read(version, ("block", "kernel")).tobytes() == kernel.tobytes()
    assert store.read(version, ("scale",)).tobytes() == values["scale"].tobytes()
    assert store.read(version, ("step",)) == store.read(version, ("step",), ()) == version
    few_rows = [(0, 128), (111, 112), (100, 186), (128, 256), (3, 3)]  # shards are 128 x 64; rows 111, 148 and 185 differ
    for rows, columns in itertools.product(few_rows, [(0, 256), (63, 65), (64, 128)]):
        part = store.read(version, ("block", "kernel"), (rows, columns))
        assert part.tobytes() == kernel[slice(*rows), slice(*columns)].tobytes(), (rows, columns)
    for start, stop in itertools.combinations((0, 15, 16, 64), 2):
        assert store.read(version, ("odd",), ((start, stop),)).tobytes() == odd[start:stop].tobytes()


def test_what_is_read_is_the_readers_own(store):
    store.read(5, ("odd",))[...] = 0
    assert store.read(5, ("odd",)).tobytes() == arrays(5)["odd"].tobytes()


@pytest.mark.parametrize("version", [0, 5])
def test_reading_what_is_not_there_says_what_is(store, version):
    for path in [("block",), ("block", "nothing"), ("kernel",), ("block.kernel",), ()]:
        message = f"version {version} at .* has no array {'/'.join(path)}, wanted one of block/kernel, odd"
        with pytest.raises(ValueError, match=message):
            store.read(version, path)
    for index in [(), ((0, 4),), ((0, 257), (0, 4)), ((-1, 4), (0, 4)), ((4, 3), (0, 4)), ((0, 4), (0, 4), (0, 1))]:
        with pytest.raises(ValueError, match=r"block/kernel has no part .*, wanted \(start, stop\) within \(\(0, 256\), \(0,"):
            store.read(version, ("block", "kernel"), index)
    with pytest.raises(SnapshotCorrupt, match="version 77 at .* is missing"):
        store.read(77, ("odd",))


# --- what lies on disk ---


def test_every_third_version_is_a_keyframe_and_each_is_told_from_the_one_before(store):
    for version in VERSIONS:
        wanted = {"keyframe": version % 3 == 0, "difference-00000.bin": version > 0, "manifest.json": True}
        assert {path.name for path in store.path(version).iterdir()} == {name for name, there in wanted.items() if there}
        assert store.base(version) == (version - 1 if version else None)
    assert store.versions() == tuple(VERSIONS) and store.incomplete() == []
    assert {path.name for path in store.directory.iterdir()} == {f"version-{version:06d}" for version in VERSIONS}


def test_nothing_is_stored_twice_and_a_difference_is_small(store):
    sizes = [sum(path.stat().st_size for path in store.path(version).rglob("*") if path.is_file()) for version in VERSIONS]
    assert total_bytes(arrays()) <= sizes[0] < total_bytes(arrays()) + 16_000
    assert all(sizes[version] < 6000 for version in VERSIONS if version % 3)


def test_the_difference_of_a_version_leads_to_its_base(store):
    for version in VERSIONS[1:]:
        assert store.difference(version).records == difference(version - 1, version).delta.result().records
        back = delta.decode(store.difference(version), put(arrays(version), "2x4"))
        assert bits(back) == bits(arrays(version - 1))
    with pytest.raises(SnapshotCorrupt, match="version 0 at .* difference-00000.bin cannot be read"):
        store.difference(0)
    for missing in (store.base, store.difference):
        with pytest.raises(SnapshotCorrupt, match="version 77 at .* is missing"):
            missing(77)


def test_a_version_may_be_told_from_any_other_or_from_none(tmp_path):
    store = SnapshotStore(tmp_path, keyframe_every=3)
    store.save(10, put(arrays(10), "2x4"))
    for version, base in [(4, 10), (20, 4), (21, 10), (22, 20), (23, 22)]:
        store.save(version, put(arrays(version), "2x4"), difference(base, version))
    store.save(24, put(arrays(24), "2x4"))
    store.wait()
    assert [version for version in store.versions() if (store.path(version) / "keyframe").exists()] == [10, 22, 24]
    again = SnapshotStore(tmp_path, keyframe_every=2)  # goes on where the other one ended
    again.save(25, put(arrays(25), "2x4"), difference(23, 25))
    again.wait()
    assert (again.path(25) / "keyframe").exists()
    for version in again.versions():
        assert bits(again.load(version, put(arrays(), "4x2"))) == bits(arrays(version))


def test_one_keyframe_for_each_version_or_more():
    with pytest.raises(ValueError, match="keyframe_every is 0, wanted at least 1; set --keyframe-every"):
        SnapshotStore("unused", keyframe_every=0)


def test_with_keyframe_every_one_each_version_is_whole(tmp_path):
    store = SnapshotStore(tmp_path, keyframe_every=1)
    store.save(0, put(arrays(0), "2x4"))
    store.save(1, put(arrays(1), "2x4"), difference(0, 1))
    store.wait()
    assert (store.path(1) / "keyframe").exists()
    assert bits(store.load(1, put(arrays()))) == bits(arrays(1))
    assert store.difference(1).records.keys() == host_copy(put(arrays(), "2x4")).shards.keys()  # for the ring to walk back


def test_what_is_frozen_is_in_the_manifest_only(tmp_path):
    store = SnapshotStore(tmp_path)
    frozen = tuple(leaf.digest() for leaf in host_copy({"scale": put(arrays())["scale"]}).leaves)

    def trained(version):
        params = put(arrays(version), "2x4")
        del params["scale"]
        return params

    copies = [host_copy(trained(version), frozen=frozen) for version in range(2)]
    future = concurrent.futures.Future()
    future.set_result(delta.encode_shards(copies[1].shards, copies[0].shards))
    store.save(0, copies[0])
    store.save(1, copies[1], Difference(0, future))
    store.save(2, put(arrays(2)))
    store.wait()
    for version in range(2):
        assert store.frozen(version) == list(frozen)
        assert store.digest(version) == params_digest(put(arrays(version)))  # of all of it
        assert bits(store.load(version, trained(0))) == bits(trained(version))
    assert store.frozen(2) == []


# --- saving ---


@pytest.mark.parametrize("as_difference", [False, True])
def test_a_donated_step_does_not_reach_a_save_under_way(tmp_path, as_difference):
    store, pending = SnapshotStore(tmp_path), concurrent.futures.Future()
    before, params = (fresh({"w": jnp.arange(2**20, dtype=jnp.float32) + step}) for step in range(2))
    store.save(0, before)
    copies = host_copy(before), host_copy(params)
    expected = bits({"w": np.arange(2, 2**20 + 2, dtype=np.float32)})
    store.save(1, params, Difference(0, pending) if as_difference else None)
    for _ in range(3):
        before, params = donating_step(before), jax.block_until_ready(donating_step(params))
    pending.set_result(delta.encode_shards(copies[1].shards, copies[0].shards))
    store.wait()
    assert bits(store.load(1, store.abstract(1, one_device()))) == expected


def test_a_version_is_there_when_its_difference_is(tmp_path):
    store, pending = SnapshotStore(tmp_path), concurrent.futures.Future()
    store.save(0, put(arrays(0), "2x4"))
    store.save(1, put(arrays(1), "2x4"), Difference(0, pending))  # returns
    listed = store.versions(), store.incomplete(), store.settled(0), store.settled(2)
    with concurrent.futures.ThreadPoolExecutor() as threads:
        settled, waited = threads.submit(store.settled, 1), threads.submit(store.wait)
        early = concurrent.futures.wait([settled, waited], timeout=0.2).done
        pending.set_result(difference(0, 1).delta.result())
    assert listed == ((0,), ["version-000001"], True, False) and not early
    assert settled.result() is True and waited.result() is None
    assert store.versions() == (0, 1) and store.incomplete() == [] and store.settled(1)
    assert bits(store.load(1, put(arrays()))) == bits(arrays(1))


def test_saves_follow_each_other_and_versions_are_listed_when_complete(tmp_path):
    store = SnapshotStore(tmp_path)
    assert store.versions() == () and store.incomplete() == []
    store.wait()
    params = {"w": jnp.arange(4.0)}
    for version in (0, 12, 5):
        store.save(version, host_copy(params))
    with pytest.raises(ValueError, match="snapshot version 5 is already at .*version-000005"):
        store.save(5, params)
    store.wait()
    assert store.versions() == SnapshotStore(tmp_path).versions() == (0, 5, 12)
    with pytest.raises(ValueError, match="snapshot version 12 is already at"):
        SnapshotStore(tmp_path).save(12, params)


def failing(tmp_path, monkeypatch, what):
    """A store with version 0, and a save of version 1 that has failed."""
    store, failed = SnapshotStore(tmp_path), concurrent.futures.Future()
    store.save(0, put(arrays(0), "2x4"))
    store.wait()
    failed.set_exception(OSError("disk full"))
    if what == "keyframe":
        monkeypatch.setattr(snapshot_store.ocp, "save_async", lambda *_, **__: failed)
    store.save(1, put(arrays(1), "2x4"), Difference(0, failed) if what == "difference" else None)
    assert not store.settled(1)
    monkeypatch.undo()
    return store


@pytest.mark.parametrize("what", ["keyframe", "difference"])
def test_a_failed_save_is_reported_once_by_wait(tmp_path, monkeypatch, what):
    store = failing(tmp_path, monkeypatch, what)
    with pytest.raises(OSError, match="disk full"):
        store.wait()
    store.wait()  # reported once
    assert store.versions() == (0,) and store.incomplete() == ["version-000001"] and not store.settled(1)
    store.save(1, put(arrays(1), "2x4"), difference(0, 1))  # a second try
    store.wait()
    assert store.versions() == (0, 1) and bits(store.load(1, put(arrays()))) == bits(arrays(1))


def test_a_failed_save_is_reported_by_the_next_one(tmp_path, monkeypatch):
    store = failing(tmp_path, monkeypatch, "difference")
    with pytest.raises(OSError, match="disk full"):
        store.save(2, put(arrays(2), "2x4"), difference(1, 2))
    with pytest.raises(SnapshotCorrupt, match="version 1 at .* is missing or incomplete"):
        store.save(2, put(arrays(2), "2x4"), difference(1, 2))  # nothing is listed that could not be loaded
    store.save(2, put(arrays(2), "2x4"), difference(0, 2))
    store.wait()
    assert store.versions() == (0, 2) and bits(store.load(2, put(arrays()))) == bits(arrays(2))


# --- several processes ---


@pytest.mark.slow
def test_two_processes_that_hold_half_each_agree_on_every_bit(tmp_path):
    program = """
import sys, jax, numpy as np
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from concurrent.futures import Future
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from rl import delta, host_copy, snapshot_store
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("fsdp", "tensor"))
specs = {"w": P("fsdp", "tensor"), "b": P("tensor"), "s": P()}  # both processes hold all of b and s
def make(version):
    values = {"w": np.arange(32, dtype=np.float32).reshape(8, 4), "b": np.arange(4, dtype=np.float32), "s": np.float32([5])}
    return {name: jax.make_array_from_callback(value.shape, NamedSharding(mesh, specs[name]), (value + version).__getitem__)
            for name, value in values.items()}
def same(back, params):
    for name, array in back.items():
        assert array.sharding == params[name].sharding
        for ours, theirs in zip(array.addressable_shards, params[name].addressable_shards, strict=True):
            np.testing.assert_array_equal(ours.data, theirs.data)
params = make(0)
copy = host_copy.host_copy(params)
assert copy.nbytes == 64 + 16 + 4, copy.nbytes
same(copy.to_device(), params)
again = host_copy.from_numpy(copy.to_numpy(), params)
assert again.nbytes == copy.nbytes and again.digest() == copy.digest()
store = snapshot_store.SnapshotStore(sys.argv[3], keyframe_every=3)
store.save(0, copy)
for version in range(1, 5):
    copy, before, future = host_copy.host_copy(make(version)), copy, Future()
    store.save(version, copy, snapshot_store.Difference(version - 1, future))
    future.set_result(delta.encode_shards(copy.shards, before.shards))
store.wait()
assert store.difference(4).records == future.result().records  # those of this process
for version in range(5):
    same(store.load(version, params), make(version))
print(copy.digest())
"""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    processes = [subprocess.Popen([sys.executable, "-c", program, address, str(rank), str(tmp_path)], env=environment, cwd=ROOT,
                                  text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in (0, 1)]
    killer = threading.Timer(60, lambda: [process.kill() for process in processes])  # if one fails, the other one waits for it
    killer.start()
    outputs = [process.communicate() for process in processes]
    killer.cancel()
    assert [process.returncode for process in processes] == [0, 0], outputs

    def values(version):
        return {"w": jnp.arange(32, dtype=jnp.float32).reshape(8, 4) + version, "b": jnp.arange(4, dtype=jnp.float32) + version,
                "s": jnp.array([5.0 + version])}

    assert {output.splitlines()[-1] for output, _ in outputs} == {params_digest(values(4))}
    store = SnapshotStore(tmp_path)
    assert sorted(store.files(2)) == ["difference-00000.bin", "difference-00001.bin"]
    assert [version for version in store.versions() if (store.path(version) / "keyframe").exists()] == [0, 3]
    for version in store.versions():
        assert bits(store.load(version, describe(values(0)))) == bits(values(version))


def test_what_cannot_be_told_apart_on_disk_is_refused(tmp_path):
    store = SnapshotStore(tmp_path)
    with pytest.raises(ValueError, match=r"\['a.b'\] of one name"):
        store.save(0, {"a.b": jnp.ones(2), "a": {"b": jnp.zeros(2)}})
    with pytest.raises(ValueError, match="snapshot version -1 .* wanted a version of 0 or more"):
        store.save(-1, {"a": jnp.ones(2)})
    assert store.versions() == () and store.incomplete() == []
