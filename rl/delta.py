"""Lossless differences of parameter versions: at the learning rates of RL, most bfloat16 weights of two versions are equal.

A delta is the XOR of two versions' bits, so it goes both ways: with either of the two it gives the other, NaN payloads and the
sign of zero included; and the delta of a longer way is the XOR of those along it. Each array, or each shard of one on the host
that holds it, is a record of its own: see `rl.delta_record`.
"""

import dataclasses
import itertools
import json
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np

from rl import delta_record
from rl.delta_record import CHECKSUM, FORMAT, MAGIC, DeltaCorrupt, Index, WrongBase, check_format

Place = tuple[tuple[str, ...], Index]
"""Which shard of which array: the array's path in the tree, and the shard's index."""

_CONTAINER = struct.Struct("<4sBI")  # magic, format, bytes of the table that follows


@dataclasses.dataclass(frozen=True)
class Delta:
    """The difference of two versions of the parameters, as far as one process holds them: a record for each place."""

    records: Mapping[Place, bytes]

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.records.values()))

    @property
    def num_changed(self) -> int:
        """Elements that differ."""
        return sum(delta_record.num_changed(record) for record in self.records.values())

    def to_bytes(self) -> bytes:
        """One string of bytes, from which `from_bytes` makes the delta again."""
        table = [[list(path), index, len(record)] for (path, index), record in self.records.items()]
        content = json.dumps(table).encode()
        parts = [_CONTAINER.pack(MAGIC, FORMAT, len(content)), content, *self.records.values()]
        return b"".join([CHECKSUM.pack(zlib.crc32(content)), *parts])

    @classmethod
    def from_bytes(cls, content: bytes) -> "Delta":
        """The inverse of `to_bytes`.

        Raises:
          DeltaCorrupt: it is not what was written; where a record is damaged, its place is named.
        """
        start = CHECKSUM.size + _CONTAINER.size
        if len(content) < start:
            raise DeltaCorrupt(f"a delta of {len(content)} bytes, wanted at least {start}; it was cut off")
        magic, version, size = _CONTAINER.unpack_from(content, CHECKSUM.size)
        check_format(magic, version)
        table = content[start : start + size]
        if CHECKSUM.unpack_from(content)[0] != zlib.crc32(table):
            raise DeltaCorrupt("the table of a delta is damaged: its checksum is another one; take it from a copy")
        entries = [((tuple(path), tuple(map(tuple, index))), length) for path, index, length in json.loads(table)]
        stops = list(itertools.accumulate((length for _, length in entries), initial=start + size))
        if stops[-1] != len(content):
            raise DeltaCorrupt(f"a delta of {len(content)} bytes, wanted {stops[-1]}; it was cut off or added to")
        records = {place: content[begin:end] for (place, _), (begin, end) in zip(entries, itertools.pairwise(stops), strict=True)}
        for place, record in records.items():
            try:
                delta_record.check(record)
            except DeltaCorrupt as error:
                raise DeltaCorrupt(f"{place_name(place)}: {error}") from None
        return cls(records)


def place_name(place: Place) -> str:
    """In words, for messages."""
    path, index = place
    return f"{'/'.join(path) or 'the array'}[{', '.join(f'{start}:{stop}' for start, stop in index)}]"


def encode(new, old) -> Delta:
    """The difference of two versions of the same parameters.

    Args:
      new, old: trees of one structure, of numpy arrays or of `jax.Array` in any sharding, but sharded alike; any dtype. Of
        arrays that several processes hold, each takes the shards it holds.

    Raises:
      ValueError: the trees, or two arrays, differ in structure, shape, dtype or sharding.
    """
    return encode_shards(host_shards(new), host_shards(old))


def decode(delta: Delta, base):
    """The other one of the two versions: the old one if `base` is the new one, the new one if it is the old one.

    Returns:
      A tree like `base`, in memory of its own: numpy arrays where `base` has them, and `jax.Array` of the same sharding.

    Raises:
      WrongBase: `base` is neither of the versions, as far as samples of its elements tell; of small arrays, all of them.
      DeltaCorrupt: a record is damaged.
    """
    flat, structure = jax.tree_util.tree_flatten_with_path(base)
    decoded, seen = [], set()
    for keys, leaf in flat:
        path = tuple(_key_name(key) for key in keys)
        shards = {index: np.array(shard, order="C") for index, shard in array_shards(leaf).items()}
        for index, shard in shards.items():
            apply_at(delta, (path, index), shard)
            seen.add((path, index))
        decoded.append(_assemble(shards, leaf))
    if missing := delta.records.keys() - seen:
        raise WrongBase(f"the base has no {', '.join(map(place_name, sorted(missing)))}; give the parameters it was made from")
    return structure.unflatten(decoded)


