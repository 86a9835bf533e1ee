"""One array's difference between two versions, as bytes that carry their own checksums: a record.

It holds the XOR of the two arrays' bits, so it leads from either to the other, in the smallest of three kinds:

    SPARSE   gaps between the places that differ, and the XOR there; compressed
    PLANES   the XOR of everything; compressed: even where all of them differ, float32 weights share sign and exponent
    RAW      the XOR of everything, as it is, where compressing gains nothing
"""

import dataclasses
import enum
import math
import struct
import zlib
from collections.abc import Sequence

import numpy as np
import zstandard

Index = tuple[tuple[int, int], ...]
"""Where a shard lies in its global array: (start, stop) per axis."""

FORMAT = 1
MAGIC = b"XORD"
_HEADER = struct.Struct("<4sBBBBQQII")  # magic, format, kind, bytes an element and a gap, elements, places, witnesses
CHECKSUM = struct.Struct("<I")  # CRC-32 of all that follows it

_NEAR = 1 << 20  # elements worked on at a time: near enough for caches, and enough that threads seldom meet in the interpreter
_SPARSE_BELOW = 1 / 8  # of the elements; where more differ, planes are smaller
_RUNS, _RUN = 128, 128  # places and elements there by which a version of an array is known


class Kind(enum.IntEnum):
    """How a record holds the XOR."""

    SPARSE = 0
    PLANES = 1
    RAW = 2


class DeltaCorrupt(ValueError):
    """Bytes that are no delta, or no longer the one that was written."""


class WrongBase(ValueError):
    """A delta of other versions or of another array than the one it is applied to."""


def encode_array(new: np.ndarray, old: np.ndarray) -> bytes:
    """The record of two arrays [...] of one shape and dtype, whatever it is."""
    if new.shape != old.shape or new.dtype != old.dtype:
        raise ValueError(f"the new one is {new.dtype.name}{list(new.shape)} and the old one {old.dtype.name}{list(old.shape)}, "
                         "wanted one shape and dtype; give two versions of one model")
    new, old = _bits(new), _bits(old)
    witnesses = (_witness(new), _witness(old))
    changes = _differing(new, old)
    return _dense_record(new ^ old, witnesses) if changes is None else _sparse_record(*changes, new.size, witnesses)


def apply(record: bytes, array: np.ndarray) -> None:
    """Makes an array of one version into that of the other, in place.

    Raises:
      WrongBase, DeltaCorrupt: the array is of neither version, or the record damaged; the array has not changed.
    """
    follow([record], array, array)


def follow(records: Sequence[bytes], source: np.ndarray, target: np.ndarray) -> None:
    """Several records, one after the other, from one version of an array to the last of them.

    Args:
      records: each starts where the one before ends.
      source: the first version.
      target: becomes the last; of the shape and dtype of `source`, which it may be.

    Raises:
      WrongBase: the array is not of the first version, as far as samples of its elements tell. Nothing has changed.
      DeltaCorrupt: a record is damaged. Nothing has changed.
    """
    if (target.shape, target.dtype) != (source.shape, source.dtype):
        raise ValueError(f"the target is {target.dtype.name}{list(target.shape)}, wanted {source.dtype.name}{list(source.shape)} "
                         "like the source; make it with np.empty_like")
    headers = [check(record) for record in records]
    base, bits = _bits(source), _bits(target)
    witness = _witness(base)
    for header in headers:
        if (base.itemsize, base.size) != (header.itemsize, header.size):
            raise WrongBase(f"the delta is of {header.size} elements of {header.itemsize} bytes, got {source.dtype.name}"
                            f"{list(source.shape)}; give an array of the same model")
        if witness not in header.witnesses:
            raise WrongBase("the delta is of two other versions of this array; give one of those it was made from")
        witness = header.witnesses[1 - header.witnesses.index(witness)]
    # A single sparse record in place has nothing to gain from blocks: no copy warms the cache for it.
    if any(header.kind is not Kind.SPARSE for header in headers) or target is source and len(records) == 1:
        if target is not source:
            bits[...] = base
        for record, header in zip(records, headers, strict=True):
            _xor(record, header, bits)
        return
    changes = [_changes(record, header) for record, header in zip(records, headers, strict=True)]
    starts = range(0, bits.size, _NEAR)
    bounds = [np.searchsorted(places, [*starts, bits.size]).tolist() for places, _ in changes]
    for index, start in enumerate(starts):  # block by block: what was copied is still in the cache when it changes
        if target is not source:
            bits[start : start + _NEAR] = base[start : start + _NEAR]
        for (places, xor), bound in zip(changes, bounds, strict=True):
            part = slice(bound[index], bound[index + 1])
            bits[places[part]] ^= xor[part]


