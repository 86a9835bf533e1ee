"""The ring: the parameters of the latest policy versions, kept while a token that one of them sampled waits to be scored.

    ring.put(version, params)      at a publish, before the sampler sees the version
    ring.pin(versions)             when a trajectory holds tokens of them
    ring.get(version)              replay: the parameters as they were put, bit for bit, on the same devices
    with ring.walk(): ...          several of them, newest first: one step each
    ring.release(versions)         when the trajectory is scored or dropped

When the ring is full, `put` first lets the oldest version go that nobody pins. If every version that could go is pinned, it
refuses and changes nothing: the caller skips the publish, drops the stalest trajectories, or evicts. So a pinned version never
disappears unless somebody says so.

The newest version is on the host as it is, and each older one as its difference to the next newer, which is small; see
`rl.version_chain`. With a budget of bytes, differences go on to the disk.
"""

import collections
import concurrent.futures
import contextlib
import operator
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import jax

from rl import processes
from rl.host_copy import HostCopy, check_params, host_copy
from rl.snapshot_store import Difference, SnapshotStore
from rl.trainable import Path, Trainable
from rl.version_chain import Cursor, VersionChain, done

MAX_DIGESTS = 1024
"""Versions whose digests are kept: more than a trajectory may be old."""


class RingFull(ValueError):
    """Every version that could leave the ring is pinned."""


class VersionGone(ValueError):
    """The ring does not hold this version: not yet, or no longer."""


def check_capacity(capacity: int, max_staleness: int) -> None:
    """Raises ValueError unless a ring of `capacity` holds every version that a trajectory within `max_staleness` may need."""
    if capacity < max_staleness + 1:
        raise ValueError(f"the ring holds {capacity} versions, wanted at least {max_staleness + 1} for a staleness of up to "
                         f"{max_staleness}, as the newest version counts too; set --ring-capacity {max_staleness + 1} or "
                         f"--max-staleness {max(capacity - 1, 0)}")


class _Walk(threading.local):
    """Where a thread is in its walk through the versions, newest first."""

    is_on = False
    cursor: Cursor | None = None


