"""Copies that no donated step can reach, and snapshots on disk that are complete and right, or refused."""

import functools
import hashlib
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from rl import snapshot_store
from rl.snapshot_store import SnapshotCorrupt, SnapshotStore, from_numpy, host_copy, params_digest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MESHES = {
    "fsdp=8": ((8,), ("fsdp",), P("fsdp")),
    "2x4": ((2, 4), ("fsdp", "tensor"), P("fsdp", "tensor")),
    "4x2": ((4, 2), ("fsdp", "tensor"), P("tensor", "fsdp")),
}


def arrays(seed=0):
    """Values that arithmetic would not preserve: every bfloat16 bit pattern (NaN payloads, both zeros) is among them."""
    generator = np.random.default_rng(seed)
    return {
        "block": {"kernel": np.arange(2**16, dtype=np.uint16).reshape(256, 256).view(jnp.bfloat16), "nothing": {}},
        "odd": generator.integers(0, 2**32, 64, dtype=np.uint32).view(np.float32),
        "scale": np.array([-0.0, 0.0, 1.0, np.inf], np.float32),
        "step": np.array(seed, np.float32),
    }


def put(values, mesh="fsdp=8"):
    """On eight devices: the kernel is sharded, one vector is sharded along one axis only, the rest is replicated."""
    shape, names, spec = MESHES[mesh]
    device_mesh = Mesh(np.array(jax.devices()).reshape(shape), names)
    specs = {"block": {"kernel": spec, "nothing": {}}, "odd": P(names[-1]), "scale": P(), "step": P()}
    return jax.tree.map(lambda array, part: jax.device_put(array, NamedSharding(device_mesh, part)), values, specs)


def bits(tree):
    return [(leaf.dtype.name, leaf.shape, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


def describe(params):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), params)


def total_bytes(params):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("mesh", MESHES)
def test_host_copy_returns_every_bit_with_its_sharding_and_stores_nothing_twice(mesh):
    values = arrays()
    params = put(values, mesh)
    copy = host_copy(params)
    back = copy.to_device()
    assert bits(back) == bits(values)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    assert jax.tree.map(lambda leaf: leaf.sharding, back) == jax.tree.map(lambda leaf: leaf.sharding, params)
    assert copy.nbytes == total_bytes(params)  # the replicated leaves lie on eight devices, and here once
    assert bits(copy.to_numpy()) == bits(values)


def test_a_single_device_array_keeps_its_device():
    params = {"w": jax.device_put(jnp.arange(3.0), jax.devices()[5])}
    assert host_copy(params).to_device()["w"].devices() == {jax.devices()[5]}


def test_copies_run_under_a_transfer_guard():
    params = put(arrays())
    with jax.transfer_guard("disallow"):  # on a CPU it catches transfers to the device only
        assert bits(host_copy(params).to_device()) == bits(params)


@jax.jit
def fresh(params):
    """Buffers that belong to XLA alone, as those of a learner do, so that donation can reuse them."""
    return jax.tree.map(lambda leaf: leaf + 1, params)


@functools.partial(jax.jit, donate_argnums=0)
def donating_step(params):
    return jax.tree.map(lambda leaf: leaf * 2 + 1, params)


def many(num_leaves=8):
    """Sizes of all sorts: only some numpy buffers happen to be aligned so that a device can share them."""
    return fresh({f"leaf{i}": jnp.arange(float(97 * i + 64), dtype=jnp.float32) for i in range(num_leaves)})


def test_a_donated_step_does_not_reach_the_copy():
    params = many()
    copy = host_copy(params)
    expected = bits(copy.to_numpy())
    for _ in range(3):
        donated = params
        params = jax.block_until_ready(donating_step(params))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))
    assert bits(copy.to_numpy()) == expected
    assert bits(copy.to_device()) == expected


def test_donating_what_the_copy_gave_does_not_reach_it():
    copy = host_copy(many())
    expected = bits(copy.to_numpy())
    for _ in range(3):
        jax.block_until_ready(donating_step(copy.to_device()))
    assert bits(copy.to_numpy()) == expected


def test_refused_params():
    donated = {"a": {"w": jnp.ones(4)}}
    donating_step(donated)
    with pytest.raises(ValueError, match="a/w was donated"):
        host_copy(donated)
    with pytest.raises(ValueError, match="ndarray at w, wanted a jax.Array"):
        host_copy({"w": np.ones(4)})
    with pytest.raises(ValueError, match="wanted nested dicts with string keys"):
        host_copy({"w": [jnp.ones(4)]})
    with pytest.raises(ValueError, match="wanted nested dicts with string keys"):
        host_copy({3: jnp.ones(4)})
    with pytest.raises(ValueError, match="at its root"):
        params_digest(jnp.ones(4))


