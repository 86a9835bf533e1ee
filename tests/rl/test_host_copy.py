"""Copies that no donated step can reach, and digests that identify parameters wherever they lie."""

import dataclasses
import functools
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.host_copy import HostCopy, combined_digest, empty, from_numpy, host_copy, owned, params_digest, shard_indices
from tests.params import MESHES, arrays, bits, describe, donating_step, fresh, put, total_bytes


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


def test_another_memory_of_the_devices_can_be_chosen():
    params = put(arrays(), "2x4")
    pinned = host_copy(params).to_device("pinned_host")
    assert bits(pinned) == bits(params)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(pinned)} == {"pinned_host"}
    assert pinned["block"]["kernel"].sharding.spec == params["block"]["kernel"].sharding.spec


def test_copies_run_under_a_transfer_guard():
    params = put(arrays())
    with jax.transfer_guard("disallow"):  # on a CPU it catches transfers to the device only
        assert bits(host_copy(params).to_device()) == bits(params)


def many(num_leaves=8):
    """Sizes of all sorts: only some numpy buffers happen to be aligned so that a device can share them."""
    return fresh({f"leaf{i}": jnp.arange(float(97 * i + 64), dtype=jnp.float32) for i in range(num_leaves)})


@pytest.mark.parametrize("make", [many, lambda: fresh(floats("2x4"))], ids=["one device", "eight devices"])
def test_a_donated_step_does_not_reach_the_copy(make):
    donated = make()
    donating_step(donated)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(donated))  # where nobody looks at the buffers, it reuses them
    expected = bits(jax.tree.map(np.array, make()))
    params = make()
    copy = host_copy(params)
    for _ in range(3):
        params = jax.block_until_ready(donating_step(params))
    assert bits(copy.to_numpy()) == expected
    assert bits(copy.to_device()) == expected
    assert copy.digest() == params_digest(make())  # computed only now


def floats(mesh):
    """Without the values that arithmetic changes into NaN."""
    values = arrays()
    values["block"]["kernel"] = np.arange(2**16, dtype=np.float32).reshape(256, 256)
    return put(values, mesh)


def test_a_copy_makes_no_difference_to_the_step_that_donates():
    expected = bits(functools.reduce(lambda params, _: donating_step(params), range(3), many()))
    params, copies = many(), []
    for _ in range(3):
        copies.append(host_copy(params))
        params = donating_step(params)
    assert bits(params) == expected


def test_donating_what_the_copy_gave_does_not_reach_it():
    copy = host_copy(many())
    expected = bits(copy.to_numpy())
    for _ in range(3):
        jax.block_until_ready(donating_step(copy.to_device()))
    assert bits(copy.to_numpy()) == expected


def test_with_shards_has_other_values_in_the_same_places():
    old, new = host_copy(put(arrays(0), "2x4")), host_copy(put(arrays(1), "2x4"))
    changed = old.with_shards(new.shards)
    assert bits(changed.to_device()) == bits(arrays(1)) and changed.digest() == new.digest()
    assert bits(old.to_device()) == bits(arrays(0)) and old.digest() != new.digest()


def test_a_shard_is_held_once_at_its_index():
    params = put(arrays(), "4x2")
    kernel = params["block"]["kernel"]
    shards = host_copy(params).shards
    assert len(shards) == 8 + 2 + 1 + 1
    assert shard_indices(kernel) == [index for path, index in shards if path == ("block", "kernel")]
    for (path, index), shard in shards.items():
        if path == ("block", "kernel"):
            where = tuple(slice(start, stop) for start, stop in index)
            assert shard.tobytes() == arrays()["block"]["kernel"][where].tobytes()
    assert [index for path, index in shards if path == ("step",)] == [()]


def test_memory_of_its_own_is_such_that_a_device_takes_it_over():
    for size in range(1, 40):
        array = empty((size, 3), np.dtype(jnp.bfloat16))
        assert array.shape == (size, 3) and array.dtype == jnp.bfloat16 and array.ctypes.data % 64 == 0
    held = owned(np.arange(12.0, dtype=np.float32).reshape(3, 4).T)
    assert held.flags.c_contiguous and held.tolist() == np.arange(12.0).reshape(3, 4).T.tolist()


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


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def test_digest_is_sha256_of_paths_dtypes_shapes_and_digests_of_the_bytes():
    params = {"b": jnp.array([[1.0, -2.0]], jnp.float32), "a": {"c": jnp.array(1.5, jnp.bfloat16)}}
    lines = [[["a", "c"], "bfloat16", [], sha256(bytes([0xC0, 0x3F]))],
             [["b"], "float32", [1, 2], sha256(np.array([1.0, -2.0], "<f4").tobytes())]]
    expected = sha256("".join(json.dumps(line) + "\n" for line in lines).encode())
    assert params_digest(params) == expected
    assert host_copy(params).digest() == expected


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
        {"a": {"w": jnp.zeros((2, 3), jnp.float32)}},
    ]
    assert len({params_digest(params) for params in [base, *others]}) == len(others) + 1


def divided(values, mesh="2x4"):
    """The copy of the kernel, with the digests of the rest."""
    params = put(values, mesh)
    frozen = tuple(leaf.digest() for leaf in host_copy({name: params[name] for name in ("step", "odd", "scale")}).leaves)
    return host_copy({"block": params["block"]}, frozen=frozen)


def test_what_is_frozen_counts_in_the_digest_and_nowhere_else():
    copy = divided(arrays())
    assert copy.digest() == params_digest(put(arrays()))
    assert copy.nbytes == 2**17 and bits(copy.to_device()) == bits({"block": arrays()["block"]})
    other = dataclasses.replace(copy, frozen=divided(arrays(1)).frozen)
    assert bits(other.to_numpy()) == bits(copy.to_numpy()) and other.digest() != copy.digest()
    assert copy.with_shards(copy.shards).digest() == copy.digest()
    leaves = [leaf.digest() for leaf in host_copy(put(arrays())).leaves]
    assert combined_digest(reversed(leaves)) == combined_digest(leaves) == copy.digest()


def test_from_numpy_inverts_to_numpy():
    params = put(arrays(), "2x4")
    values = jax.tree.map(np.array, host_copy(params).to_numpy())
    copy = from_numpy(values, describe(params))
    assert isinstance(copy, HostCopy) and copy.nbytes == total_bytes(params)
    for leaf in jax.tree.leaves(values):
        leaf[...] = np.zeros((), leaf.dtype)  # it has memory of its own
    assert bits(copy.to_device()) == bits(params)
    assert copy.to_device()["block"]["kernel"].sharding == params["block"]["kernel"].sharding


def test_from_numpy_refuses_another_model():
    params = put(arrays())
    values = host_copy(params).to_numpy()
    with pytest.raises(ValueError, match=r"the arrays has \(\(4,\), 'float32'\) at scale, wanted \(\(5,\), 'float32'\)"):
        from_numpy(values, describe(params) | {"scale": jax.ShapeDtypeStruct((5,), jnp.float32)})
    del values["block"]["nothing"]
    with pytest.raises(ValueError, match="structure"):
        from_numpy(values, describe(params))
