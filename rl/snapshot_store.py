"""Where the bytes of parameter snapshots live: in host memory and on disk.

A snapshot outlives the parameters it was taken from: the learner donates those to its next step. So `host_copy` copies every
distinct shard into numpy memory of its own, and `HostCopy.to_device` puts it back with the very same sharding, bit for bit.
`SnapshotStore` writes such copies to disk through Orbax while the run goes on, and lists only those that are complete. Files
without compression carry no checksum of their own; so a manifest names the SHA-256 of each, and a load believes no other bytes.
"""

import concurrent.futures
import dataclasses
import functools
import hashlib
import itertools
import json
import operator
import os
import pathlib
import shutil
from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

Index = tuple[tuple[int, int], ...]
"""Where a shard lies in its global array: (start, stop) per axis."""

_MANIFEST = "manifest.json"  # written last, in one rename: a directory without it is no snapshot


class SnapshotCorrupt(ValueError):
    """A persisted snapshot is missing, incomplete or damaged."""


@dataclasses.dataclass(frozen=True, eq=False)
class HostLeaf:
    """One global array as this process holds it: each distinct shard once, however many devices replicate it."""

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
                return multihost_utils.process_allgather(_to_device([self])[0], tiled=True)
        array = np.empty(self.shape, self.dtype)
        for index, shard in self.shards.items():
            array[tuple(slice(start, stop) for start, stop in index)] = shard
        return array


@dataclasses.dataclass(frozen=True, eq=False)
class HostCopy:
    """Parameters in host memory, independent of the arrays they were copied from. Made by `host_copy` or `from_numpy`."""

    leaves: tuple[HostLeaf, ...]
    structure: jax.tree_util.PyTreeDef

    @property
    def nbytes(self) -> int:
        """Bytes that this process holds: those of the parameters, replicas not counted."""
        return sum(leaf.nbytes for leaf in self.leaves)

    def to_device(self, memory_kind: str | None = None) -> dict:
        """The parameters on their devices, with the sharding they were copied from, bitwise equal.

        Args:
          memory_kind: the memory of the devices to use, such as "pinned_host"; None for the one they were copied from.
        """
        return self.structure.unflatten(_to_device(self.leaves, memory_kind))

    def to_numpy(self) -> dict:
        """The global arrays in numpy. A collective where several processes hold the parameters."""
        return self.structure.unflatten([leaf.to_numpy() for leaf in self.leaves])

    def digest(self) -> str:
        """The `params_digest` of the parameters, computed at the first call. A collective where several processes hold them."""
        return self._digest

    @functools.cached_property
    def _digest(self) -> str:
        return _digest_of(self.leaves)


def _to_device(leaves: Sequence[HostLeaf], memory_kind: str | None = None) -> list[jax.Array]:
    """The leaves' arrays on their devices. All shards go in one call: the host's time is per call, not per byte."""
    shardings = [leaf.sharding if memory_kind is None else leaf.sharding.with_memory_kind(memory_kind) for leaf in leaves]
    shards, places, counts = [], [], []
    for leaf, sharding in zip(leaves, shardings, strict=True):
        held = sharding.addressable_devices_indices_map(leaf.shape)
        shards += [leaf.shards[_index(slices, leaf.shape)] for slices in held.values()]
        places += [jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind) for device in held]
        counts.append(len(held))
    placed = iter(jax.device_put(shards, places))
    return [
        jax.make_array_from_single_device_arrays(leaf.shape, sharding, list(itertools.islice(placed, count)), dtype=leaf.dtype)
        for leaf, sharding, count in zip(leaves, shardings, counts, strict=True)
    ]


def host_copy(params: dict) -> HostCopy:
    """Copies the parameters into numpy memory of its own, which no later step can reach, however it donates.

    Args:
      params: nested dict with string keys of `jax.Array`, sharded in any way.

    Raises:
      ValueError: another kind of tree or leaf, or an array that was already donated.
    """
    check_params(params)
    arrays, structure = _flatten(params)
    with jax.transfer_guard("allow"):  # this transfer is what the function is for
        return HostCopy(tuple(_copy_leaf(path, array) for path, array in arrays), structure)


def check_params(params: dict) -> None:
    """Raises the ValueError that `host_copy` would raise, without copying."""
    for path, array in _flatten(params)[0]:
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
    described, structure = _flatten(like)
    given, given_structure = _flatten(arrays)
    _check_alike("the arrays", given, described)
    if given_structure != structure:
        raise ValueError(f"the arrays have structure {given_structure}, wanted {structure}; give the state of the same model")
    leaves = []
    for (path, array), (_, leaf) in zip(given, described, strict=True):
        held = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        shards = {_index(slices, leaf.shape): slices for slices in held}
        shards = {index: _frozen_copy(array[slices]) for index, slices in shards.items()}
        leaves.append(HostLeaf(path, tuple(leaf.shape), np.dtype(leaf.dtype), leaf.sharding, shards))
    return HostCopy(tuple(leaves), structure)