def test_digest_is_sha256_of_paths_dtypes_shapes_and_bytes():
    params = {"b": jnp.array([[1.0, -2.0]], jnp.float32), "a": {"c": jnp.array(1.5, jnp.bfloat16)}}
    expected = hashlib.sha256()
    expected.update(b'[["a", "c"], "bfloat16", []]\n' + bytes([0xC0, 0x3F]))
    expected.update(b'[["b"], "float32", [1, 2]]\n' + np.array([1.0, -2.0], "<f4").tobytes())
    assert params_digest(params) == expected.hexdigest()
    assert host_copy(params).digest() == expected.hexdigest()


def test_digest_does_not_depend_on_the_sharding():
    values = arrays()
    whole = params_digest(jax.tree.map(jnp.asarray, values))
    assert {params_digest(put(values, mesh)) for mesh in MESHES} == {whole}
    assert {host_copy(put(values, mesh)).digest() for mesh in MESHES} == {whole}


def test_digest_changes_with_every_part():
    base = {"a": {"w": jnp.zeros((2, 3), jnp.float32)}, "b": jnp.ones(2)}
    others = [
        {"a": {"w": jnp.zeros((2, 3), jnp.float32).at[1, 2].set(-0.0)}, "b": jnp.ones(2)},
        {"a": {"w": jnp.zeros((3, 2), jnp.float32)}, "b": jnp.ones(2)},
        {"a": {"w": jnp.zeros((2, 3), jnp.int32)}, "b": jnp.ones(2)},
        {"a": {"v": jnp.zeros((2, 3), jnp.float32)}, "b": jnp.ones(2)},
        {"a/w": jnp.zeros((2, 3), jnp.float32), "b": jnp.ones(2)},
    ]
    assert len({params_digest(params) for params in [base, *others]}) == len(others) + 1


def test_from_numpy_inverts_to_numpy():
    params = put(arrays(), "2x4")
    copy = from_numpy(host_copy(params).to_numpy(), describe(params))
    assert bits(copy.to_device()) == bits(params)
    assert copy.to_device()["block"]["kernel"].sharding == params["block"]["kernel"].sharding
    assert copy.nbytes == total_bytes(params)


def test_from_numpy_refuses_another_model():
    params = put(arrays())
    values = host_copy(params).to_numpy()
    with pytest.raises(ValueError, match=r"the arrays has \(\(4,\), 'float32'\) at scale, wanted \(\(5,\), 'float32'\)"):
        from_numpy(values, describe(params) | {"scale": jax.ShapeDtypeStruct((5,), jnp.float32)})
    del values["block"]["nothing"]
    with pytest.raises(ValueError, match="structure"):
        from_numpy(values, describe(params))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A store with one snapshot; tests that change it copy it first."""
    store = SnapshotStore(tmp_path_factory.mktemp("store"))
    store.save(3, put(arrays(), "2x4"))
    store.wait()
    return store


@pytest.fixture
def own(saved, tmp_path):
    shutil.copytree(saved.directory, tmp_path / "copy")
    return SnapshotStore(tmp_path / "copy")


@pytest.mark.parametrize("mesh", MESHES)
def test_a_snapshot_is_loaded_bitwise_onto_any_mesh(saved, mesh):
    like = describe(put(arrays(), mesh))
    loaded = saved.load(3, like)
    assert bits(loaded) == bits(arrays())
    assert loaded["block"]["kernel"].sharding == like["block"]["kernel"].sharding
    assert jax.tree.structure(loaded) == jax.tree.structure(like)


def test_a_snapshot_is_loaded_without_knowing_the_model(saved):
    like = saved.abstract(3, SingleDeviceSharding(jax.devices()[2]))
    loaded = saved.load(3, like)
    assert bits(loaded) == bits(arrays())
    assert loaded["odd"].devices() == {jax.devices()[2]}
    assert saved.digest(3) == params_digest(loaded)


def test_a_snapshot_stores_nothing_twice(saved):
    size = sum(path.stat().st_size for path in saved.path(3).rglob("*") if path.is_file())
    assert total_bytes(arrays()) <= size < total_bytes(arrays()) + 16_000


def test_a_donated_step_does_not_reach_a_save_under_way(tmp_path):
    expected = bits({"w": np.arange(1, 2**20 + 1, dtype=np.float32)})
    params = fresh({"w": jnp.arange(2**20, dtype=jnp.float32)})
    store = SnapshotStore(tmp_path)
    store.save(0, params)
    jax.block_until_ready(donating_step(params))
    store.wait()
    assert bits(store.load(0, store.abstract(0, SingleDeviceSharding(jax.devices()[0])))) == expected


def test_saves_follow_each_other_and_versions_are_listed_when_complete(tmp_path):
    store = SnapshotStore(tmp_path)
    assert store.versions() == ()
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


def test_half_written_snapshots_are_not_listed(own):
    complete = own.path(3)
    shutil.copytree(complete, own.directory / "version-000004.orbax-checkpoint-tmp")
    shutil.copytree(complete, own.path(5))
    (own.path(5) / "manifest.json").rename(own.path(5) / "manifest.json.tmp")
    (own.directory / "version-x").mkdir()
    assert own.versions() == (3,)
    for version in (4, 5, 6):
        with pytest.raises(SnapshotCorrupt, match=rf"snapshot version {version} at {own.path(version)} is missing or incomplete"):
            own.load(version, own.abstract(3, SingleDeviceSharding(jax.devices()[0])))
    own.save(4, {"w": jnp.ones(3)})  # what a killed save left behind does not stand in the way
    own.wait()
    assert own.versions() == (3, 4)


def test_a_save_that_is_killed_is_not_listed_and_can_be_saved_again(tmp_path):
    program = """
