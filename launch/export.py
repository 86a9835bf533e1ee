"""Writes a snapshot of a run on a pretrained model as a Hugging Face folder, for `transformers` or another run.

    python -m launch.export RUN_DIR FOLDER [--version V]
"""

import dataclasses
import pathlib
import shutil
import sys
from typing import Annotated

import tyro

from launch import run_directory
from launch.build import Foundation
from launch.config import ConfigError
from launch.evaluate import choose_version
from models.pretrained import locate, read_raw
from models.text_files import TEXT_FILES
from models.weights import export_folder
from rl.snapshot_store import SnapshotStore


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """What to write, and where."""

    run_dir: Annotated[pathlib.Path, tyro.conf.Positional]  # of launch.train
    folder: Annotated[pathlib.Path, tyro.conf.Positional]  # a new one
    version: int | None = None  # of the persisted snapshots; default: the newest


def main(arguments: list[str]) -> int:
    options = tyro.cli(ExportOptions, args=arguments, prog="python -m launch.export", description=__doc__)
    try:
        version, text_files = export(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.folder}: version {version}, with {', '.join(text_files) or 'no tokenizer: it is in the GGUF file'}")
    return 0


def export(options: ExportOptions) -> tuple[int, list[str]]:
    """Writes the folder.

    Returns:
      The version, and the names of the files about text that were copied.

    Raises:
      ValueError: no such run or version, a run that began with no pretrained model, or a folder with something in it.
    """
    config = run_directory.read_config(options.run_dir)
    if config.pretrained.model_path is None:
        raise ConfigError(
            f"{options.run_dir} began with random weights, wanted a run with --model-path: an export has the names and the "
            "config of the model that it began with"
        )
    source = locate(config.pretrained.model_path)
    store = SnapshotStore(options.run_dir / "snapshots")
    version = choose_version(store.versions(), options.run_dir, options.version)
    params = store.load(version, like=Foundation.of(config).published_shapes)
    export_folder(options.folder, params, config.model, read_raw(source))
    names = [name for name in TEXT_FILES if source.is_dir() and (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, options.folder / name)
    return version, names


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