def params_digest(params: dict) -> str:
    """SHA-256 over path, dtype, shape and bytes of every global array, in the order of the paths; whatever the sharding.

    A collective where several processes hold the parameters: every process must call it.

    Args:
      params: nested dict with string keys of `jax.Array`.

    Returns:
      64 hexadecimal digits.
    """
    check_params(params)
    arrays, _ = _flatten(params)
    with jax.transfer_guard("allow"):
        return _digest_of(_copy_leaf(path, array) for path, array in arrays)  # one leaf in host memory at a time


class SnapshotStore:
    """Snapshots on disk, one directory a version, written while the run goes on.

    One save is under way at a time: a second one waits for it, so that a slow disk cannot fill the memory. Until it is written, a
    save holds one more copy of the parameters in host memory. The directory is on a file system that all processes share.
    """

    def __init__(self, directory: str | pathlib.Path):
        self.directory = pathlib.Path(directory).absolute()
        self._saving: tuple[int, concurrent.futures.Future] | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshot-store")

    def path(self, version: int) -> pathlib.Path:
        return self.directory / f"version-{version:06d}"

    def save(self, version: int, params: dict | HostCopy) -> None:
        """Starts to write a snapshot and returns; `wait` says when it is there. With several processes, all call it.

        Raises:
          ValueError: this version is there already, or being written.
        """
        version = operator.index(version)
        if self._saving is not None and self._saving[0] == version or self.path(version).exists():
            raise ValueError(f"snapshot version {version} is already at {self.path(version)} and snapshots never change; "
                             "save each version once, or after going back to an earlier one call discard_after")
        copy = params if isinstance(params, HostCopy) else host_copy(params)
        self.wait()
        self.directory.mkdir(parents=True, exist_ok=True)
        # Orbax wants jax arrays, to know who writes which shard. In host memory they cost none of the accelerators'.
        arrays = copy.to_device("pinned_host")
        with jax.transfer_guard("allow"), _context():
            response = ocp.save_async(self.path(version), arrays, custom_metadata={"digest": copy.digest()})
        self._saving = (version, self._thread.submit(self._finish, version, response, copy.digest()))

    def wait(self) -> None:
        """Returns when the save under way, if there is one, is complete; raises what made it fail."""
        if self._saving is not None:
            (_, future), self._saving = self._saving, None
            future.result()

    def versions(self) -> tuple[int, ...]:
        """The versions that are completely written, ascending."""
        named = ((path, path.name.removeprefix("version-")) for path in self.directory.glob("version-*"))
        return tuple(sorted(int(number) for path, number in named if number.isdecimal() and (path / _MANIFEST).is_file()))

    def load(self, version: int, like: dict) -> dict:
        """Reads a snapshot, onto any devices and sharding, and verifies that its values are the ones that were saved.

        Args:
          version: one of `versions()`.
          like: the tree of `jax.ShapeDtypeStruct`, or of arrays, whose shapes, dtypes and shardings the result has;
            `abstract` makes one.

        Raises:
          SnapshotCorrupt: missing, incomplete or damaged.
          ValueError: it is the snapshot of another model: paths, shapes or dtypes differ from `like`.
        """
        described, structure = _flatten(like)
        _check_alike(f"snapshot version {version} at {self.path(version)}", _flatten(self._arrays(version))[0], described)
        abstract = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for _, leaf in described]
        with jax.transfer_guard("allow"), _context():
            params = ocp.load(self.path(version), structure.unflatten(abstract))
        digest = params_digest(params)
        if digest != self.digest(version):
            raise self._corrupt(version, f"gave values of digest {digest}, wanted {self.digest(version)}")
        return params

    def abstract(self, version: int, sharding: jax.sharding.Sharding) -> dict:
        """The tree to `load` a snapshot with when nothing is known of it: every array has the same sharding.

        Raises:
          SnapshotCorrupt: missing, incomplete or damaged.
        """
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), self._arrays(version))

    def digest(self, version: int) -> str:
        """The `params_digest` of what was saved. Raises SnapshotCorrupt like `files`."""
        return self._manifest(version)["digest"]

    def files(self, version: int) -> dict[str, str]:
        """SHA-256 of every file of a snapshot, by its path below the snapshot's directory, as it was when written.

        Raises:
          SnapshotCorrupt: missing, incomplete, or the manifest is damaged.
        """
        return self._manifest(version)["files"]

    def files_now(self, version: int) -> dict[str, str]:
        """Like `files`, but computed from what lies on disk now. Empty where nothing does."""
        root = self.path(version)
        digests = {}
        for path in sorted(path for path in root.rglob("*") if path.is_file() and path != root / _MANIFEST):
            with path.open("rb") as file:
                digests[path.relative_to(root).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
        return digests

    def discard_after(self, version: int) -> None:
        """Deletes the snapshots newer than `version`, and what a stopped save left behind: a run goes back to that version.

        For the start of a resumed run, in one process, while nothing is being saved.
        """
        kept = {self.path(older) for older in self.versions() if older <= version}
        for path in set(self.directory.glob("version-*")) - kept:
            (path / _MANIFEST).unlink(missing_ok=True)  # from here on it is not listed, wherever the deletion stops
            shutil.rmtree(path)

    def _finish(self, version: int, response: ocp.AsyncResponse, digest: str) -> None:
        response.result()
        if jax.process_index() == 0:
            unfinished = self.path(version) / f"{_MANIFEST}.tmp"
            unfinished.write_bytes(_manifest_bytes(version, digest, self.files_now(version)))
            os.replace(unfinished, self.path(version) / _MANIFEST)

    def _manifest(self, version: int) -> dict:
        if version not in self.versions():
            raise self._corrupt(version, f"is missing or incomplete; versions there: {list(self.versions())}")
        content = (self.path(version) / _MANIFEST).read_bytes()
        try:
            manifest = json.loads(content)
            intact = _manifest_bytes(version, manifest["digest"], manifest["files"]) == content
        except (ValueError, KeyError, TypeError):  # not JSON, or not of this form
            intact = False
        if not intact:
            raise self._corrupt(version, f"is damaged: {_MANIFEST} is not the one that was written with it")
        return manifest

    def _arrays(self, version: int) -> dict:
        """The tree of shapes and dtypes of a snapshot whose every file is as it was written."""
        written, now = self.files(version), self.files_now(version)
        damaged = sorted(name for name in written.keys() | now.keys() if written.get(name) != now.get(name))
        if damaged:
            raise self._corrupt(version, f"is damaged: {', '.join(damaged)} changed, vanished or appeared since it was written")
        return ocp.metadata(self.path(version)).metadata

    def _corrupt(self, version: int, what: str) -> SnapshotCorrupt:
        return SnapshotCorrupt(f"snapshot version {version} at {self.path(version)} {what}; "
                               "bring it back from a copy of the run directory, or use another version")


def _context() -> ocp.Context:
    """Without compression: parameters hardly shrink, and saves are several times faster."""
    context = ocp.Context()
    context.array.saving.use_compression = False
    return context


def _manifest_bytes(version: int, digest: str, files: dict[str, str]) -> bytes:
    """Canonical JSON that holds the SHA-256 of the rest, so that no byte of it can change unnoticed."""
    body = {"digest": digest, "files": files, "version": version}
    sha256 = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": sha256}, sort_keys=True).encode()


def _flatten(tree: dict) -> tuple[list, jax.tree_util.PyTreeDef]:
    """[(path, leaf)] in the order of the paths, and the structure."""
    with_keys, structure = jax.tree_util.tree_flatten_with_path(tree)
    for keys, leaf in with_keys:
        if not keys or not all(isinstance(key, jax.tree_util.DictKey) and isinstance(key.key, str) for key in keys):
            raise ValueError(f"params has a {type(leaf).__name__} at {jax.tree_util.keystr(keys) or 'its root'}, "
                             "wanted nested dicts with string keys; split the model into plain dicts first")
    return [(tuple(key.key for key in keys), leaf) for keys, leaf in with_keys], structure


def _check_alike(what: str, given: list, wanted: list) -> None:
    """Raises ValueError where paths, shapes or dtypes of two flattened trees differ."""
    given_kinds, wanted_kinds = ({path: (tuple(leaf.shape), np.dtype(leaf.dtype).name) for path, leaf in leaves}
                                 for leaves in (given, wanted))
    for path in sorted(given_kinds.keys() | wanted_kinds.keys()):
        if given_kinds.get(path) != wanted_kinds.get(path):
            raise ValueError(f"{what} has {given_kinds.get(path, 'nothing')} at {'/'.join(path)}, "
                             f"wanted {wanted_kinds.get(path, 'nothing')}; use the configuration of the model it was made with")


def _index(slices: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    return tuple(part.indices(size)[:2] for part, size in zip(slices, shape, strict=True))


def _frozen_copy(array) -> np.ndarray:
    """A true copy, read-only: `np.asarray` may be a view of a device buffer, and a buffer made from it a view of this memory."""
    copy = np.array(array, order="C")
    copy.flags.writeable = False
    return copy


def _copy_leaf(path: tuple[str, ...], array: jax.Array) -> HostLeaf:
    distinct = {}
    for shard in array.addressable_shards:
        distinct.setdefault(_index(shard.index, array.shape), shard.data)
    # jax keeps the host value of an array as long as the array; that of these short-lived wrappers goes with them.
    wrappers = {index: jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])
                for index, data in distinct.items()}
    for wrapper in wrappers.values():
        wrapper.copy_to_host_async()
    shards = {index: _frozen_copy(wrapper) for index, wrapper in wrappers.items()}
    return HostLeaf(path, array.shape, np.dtype(array.dtype), array.sharding, shards)


def _digest_of(leaves: Iterable[HostLeaf]) -> str:
    digest = hashlib.sha256()
    for leaf in leaves:
        digest.update(json.dumps([leaf.path, leaf.dtype.name, leaf.shape]).encode() + b"\n")
        digest.update(np.ascontiguousarray(leaf.to_numpy()).reshape(-1).view(np.uint8))
    return digest.hexdigest()