import os, sys, jax.numpy as jnp
from rl import snapshot_store
store = snapshot_store.SnapshotStore(sys.argv[1])
store.save(0, {"w": jnp.ones(3)})
store.wait()
store.save(1, {"w": jnp.ones(2**22)})
os.kill(os.getpid(), 9)
"""
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, capture_output=True)
    assert killed.returncode == -9, killed.stderr
    store = SnapshotStore(tmp_path)
    assert store.versions() == (0,)
    store.discard_after(1)
    store.save(1, {"w": jnp.ones(4)})
    store.wait()
    assert store.versions() == (0, 1)


def test_two_processes_that_hold_half_each_agree_on_every_bit(tmp_path):
    program = """
import sys, jax, numpy as np
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from rl import snapshot_store
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("fsdp", "tensor"))
values = {"w": np.arange(32, dtype=np.float32).reshape(8, 4), "b": np.arange(4, dtype=np.float32)}
specs = {"w": P("fsdp", "tensor"), "b": P("tensor")}
params = {name: jax.make_array_from_callback(value.shape, NamedSharding(mesh, specs[name]), value.__getitem__)
          for name, value in values.items()}
copy = snapshot_store.host_copy(params)
assert copy.nbytes == 64 + 16, copy.nbytes
for name, back in copy.to_device().items():
    assert back.sharding == params[name].sharding
    for ours, theirs in zip(back.addressable_shards, params[name].addressable_shards, strict=True):
        np.testing.assert_array_equal(ours.data, theirs.data)
