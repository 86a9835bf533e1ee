"""Older versions as differences: bit for bit, small, joined or moved to disk when they should be, and damage is named."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rl import version_chain
from rl.delta import Delta
from rl.delta_record import DeltaCorrupt, WrongBase
from rl.host_copy import host_copy
from rl.snapshot_store import SnapshotStore
from rl.snapshots import SnapshotRing, VersionGone
from rl.version_chain import VersionChain

MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("fsdp", "tensor"))
SHARDINGS = {"kernel": NamedSharding(MESH, P("fsdp", "tensor")), "scale": NamedSharding(MESH, P())}


@functools.cache
def weights(version):
    """Bfloat16 weights of which few change from one version to the next."""
    master = np.random.default_rng(0).normal(0, 0.04, (512, 256)).astype(np.float32)
    for step in range(version):
        master += np.random.default_rng(step + 1).normal(0, 1e-6, master.shape).astype(np.float32)
    return {"kernel": master.astype(jnp.bfloat16), "scale": np.full(5, 1 + version, np.float32)}


def params(version):
    return jax.device_put(weights(version), SHARDINGS)


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def describe(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree)


def filled(num_versions, capacity=None, **options):
    ring = SnapshotRing(capacity or num_versions, **options)
    for version in range(num_versions):
        ring.put(version, params(version))
    return ring


def test_versions_are_small_and_come_back_bit_for_bit_in_any_order():
    ring, whole = filled(8), host_copy(params(0)).nbytes
    assert whole < ring.nbytes < 1.25 * whole, "differences of a small array, with their headers"
    for version in (3, 7, 0, 5, 0):
        got = ring.get(version)
        assert bits(got) == bits(weights(version))
        assert jax.tree.map(lambda leaf: leaf.sharding, got) == SHARDINGS
    with ring.walk():
        for version in (7, 6, 4, 4, 1, 0, 3, 2):  # up again in between
            assert bits(ring.get(version)) == bits(weights(version))
    elsewhere = jax.tree.map(lambda _: NamedSharding(Mesh(np.array(jax.devices()[4:6]), ("x",)), P("x")), {"kernel": 0})
    elsewhere["scale"] = NamedSharding(elsewhere["kernel"].mesh, P())
    got = ring.get(2, elsewhere)
    assert bits(got) == bits(weights(2)) and got["kernel"].sharding == elsewhere["kernel"]


def test_a_walk_goes_one_step_at_a_time(monkeypatch):
    steps, follow = [], version_chain.delta.follow

    def counted(deltas, place, source, target):
        if place[0] == ("scale",):
            steps.append((len(deltas), source is target))
        follow(deltas, place, source, target)

    monkeypatch.setattr(version_chain.delta, "follow", counted)
    ring = filled(5)
    with ring.walk():
        for version in (4, 3, 2, 1, 0):
            ring.get(version)
    assert steps == [(1, False), (1, True), (1, True), (1, True)], "the newest version is never changed"
    ring.get(1), ring.get(0)
    assert steps[4:] == [(3, False), (4, False)], "outside of a walk each starts from the newest"


def test_what_is_got_in_a_walk_stays_what_it_is():
    ring = filled(4)
    with ring.walk():
        got = {version: ring.get(version) for version in (3, 2, 1, 0)}
    assert all(bits(tree) == bits(weights(version)) for version, tree in got.items())


def test_a_program_under_way_reads_what_it_was_given():
    """Dropped as soon as a slow program has been started with it, while the walk goes on."""
    ring = filled(8)
    slow = jax.jit(lambda tree: (jax.lax.fori_loop(0, 40, lambda _, x: jnp.sin(x @ x.T @ x), tree["kernel"].astype(jnp.float32)),
                                 tree["kernel"], tree["scale"]))  # fmt: skip
    single = jax.tree.map(lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), SHARDINGS)
    with ring.walk():
        found = [slow(ring.get(version, single))[1:] for version in range(7, -1, -1)]
    for version, (kernel, scale) in zip(range(7, -1, -1), found, strict=True):
        assert bits({"kernel": kernel, "scale": scale}) == bits(weights(version))


def test_a_walk_uses_the_memory_of_versions_that_nobody_holds_again():
    ring, kept = filled(8), None
    with ring.walk():
        for version in range(7, -1, -1):
            before, kept = kept, ring.get(version)  # as a source does, which still scores the version before
            del before
        assert {len(memories) for memories in ring._walk.cursor._memories.values()} == {2}
        assert bits(kept) == bits(weights(0))


def test_encoding_does_not_keep_the_caller_waiting(monkeypatch):
    hold, encode = threading.Event(), version_chain.delta.encode_shards

    def slow(*arguments, **options):
        assert hold.wait(60)
        return encode(*arguments, **options)

    monkeypatch.setattr(version_chain.delta, "encode_shards", slow)
    ring = SnapshotRing(3)
    ring.put(0, params(0))
    ring.put(1, params(1))  # returns
    assert ring.versions == (0, 1) and bits(ring.get(1)) == bits(weights(1))
    hold.set()
    assert bits(ring.get(0)) == bits(weights(0))


def test_an_error_while_encoding_is_raised(monkeypatch):
    def broken(*_, **__):
        raise MemoryError("no room to encode")

    monkeypatch.setattr(version_chain.delta, "encode_shards", broken)
    ring = SnapshotRing(3)
    ring.put(0, params(0))
    ring.put(1, params(1))
    with pytest.raises(MemoryError, match="no room to encode"):
        _ = ring.nbytes
    with pytest.raises(MemoryError, match="no room to encode"):
        ring.get(0)


def test_steps_over_versions_that_left_are_joined():
    ring = SnapshotRing(3)
    ring.put(0, params(0))
    ring.pin([0])
    for version in range(1, 30):
        ring.put(version, params(version))
        assert ring.versions[0] == 0 and len(ring.versions) <= 3
    assert len(ring._chain.state()["links"]) <= 3
    assert bits(ring.get(0)) == bits(weights(0))
    ring.release([0])
    ring.put(30, params(30))
    assert ring.versions == (28, 29, 30) and bits(ring.get(28)) == bits(weights(28))


def test_a_version_that_comes_again_does_not_confuse():
    ring = SnapshotRing(4)
    for version, value in enumerate((4, 1, 2, 1)):
        ring.put(version, {"w": jnp.full(1, value, jnp.bfloat16)})
    ring.pin([0, 1])
    ring.put(4, {"w": jnp.full(1, 8, jnp.bfloat16)})
    ring.release([1])
    ring.put(5, {"w": jnp.full(1, 16, jnp.bfloat16)})
    assert bits(ring.get(0)) == bits({"w": jnp.full(1, 4, jnp.bfloat16)})


def test_beyond_the_budget_differences_are_read_from_disk(tmp_path):
    whole = host_copy(params(0)).nbytes
    store = SnapshotStore(tmp_path, keyframe_every=3)
    unlimited = filled(9).nbytes - whole
    ring = filled(9, store=store, persist_every=1, host_bytes=whole + unlimited // 3)
    assert whole < ring.nbytes <= whole + unlimited // 3
    assert bits(ring.get(0)) == bits(weights(0))
    with ring.walk():
        assert all(bits(ring.get(version)) == bits(weights(version)) for version in range(8, -1, -1))
    store.wait()
    assert store.versions() == tuple(range(9))
    state = ring.state()
    again = SnapshotRing(9, store=store, persist_every=1, host_bytes=whole + unlimited // 3)
    again.restore(state, describe(params(0)))
    assert again.nbytes == ring.nbytes and bits(again.get(0)) == bits(weights(0))
    path = store.path(1) / "difference-00000.bin"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"snapshot version 1 at .* is damaged: difference-00000.bin changed"):
        again.get(0)
    assert bits(again.get(1)) == bits(weights(1)), "versions that are not told from it are whole"


def test_a_budget_needs_every_version_on_disk():
    with pytest.raises(ValueError, match="wanted 1: what leaves the memory must be on disk"):
        SnapshotRing(3, host_bytes=10)


def test_a_budget_of_nothing_keeps_the_newest_version_and_pinned_ones_on_disk(tmp_path):
    whole = host_copy(params(0)).nbytes
    ring = SnapshotRing(3, store=SnapshotStore(tmp_path), persist_every=1, host_bytes=whole)
    ring.put(0, params(0))
    ring.pin([0])
    for version in range(1, 8):
        ring.put(version, params(version))
    assert ring.nbytes == whole and ring.versions == (0, 6, 7)
    assert all(bits(ring.get(version)) == bits(weights(version)) for version in ring.versions)


def test_a_damaged_byte_in_memory_is_noticed_and_named():
    ring = filled(4)
    _ = ring.nbytes
    link = ring._chain._links[1]  # from version 2 to version 1
    records = dict(link.delta.result().records)
    place = next(place for place in records if place[0] == ("kernel",))
    damaged = bytearray(records[place])
    damaged[len(damaged) // 2] ^= 4
    link.delta = version_chain.done(Delta({**records, place: bytes(damaged)}))
    assert bits(ring.get(2)) == bits(weights(2))
    for version in (1, 0):
        with pytest.raises(DeltaCorrupt, match=r"kernel\[0:256, 0:64\]: a record is damaged"):
            ring.get(version)


def test_a_damaged_newest_version_is_noticed():
    ring = filled(3)
    version, copy = ring._chain._newest
    shards = {place: shard + 1 if place[0] == ("scale",) else shard for place, shard in copy.shards.items()}
    ring._chain._newest = version, copy.with_shards(shards)
    with pytest.raises(WrongBase, match=r"scale\[0:5\]"):
        ring.get(0)


def test_a_state_of_another_sharding_is_refused():
    state = filled(3).state()
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(MESH, P())), params(0))
    with pytest.raises(ValueError, match=r"sharded .* resume with the mesh of that run"):
        SnapshotRing(3).restore(state, like)


def test_versions_that_are_not_kept_are_told_apart_for_the_disk_all_the_same(tmp_path):
    chain = VersionChain()
    assert chain.nbytes == 0 and chain.difference(0) is None
    for version in range(3):
        told = chain.append(version, host_copy(params(version)), keep_before=False, tell=version == 2)
        assert (told is None) == (version < 2)
    assert told.base == 1 and chain.difference(2) is None and chain.state()["links"] == []
    assert chain.nbytes == host_copy(params(0)).nbytes
    store = SnapshotStore(tmp_path, keyframe_every=3)
    ring = filled(5, capacity=1, store=store, persist_every=1)
    store.wait()
    assert ring.versions == (4,) and store.versions() == (0, 1, 2, 3, 4)
    assert [(store.path(version) / "keyframe").exists() for version in range(5)] == [True, False, False, True, False]
    assert all(bits(store.load(version, describe(params(0)))) == bits(weights(version)) for version in range(5))


def test_a_version_that_leaves_while_it_is_wanted_is_gone_or_what_it_was(monkeypatch):
    ring = filled(4)
    ring.pin([0])
    check, putter = ring._check_held, threading.Thread(target=lambda: ring.put(4, params(4)))

    def leaves(version):
        """Another thread lets a version go as soon as it has been looked for."""
        check(version)
        monkeypatch.undo()
        putter.start()
        putter.join(0.5)  # which has to wait until the getter knows the way

    monkeypatch.setattr(ring, "_check_held", leaves)
    assert bits(ring.get(1)) == bits(weights(1))
    putter.join()
    assert ring.nbytes and ring.versions == (0, 2, 3, 4)
    with pytest.raises(VersionGone):
        ring.get(1)
    cursor = ring._chain.cursor()
    with pytest.raises(ValueError, match="wanted version 1 among them"):
        cursor.to(1)
    assert bits(cursor.to(0).to_device()) == bits(weights(0))


def test_other_parameters_than_before_are_refused_and_nothing_has_changed():
    ring = filled(3)
    other = params(3)
    with pytest.raises(ValueError, match=r"params has nothing at scale, wanted .* as in version 2; put versions of one model"):
        ring.put(3, {"kernel": other["kernel"]})
    with pytest.raises(ValueError, match="at kernel, wanted"):
        ring.put(3, {**other, "kernel": jax.device_put(other["kernel"], NamedSharding(MESH, P()))})
    with pytest.raises(ValueError, match="float32.* at kernel"):
        ring.put(3, {**other, "kernel": other["kernel"].astype(jnp.float32)})
    assert ring.versions == (0, 1, 2) and bits(ring.get(0)) == bits(weights(0))


def test_a_version_that_could_not_be_written_is_not_called_persisted(tmp_path, monkeypatch):
    store = SnapshotStore(tmp_path)
    ring = SnapshotRing(4, store=store, persist_every=1)
    ring.put(0, params(0))
    store.wait()
    write = store._write

    def full(version, *arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(store, "_write", full)
    ring.put(1, params(1))
    monkeypatch.setattr(store, "_write", write)
    with pytest.raises(OSError, match="no space left"):
        ring.state()
    assert ring.persisted == (0,) and ring.state()["persisted"] == [0]
    ring.put(2, params(2))
    store.wait()
    assert store.versions() == (0, 2) and store.base(2) is None, "whole, for what it would be told from is not there"
    ring.persist(1)
    store.wait()
    assert all(bits(store.load(version, describe(params(0)))) == bits(weights(version)) for version in (0, 1, 2))