def encode_shards(
    new: Mapping[Place, np.ndarray], old: Mapping[Place, np.ndarray], *, apply_all: Callable[..., Iterable[bytes]] = map
) -> Delta:
    """`encode`, of the shards that a process holds; `apply_all` is `map`, or does the same with several threads."""
    if new.keys() != old.keys():
        place = sorted(new.keys() ^ old.keys())[0]
        raise ValueError(f"{place_name(place)} is in one version only, wanted in both; give two versions of one model, "
                         "sharded alike")

    def record_of(place: Place) -> bytes:
        try:
            return delta_record.encode_array(new[place], old[place])
        except ValueError as error:
            raise ValueError(f"{place_name(place)}: {error}") from None

    return Delta(dict(zip(new, apply_all(record_of, new), strict=True)))


def apply_at(delta: Delta, place: Place, shard: np.ndarray) -> None:
    """Makes one shard of a version into that of the other, in place.

    Raises:
      WrongBase, DeltaCorrupt: as `decode`; the shard has not changed.
    """
    follow([delta], place, shard, shard)


def follow(deltas: Sequence[Delta], place: Place, source: np.ndarray, target: np.ndarray) -> None:
    """Several deltas, one after the other, from one shard of a version to that of the last.

    Args:
      deltas: each starts where the one before ends.
      place: of the shard.
      source: the shard of the first version.
      target: becomes that of the last; like `source`, which it may be.

    Raises:
      WrongBase, DeltaCorrupt: as `decode`; nothing has changed.
    """
    for each in deltas:
        if place not in each.records:
            raise WrongBase(f"the delta has no {place_name(place)}, only {', '.join(map(place_name, each.records)) or 'nothing'}"
                            "; give the parameters it was made from, sharded alike")
    try:
        delta_record.follow([each.records[place] for each in deltas], source, target)
    except (WrongBase, DeltaCorrupt) as error:
        raise type(error)(f"{place_name(place)}: {error}") from None


def compose(newer: Delta, older: Delta) -> Delta:
    """The delta from where `newer` starts to where `older` ends; of deltas that were encoded new to old, the newer one first.

    Raises:
      ValueError: they do not meet in one version of the same arrays.
      DeltaCorrupt: a record is damaged.
    """
    if newer.records.keys() != older.records.keys():
        raise ValueError("two deltas of different arrays, wanted of one model, sharded alike")
    composed = {}
    for place, record in newer.records.items():
        try:
            composed[place] = delta_record.compose(record, older.records[place])
        except ValueError as error:  # DeltaCorrupt is one
            raise type(error)(f"{place_name(place)}: {error}") from None
    return Delta(composed)


def host_shards(tree) -> dict[Place, np.ndarray]:
    """Each distinct shard that this process holds of a tree's arrays, on the host. On a CPU they are views."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {(tuple(_key_name(key) for key in keys), index): shard
            for keys, leaf in flat for index, shard in array_shards(leaf).items()}


def array_shards(array: np.ndarray | jax.Array) -> dict[Index, np.ndarray]:
    """Each distinct shard of an array that this process holds, however many devices replicate it; read-only.

    They stay what they are, whatever is donated: a buffer that numpy looks at is never written to.
    """
    if not isinstance(array, jax.Array):
        array = np.asarray(array)
        return {tuple((0, size) for size in array.shape): array}
    distinct = {}
    for shard in array.addressable_shards:
        distinct.setdefault(shard_index(shard.index, array.shape), shard.data)
    # jax keeps the host value of an array as long as the array; that of these short-lived wrappers goes with the views.
    wrappers = {index: jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])
                for index, data in distinct.items()}
    for wrapper in wrappers.values():
        wrapper.copy_to_host_async()
    return {index: np.asarray(wrapper) for index, wrapper in wrappers.items()}


def shard_index(slices: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
    """Where a shard lies, from the slices by which jax says it."""
    return tuple(part.indices(size)[:2] for part, size in zip(slices, shape, strict=True))


def _assemble(shards: dict[Index, np.ndarray], like: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
    if not isinstance(like, jax.Array):
        return next(iter(shards.values()))
    kind = like.sharding.memory_kind
    placed = [jax.device_put(shards[shard_index(slices, like.shape)], jax.sharding.SingleDeviceSharding(device, memory_kind=kind))
              for device, slices in like.sharding.addressable_devices_indices_map(like.shape).items()]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, placed, dtype=like.dtype)


def _key_name(key) -> str:
    return str(key.key) if isinstance(key, jax.tree_util.DictKey) else jax.tree_util.keystr((key,))
