"""The ring: what was put comes back bit for bit, a pinned version never leaves, and a refusal changes nothing."""

import functools
import json
import sys
import threading

import hypothesis
import hypothesis.stateful
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from rl.host_copy import params_digest
from rl.snapshot_store import SnapshotStore
from rl.snapshots import RingFull, SnapshotRing, VersionGone, check_capacity

SHAPES = {"fsdp=8": ((8, 1), P("fsdp")), "2x4": ((2, 4), P("fsdp", "tensor"))}


def sharded(seed, shape_name="fsdp=8"):
    """A sharded kernel of random bits (NaN payloads among them), a replicated bias with both zeros."""
    shape, spec = SHAPES[shape_name]
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("fsdp", "tensor"))
    kernel = np.random.default_rng(seed).integers(0, 2**16, (64, 32), dtype=np.uint16).view(jnp.bfloat16)
    bias = np.array([-0.0, 0.0, np.nan, -np.inf, seed], np.float32)
    shardings = {"kernel": NamedSharding(mesh, spec), "bias": NamedSharding(mesh, P())}
    return {"layer": jax.device_put({"kernel": kernel, "bias": bias}, shardings)}


def test_the_step_of_these_tests_donates():
    donated = fresh(sharded(0))
    train_step(donated)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))  # or they would test nothing


def tiny(value):
    return {"w": jnp.array([value, -value], jnp.float32)}


def bits(params):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)]


def copied(state):
    return jax.tree.map(lambda leaf: np.array(leaf) if isinstance(leaf, np.ndarray) else leaf, state)


def describe(params):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), params)


@jax.jit
def fresh(params):
    return jax.tree.map(lambda leaf: leaf + jnp.ones((), leaf.dtype), params)


@functools.partial(jax.jit, donate_argnums=0)
def train_step(params):
    return jax.tree.map(lambda leaf: leaf * jnp.full((), 0.5, leaf.dtype) + jnp.ones((), leaf.dtype), params)


@pytest.mark.parametrize("shape_name", SHAPES)
def test_get_returns_every_bit_with_the_sharding_of_put(shape_name):
    ring = SnapshotRing(3)
    params = [sharded(seed, shape_name) for seed in range(3)]
    for version, tree in enumerate(params):
        ring.put(version, tree)
    for version, tree in enumerate(params):
        got = ring.get(version)
        assert bits(got) == bits(tree)
        assert jax.tree.map(lambda leaf: leaf.sharding, got) == jax.tree.map(lambda leaf: leaf.sharding, tree)
        assert ring.digest(version) == params_digest(tree)
    each = 64 * 32 * 2 + 5 * 4  # replicas not counted
    assert 3 * each - 2 * 5 * 4 < ring.nbytes < 3 * each + 1000  # of random bits, differences are as large, and have headers


@pytest.mark.parametrize("shape_name", SHAPES)
def test_three_donated_steps_leave_a_snapshot_alone(shape_name):
    params = fresh(sharded(0, shape_name))
    ring = SnapshotRing(2)
    ring.put(0, params)
    expected, digest = bits(ring.get(0)), params_digest(params)
    for _ in range(3):
        params = jax.block_until_ready(train_step(params))
    assert bits(ring.get(0)) == expected
    assert ring.digest(0) == digest  # computed only now
    jax.block_until_ready(train_step(ring.get(0)))  # and donating what get gave does no harm either
    assert bits(ring.get(0)) == expected


def test_the_oldest_unpinned_version_leaves_first():
    ring = SnapshotRing(3)
    for version in (0, 2, 5):
        ring.put(version, tiny(version))
    ring.pin([2])
    ring.put(6, tiny(6))
    assert ring.versions == (2, 5, 6)
    ring.put(7, tiny(7))
    assert ring.versions == (2, 6, 7)
    ring.release([2])
    ring.put(8, tiny(8))
    assert ring.versions == (6, 7, 8)


def test_a_full_ring_of_pins_refuses_and_changes_nothing():
    ring = SnapshotRing(3)
    for version in range(3):
        ring.put(version, tiny(version))
    ring.pin([0, 1])
    before = ring.state()
    assert not ring.has_room()  # version 2 is free, but the sampler still writes with it
    with pytest.raises(RingFull, match=r"version 3: the ring of 3 holds versions \[0, 1, 2\], pinned {0: 1, 1: 1}; skip this"):
        ring.put(3, tiny(3))
    after = ring.state()
    assert json.dumps(before.pop("versions")) == json.dumps(after.pop("versions"))
    assert before["pins"] == after["pins"]
    assert all(bits(before[part]) == bits(after[part]) for part in ("params", "chain"))
    ring.release([1])
    assert ring.has_room()
    ring.put(3, tiny(3))
    assert ring.versions == (0, 2, 3)


def test_a_ring_of_one_replaces_its_version_unless_it_is_pinned():
    ring = SnapshotRing(1)
    ring.put(0, tiny(0))
    ring.put(1, tiny(1))
    assert ring.versions == (1,) and bits(ring.get(1)) == bits(tiny(1))
    ring.pin([1])
    with pytest.raises(RingFull):
        ring.put(2, tiny(2))


