"""The metadata of a GGUF file: what its header says before the tensors begin.

The `gguf` package makes a view of every string, which takes seconds for a vocabulary; this reads them in a tenth of one.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import pathlib
import struct
from typing import Any, BinaryIO

STARTS = (b"GGUF\x02\0\0\0", b"GGUF\x03\0\0\0")
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def read_metadata(path: pathlib.Path) -> dict[str, Any]:
    """Numbers, texts, and lists of them, by key.

    Raises:
      ValueError: the file is no little-endian GGUF of version 2 or 3, or its header is cut or broken.
    """
    with path.open("rb") as file:
        start = file.read(8)
        if start not in STARTS:
            raise ValueError(f"{path} begins with {start!r}, wanted {STARTS[-1]!r}; name a little-endian GGUF file")
        try:
            _, num_keys = _numbers(file, "Q", 2)
            return {_string(file): _value(file, *_numbers(file, "I", 1)) for _ in range(num_keys)}
        except (struct.error, KeyError, UnicodeDecodeError, RecursionError, OverflowError, MemoryError) as error:
            raise ValueError(f"{path} has a broken header ({type(error).__name__}: {error}); fetch the file again") from error


def _numbers(file: BinaryIO, form: str, count: int) -> tuple:
    size = struct.calcsize(f"<{form}") * count
    return struct.unpack(f"<{count}{form}", file.read(size))


def _string(file: BinaryIO) -> str:
    (length,) = _numbers(file, "Q", 1)
    data = file.read(length)
    if len(data) < length:
        raise struct.error(f"a text of {length} bytes of which {len(data)} are there")
    return data.decode()


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        (element_kind,), (count,) = _numbers(file, "I", 1), _numbers(file, "Q", 1)
        if element_kind in _SCALARS:
            return list(_numbers(file, _SCALARS[element_kind], count))
        return [_value(file, element_kind) for _ in range(count)]
    return _numbers(file, _SCALARS[kind], 1)[0]
