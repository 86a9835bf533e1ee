"""A pretrained model, whether a Hugging Face folder or a GGUF file."""

import functools
import pathlib
from typing import TYPE_CHECKING

from models.config import ModelConfig, Precision
from models.families import WeightsError, check_config, model_config
from models.filling import check_tensors
from models.parameters import Params
from models.weights import Folder, import_folder, read_config

if TYPE_CHECKING:
    from models.gguf import GgufFile


def read_shape(path: pathlib.Path) -> ModelConfig:
    """The decoder that lies there; see `models.families.model_config`.

    Raises:
      WeightsError: it cannot be read, or is none that we compute.
    """
    return model_config(read_raw(path))


def read_raw(path: pathlib.Path) -> dict:
    """The `config.json` that goes with it.

    Raises:
      WeightsError: it cannot be read.
    """
    return read_config(path) if path.is_dir() else _open_gguf(path).raw


def check_params(path: pathlib.Path, config: ModelConfig) -> None:
    """Refuses what `import_params` would refuse, and reads no weights for it.

    Raises:
      WeightsError: it does not hold exactly this model.
    """
    check_config(config, read_raw(path), path)
    check_tensors(Folder(path) if path.is_dir() else _open_gguf(path), config)


def import_params(path: pathlib.Path, config: ModelConfig, *, precision: Precision, shardings: Params | None = None) -> Params:
    """Its parameters, placed; see `models.weights.import_folder`.

    Raises:
      WeightsError: it does not hold exactly this model.
    """
    if path.is_dir():
        return import_folder(path, config, precision=precision, shardings=shardings)
    file = _open_gguf(path)
    from models.gguf import import_gguf

    return import_gguf(file, config, precision=precision, shardings=shardings)


def _open_gguf(path: pathlib.Path) -> "GgufFile":
    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise WeightsError(f"{path}: {error}; wanted a GGUF file") from error
    return _opened_gguf(path, changed)


@functools.lru_cache(maxsize=1)  # a run looks into it for its shape, then for its weights; each time takes seconds
def _opened_gguf(path: pathlib.Path, changed: int) -> "GgufFile":
    try:
        from models.gguf import GgufFile  # its package is an extra
    except ImportError as error:
        raise WeightsError(f"{path}: reading GGUF wants a package ({error}); pip install 'exactor[gguf]'") from error
    return GgufFile(path)
