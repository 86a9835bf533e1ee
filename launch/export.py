"""Writes a snapshot of a run on a pretrained model as a Hugging Face folder, for `transformers` or another run.

    python -m launch.export RUN_DIR FOLDER [--version V]
"""

import dataclasses
import pathlib
import sys
from typing import Annotated

import jax
import tyro

from launch import run_directory
from launch.config import ConfigError, MeshOptions
from launch.evaluate import choose_version
from launch.mesh import make_mesh
from launch.pretrained import locate
from models.pretrained import read_raw
from models.text_files import read_text_files, write_text_files
from models.transformer import Model
from models.weights import export_folder
from rl.learner import published_shapes
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
        version = export(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.folder}: version {version}")
    return 0


def export(options: ExportOptions) -> int:
    """Writes the folder: weights, and the texts of the model that the run began with.

    Returns:
      The version.

    Raises:
      ValueError: no such run or version, a run that began with no pretrained model, or a folder with something in it.
      OSError: the folder cannot be written.
    """
    config = run_directory.read_config(options.run_dir)
    if config.pretrained.model_path is None:
        raise ConfigError(
            f"{options.run_dir} began with random weights, wanted a run with --model-path: an export has the names and the "
            "config of the model that it began with"
        )
    source = locate(config.pretrained.model_path)
    texts = read_text_files(source, vocab_size=config.model.vocab_size)
    store = SnapshotStore(options.run_dir / "snapshots")
    version = choose_version(store.versions(), options.run_dir, options.version)
    # One device holds it whole, however many the run had.
    mesh = make_mesh(MeshOptions(), jax.devices()[:1])
    shapes = published_shapes(Model(config.model), mesh, config.snapshots.publish_dtype)
    export_folder(options.folder, store.load(version, like=shapes), config.model, read_raw(source))
    write_text_files(options.folder, texts)
    return version


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