def test_pins_are_counted():
    ring = SnapshotRing(2)
    ring.put(0, tiny(0))
    ring.put(1, tiny(1))
    assert ring.pins == {} and ring.oldest_pinned is None
    ring.pin((0, 1))
    ring.pin([np.int32(0)])
    ring.pin([])
    assert ring.pins == {0: 2, 1: 1} and ring.oldest_pinned == 0
    ring.release([0])
    with pytest.raises(RingFull):
        ring.put(2, tiny(2))
    ring.release([0])
    assert ring.pins == {1: 1} and ring.oldest_pinned == 1
    ring.put(2, tiny(2))
    assert ring.versions == (1, 2)


def test_evicting_takes_the_oldest_version_or_none():
    ring = SnapshotRing(3)
    for version in range(3):
        ring.put(version, tiny(version))
        ring.pin([version])
    assert not ring.evict(keep=0), "the sampler has it, and the next one is not older"
    assert ring.versions == (0, 1, 2)
    assert ring.evict(keep=2) and ring.versions == (1, 2) and ring.pins == {1: 1, 2: 1}
    with pytest.raises(VersionGone, match="version 0"):
        ring.get(0)
    again = SnapshotRing(3)
    again.restore(ring.state(), describe(tiny(0)))
    for each in (ring, again):
        each.release([0, 1])  # whoever pinned it releases it as ever
        assert each.pins == {2: 1}


def test_wrong_pins_and_releases_change_nothing():
    ring = SnapshotRing(2)
    ring.put(0, tiny(0))
    ring.put(1, tiny(1))
    ring.pin([1])
    with pytest.raises(VersionGone, match=r"version 7 is not in the ring, which holds \[0, 1\]"):
        ring.pin([0, 7])
    with pytest.raises(VersionGone, match="version -1"):
        ring.pin([-1])
    with pytest.raises(ValueError, match="version 0 released 1 times but pinned 0 times"):
        ring.release([1, 0])
    with pytest.raises(ValueError, match="version 1 released 2 times but pinned 1 times"):
        ring.release([1, 1])
    assert ring.pins == {1: 1}


def test_a_version_that_left_is_an_error_that_names_those_present():
    ring = SnapshotRing(1)
    with pytest.raises(VersionGone, match=r"version 0 is not in the ring, which holds \[\]"):
        ring.get(0)
    ring.put(0, tiny(0))
    ring.put(1, tiny(1))
    for call in (ring.get, ring.digest):
        with pytest.raises(VersionGone, match=r"version 0 is not in the ring, which holds \[1\]"):
            call(0)


def test_versions_strictly_increase():
    ring = SnapshotRing(2)
    with pytest.raises(ValueError, match="version -1"):
        ring.put(-1, tiny(0))
    ring.put(4, tiny(4))
    for version in (4, 3):
        with pytest.raises(ValueError, match=f"version {version} put after version 4"):
            ring.put(version, tiny(1))
    assert ring.versions == (4,)


def test_refused_params_let_nothing_leave():
    ring = SnapshotRing(1)
    ring.put(0, tiny(0))
    donated = fresh(tiny(1))
    train_step(donated)
    with pytest.raises(ValueError, match="w was donated"):
        ring.put(1, donated)
    assert ring.versions == (0,)


def test_check_capacity_names_numbers_and_options():
    check_capacity(4, 3)
    with pytest.raises(ValueError, match="holds 3 versions, wanted at least 4 .* --ring-capacity 4 or --max-staleness 2"):
        check_capacity(3, 3)


def test_refused_arguments(tmp_path):
    with pytest.raises(ValueError, match="ring of 0 versions"):
        SnapshotRing(0)
    with pytest.raises(ValueError, match="persist_every is 2 with no store"):
        SnapshotRing(1, persist_every=2)
    with pytest.raises(ValueError, match="persist_every is 0 with a store"):
        SnapshotRing(1, store=SnapshotStore(tmp_path), persist_every=0)
    ring = SnapshotRing(1)
    ring.put(0, tiny(0))
    with pytest.raises(ValueError, match="the ring has no store"):
        ring.persist(0)


def test_every_nth_version_is_persisted_and_outlives_the_ring(tmp_path):
    store = SnapshotStore(tmp_path)
    ring = SnapshotRing(2, store=store, persist_every=2)
    for version in range(5):
        ring.put(version, sharded(version))
    ring.persist(3)
    ring.persist(3)  # once is enough
    ring.persist(4)
    with pytest.raises(VersionGone):
        ring.persist(1)
    store.wait()
    assert store.versions() == (0, 2, 3, 4)
    loaded = store.load(0, store.abstract(0, SingleDeviceSharding(jax.devices()[0])))
    assert bits(loaded) == bits(sharded(0))
    assert store.digest(4) == ring.digest(4)
    assert bits(store.load(4, describe(sharded(4, "2x4")))) == bits(ring.get(4))