class SnapshotRing:
    """Parameter snapshots by version.

    One thread puts and persists; any thread may pin, release and get.

    Args:
      capacity: how many versions it holds at most.
      store: where `persist` and `persist_every` write.
      persist_every: every version that this divides is persisted when it is put; None for none.
      host_bytes: what the versions may take in host memory; None for any amount. Beyond it the oldest differences are read from
        the store, so every version must be persisted.
      trainable: which arrays differ between versions, by their paths; None for all. The others are kept once.
    """

    def __init__(self, capacity: int, *, store: SnapshotStore | None = None, persist_every: int | None = None,
                 host_bytes: int | None = None, trainable: Callable[[Path], bool] | None = None):
        if capacity < 1:
            raise ValueError(f"a ring of {capacity} versions, wanted at least 1; set --ring-capacity")
        if persist_every is not None and (store is None or persist_every < 1):
            raise ValueError(f"persist_every is {persist_every} with {'no' if store is None else 'a'} store, wanted 1 or more "
                             "with a store; give both, or no persist_every")
        if host_bytes is not None and persist_every != 1:
            raise ValueError(f"host_bytes is {host_bytes} and persist_every {persist_every}, wanted 1: what leaves the memory "
                             "must be on disk; set --persist-every 1, or no --ring-host-gib")
        self.capacity = capacity
        self._store, self._persist_every = store, persist_every
        self._trainable = None if trainable is None else Trainable(trainable)
        self._chain = VersionChain(store=store, host_bytes=host_bytes)
        self._versions: list[int] = []  # ascending: versions only grow
        self._pins: collections.Counter[int] = collections.Counter()
        self._persisted: set[int] = set()
        self._digests: dict[int, concurrent.futures.Future[str]] = {}
        self._digesting = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="snapshot-digest")
        self._walk = _Walk()
        self._lock = threading.RLock()

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions it holds, ascending."""
        with self._lock:
            return tuple(self._versions)

    @property
    def pins(self) -> dict[int, int]:
        """The pinned versions and how often each is pinned."""
        with self._lock:
            return {version: self._pins[version] for version in self._versions if self._pins[version]}

    @property
    def oldest_pinned(self) -> int | None:
        """The oldest pinned version; None when nothing is pinned."""
        return min(self.pins, default=None)

    @property
    def nbytes(self) -> int:
        """Bytes that its versions take in the memory of this process. Waits for what is being encoded."""
        return self._chain.nbytes

    def has_room(self) -> bool:
        """Whether this process pins so few versions that `put` would find a place now."""
        with self._lock:
            return len(self._versions) < self.capacity or not all(self._pins[version] for version in self._candidates())

    def make_room(self) -> bool:
        """Lets the oldest unpinned version go if the ring is full; returns whether the next `put` finds a place.

        Collective with several processes: their rings hold the same versions, and one leaves only if none of them pins it.
        """
        with self._lock:
            return len(self._versions) < self.capacity or self._let_go(
                lambda version: self._pins[version] == 0, self._candidates()
            )

    def evict(self, *, keep: int) -> bool:
        """Lets the oldest version go, pinned or not, unless it is `keep`; returns whether it has gone. Collective, as above.

        Whoever pinned it releases it as ever; who gets it meanwhile is told that it is gone.
        """
        with self._lock:
            return self._let_go(lambda version: version != keep, self._candidates()[:1])

    def _let_go(self, may_leave: Callable[[int], bool], candidates: Sequence[int]) -> bool:
        """The first of these versions leaves that may do so everywhere, if there is one."""
        may = processes.gather([may_leave(version) for version in candidates]).all(axis=0)
        leaving = next((version for version, free in zip(candidates, may, strict=True) if free), None)
        if leaving is not None:
            self._versions.remove(leaving)
            self._chain.keep_only(self._versions)
        return leaving is not None

    def put(self, version: int, params: dict) -> None:
        """Takes in the parameters of a new version; the caller may donate them at once.

        On an accelerator this copies them to the host. They are encoded, and written to the store, in the background.

        Args:
          version: larger than every version put before.
          params: nested dict of `jax.Array`, sharded in any way, but always alike.

        Raises:
          RingFull: every version that could leave is pinned. Nothing has changed.
          ValueError: the version does not increase, or the parameters cannot be copied, or are not like those before. Nothing has
            changed.
          OSError: the store failed to write the version before; this one is in the ring, but not persisted.
        """
        version = operator.index(version)
        check_params(params)  # before anything leaves
        trained = params if self._trainable is None else self._trainable.trained(params)
        self._chain.check_alike(trained)
        self._chain.wait()
        with self._lock:
            newest = max(self._versions, default=-1)
            if version <= newest:
                raise ValueError(f"version {version} put after version {newest}, wanted a larger one; versions count publishes")
            if not self.make_room():
                raise RingFull(f"no room for version {version}: the ring of {self.capacity} holds versions {self._versions}, "
                               f"pinned {self.pins}; skip this publish, drop the stalest trajectories, or raise --ring-capacity")
        copy = host_copy(trained, frozen=() if self._trainable is None else self._trainable.digests)
        with self._lock:
            difference = self._chain.append(
                version, copy, keep_before=bool(self._versions), tell=self._persist_every == 1
            )
            self._versions.append(version)
        if self._persist_every is not None and version % self._persist_every == 0:
            self._write(version, difference)
        self._chain.tidy(self._versions)

    def get(self, version: int, shardings: dict | None = None) -> dict:
        """The parameters on devices, bitwise equal to those put.

        Args:
          version: which.
          shardings: tree of where they shall lie, which may be other devices; by default as those put. In one process only.

        Raises:
          VersionGone: the ring does not hold this version.
          DeltaCorrupt, SnapshotCorrupt: what it is told from is damaged, in memory or on disk.
        """
        with self._lock:  # so that it does not leave in between
            self._check_held(version)
            cursor = self._walk.cursor
            if cursor is None or cursor.version < version:
                cursor = self._chain.cursor()
        self._walk.cursor = None  # whatever fails, nobody goes on from where it failed
        params = self._placed(cursor, version, shardings)
        if self._walk.is_on:
            self._walk.cursor = cursor
        return params

    @contextlib.contextmanager
    def walk(self) -> Iterator[None]:
        """Within it, each `get` of this thread starts where the one before has ended: so ask for the newest version first.

        Then each version is one step back: in place, if the version before is not needed any more, and else beside it. Until the
        end the host holds one version more, or two.
        """
        self._walk.is_on = True
        try:
            yield
        finally:
            self._walk.is_on, self._walk.cursor = False, None

    def _placed(self, cursor: Cursor, version: int, shardings: dict | None) -> dict:
        copy = cursor.to(version)
        if shardings is None:
            params = copy.to_device()
        else:
            wanted = shardings if self._trainable is None else self._trainable.like(shardings)
            params = jax.device_put(copy.to_numpy(), wanted)
        return params if self._trainable is None else self._trainable.whole(params, shardings)

    def held_by_any(self, versions: Collection[int]) -> list[int]:
        """The versions of the ring that this process or any other one names, newest first. Collective with several processes."""
        in_ring = self.versions
        is_held = processes.gather([version in versions for version in in_ring]).any(axis=0)
        return [version for version, held in zip(reversed(in_ring), reversed(is_held), strict=True) if held]

    def digest(self, version: int) -> str:
        """The `params_digest` of a version. A collective where several processes hold the parameters.

        Raises:
          VersionGone: the ring does not hold this version.
        """
        self._check_held(version)
        return self.digest_later(version).result()

    def digest_later(self, version: int) -> "concurrent.futures.Future[str]":
        """`digest`, computed in the background where no other process has a part in it. It outlives the version."""
        if version not in self._digests:
            copy = self._copy(version)
            if processes.num_processes() > 1:
                copy.digest()  # a collective belongs to the caller's thread; it is computed once
            self._digests[version] = self._digesting.submit(copy.digest)
            if len(self._digests) > MAX_DIGESTS:
                del self._digests[min(self._digests)]
        return self._digests[version]

    @property
    def digests(self) -> dict[int, str]:
        """Those that were asked for, by version, of versions that have left as well."""
        return {version: digest.result() for version, digest in self._digests.items()}

    def pin(self, versions: Iterable[int]) -> None:
        """Keeps versions, one count for each time one is named: as a rule the distinct versions of one trajectory.

        Raises:
          VersionGone: the ring does not hold one of them. Nothing has changed.
        """
        counts = collections.Counter(operator.index(version) for version in versions)
        with self._lock:
            for version in counts:
                self._check_held(version)
            self._pins.update(counts)

    def release(self, versions: Iterable[int]) -> None:
        """Takes back what one `pin` with the same versions did.

        Raises:
          ValueError: one of them is not pinned so often. Nothing has changed.
        """
        counts = collections.Counter(operator.index(version) for version in versions)
        with self._lock:
            for version, count in counts.items():
                if count > self._pins[version]:
                    raise ValueError(f"version {version} released {count} times but pinned {self._pins[version]} times, wanted "
                                     f"one release for each pin; pins: {self.pins}")
            self._pins = self._pins - counts

    def persist(self, version: int) -> None:
        """Starts to write a version to the store, unless that was done before. It may leave the ring meanwhile.

        Raises:
          VersionGone: the ring does not hold this version.
          ValueError: the ring has no store, or the store holds another snapshot of this version.
        """
        if self._store is None:
            raise ValueError(f"version {version} cannot be persisted: the ring has no store; make it with one")
        self._check_held(version)
        self._write(version, self._chain.difference(version))

    @property
    def persisted(self) -> tuple[int, ...]:
        """The versions handed to the store, ascending, but for those that it failed to write. All but the newest are complete."""
        return tuple(sorted(self._persisted - (set() if self._store is None else self._store.failed)))

    def state(self) -> dict:
        """Plain numpy arrays and JSON values. Waits for the save under way, so that whoever resumes finds it on disk.

        `params` are global arrays, for which this is a collective where several processes hold them; the rest is each one's own.
        """
        if self._store is not None:
            self._store.wait()
        chain = self._chain.state()
        with self._lock:
            return {
                "versions": list(self._versions),
                "pins": {str(version): count for version, count in self._pins.items()},
                "persisted": list(self.persisted),
                "digests": {str(version): digest for version, digest in self.digests.items()},
                "params": {"newest": chain.pop("params"), "frozen": {} if self._trainable is None else self._trainable.state()},
                "chain": chain,
            }

    def restore(self, state: dict, like: dict) -> None:
        """Becomes the ring whose `state` this is.

        Args:
          state: from `state()`.
          like: tree of `jax.ShapeDtypeStruct` with the shardings that `get` shall return.

        Raises:
          ValueError: more versions than the capacity, or arrays of another model.
        """
        if len(state["versions"]) > self.capacity:
            raise ValueError(f"the saved ring holds versions {state['versions']}, wanted at most {self.capacity}; "
                             f"resume with --ring-capacity {len(state['versions'])} or more")
        trained, digests = like, ()
        if self._trainable is not None:
            self._trainable.restore(state["params"]["frozen"], like)
            trained, digests = self._trainable.like(like), self._trainable.digests
        self._chain.restore({**state["chain"], "params": state["params"]["newest"]}, trained, digests)
        with self._lock:
            self._versions = list(state["versions"])
            self._pins = collections.Counter({int(version): count for version, count in state["pins"].items()})
            self._persisted = set(state["persisted"])
            self._digests = {int(version): done(digest) for version, digest in state["digests"].items()}

    def _write(self, version: int, difference: Difference | None) -> None:
        if version in self.persisted:
            return
        if difference is not None and difference.base not in self.persisted:
            difference = None  # a keyframe, then
        self._store.save(version, self._copy(version), difference)
        self._persisted.add(version)

    def _copy(self, version: int) -> HostCopy:
        with self._lock:
            self._check_held(version)
            cursor = self._chain.cursor()
        return cursor.to(version)

    def _check_held(self, version: int) -> None:
        with self._lock:
            if version not in self._versions:
                raise VersionGone(f"version {version} is not in the ring, which holds {self._versions}; "
                                  "pin a version as soon as a token of it exists")

    def _candidates(self) -> list[int]:
        """The versions that may leave a full ring, unless they are pinned; oldest first.

        Never the newest, which the sampler still writes tokens with; but a ring of one has no other, and nothing is got from it.
        """
        return self._versions[: max(self.capacity - 1, 1)]
