"""Parameter snapshots on disk: now and then a keyframe, and between them the differences.

A version is written while the run goes on, in a directory of its own. As a rule that holds the difference to the version before;
every `keyframe_every`th version, and one whose predecessor was not written, is a *keyframe*: whole, through Orbax. A version is
its keyframe and the differences since, and any array of it, or a part of one, can be read without the rest. A manifest, written
last, names the SHA-256 of each file: a directory without it is no snapshot, and a load believes no other bytes.
"""

import collections
import concurrent.futures
import hashlib
import json
import operator
import os
import pathlib
import shutil
import time
from collections.abc import Iterable
from typing import NamedTuple

import jax
import numpy as np
import tensorstore
from orbax.checkpoint import v1 as ocp

from rl import delta_record, processes
from rl.delta import Delta, Place
from rl.delta_record import Index
from rl.host_copy import HostCopy, HostLeaf, LeafDigest, check_alike, empty, flatten, host_copy, shard_indices

_MANIFEST = "manifest.json"  # written last, in one rename: a directory without it is no snapshot
_KEYFRAME = "keyframe"
_DIFFERENCE = "difference"
_PATIENCE = 600  # seconds that one process waits for the files of the others


class SnapshotCorrupt(ValueError):
    """A persisted snapshot is missing, incomplete or damaged."""


class Difference(NamedTuple):
    """What a version is written as: the difference to one that was written before."""

    base: int
    delta: "concurrent.futures.Future[Delta]"  # may be on its way


