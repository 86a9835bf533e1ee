"""A dedicated scorer: how much of its work happens while the learner trains?

A run in threads on 8 devices, 4 for learner and sampler and 4 for the scorer, with real programs throughout. On a CPU set
XLA_FLAGS=--xla_force_host_platform_device_count=8 and NPROC=32. Virtual devices share its cores, so everything takes longer than
on devices of its own, and nothing is gained, but the order of things is the same.
"""

import dataclasses
import pathlib
import tempfile

from launch import run_directory
from launch.build import Foundation, build_loop
from launch.config import Config, MeshOptions, check, load_config
from launch.display import Display
from rl.loop import Schedule
from rl.old_logprobs import SourceName
from rl.threads import Interleaving, Threads

DEVICES = 4  # of the learner, and as many of the scorer
WARM_STEPS = 8  # programs are compiled, and the queue is as full as it will be


@dataclasses.dataclass(frozen=True)
class Options:
    """How long it runs."""

    steps: int = 30  # learner steps measured


def run(options: Options, display: Display) -> dict[str, float]:
    """Figures: `wait_over_score`, the time that the learner waits over that of scoring; `score_over_train`; and the seconds of
    each a learner step."""
    config = _config(WARM_STEPS + options.steps)
    check(config)
    foundation = Foundation.of(config)
    foundation.check()
    with tempfile.TemporaryDirectory() as directory:
        run_dir = pathlib.Path(directory)
        loop = build_loop(foundation, run_dir, foundation.sampler_factory()(), foundation.scorer())
        loop.start(foundation.initial_params())
        display.phase(f"{config.steps} learner steps on {2 * DEVICES} devices")
        Threads(loop, Interleaving(run_dir / "interleaving.txt")).run(config.steps)
        loop.finish()
        rows = run_directory.read_metrics(run_dir)[WARM_STEPS:]
    seconds = {name: sum(row[f"seconds_{name}"] for row in rows) / len(rows) for name in ("score", "train", "stall", "step")}
    names = {"score": "scoring", "train": "training", "stall": "the learner's wait for scores", "step": "all"}
    display.table("a learner step", [(names[name], f"{value:.3f} s") for name, value in seconds.items()])
    figures = {"wait_over_score": seconds["stall"] / seconds["score"], "score_over_train": seconds["score"] / seconds["train"]}
    display.table("of these", [("wait / scoring", f"{figures['wait_over_score']:.1%}"),
                               ("scoring / training", f"{figures['score_over_train']:.1%}")])  # fmt: skip
    return figures | {f"seconds_{name}": value for name, value in seconds.items()}


def _config(steps: int) -> Config:
    config = load_config("quickstart")
    return dataclasses.replace(
        config,
        mesh=MeshOptions(fsdp=DEVICES),
        warm_start=dataclasses.replace(config.warm_start, updates=0),
        loop=dataclasses.replace(config.loop, schedule=Schedule.THREADS),
        snapshots=dataclasses.replace(
            config.snapshots,
            old_logprobs=SourceName.DEDICATED,
            scorer_devices=DEVICES,
            score_rows=4,
            exactness_every=0,
            decompose_every=0,
            persist_every=steps,
        ),
        steps=steps,
    )
