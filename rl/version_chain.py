"""The bytes of the ring's versions on the host: the newest as it is, each older one as its difference to the next newer.

    newest  --delta-->  older  --delta-->  older still  ...

A new version is told from the one before in the background; until that is done, the one before is held too. Whoever wants older
versions walks the chain, newest first, one step a version. Beyond a budget of bytes the oldest deltas leave the memory, if
they are in the store, and are read from there.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import gc
import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np

from rl import delta
from rl.delta import Delta, Place
from rl.delta_record import DeltaCorrupt
from rl.host_copy import HostCopy, LeafDigest, Memory, flatten, from_numpy, pool, shard_indices
from rl.snapshot_store import Difference, SnapshotStore

T = TypeVar("T")


@dataclasses.dataclass
class _Link:
    """One step back, from a version to the one before."""

    newer: int
    older: int
    delta: "concurrent.futures.Future[Delta] | None"  # None: it is in the store, as the difference of the newer one


class VersionChain:
    """Versions and the steps between them.

    Args:
      store: where links may be found as well.
      host_bytes: beyond so many, links leave the memory; None for any number.
    """

    def __init__(self, *, store: SnapshotStore | None = None, host_bytes: int | None = None):
        self._store, self._host_bytes = store, host_bytes
        self._newest: tuple[int, HostCopy] | None = None
        self._links: list[_Link] = []  # from the newest version on
        self._lock = threading.Lock()
        self._worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="version-chain")
        self._jobs: list[concurrent.futures.Future] = []

    def append(self, version: int, copy: HostCopy, *, keep_before: bool, tell: bool = False) -> Difference | None:
        """Adds a version.

        Args:
          version: newer than all others.
          copy: what it is.
          keep_before: whether the one before stays; if not, nor does any other.
          tell: whether its difference to the one before is wanted even so.

        Returns:
          That difference, which is on its way; None if it is neither needed nor wanted, or there is none before.
        """
        self.wait()  # so that only one version is held whole beside the newest
        with self._lock:
            before, self._newest = self._newest, (version, copy)
            if before is None or not (keep_before or tell):
                self._links = []
                return None
            encoded = self._worker.submit(delta.encode_shards, copy.shards, before[1].shards, apply_all=pool.map)
            self._jobs.append(encoded)
            self._links = [_Link(version, before[0], encoded), *self._links] if keep_before else []
            return Difference(before[0], encoded)

    def difference(self, version: int) -> Difference | None:
        """What a version is told from the one before by, if it is there and in memory; it may be on its way."""
        with self._lock:
            link = next((link for link in self._links if link.newer == version), None)
            encoded = None if link is None else link.delta  # once: it may be moved down meanwhile
            return None if encoded is None else Difference(link.older, encoded)

    def check_alike(self, params: dict) -> None:
        """Raises ValueError unless parameters are arrays like those of the newest version, sharded alike."""
        if self._newest is None:
            return
        version, copy = self._newest
        wanted = {leaf.path: (leaf.shape, leaf.dtype.name, sorted(leaf.shards)) for leaf in copy.leaves}
        given = {path: (leaf.shape, np.dtype(leaf.dtype).name, sorted(shard_indices(leaf))) for path, leaf in flatten(params)[0]}
        for path in sorted(given.keys() | wanted.keys()):
            if given.get(path) != wanted.get(path):
                raise ValueError(f"params has {given.get(path, 'nothing')} at {'/'.join(path)}, wanted "
                                 f"{wanted.get(path, 'nothing')} (shape, dtype, shards) as in version {version}; put versions of "
                                 "one model, sharded alike")

    def keep_only(self, versions: Iterable[int]) -> None:
        """Lets go of the bytes that none of these versions needs; they are among those of the chain."""
        oldest = min(versions, default=None)
        with self._lock:
            self._links = [link for link in self._links if oldest is not None and link.older >= oldest]

    def tidy(self, versions: Iterable[int]) -> None:
        """In the background: joins the steps over versions that are no longer wanted, or moves links to the store."""
        if self._host_bytes is None:
            self._jobs.append(self._worker.submit(self._join_steps, frozenset(versions)))
        else:  # what was written tells each version from the one before, wanted or not
            self._jobs.append(self._worker.submit(self._move_down))

    def wait(self) -> None:
        """Until what happens in the background is done; raises what went wrong there."""
        jobs, self._jobs = self._jobs, []
        concurrent.futures.wait(jobs)
        for job in jobs:
            job.result()

    @property
    def nbytes(self) -> int:
        """Bytes in host memory: of the newest version, and of the deltas. Waits for those on their way."""
        self.wait()
        with self._lock:
            whole = 0 if self._newest is None else self._newest[1].nbytes
            return whole + sum(link.delta.result().nbytes for link in self._links if link.delta is not None)

    def cursor(self) -> "Cursor":
        """Where to start to walk from, as things are now."""
        with self._lock:
            (version, copy), links = self._newest, tuple(self._links)
        return Cursor(version, copy, links, self._delta)

    def state(self) -> dict:
        """Plain numpy arrays and JSON values.

        `params` is the newest version, as global arrays: a collective where several processes hold them. The rest is this
        process's own.
        """
        self.wait()
        with self._lock:
            newest, links = self._newest, list(self._links)
        return {
            "newest": None if newest is None else newest[0],
            "params": {} if newest is None else newest[1].to_numpy(),
            "links": [[link.newer, link.older, link.delta and np.frombuffer(link.delta.result().to_bytes(), np.uint8)]
                      for link in links],
        }  # fmt: skip

    def restore(self, state: dict, like: dict, frozen: tuple[LeafDigest, ...]) -> None:
        """Becomes the chain whose `state` this is; `like` are `jax.ShapeDtypeStruct` with the shardings of the parameters."""
        newest = None
        if state["newest"] is not None:
            copy = dataclasses.replace(from_numpy(state["params"], like), frozen=frozen)
            newest = state["newest"], copy
        links = [_Link(newer, older, None if content is None else done(Delta.from_bytes(content.tobytes())))
                 for newer, older, content in state["links"]]
        for link in links:
            if link.delta is not None and link.delta.result().records.keys() != newest[1].shards.keys():
                raise ValueError("the saved versions are sharded in another way than the parameters are now; resume with the "
                                 "mesh of that run")
        self.wait()
        with self._lock:
            self._newest, self._links = newest, links

    def _delta(self, link: _Link) -> Delta:
        held = link.delta
        try:
            return self._store.difference(link.newer) if held is None else held.result()
        except DeltaCorrupt as error:
            raise DeltaCorrupt(f"version {link.older}, told from version {link.newer}: {error}") from None

    def _join_steps(self, versions: frozenset[int]) -> None:
        """Two steps become one where nobody wants the version between them."""
        with self._lock:
            links = list(self._links)
        joined: list[_Link] = []
        for link in links:
            if joined and joined[-1].older == link.newer and link.newer not in versions:
                before = joined.pop()
                link = _Link(before.newer, link.older, done(delta.compose(self._delta(before), self._delta(link))))
            joined.append(link)
        with self._lock:
            # Meanwhile the oldest may have gone; and a newer one has not come, for that waits for this.
            self._links = [link for link in joined if any(link.older == old.older for old in self._links)]

    def _move_down(self) -> None:
        """The oldest links leave the memory, as far as they are in the store, until the rest is within the budget."""
        with self._lock:
            links, whole = list(self._links), self._newest[1].nbytes
        held = [link for link in links if link.delta is not None]
        excess = whole + sum(link.delta.result().nbytes for link in held) - self._host_bytes
        for link in reversed(held):
            if excess <= 0:
                return
            if self._store.settled(link.newer) and self._store.base(link.newer) == link.older:
                excess -= link.delta.result().nbytes
                link.delta = None


class Cursor:
    """A version on the host, and the way from there to the older ones."""

    def __init__(self, version: int, newest: HostCopy, links: tuple[_Link, ...], delta_of: Callable[[_Link], Delta]):
        self.version = version
        self._newest, self._links, self._delta_of = newest, links, delta_of
        self._at: dict[Place, Memory] = {}  # where each shard lies; before the first step, with the newest version
        self._memories: dict[Place, list[Memory]] = collections.defaultdict(list)

    def to(self, version: int) -> HostCopy:
        """Steps to a version that is not newer, and returns it.

        A shard is changed in place where nobody looks at it any more; what somebody does look at stays what it is.

        Args:
          version: one that the chain holds.
        """
        steps = [link for link in self._links if link.older >= version and link.newer <= self.version]
        if (steps[-1].older if steps else self.version) != version:
            raise ValueError(f"the chain leads from version {self.version} to {[link.older for link in self._links]}, wanted "
                             f"version {version} among them; get a version that the ring holds")
        deltas = [self._delta_of(link) for link in steps]
        self.version = version
        shards = self._newest.shards
        if deltas:
            gc.collect(0)  # jax lets go of the memory of arrays that were dropped when Python collects garbage
            largest_first = sorted(shards, key=lambda place: -shards[place].nbytes)  # so that all threads end together
            self._at = dict(zip(largest_first, pool.map(functools.partial(self._step, deltas), largest_first), strict=True))
        if not self._at:
            return self._newest
        return self._newest.with_shards({place: memory.view() for place, memory in self._at.items()})

    def _step(self, deltas: list[Delta], place: Place) -> Memory:
        at, memories = self._at.get(place), self._memories[place]
        if at is not None and at.is_unused:
            target = at
        else:
            target = next((memory for memory in memories if memory.is_unused), None)
        source = self._newest.shards[place] if at is None else at.view()
        if target is None:
            target = Memory(source.shape, source.dtype)
            memories.append(target)
        delta.follow(deltas, place, source, source if target is at else target.view())
        return target


def done(result: T) -> "concurrent.futures.Future[T]":
    """A future that has its result."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_result(result)
    return future
