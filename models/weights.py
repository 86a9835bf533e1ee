"""Weights from and to Hugging Face folders: `config.json` and one or more `*.safetensors`.

An import is all or nothing: files, names, shapes and types are checked before the first number is read, and what is wrong is said
in one line. An export writes what transformers load, and what an import reads back bit by bit.
"""

import json
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from models.config import ModelConfig, Precision
from models.families import Place, WeightsError, check_config, places
from models.filling import fill
from models.parameters import Params, by_path
from models.transformer import Model

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

STORED_TYPES = {"BF16": Precision.BFLOAT16.dtype, "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}
MAX_SHARD_BYTES = 2 * 10**9


def read_config(folder: pathlib.Path) -> dict:
    """A folder's `config.json`, as it stands there; `models.families.model_config` reads it.

    Raises:
      WeightsError: there is none, or it is no JSON object.
    """
    return _read_json(pathlib.Path(folder) / CONFIG)


def import_folder(folder: pathlib.Path, config: ModelConfig, *, precision: Precision, shardings: Params | None = None) -> Params:
    """The parameters in a folder, placed.

    Args:
      folder: holds `config.json`, and `model.safetensors` or the files that `model.safetensors.index.json` names.
      config: from `models.families.model_config`; its `FREE_FIELDS` may have been replaced.
      precision: type of the parameters.
      shardings: a tree like the parameters (`models.sharding.parameter_shardings`); None: all on the default device.

    Raises:
      WeightsError: a folder that does not hold exactly this model. Nothing is placed then.
    """
    folder = pathlib.Path(folder)
    check_config(config, read_config(folder), folder / CONFIG)
    return fill(Folder(folder), config, precision=precision, shardings=shardings)


class Folder:
    """The tensors of a folder's safetensors files. A `models.filling.Source`.

    Raises:
      WeightsError: files that are missing, damaged, or in disagreement with their index; a type that is none of `STORED_TYPES`.
    """

    def __init__(self, folder: pathlib.Path):
        self._stored, self.shapes = {}, {}
        indexed = _indexed_files(folder)
        for path in [folder / SINGLE] if indexed is None else sorted({folder / file for file in indexed.values()}):
            for name, (dtype, shape, offset) in _tensors_in(path).items():
                if indexed is not None and indexed.get(name) != path.name:
                    raise WeightsError(f"{path}: holds tensor {name}, which {INDEX} places in {indexed.get(name)}")
                self._stored[name], self.shapes[name] = (path, dtype, offset), shape
        missing = sorted((indexed or {}).keys() - self.shapes.keys())
        if missing:
            raise WeightsError(f"{folder / indexed[missing[0]]}: tensor {missing[0]} is missing, wanted as {INDEX} says")

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        path, dtype, offset = self._stored[name]
        row = self.shapes[name][1:]
        row_length = math.prod(row)
        numbers = np.fromfile(path, dtype, count=(stop - start) * row_length, offset=offset + start * row_length * dtype.itemsize)
        return numbers.reshape(stop - start, *row)


def _tensors_in(path: pathlib.Path) -> dict[str, tuple[np.dtype, tuple[int, ...], int]]:
    """Types and shapes of a file's tensors, and where in it they begin; the library sees to it that all of that is sound."""
    tensors = {}
    try:
        with safe_open(path, "numpy") as file, open(path, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            # Slices of the library map the file or read whole tensors, which is memory; a place to read from it does not tell.
            header = json.loads(stream.read(length))
            for name in file.keys():
                stored = file.get_slice(name)
                kind, shape = stored.get_dtype(), tuple(stored.get_shape())
                if kind not in STORED_TYPES:
                    raise WeightsError(f"{path}: tensor {name} is of type {kind}, wanted one of: {', '.join(STORED_TYPES)}")
                tensors[name] = STORED_TYPES[kind], shape, 8 + length + header[name]["data_offsets"][0]
    except (SafetensorError, OSError) as error:
        problem = str(error).partition("\n")[0]
        raise WeightsError(f"{path}: {problem}; wanted a whole safetensors file") from error
    return tensors


def _indexed_files(folder: pathlib.Path) -> dict[str, str] | None:
    """From each tensor's name to its file; None where all of them are in `SINGLE`, which wins over an index."""
    if (folder / SINGLE).exists():
        return None
    if not (folder / INDEX).exists():
        raise WeightsError(f"{folder}: no weights in it, wanted {SINGLE} or {INDEX}")
    files = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) and file and pathlib.PurePath(file).name == file
                                              for file in files.values()):
        raise WeightsError(f"{folder / INDEX}: no weight_map from names of tensors to names of files")
    for file in sorted(set(files.values())):
        if not (folder / file).is_file():
            raise WeightsError(f"{folder}: {file} is missing, wanted as {INDEX} names it")
    return files


