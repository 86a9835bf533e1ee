"""The ring: the parameters of the latest policy versions, kept while a token that one of them sampled waits to be scored.

    ring.put(version, params)      at a publish, before the sampler sees the version
    ring.pin(versions)             when a trajectory holds tokens of them
    ring.get(version)              replay: the parameters as they were put, bit for bit, on the same devices
    ring.release(versions)         when the trajectory is scored or dropped

When the ring is full, `put` first lets the oldest version go that nobody pins. If every version that could go is pinned, it
refuses and changes nothing: the caller skips the publish, drops the stalest trajectories, or evicts. So a pinned version never
disappears unless somebody says so.
"""

import collections
import operator
import threading
from collections.abc import Callable, Collection, Iterable, Sequence

import jax

from rl import processes, snapshot_store


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


class SnapshotRing:
    """Parameter snapshots by version, in host memory.

    One thread puts; any thread may pin, release and get.

    Args:
      capacity: how many versions it holds at most.
      store: where `persist` and `persist_every` write.
      persist_every: every version that this divides is persisted when it is put; None for none.
    """

    def __init__(self, capacity: int, *, store: snapshot_store.SnapshotStore | None = None, persist_every: int | None = None):
        if capacity < 1:
            raise ValueError(f"a ring of {capacity} versions, wanted at least 1; set --ring-capacity")
        if persist_every is not None and (store is None or persist_every < 1):
            raise ValueError(f"persist_every is {persist_every} with {'no' if store is None else 'a'} store, wanted 1 or more "
                             "with a store; give both, or no persist_every")
        self.capacity = capacity
        self._store = store
        self._persist_every = persist_every
        self._copies: dict[int, snapshot_store.HostCopy] = {}  # ascending: versions only grow
        self._pins: collections.Counter[int] = collections.Counter()
        self._persisted: set[int] = set()
        self._lock = threading.RLock()

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions it holds, ascending."""
        with self._lock:
            return tuple(self._copies)

    @property
    def pins(self) -> dict[int, int]:
        """The pinned versions and how often each is pinned."""
        with self._lock:
            return {version: self._pins[version] for version in self._copies if self._pins[version]}

    @property
    def oldest_pinned(self) -> int | None:
        """The oldest pinned version; None when nothing is pinned."""
        return min(self.pins, default=None)

    @property
    def nbytes(self) -> int:
        """Bytes of all snapshots in the memory of this process."""
        with self._lock:
            return sum(copy.nbytes for copy in self._copies.values())

    def has_room(self) -> bool:
        """Whether this process pins so few versions that `put` would find a place now."""
        with self._lock:
            return len(self._copies) < self.capacity or not all(self._pins[version] for version in self._candidates())

    def make_room(self) -> bool:
        """Lets the oldest unpinned version go if the ring is full; returns whether the next `put` finds a place.

        Collective with several processes: their rings hold the same versions, and one leaves only if none of them pins it.
        """
        with self._lock:
            return len(self._copies) < self.capacity or self._let_go(
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
            del self._copies[leaving]
        return leaving is not None

    def put(self, version: int, params: dict) -> None:
        """Copies the parameters of a new version; the caller may donate them at once.

        Args:
          version: larger than every version put before.
          params: nested dict of `jax.Array`, sharded in any way.

        Raises:
          RingFull: every version that could leave is pinned. Nothing has changed.
          ValueError: the version does not increase, or the parameters cannot be copied.
        """
        version = operator.index(version)
        snapshot_store.check_params(params)  # before anything leaves
        with self._lock:
            newest = max(self._copies, default=-1)
            if version <= newest:
                raise ValueError(f"version {version} put after version {newest}, wanted a larger one; versions count publishes")
            # Before the copy, so that memory never holds more than the capacity.
            if not self.make_room():
                raise RingFull(f"no room for version {version}: the ring of {self.capacity} holds versions {list(self._copies)}, "
                               f"pinned {self.pins}; skip this publish, drop the stalest trajectories, or raise --ring-capacity")
        copy = snapshot_store.host_copy(params)
        with self._lock:
            self._copies[version] = copy
        if self._persist_every is not None and version % self._persist_every == 0:
            self.persist(version)

    def get(self, version: int, shardings: dict | None = None) -> dict:
        """The parameters on devices, bitwise equal to those put.

        Args:
          version: which.
          shardings: tree of where they shall lie, which may be other devices; by default as those put. In one process only.

        Raises:
          VersionGone: the ring does not hold this version.
        """
        copy = self._copy(version)
        return copy.to_device() if shardings is None else jax.device_put(copy.to_numpy(), shardings)

    def held_by_any(self, versions: Collection[int]) -> list[int]:
        """The versions of the ring that this process or any other one names, newest first. Collective with several processes."""
        in_ring = self.versions
        is_held = processes.gather([version in versions for version in in_ring]).any(axis=0)
        return [version for version, held in zip(reversed(in_ring), reversed(is_held), strict=True) if held]

    def digest(self, version: int) -> str:
        """The `params_digest` of a version, computed once. A collective where several processes hold the parameters.

        Raises:
          VersionGone: the ring does not hold this version.
        """
        return self._copy(version).digest()

    def pin(self, versions: Iterable[int]) -> None:
        """Keeps versions, one count for each time one is named: as a rule the distinct versions of one trajectory.

        Raises:
          VersionGone: the ring does not hold one of them. Nothing has changed.
        """
        counts = collections.Counter(operator.index(version) for version in versions)
        with self._lock:
            for version in counts:
                self._copy(version)
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
        copy = self._copy(version)
        if version not in self._persisted:
            self._store.save(version, copy)
            self._persisted.add(version)

    @property
    def persisted(self) -> tuple[int, ...]:
        """The versions handed to the store, ascending. All but the newest are completely written."""
        return tuple(sorted(self._persisted))

    def state(self) -> dict:
        """Plain numpy arrays and JSON values. Waits for the save under way, so that whoever resumes finds it on disk.

        A collective where several processes hold the parameters; every process then has the global arrays.
        """
        if self._store is not None:
            self._store.wait()
        with self._lock:
            copies, pins = dict(self._copies), dict(self._pins)
        return {
            "versions": list(copies),
            "pins": {str(version): count for version, count in pins.items()},
            "persisted": sorted(self._persisted),
            "params": {str(version): copy.to_numpy() for version, copy in copies.items()},
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
        copies = {version: snapshot_store.from_numpy(state["params"][str(version)], like) for version in state["versions"]}
        with self._lock:
            self._copies = copies
            self._pins = collections.Counter({int(version): count for version, count in state["pins"].items()})
            self._persisted = set(state["persisted"])

    def _copy(self, version: int) -> snapshot_store.HostCopy:
        with self._lock:
            if version not in self._copies:
                raise VersionGone(f"version {version} is not in the ring, which holds {list(self._copies)}; "
                                  "pin a version as soon as a token of it exists")
            return self._copies[version]

    def _candidates(self) -> list[int]:
        """The versions that may leave a full ring, unless they are pinned; oldest first.

        Never the newest, which the sampler still writes tokens with; but a ring of one has no other, and nothing is got from it.
        """
        return list(self._copies)[: max(self.capacity - 1, 1)]
