"""Parameters in host memory: each process holds the shards of its devices, each distinct one once.

What is held outlives the parameters it was taken from: the learner may donate those to its next step. On an accelerator it is a
copy. On a CPU, host and device memory are one, and it is a view of the very buffers, which costs nothing: as long as numpy looks
at a buffer, a donation of it makes the runtime copy instead. `to_device` puts it back with the very same sharding, bit for bit.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from rl.delta import Place, array_shards, shard_index
from rl.delta_record import Index

_ALIGNMENT = 64
"""Bytes. A CPU device takes over numpy memory that is aligned like this, and copies any other."""

_digesting = threading.Lock()

pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="host-copy")
"""For work on many shards at once; numpy, zstandard and hashlib let go of the interpreter."""


@dataclasses.dataclass(frozen=True, eq=False)
class HostLeaf:
    """One global array as this process holds it."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: jax.sharding.Sharding
    shards: dict[Index, np.ndarray]

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards.values())

    def to_numpy(self) -> np.ndarray:
        """The global array. Where other processes hold parts of it this is a collective: every process must call it."""
        whole = tuple((0, size) for size in self.shape)
        if whole in self.shards:
            return self.shards[whole]
        if not self.sharding.is_fully_addressable:
            with jax.transfer_guard("allow"):
                return multihost_utils.process_allgather(to_device([self])[0], tiled=True)
        array = empty(self.shape, self.dtype)
        for index, shard in self.shards.items():
            array[tuple(slice(start, stop) for start, stop in index)] = shard
        return array

    def digest(self) -> "LeafDigest":
        """What identifies the global array. A collective as `to_numpy`."""
        content = np.ascontiguousarray(self.to_numpy()).reshape(-1).view(np.uint8)
        return LeafDigest(self.path, self.dtype.name, self.shape, hashlib.sha256(content).hexdigest())


class LeafDigest(NamedTuple):
    """What identifies an array of the parameters."""

    path: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    sha256: str  # of its bytes