class SnapshotStore:
    """Snapshots on disk, one directory a version, written while the run goes on.

    One save is under way at a time: a second one waits for it, so that a slow disk cannot fill the memory. The directory is on a
    file system that all processes share.

    Args:
      directory: theirs; made with the first one.
      keyframe_every: most versions from one keyframe to the next. A version is read faster the fewer, and takes less the more.
    """

    def __init__(self, directory: str | pathlib.Path, *, keyframe_every: int = 16):
        if keyframe_every < 1:
            raise ValueError(f"keyframe_every is {keyframe_every}, wanted at least 1; set --keyframe-every")
        self.directory = pathlib.Path(directory).absolute()
        self._keyframe_every = keyframe_every
        self._saving: tuple[int, concurrent.futures.Future] | None = None
        self.failed: set[int] = set()  # versions that could not be written
        self._thread = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshot-store")

    def path(self, version: int) -> pathlib.Path:
        return self.directory / f"version-{version:06d}"

    # --- writing ---

    def save(self, version: int, params: dict | HostCopy, difference: Difference | None = None) -> None:
        """Starts to write a snapshot and returns; `wait` says when it is there. With several processes, all call it.

        Args:
          version: which.
          params: what it is.
          difference: the same, told from a version that is in the store or on its way there; without it, it becomes a keyframe.

        Raises:
          ValueError: this version is there already, or being written; or it is negative, or two arrays have one name on disk.
          SnapshotCorrupt: the version that it is told from is not there.
        """
        version = operator.index(version)
        if self._saving is not None and self._saving[0] == version or (self.path(version) / _MANIFEST).exists():
            raise ValueError(f"snapshot version {version} is already at {self.path(version)} and snapshots never change; "
                             "save each version once, or after going back to an earlier one call discard_after")
        copy = params if isinstance(params, HostCopy) else host_copy(params)
        names = collections.Counter(".".join(leaf.path) for leaf in copy.leaves)
        if version < 0 or max(names.values()) > 1:
            twice = [name for name, count in names.items() if count > 1]
            raise ValueError(f"snapshot version {version} with arrays {twice} of one "
                             "name, wanted a version of 0 or more, and paths that differ when they are joined by dots")
        self.wait()
        depth = int(processes.first_does(lambda: self._begin(version, difference)))
        keyframe = None
        if processes.num_processes() > 1:  # collectives, which belong to the caller's thread
            copy.digest()
            keyframe = self._start_keyframe(version, copy) if depth == 0 else None
        self.failed.discard(version)
        self._saving = version, self._thread.submit(self._write, version, copy, difference, depth, keyframe)

    def wait(self) -> None:
        """Returns when the save under way, if there is one, is complete; raises what made it fail."""
        if self._saving is not None:
            version, future = self._saving
            error = future.exception()  # waits
            self._saving = None
            if error is not None:
                self.failed.add(version)
                raise error

    def settled(self, version: int) -> bool:
        """Whether a version is completely written; waits if it is just being written."""
        saving = self._saving
        if saving is not None and saving[0] == version:
            concurrent.futures.wait([saving[1]])
        return (self.path(version) / _MANIFEST).is_file()

    def _begin(self, version: int, difference: Difference | None) -> str:
        """Makes an empty directory for a version; how many differences lie between it and its keyframe."""
        depth = 0 if difference is None else (self._manifest(difference.base)["depth"] + 1) % self._keyframe_every
        if self.path(version).exists():  # a stopped save left it behind
            shutil.rmtree(self.path(version))
        self.path(version).mkdir(parents=True)
        return str(depth)

    def _write(self, version: int, copy: HostCopy, difference: Difference | None, depth: int,
               keyframe: ocp.AsyncResponse | None) -> None:
        """On the store's thread."""
        root = self.path(version)
        if depth == 0:
            (keyframe or self._start_keyframe(version, copy)).result()
        if difference is not None:
            _write_whole(root / _part(processes.index()), difference.delta.result().to_bytes())
        if processes.index() == 0:
            parts = [root / _part(index) for index in range(processes.num_processes())] if difference is not None else []
            _wait_for(parts)
            body = {
                "version": version,
                "digest": copy.digest(),
                "frozen": copy.frozen,
                "depth": depth,
                "base": None if difference is None else difference.base,
                "base_digest": None if difference is None else self.digest(difference.base),
                "files": self.files_now(version),
            }
            _write_whole(root / _MANIFEST, _manifest_bytes(body))
        else:
            _wait_for([root / _MANIFEST])

    def _start_keyframe(self, version: int, copy: HostCopy) -> ocp.AsyncResponse:
        # Orbax wants jax arrays, to know who writes which shard. In host memory they cost none of the accelerators'.
        platforms = {device.platform for leaf in copy.leaves for device in leaf.sharding.device_set}
        arrays = copy.to_device(None if platforms == {"cpu"} else "pinned_host")
        with jax.transfer_guard("allow"), _context():
            return ocp.save_async(self.path(version) / _KEYFRAME, arrays)

    # --- what is there ---

    def versions(self) -> tuple[int, ...]:
        """The versions that are completely written, ascending."""
        named = ((path, path.name.removeprefix("version-")) for path in self.directory.glob("version-*"))
        return tuple(sorted(int(number) for path, number in named if number.isdecimal() and (path / _MANIFEST).is_file()))

    def incomplete(self) -> list[str]:
        """Names of what a stopped save left behind: it is never listed, never loaded, and in nobody's way."""
        complete = {self.path(version) for version in self.versions()}
        return sorted(path.name for path in set(self.directory.glob("version-*")) - complete)

    def digest(self, version: int) -> str:
        """The `params_digest` of what was saved. Raises SnapshotCorrupt like `files`."""
        return self._manifest(version)["digest"]

    def frozen(self, version: int) -> list[LeafDigest]:
        """The arrays that belong to a snapshot but are not in it, since no version changes them. Raises like `files`."""
        return [LeafDigest(tuple(path), dtype, tuple(shape), sha256)
                for path, dtype, shape, sha256 in self._manifest(version)["frozen"]]

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

    def discard_after(self, version: int) -> list[str]:
        """Deletes the snapshots newer than `version`, and what a stopped save left behind: a run goes back to that version.

        For the start of a resumed run, in one process, while nothing is being saved.

        Returns:
          Names of what a stopped save had left behind.
        """
        left = self.incomplete()
        kept = {self.path(older) for older in self.versions() if older <= version}
        # Newest first: no version that is still listed is told from one that has gone.
        for path in sorted(set(self.directory.glob("version-*")) - kept, reverse=True):
            (path / _MANIFEST).unlink(missing_ok=True)  # from here on it is not listed, wherever the deletion stops
            shutil.rmtree(path)
        return left

    # --- reading ---

    def load(self, version: int, like: dict) -> dict:
        """Reads a snapshot, onto any devices and sharding, and verifies that its values are the ones that were saved.

        Args:
          version: one of `versions()`.
          like: the tree of `jax.ShapeDtypeStruct`, or of arrays, whose shapes, dtypes and shardings the result has;
            `abstract` makes one. Without the arrays that are `frozen`.

        Raises:
          SnapshotCorrupt: it, or a version that it is told from, is missing, incomplete or damaged.
          ValueError: it is the snapshot of another model: paths, shapes or dtypes differ from `like`.
        """
        described, structure = flatten(like)
        chain = self._chain(version)
        check_alike(f"snapshot version {version} at {self.path(version)}", flatten(chain.shapes)[0], described)
        leaves = [HostLeaf(path, tuple(leaf.shape), np.dtype(leaf.dtype), leaf.sharding,
                           {index: chain.read(path, index) for index in shard_indices(leaf)}) for path, leaf in described]
        copy = HostCopy(tuple(leaves), structure, frozen=tuple(self.frozen(version)))
        if copy.digest() != self.digest(version):
            raise self._corrupt(version, f"gave values of digest {copy.digest()}, wanted {self.digest(version)}")
        with jax.transfer_guard("allow"):
            return copy.to_device()

    def read(self, version: int, path: tuple[str, ...], index: Index | None = None) -> np.ndarray:
        """One array of a snapshot, or the part of it at `index`, without the rest.

        Raises:
          SnapshotCorrupt: as `load`, but only the files are verified.
          ValueError: there is no such array, or it has no such part.
        """
        chain = self._chain(version)
        shapes = dict(flatten(chain.shapes)[0])
        if path not in shapes:
            raise ValueError(f"snapshot version {version} at {self.path(version)} has no array {'/'.join(path)}, "
                             f"wanted one of {', '.join(sorted('/'.join(path) for path in shapes))}")
        whole = tuple((0, size) for size in shapes[path].shape)
        index = whole if index is None else index
        if len(index) != len(whole) or not all(0 <= start <= stop <= size
                                               for (start, stop), (_, size) in zip(index, whole, strict=True)):
            raise ValueError(f"{'/'.join(path)} has no part {index}, wanted (start, stop) within {whole} for each axis")
        return chain.read(path, index)

    def abstract(self, version: int, sharding: jax.sharding.Sharding) -> dict:
        """The tree to `load` a snapshot with when nothing is known of it: every array has the same sharding.

        Raises:
          SnapshotCorrupt: missing, incomplete or damaged.
        """
        shapes = self._chain(version).shapes
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)

    def base(self, version: int) -> int | None:
        """The version that this one is told from, whether or not it is a keyframe too. Raises SnapshotCorrupt like `files`."""
        return self._manifest(version)["base"]

    def difference(self, version: int) -> Delta:
        """The difference between a version and its `base`, as far as this process wrote it.

        Raises:
          SnapshotCorrupt: missing or damaged.
        """
        return self._difference(version, processes.index(), self._manifest(version)["files"])

    def _chain(self, version: int) -> "_Chain":
        """The keyframe of a version and the differences since, verified."""
        steps: list[dict[Place, bytes]] = []
        while (manifest := self._intact(version))["depth"]:
            names = [name for name in manifest["files"] if name.startswith(_DIFFERENCE)]
            parts = [self._difference(version, index, manifest["files"]) for index in range(len(names))]
            steps.insert(0, {place: record for part in parts for place, record in part.records.items()})  # replicas once
            base = manifest["base"]
            if self.digest(base) != manifest["base_digest"]:
                raise self._corrupt(version, f"is told from another version {base} than the one at {self.path(base)}")
            version = base
        return _Chain(self.path(version) / _KEYFRAME, steps)

    def _difference(self, version: int, index: int, files: dict[str, str]) -> Delta:
        name = _part(index)
        try:
            content = (self.path(version) / name).read_bytes()
        except OSError as error:
            raise self._corrupt(version, f"is damaged: {name} cannot be read: {error}") from None
        if hashlib.sha256(content).hexdigest() != files.get(name):
            raise self._corrupt(version, f"is damaged: {name} changed since it was written")
        return Delta.from_bytes(content)

    def _intact(self, version: int) -> dict:
        """The manifest of a version whose every file is as it was written."""
        manifest, now = self._manifest(version), self.files_now(version)
        written = manifest["files"]
        damaged = sorted(name for name in written.keys() | now.keys() if written.get(name) != now.get(name))
        if damaged:
            raise self._corrupt(version, f"is damaged: {', '.join(damaged)} changed, vanished or appeared since it was written")
        return manifest

    def _manifest(self, version: int) -> dict:
        try:
            content = (self.path(version) / _MANIFEST).read_bytes()
        except FileNotFoundError:
            raise self._corrupt(version, f"is missing or incomplete; versions there: {list(self.versions())}") from None
        try:
            manifest = json.loads(content)
            intact = manifest.pop("sha256") and _manifest_bytes(manifest) == content and manifest["version"] == version
        except (ValueError, KeyError, TypeError, AttributeError):  # not JSON, or not of this form
            intact = False
        if not intact:
            raise self._corrupt(version, f"is damaged: {_MANIFEST} is not the one that was written with it")
        return manifest

    def _corrupt(self, version: int, what: str) -> SnapshotCorrupt:
        return SnapshotCorrupt(f"snapshot version {version} at {self.path(version)} {what}; "
                               "bring it back from a copy of the run directory, or use another version")