def apply_part(record: bytes, index: Index, part: np.ndarray, part_index: Index) -> None:
    """`apply`, of the record of one part of an array to another part of it, as far as they have elements in common.

    Where they are not the same part, a wrong base is not noticed.

    Args:
      record: of the part at `index`.
      part: the elements at `part_index`; changed in place.

    Raises:
      WrongBase, DeltaCorrupt: as `apply`.
    """
    if part.shape != tuple(stop - start for start, stop in part_index):
        raise ValueError(f"the part at {part_index} has shape {part.shape}; give the elements of that index")
    if index == part_index:
        apply(record, part)
        return
    common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(index, part_index, strict=True)]
    if any(start >= stop for start, stop in common):
        return
    header = check(record)
    xor = np.zeros([stop - start for start, stop in index], f"u{part.itemsize}")
    if (header.itemsize, header.size) != (xor.itemsize, xor.size):
        raise WrongBase(f"the delta is of {header.size} elements of {header.itemsize} bytes, got {part.dtype.name} at {index}; "
                        "give an array of the same model")
    _xor(record, header, xor.reshape(-1))
    source, target = (tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(common, origin, strict=True))
                      for origin in (index, part_index))
    part.view(xor.dtype)[target] ^= xor[source]


def compose(newer: bytes, older: bytes) -> bytes:
    """The record from where `newer` starts to where `older` ends; of records that were encoded new to old, the newer one first.

    Raises:
      ValueError: they do not meet in one version of one array.
      DeltaCorrupt: a record is damaged.
    """
    one, other = check(newer), check(older)
    if (one.itemsize, one.size) != (other.itemsize, other.size):
        raise ValueError("two records of different arrays, wanted of one")
    (start, between), (other_between, end) = one.witnesses, other.witnesses
    if between != other_between:
        raise ValueError("two differences that do not meet in one version; give the newer one first, and then the next older")
    xor = np.zeros(one.size, f"u{one.itemsize}")
    _xor(newer, one, xor)
    _xor(older, other, xor)
    changes = _differing(xor, np.zeros_like(xor))
    witnesses = start, end
    return _dense_record(xor, witnesses) if changes is None else _sparse_record(*changes, xor.size, witnesses)


def check(record: bytes) -> "Header":
    """What a record says of itself. Raises DeltaCorrupt if it is damaged."""
    start = CHECKSUM.size
    if len(record) < start + _HEADER.size:
        raise DeltaCorrupt(f"a record of {len(record)} bytes, wanted at least {start + _HEADER.size}; it was cut off")
    if CHECKSUM.unpack_from(record)[0] != zlib.crc32(memoryview(record)[start:]):
        raise DeltaCorrupt("a record is damaged: its checksum is another one; take it from a copy")
    magic, version, kind, itemsize, gap_size, size, num_places, *witnesses = _HEADER.unpack_from(record, start)
    check_format(magic, version)
    return Header(Kind(kind), itemsize, gap_size, size, num_places, tuple(witnesses))


@dataclasses.dataclass(frozen=True)
class Header:
    """What a record says of itself."""

    kind: Kind
    itemsize: int
    gap_size: int  # bytes of a gap, in sparse records
    size: int  # elements of the array
    num_places: int  # elements that differ
    witnesses: tuple[int, int]  # of the new version and the old one


def num_changed(record: bytes) -> int:
    """Elements that differ between the two versions."""
    return _HEADER.unpack_from(record, CHECKSUM.size)[6]


def check_format(magic: bytes, version: int) -> None:
    """Raises DeltaCorrupt unless bytes begin as ours do."""
    if magic != MAGIC:
        raise DeltaCorrupt(f"a delta begins with {MAGIC!r}, got {magic!r}; give the bytes of a delta")
    if version != FORMAT:
        raise DeltaCorrupt(f"a delta of format {version}, wanted {FORMAT}; read it with the release that wrote it")