again = snapshot_store.from_numpy(copy.to_numpy(), params)
assert again.nbytes == copy.nbytes and again.digest() == copy.digest()
store = snapshot_store.SnapshotStore(sys.argv[3])
store.save(0, copy)
store.wait()
print(copy.digest())
"""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    processes = [subprocess.Popen([sys.executable, "-c", program, address, str(rank), str(tmp_path)], env=environment, cwd=ROOT,
                                  text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in (0, 1)]
    outputs = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    values = {"w": jnp.arange(32, dtype=jnp.float32).reshape(8, 4), "b": jnp.arange(4, dtype=jnp.float32)}
    assert {output.splitlines()[-1] for output, _ in outputs} == {params_digest(values)}
    store = SnapshotStore(tmp_path)
    assert bits(store.load(0, describe(values))) == bits(values)


def test_discard_after_goes_back(own):
    shutil.copytree(own.path(3), own.path(4))
    shutil.copytree(own.path(3), own.path(2))
    shutil.copytree(own.path(3), own.path(1))
    (own.path(1) / "manifest.json").unlink()
    shutil.copytree(own.path(3), own.directory / "version-000007.orbax-checkpoint-tmp")
    own.discard_after(3)
    assert own.versions() == (2, 3)
    assert sorted(path.name for path in own.directory.iterdir()) == ["version-000002", "version-000003"]
    own.save(4, {"w": jnp.ones(3)})
    own.wait()
    assert own.versions() == (2, 3, 4)


def test_loading_into_another_model_says_what_differs(saved):
    like = saved.abstract(3, SingleDeviceSharding(jax.devices()[0]))
    for changed, message in [
        ({"scale": jax.ShapeDtypeStruct((5,), jnp.float32)}, r"has \(\(4,\), 'float32'\) at scale, wanted \(\(5,\), 'float32'\)"),
        ({"scale": jax.ShapeDtypeStruct((4,), jnp.bfloat16)}, r"at scale, wanted \(\(4,\), 'bfloat16'\)"),
        ({"extra": jax.ShapeDtypeStruct((4,), jnp.float32)}, "has nothing at extra, wanted"),
        ({"block": {}}, "at block/kernel, wanted nothing"),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            saved.load(3, like | changed)
        assert not isinstance(error.value, SnapshotCorrupt)


def test_files_names_and_digests_every_file(saved):
    files = saved.files(3)
    on_disk = {str(path.relative_to(saved.path(3))): path for path in saved.path(3).rglob("*") if path.is_file()}
    del on_disk["manifest.json"]
    assert files == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in on_disk.items()}
    assert files == saved.files_now(3) and saved.files_now(9) == {}
    assert "commit_success.txt" in files and any(name.startswith("state/") for name in files)
    with pytest.raises(SnapshotCorrupt, match="snapshot version 9 at .*version-000009 is missing"):
        saved.files(9)


def flip(path, position, bit=1):
    content = bytearray(path.read_bytes())
    content[position] ^= bit
    path.write_bytes(content)


def test_a_damaged_file_is_named_and_nothing_is_loaded(own):
    device = SingleDeviceSharding(jax.devices()[0])
    like = own.abstract(3, device)
    for path in sorted(path for path in own.path(3).rglob("*") if path.is_file() and path.name != "manifest.json"):
        content = path.read_bytes()
        name = path.relative_to(own.path(3)).as_posix()
        message = rf"snapshot version 3 at {own.path(3)} is damaged: {name} changed"
        for damaged in (None, content[: len(content) // 2], content + b"\0"):
            if damaged == content:
                continue
            path.unlink() if damaged is None else path.write_bytes(damaged)
            with pytest.raises(SnapshotCorrupt, match=message):
                own.load(3, like)
            with pytest.raises(SnapshotCorrupt, match=message):
                own.abstract(3, device)
            path.write_bytes(content)
        if content:
            flip(path, len(content) // 2)
            with pytest.raises(SnapshotCorrupt, match=message):
                own.load(3, like)
            path.write_bytes(content)
    (own.path(3) / "state" / "stray").touch()
    with pytest.raises(SnapshotCorrupt, match="state/stray changed, vanished or appeared"):
        own.load(3, like)


def test_every_byte_of_the_manifest_counts(own):
    path = own.path(3) / "manifest.json"
    content = path.read_bytes()
    for position in [*range(0, len(content), 11), len(content) - 1]:
        flip(path, position, 1 << position % 7)
        with pytest.raises(SnapshotCorrupt, match=rf"version 3 at {own.path(3)} is damaged: manifest.json is not"):
            own.files(3)
        path.write_bytes(content)
    for other in (b"3", b"[]", b"{}", b"", b"\xff"):
        path.write_bytes(other)
        with pytest.raises(SnapshotCorrupt, match="manifest.json is not"):
            own.digest(3)


def test_a_snapshot_under_another_number_is_refused(own):
    shutil.copytree(own.path(3), own.path(4))
    with pytest.raises(SnapshotCorrupt, match="version 4 at .* manifest.json is not the one that was written with it"):
        own.digest(4)


def test_values_that_differ_from_the_digest_are_refused(saved, monkeypatch):
    like = saved.abstract(3, SingleDeviceSharding(jax.devices()[0]))
    changed = saved.load(3, like)
    changed["scale"] = changed["scale"].at[0].set(0.0)  # was -0.0
    monkeypatch.setattr(snapshot_store.ocp, "load", lambda *_: changed)
    with pytest.raises(SnapshotCorrupt, match=rf"snapshot version 3 at {saved.path(3)} gave values of digest"):
        saved.load(3, like)


def test_a_failed_save_is_reported_by_wait(tmp_path, monkeypatch):
    store = SnapshotStore(tmp_path)
    monkeypatch.setattr(snapshot_store.ocp, "save_async", lambda *_, **__: FailedResponse())
    store.save(0, {"w": jnp.ones(3)})
    with pytest.raises(OSError, match="disk full"):
        store.wait()
    store.wait()  # reported once
    assert store.versions() == ()


class FailedResponse:
    def result(self):
        raise OSError("disk full")