class _Chain:
    """A keyframe and the differences since, oldest first."""

    def __init__(self, keyframe: pathlib.Path, steps: list[dict[Place, bytes]]):
        self._keyframe = keyframe
        self._records: dict[tuple[str, ...], list[tuple[Index, bytes]]] = {}
        for records in steps:
            for (path, index), record in records.items():
                self._records.setdefault(path, []).append((index, record))

    @property
    def shapes(self) -> dict:
        """The tree of shapes and dtypes."""
        return ocp.metadata(self._keyframe).metadata

    def read(self, path: tuple[str, ...], index: Index) -> np.ndarray:
        """A part of an array, in memory of its own."""
        database = next(self._keyframe.glob("*/manifest.ocdbt")).parent.as_uri() + "/"
        kvstore = {"driver": "ocdbt", "base": database, "path": ".".join(path) + "/"}
        stored = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}, open=True).result()
        part = empty(tuple(stop - start for start, stop in index), stored.dtype.numpy_dtype)
        part[...] = stored[tuple(slice(start, stop) for start, stop in index)].read().result()
        for where, record in self._records.get(path, []):
            delta_record.apply_part(record, where, part, index)
        return part


def _context() -> ocp.Context:
    """Without compression: parameters hardly shrink, and saves are several times faster."""
    context = ocp.Context()
    context.array.saving.use_compression = False
    return context


def _part(index: int) -> str:
    """The file with a process's share of a difference."""
    return f"{_DIFFERENCE}-{index:05d}.bin"


def _write_whole(path: pathlib.Path, content: bytes) -> None:
    """All of it or nothing, whenever the process or the machine stops."""
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def _wait_for(paths: Iterable[pathlib.Path]) -> None:
    """Until the files are there, which other processes write."""
    give_up = time.monotonic() + _PATIENCE
    for path in paths:
        while not path.exists():
            if time.monotonic() > give_up:
                raise TimeoutError(f"{path} is not there after {_PATIENCE} s: the process that writes it has stopped, or the run "
                                   "directory is not on a file system that all processes share")
            time.sleep(0.01)


def _manifest_bytes(body: dict) -> bytes:
    """Canonical JSON that holds the SHA-256 of the rest, so that no byte of it can change unnoticed."""
    sha256 = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({**body, "sha256": sha256}, sort_keys=True).encode()
