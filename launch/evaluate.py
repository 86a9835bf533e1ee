"""Evaluates a snapshot of a run on the held-out instances.

python -m launch.evaluate RUN_DIR [--version V] [--temperature T] [--top-p P]
"""

import dataclasses
import json
import pathlib
import sys
from typing import Annotated

import tyro

from launch import run_directory
from launch.build import Foundation
from launch.config import Config, ConfigError
from launch.display import Display
from rl.snapshot_store import SnapshotStore


@dataclasses.dataclass(frozen=True)
class EvaluateOptions:
    """What to evaluate."""

    run_dir: Annotated[pathlib.Path, tyro.conf.Positional]  # of launch.train
    version: int | None = None  # of the persisted snapshots; default: the newest
    episodes: int | None = None  # held-out instances; default: the run's
    temperature: float | None = None  # default: the run's
    top_k: int = 0  # sample from so many of the likeliest tokens; 0: from all
    top_p: float = 1.0  # sample from the likeliest tokens that hold this mass
    json: pathlib.Path | None = None  # also write the figures here


def main(arguments: list[str]) -> int:
    options = tyro.cli(EvaluateOptions, args=arguments, prog="python -m launch.evaluate", description=__doc__)
    try:
        config = run_directory.read_config(options.run_dir)
        foundation = Foundation.of(_with_sampling(config, options))
        store = SnapshotStore(options.run_dir / "snapshots")
        version = choose_version(store.versions(), options.run_dir, options.version)
        params = store.load(version, like=foundation.published_shapes)
        make_sampler = foundation.sampler_factory()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    episodes = options.episodes or config.evaluation_episodes
    figures = {"version": version, "episodes": episodes}
    with Display(0) as display:
        display.phase(f"evaluating version {version} on {episodes} held-out instances of {config.environment.value}")
        rows = [("", "success", "reward", "tokens an episode")]
        for label, greedy in (("greedy", True), ("sampled", False)):
            sampler = make_sampler()
            sampler.publish(version, params)
            result = foundation.evaluate(sampler, num_episodes=episodes, greedy=greedy)
            figures |= {f"{label}_success": result.success, f"{label}_reward": result.reward, f"{label}_tokens": result.tokens}
            rows.append((label, f"{result.success:.1%}", f"{result.reward:.3f}", f"{result.tokens:.1f}"))
        display.table("held-out", rows)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def _with_sampling(config: Config, options: EvaluateOptions) -> Config:
    temperature = config.sampler.temperature if options.temperature is None else options.temperature
    sampler = dataclasses.replace(config.sampler, temperature=temperature, top_k=options.top_k, top_p=options.top_p)
    return dataclasses.replace(config, sampler=sampler)


def choose_version(versions: tuple[int, ...], run_dir: pathlib.Path, asked: int | None) -> int:
    """The version that is asked for, or the newest.

    Raises:
      ConfigError: it is not there.
    """
    if not versions:
        raise ConfigError(f"{run_dir} holds no persisted snapshot; let launch.train finish, or train with --persist-every")
    version = versions[-1] if asked is None else asked
    if version not in versions:
        raise ConfigError(f"--version {version} is not persisted; wanted one of {', '.join(map(str, versions))}")
    return version


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