def test_state_and_restore_give_the_same_ring(tmp_path):
    store = SnapshotStore(tmp_path)
    ring = SnapshotRing(3, store=store, persist_every=2)
    for version in (1, 2, 3):
        ring.put(version, sharded(version, "2x4"))
    ring.pin([1, 2])
    ring.pin([2])
    state = ring.state()
    assert store.versions() == (2,)  # what the state counts on is on disk
    params, chain = state.pop("params"), state.pop("chain")
    state = json.loads(json.dumps(state)) | {"params": jax.tree.map(np.array, params), "chain": copied(chain)}
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(params))

    other = SnapshotRing(3, store=store, persist_every=2)
    other.restore(state, describe(sharded(0, "2x4")))
    assert (other.versions, other.pins, other.nbytes) == (ring.versions, ring.pins, ring.nbytes)
    for version in (1, 2, 3):
        got = other.get(version)
        assert bits(got) == bits(sharded(version, "2x4"))
        assert jax.tree.map(lambda leaf: leaf.sharding, got) == jax.tree.map(lambda leaf: leaf.sharding, ring.get(version))
        assert other.digest(version) == ring.digest(version)
    with pytest.raises(RingFull):
        other.put(4, sharded(4, "2x4"))
    other.release([1])
    other.put(4, sharded(4, "2x4"))  # persisted like in the first ring, though version 2 is there already
    other.persist(2)
    store.wait()
    assert other.versions == (2, 3, 4) and store.versions() == (2, 4)


def test_restore_owns_its_arrays_and_refuses_what_does_not_fit():
    ring = SnapshotRing(2)
    ring.put(0, tiny(1))
    ring.put(1, tiny(2))
    state = ring.state()
    state["params"] = jax.tree.map(np.array, state["params"])
    other = SnapshotRing(2)
    other.restore(state, describe(tiny(0)))
    state["params"]["newest"]["w"][:] = 7
    assert bits(other.get(1)) == bits(tiny(2))
    with pytest.raises(ValueError, match=r"holds versions \[0, 1\], wanted at most 1; resume with --ring-capacity 2"):
        SnapshotRing(1).restore(state, describe(tiny(0)))
    with pytest.raises(ValueError, match="at w, wanted"):
        other.restore(state, {"w": jax.ShapeDtypeStruct((3,), jnp.float32, sharding=SingleDeviceSharding(jax.devices()[0]))})
    assert other.versions == (0, 1)


def test_pins_from_many_threads_are_all_counted():
    ring = SnapshotRing(2)
    ring.put(0, tiny(0))
    ring.put(1, tiny(1))

    def pin_and_release():
        for _ in range(500):
            ring.pin([0, 1])
            ring.release([0])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns within a call, so that a missing lock shows
    threads = [threading.Thread(target=pin_and_release) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)
    assert ring.pins == {1: 2000}


class RingAgainstModel(hypothesis.stateful.RuleBasedStateMachine):
    """Any sequence of calls against a plain dict from version to [value, pins]."""

    @hypothesis.stateful.initialize(capacity=st.integers(1, 4))
    def start(self, capacity):
        self.capacity = capacity
        self.ring = SnapshotRing(capacity)
        self.model = {}

    @hypothesis.stateful.rule(gap=st.integers(1, 3))
    def put(self, gap):
        version = max(self.model, default=-1) + gap
        candidates = sorted(self.model) if self.capacity == 1 else sorted(self.model)[:-1]
        free = [old for old in candidates if self.model[old][1] == 0]
        room = len(self.model) < self.capacity or bool(free)
        assert self.ring.has_room() == room
        if not room:
            with pytest.raises(RingFull):
                self.ring.put(version, tiny(version))
            return
        if len(self.model) == self.capacity:
            del self.model[free[0]]
        self.model[version] = [version, 0]
        self.ring.put(version, tiny(version))

    @hypothesis.stateful.rule(versions=st.lists(st.integers(0, 12), max_size=3))
    def pin(self, versions):
        if all(version in self.model for version in versions):
            self.ring.pin(versions)
            for version in versions:
                self.model[version][1] += 1
        else:
            with pytest.raises(VersionGone):
                self.ring.pin(versions)

    @hypothesis.stateful.rule(versions=st.lists(st.integers(0, 12), max_size=3))
    def release(self, versions):
        if all(versions.count(version) <= self.model.get(version, [0, 0])[1] for version in versions):
            self.ring.release(versions)
            for version in versions:
                self.model[version][1] -= 1
        else:
            with pytest.raises(ValueError, match="pinned"):
                self.ring.release(versions)

    @hypothesis.stateful.rule()
    def stop_and_resume(self):
        state = self.ring.state()
        self.ring = SnapshotRing(self.capacity)
        self.ring.restore(state, describe(tiny(0)))

    @hypothesis.stateful.invariant()
    def same(self):
        assert self.ring.versions == tuple(sorted(self.model))
        assert self.ring.pins == {version: pins for version, (_, pins) in self.model.items() if pins}
        assert bool(self.model) * 8 <= self.ring.nbytes < 8 + 100 * len(self.model)
        for version in self.model:
            assert bits(self.ring.get(version)) == bits(tiny(version))


TestRingAgainstModel = RingAgainstModel.TestCase
TestRingAgainstModel.settings = hypothesis.settings(max_examples=20, stateful_step_count=20, deadline=None)
