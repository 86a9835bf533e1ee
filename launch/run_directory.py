"""What a run leaves on disk, and how it is read back."""

import datetime
import functools
import json
import os
import pathlib
import subprocess
from importlib import metadata

import cattrs.preconf.json

from launch.config import Config, ConfigError

CONFIG, SUMMARY = "config.json", "summary.json"
PACKAGES = (
    "exactor",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "tensorstore",
    "chex",
    "google-jetstream",
    "gymnasium",
    "numpy",
)


@functools.cache
def _converter() -> cattrs.Converter:
    converter = cattrs.preconf.json.make_converter(forbid_extra_keys=True)
    converter.register_unstructure_hook(pathlib.Path, str)
    converter.register_structure_hook(pathlib.Path, lambda value, _: pathlib.Path(value))
    return converter


def create(config: Config, name: str) -> pathlib.Path:
    """Makes the run's directory and writes its resolved config, with the versions of the packages and the commit.

    Raises:
      ConfigError: it is there already and not empty.
    """
    started = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    run_dir = config.run_dir or pathlib.Path("runs") / f"{started}-{name}-seed{config.seed}"
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise ConfigError(
            f"--run-dir {run_dir} exists and is not empty; a run never writes into another's directory: choose another"
        )
    run_dir.mkdir(parents=True, exist_ok=True)
    versions = {package: _version(package) for package in PACKAGES}
    write_json(
        run_dir / CONFIG, {"name": name, "config": _converter().unstructure(config), "versions": versions, "commit": _commit()}
    )
    return run_dir


def read_config(run_dir: pathlib.Path) -> Config:
    """The resolved config of a run.

    Raises:
      ConfigError: no run lies there, or one that another version of this code wrote.
    """
    path = run_dir / CONFIG
    if not path.is_file():
        raise ConfigError(f"{run_dir} holds no {CONFIG}; wanted the directory that launch.train wrote its run to")
    try:
        return _converter().structure(json.loads(path.read_text())["config"], Config)
    except (cattrs.BaseValidationError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{path} does not describe a config of this version: {error}; check out the commit that it names"
        ) from error


def write_json(path: pathlib.Path, content: dict) -> None:
    """Writes a JSON file that is either whole or not there."""
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    os.replace(unfinished, path)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of this checkout, marked when files differ from it; None outside of one."""
    root = pathlib.Path(__file__).parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"], cwd=root, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()