def _read_json(path: pathlib.Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WeightsError(f"{path} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        problem = str(error).partition("\n")[0]
        raise WeightsError(f"{path}: {problem}; wanted a JSON object") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: holds a {type(value).__name__}, wanted a JSON object")
    return value


def export_folder(folder: pathlib.Path, params: Params, config: ModelConfig, raw: Mapping, *,
                  max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Writes a folder that Hugging Face's transformers load, and `import_folder` as well, bit by bit.

    Names, shapes and `config.json` are those of the folder that the model came from; only the type that its `dtype` or
    `torch_dtype` names becomes that of the parameters. One file's tensors are in host memory at one time.

    Args:
      folder: must not exist, or be empty. It appears when it is complete.
      params: whole on the devices of this process.
      config: their shape.
      raw: the `config.json` that they were imported with.
      max_shard_bytes: of one file, unless a single tensor is larger.

    Raises:
      WeightsError: a folder with something in it, or parameters that are not those of `config` and `raw`.
    """
    folder = pathlib.Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WeightsError(f"{folder} exists, wanted a new or an empty folder")
    check_config(config, raw, CONFIG)
    leaves = _check_params(params, config)
    shards = _shards(config, leaves, max_shard_bytes)
    names = [SINGLE] if len(shards) == 1 else [f"model-{number:05}-of-{len(shards):05}.safetensors"
                                               for number in range(1, len(shards) + 1)]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        partial = pathlib.Path(scratch) / folder.name
        partial.mkdir()
        dtype = leaves["embedding"].dtype.name
        changed = {key: dtype for key in ("dtype", "torch_dtype") if raw.get(key) is not None}
        _write_json(partial / CONFIG, {**raw, **changed})
        for file, shard in zip(names, shards, strict=True):
            tensors = {name: _stored(leaves[place.path], place) for name, place in shard.items()}
            save_file(tensors, partial / file, metadata={"format": "pt"})  # transformers ask for that entry
            shutil.copymode(partial / CONFIG, partial / file)  # it lets nobody but the owner read it
        if len(shards) > 1:
            files = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
            total = sum(_num_bytes(leaves, place) for shard in shards for place in shard.values())
            _write_json(partial / INDEX, {"metadata": {"total_size": total}, "weight_map": files})
        os.replace(partial, folder)


def _check_params(params: Params, config: ModelConfig) -> dict[str, jax.Array]:
    """The leaves by path."""
    leaves, wanted = by_path(params), by_path(Model(config).shapes)
    got = {path: leaf.shape for path, leaf in leaves.items()}
    for path in sorted(got.keys() | wanted.keys()):
        expected = wanted[path].shape if path in wanted else None
        if got.get(path) != expected:
            raise WeightsError(f"parameter {path} has shape {got.get(path)}, wanted {expected}")
        if isinstance(leaves[path], jax.Array) and not leaves[path].is_fully_addressable:
            raise WeightsError(f"parameter {path} lies on devices of several processes, wanted it on those of one")
    return leaves


def _num_bytes(leaves: Mapping[str, jax.Array], place: Place) -> int:
    return math.prod(place.shape) * leaves[place.path].dtype.itemsize


def _shards(config: ModelConfig, leaves: Mapping[str, jax.Array], max_bytes: int) -> list[dict[str, Place]]:
    """Tensors by file, layer after layer."""
    def depth(named):
        order = {"embedding": -1, "final_norm/scale": config.num_layers, "head/kernel": config.num_layers}
        return order.get(named[1].path, named[1].layer)

    shards, room = [], 0
    for name, place in sorted(places(config), key=depth):
        num_bytes = _num_bytes(leaves, place)
        if not shards or num_bytes > room:
            shards.append({})
            room = max_bytes
        shards[-1][name] = place
        room -= num_bytes
    return shards


def _stored(leaf: jax.Array, place: Place) -> np.ndarray:
    """A tensor as it is stored: `Place` the other way round."""
    ours = np.asarray(leaf if place.layer is None else leaf[place.layer])
    ours = ours[tuple(slice(place.unfolded[axis]) for axis in place.order)]  # without the rows that pad the vocabulary
    return np.ascontiguousarray(ours.transpose(np.argsort(place.order))).reshape(place.shape)


def _write_json(path: pathlib.Path, value: Mapping) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