def _bits(array: np.ndarray) -> np.ndarray:
    """The bits of an array as unsigned integers, flat; a view. They compare and XOR whatever the floats are."""
    if not array.flags.c_contiguous:
        raise ValueError(f"an array of strides {array.strides}, wanted a contiguous one; copy it first")
    return array.reshape(-1).view(f"u{math.gcd(array.itemsize, 8)}")


def _witness(bits: np.ndarray) -> int:
    """A checksum by which two versions are told apart: of all of a small array, and of runs of elements all over a large one."""
    if bits.size <= _RUNS * _RUN:
        return zlib.crc32(bits)
    checksum = 0
    for start in np.linspace(0, bits.size - _RUN, _RUNS, dtype=np.intp).tolist():
        checksum = zlib.crc32(bits[start : start + _RUN], checksum)
    return checksum


def _differing(new: np.ndarray, old: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Ascending places where two flat arrays differ, and the XOR there; None if they are too many for a sparse record."""
    all_places, all_xor, count = [np.zeros(0, np.intp)], [new[:0]], 0
    for start in range(0, new.size, _NEAR):
        one, other = new[start : start + _NEAR], old[start : start + _NEAR]
        places = np.flatnonzero(one != other)
        count += places.size
        if count > new.size * _SPARSE_BELOW:
            return None
        all_xor.append(one[places] ^ other[places])
        places += start
        all_places.append(places)
    return np.concatenate(all_places), np.concatenate(all_xor)


def _sparse_record(places: np.ndarray, xor: np.ndarray, size: int, witnesses: tuple[int, int]) -> bytes:
    gaps = np.diff(places, prepend=0)
    gaps = gaps.astype(np.min_scalar_type(int(gaps.max(initial=0))))
    payload = _compressed(_planes(gaps) + _planes(xor))
    return _record(Kind.SPARSE, xor.itemsize, gaps.itemsize, size, places.size, witnesses, payload)


def _dense_record(xor: np.ndarray, witnesses: tuple[int, int]) -> bytes:
    payload, kind = _compressed(_planes(xor)), Kind.PLANES
    if len(payload) >= xor.nbytes:
        payload, kind = xor.tobytes(), Kind.RAW
    return _record(kind, xor.itemsize, 0, xor.size, int(np.count_nonzero(xor)), witnesses, payload)


def _record(kind: Kind, itemsize: int, gap_size: int, size: int, num_places: int, witnesses: tuple[int, int],
            payload: bytes) -> bytes:
    header = _HEADER.pack(MAGIC, FORMAT, kind, itemsize, gap_size, size, num_places, *witnesses)
    return b"".join([CHECKSUM.pack(zlib.crc32(payload, zlib.crc32(header))), header, payload])


def _changes(record: bytes, header: Header) -> tuple[np.ndarray, np.ndarray]:
    """Of a sparse record, ascending places and the XOR there."""
    content = memoryview(zstandard.ZstdDecompressor().decompress(_payload(record)))
    middle = header.gap_size * header.num_places
    places = np.cumsum(_unplaned(content[:middle], f"u{header.gap_size}"), dtype=np.intp)
    return places, _unplaned(content[middle:], f"u{header.itemsize}")


def _xor(record: bytes, header: Header, bits: np.ndarray) -> None:
    """XORs what a checked record holds into flat bits of its size."""
    if header.kind is Kind.SPARSE:
        places, xor = _changes(record, header)
        bits[places] ^= xor
    elif header.kind is Kind.PLANES:
        bits ^= _unplaned(zstandard.ZstdDecompressor().decompress(_payload(record)), bits.dtype)
    else:
        bits ^= np.frombuffer(_payload(record), bits.dtype)


def _payload(record: bytes) -> memoryview:
    return memoryview(record)[CHECKSUM.size + _HEADER.size :]


def _planes(array: np.ndarray) -> bytes:
    """The first bytes of all elements, then the second ones, ...: like ones side by side compress better."""
    planes = array.view(np.uint8).reshape(-1, array.itemsize)
    return b"".join(planes[:, number].tobytes() for number in range(array.itemsize))


def _unplaned(content, dtype) -> np.ndarray:
    """The inverse of `_planes`."""
    planes = np.frombuffer(content, np.uint8).reshape(np.dtype(dtype).itemsize, -1)
    array = planes[0].astype(dtype)
    for number, plane in enumerate(planes[1:], 1):
        array |= plane.astype(dtype) << (8 * number)
    return array


def _compressed(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(content)