@dataclasses.dataclass(frozen=True, eq=False)
class HostCopy:
    """Parameters in host memory. Made by `host_copy` or `from_numpy`."""

    leaves: tuple[HostLeaf, ...]
    structure: jax.tree_util.PyTreeDef
    frozen: tuple["LeafDigest", ...] = ()  # of what belongs to the parameters, but lies elsewhere; the digest is of both

    @property
    def nbytes(self) -> int:
        """Bytes that this process holds of the leaves, replicas not counted."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def shards(self) -> dict[Place, np.ndarray]:
        """What this process holds."""
        return {(leaf.path, index): shard for leaf in self.leaves for index, shard in leaf.shards.items()}

    def with_shards(self, shards: Mapping[Place, np.ndarray]) -> "HostCopy":
        """The same arrays with other values."""
        leaves = [dataclasses.replace(leaf, shards={index: shards[leaf.path, index] for index in leaf.shards})
                  for leaf in self.leaves]
        return dataclasses.replace(self, leaves=tuple(leaves))

    def to_device(self, memory_kind: str | None = None) -> dict:
        """The parameters on their devices, with the sharding they were copied from, bitwise equal.

        CPU devices may take over this memory, so it must not change.

        Args:
          memory_kind: the memory of the devices to use, such as "pinned_host"; None for the one they were copied from.
        """
        return self.structure.unflatten(to_device(self.leaves, memory_kind))

    def to_numpy(self) -> dict:
        """The global arrays in numpy. A collective where several processes hold the parameters."""
        return self.structure.unflatten([leaf.to_numpy() for leaf in self.leaves])

    def digest(self) -> str:
        """The `params_digest` of the parameters, computed at the first call. A collective where several processes hold them."""
        with _digesting:  # whoever else asks waits, and does not compute it too
            return self._digest

    @functools.cached_property
    def _digest(self) -> str:
        if all(leaf.sharding.is_fully_addressable for leaf in self.leaves):
            return combined_digest((*pool.map(HostLeaf.digest, self.leaves), *self.frozen))
        return combined_digest((*map(HostLeaf.digest, self.leaves), *self.frozen))  # collectives go in order


def to_device(leaves: Sequence[HostLeaf], memory_kind: str | None = None) -> list[jax.Array]:
    """The leaves' arrays on their devices. All shards go in one call: the host's time is per call, not per byte."""
    shardings = [leaf.sharding if memory_kind is None else leaf.sharding.with_memory_kind(memory_kind) for leaf in leaves]
    shards, places, counts = [], [], []
    for leaf, sharding in zip(leaves, shardings, strict=True):
        held = sharding.addressable_devices_indices_map(leaf.shape)
        shards += [leaf.shards[shard_index(slices, leaf.shape)] for slices in held.values()]
        places += [jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in held]
        counts.append(len(held))
    placed = iter(jax.device_put(shards, places))
    return [
        jax.make_array_from_single_device_arrays(leaf.shape, sharding, list(itertools.islice(placed, count)), dtype=leaf.dtype)
        for leaf, sharding, count in zip(leaves, shardings, counts, strict=True)
    ]


def host_copy(params: dict, *, frozen: tuple[LeafDigest, ...] = ()) -> HostCopy:
    """Holds the parameters, whatever becomes of them.

    Args:
      params: nested dict with string keys of `jax.Array`, sharded in any way.
      frozen: what identifies the rest of the parameters, if there is more.

    Raises:
      ValueError: another kind of tree or leaf, or an array that was already donated.
    """
    check_params(params)
    arrays, structure = flatten(params)
    with jax.transfer_guard("allow"):  # this transfer is what the function is for
        return HostCopy(tuple(_leaf(path, array) for path, array in arrays), structure, frozen)


def check_params(params: dict) -> None:
    """Raises the ValueError that `host_copy` would raise, without copying."""
    for path, array in flatten(params)[0]:
        if not isinstance(array, jax.Array):
            raise ValueError(f"params has a {type(array).__name__} at {'/'.join(path)}, wanted a jax.Array; "
                             "put it on a device first")
        if array.is_deleted():
            raise ValueError(f"params at {'/'.join(path)} was donated or deleted, wanted a live array; "
                             "take the snapshot before the step that donates it")


def from_numpy(arrays: dict, like: dict) -> HostCopy:
    """The inverse of `HostCopy.to_numpy`: each process keeps the shards that its devices hold.

    Args:
      arrays: nested dict of global numpy arrays.
      like: the same tree of `jax.ShapeDtypeStruct` with shardings.

    Raises:
      ValueError: structures, shapes or dtypes differ.
    """
    described, structure = flatten(like)
    given, given_structure = flatten(arrays)
    check_alike("the arrays", given, described)
    if given_structure != structure:
        raise ValueError(f"the arrays have structure {given_structure}, wanted {structure}; give the state of the same model")
    leaves = [HostLeaf(path, tuple(leaf.shape), np.dtype(leaf.dtype), leaf.sharding,
                       {index: owned(array[_slices(index)]) for index in shard_indices(leaf)})
              for (path, array), (_, leaf) in zip(given, described, strict=True)]
    return HostCopy(tuple(leaves), structure)


def shard_indices(leaf: jax.ShapeDtypeStruct | jax.Array) -> list[Index]:
    """The distinct shards of a leaf, with a sharding, that this process holds."""
    held = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    return list(dict.fromkeys(shard_index(slices, leaf.shape) for slices in held))


def params_digest(params: dict) -> str:
    """SHA-256 over path, dtype, shape and the SHA-256 of the bytes of every global array, in the order of the paths.

    The sharding makes no difference. A collective where several processes hold the parameters: every process must call it.

    Args:
      params: nested dict with string keys of `jax.Array`.

    Returns:
      64 hexadecimal digits.
    """
    return host_copy(params).digest()


def combined_digest(leaves: Iterable[LeafDigest]) -> str:
    """The `params_digest` of arrays, from what identifies each."""
    digest = hashlib.sha256()
    for leaf in sorted(leaves):
        digest.update(json.dumps(leaf).encode() + b"\n")
    return digest.hexdigest()


def flatten(tree: dict) -> tuple[list, jax.tree_util.PyTreeDef]:
    """[(path, leaf)] in the order of the paths, and the structure.

    Raises:
      ValueError: it is no nested dict with string keys.
    """
    with_keys, structure = jax.tree_util.tree_flatten_with_path(tree)
    for keys, leaf in with_keys:
        if not keys or not all(isinstance(key, jax.tree_util.DictKey) and isinstance(key.key, str) for key in keys):
            raise ValueError(f"params has a {type(leaf).__name__} at {jax.tree_util.keystr(keys) or 'its root'}, "
                             "wanted nested dicts with string keys; split the model into plain dicts first")
    return [(tuple(key.key for key in keys), leaf) for keys, leaf in with_keys], structure


def check_alike(what: str, given: list, wanted: list) -> None:
    """Raises ValueError where paths, shapes or dtypes of two flattened trees differ."""
    given_kinds, wanted_kinds = ({path: (tuple(leaf.shape), np.dtype(leaf.dtype).name) for path, leaf in leaves}
                                 for leaves in (given, wanted))
    for path in sorted(given_kinds.keys() | wanted_kinds.keys()):
        if given_kinds.get(path) != wanted_kinds.get(path):
            raise ValueError(f"{what} has {given_kinds.get(path, 'nothing')} at {'/'.join(path)}, "
                             f"wanted {wanted_kinds.get(path, 'nothing')}; use the configuration of the model it was made with")


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Memory of its own that a CPU device can take over."""
    return Memory(shape, dtype).view()


class Memory:
    """Memory for one array, which a CPU device can take over, and which knows whether anybody looks at it.

    The first write to fresh memory takes several times as long as later ones; so whoever makes one version after the other uses
    it again, but only when nobody refers to it any more. Views do, as do device arrays made from one, and programs under way that
    read those.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype):
        self._shape, self._dtype = shape, np.dtype(dtype)
        self._nbytes = math.prod(shape) * self._dtype.itemsize
        self._block = np.empty(self._nbytes + _ALIGNMENT, np.uint8)
        self._unused_count = sys.getrefcount(self._block)  # this object's reference, and what the call itself makes

    def view(self) -> np.ndarray:
        offset = -self._block.ctypes.data % _ALIGNMENT
        return self._block[offset : offset + self._nbytes].view(self._dtype).reshape(self._shape)

    @property
    def is_unused(self) -> bool:
        return sys.getrefcount(self._block) == self._unused_count


def owned(array: np.ndarray) -> np.ndarray:
    """A copy in memory of its own."""
    copy = empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def _leaf(path: tuple[str, ...], array: jax.Array) -> HostLeaf:
    return HostLeaf(path, array.shape, np.dtype(array.dtype), array.sharding, array_shards(array))


def _slices(index: Index) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in index)
