"""Old logprobs: how far each source's anchor is from the exact one, by staleness, and what exactness costs.

A policy is trained for some steps. Some of its versions play the same games while they are live, and then every source anchors
them for a learner step of two minibatches at the present version: as old as the version is, so stale are the tokens. The error is
the distance from the exact old logprob, over all trained tokens of both minibatches. No source is its own judge: one that claims
to be exact is compared with the scores of the version while it was live. Timed side by side on one batch, with a model that is
large enough for its arithmetic to take most of the time: the replay of 1 and of 5 versions, one a trajectory, against scoring
everything once under the present version, in buckets of one row.
"""

import contextlib
import dataclasses
import importlib.util
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np

from launch.build import Foundation, build_loop
from launch.config import Config, check_writable, load_config
from launch.display import Display
from launch.styles import STYLES
from launch.train import warm_started
from models.transformer import Params
from rl.batching import make_batch
from rl.decomposition import Decomposition
from rl.learner import Learner, publish_cast
from rl.loop import Loop
from rl.old_logprobs import EwmaOptions, OldLogprobSource, SourceName, score_version
from rl.old_logprobs.approximate import RecomputeSource
from rl.old_logprobs.exact import SnapshotSource
from rl.sampler import Sampler
from rl.scorer import Scorer
from rl.snapshots import SnapshotRing
from rl.types import Trajectory

STALENESS = (0, 1, 2, 4, 8)
WINDOWLESS = "ewma_w0"
"""EWMA with a window of no publishes: it must be what recompute is."""
NUM_VERSIONS = (1, 5)
"""In the batch whose replay is timed."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The policy and the games."""

    episodes: int = 64
    warm_start_updates: int = 60
    learning_rate: float = 3e-4
    learner_steps: int = 16  # before the comparison
    repetitions: int = 9  # of each timing
    seed: int = 0
    plot: pathlib.Path | None = None  # also draw the errors here


@dataclasses.dataclass(frozen=True)
class Past:
    """What a run leaves: its versions, and what each of those that are compared played and scored while it was live."""

    foundation: Foundation
    learner_state: dict
    ring: SnapshotRing
    scorer: Scorer
    episodes: dict[int, list[Trajectory]]  # by staleness; with old logprobs

    @property
    def version(self) -> int:
        """Of the learner."""
        return self.ring.versions[-1]

    @property
    def live(self) -> Params:
        return self.ring.get(self.version)


def run(options: Options, display: Display) -> dict[str, float]:
    """Figures: `error_mean/SOURCE/STALENESS`, `error_max/...` and `engine_numerics/STALENESS` in nats, `replay_over_recompute/K`
    and `padded_over_scored/K` for K versions in the batch, and the larger ones without a number."""
    if options.learner_steps < max(STALENESS):
        raise ValueError(f"--learner-steps is {options.learner_steps}, wanted {max(STALENESS)} or more: as old are the stalest")
    check_writable("--plot", options.plot)
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot wants matplotlib; pip install -e '.[notebooks]'")
    past = _play(options, display)
    figures = {}
    learners = {}  # what acts inside the step is compiled into it; the others share one
    for name in (*(source.value for source in SourceName), WINDOWLESS):
        display.phase(f"errors of {name}")
        source = _make(past, name)
        inside = name if source.inside else None
        if inside not in learners:
            learners[inside] = past.foundation.learner(source)
        figures |= _errors(past, name, learners[inside])
    display.phase("replay against recompute")
    figures |= _costs(past, options.repetitions)
    _show(figures, display)
    if options.plot is not None:
        draw(figures).savefig(options.plot, dpi=150)
    return figures


def _config(options: Options) -> Config:
    config = load_config("quickstart")
    return dataclasses.replace(
        config,
        seed=options.seed,
        warm_start=dataclasses.replace(config.warm_start, updates=options.warm_start_updates),
        optimizer=dataclasses.replace(config.optimizer, learning_rate=options.learning_rate, decay_updates=None),
        step=dataclasses.replace(config.step, minibatches=2),
        snapshots=dataclasses.replace(
            config.snapshots, ring_capacity=2 * max(STALENESS), exactness_every=0, decompose_every=0, score_rows=16
        ),
        length_buckets=1,
    )


def _play(options: Options, display: Display) -> Past:
    """Trains, and lets the versions that are compared play."""
    config = _config(options)
    foundation = Foundation.of(config)
    make_sampler, scorer = foundation.sampler_factory(), foundation.scorer()
    display.phase(f"warm start, {options.warm_start_updates} updates")
    params = warm_started(foundation)
    episodes = {}
    with tempfile.TemporaryDirectory() as directory:
        loop = build_loop(foundation, pathlib.Path(directory), make_sampler(), scorer)
        with contextlib.closing(loop):
            loop.start(params)
            for staleness in sorted(STALENESS, reverse=True):
                steps = options.learner_steps - staleness
                display.phase(f"training up to version {steps}, which plays")
                loop.run(steps)
                episodes[staleness] = _episodes(loop, foundation, make_sampler(), scorer, options.episodes)
            return Past(foundation, loop.rooms.learner.state(), loop.rooms.ring, scorer, dict(sorted(episodes.items())))


def _episodes(loop: Loop, foundation: Foundation, sampler: Sampler, scorer: Scorer, num_episodes: int) -> list[Trajectory]:
    """What the live version plays, with the old logprobs that it scores itself."""
    version, live = loop.version, loop.live
    sampler.publish(version, live)
    played = foundation.evaluate(sampler, num_episodes=num_episodes, greedy=False)
    episodes = []
    for trajectory, score in zip(played.trajectories, score_version(scorer, live, version, played.trajectories), strict=True):
        old_logprobs = np.full(len(trajectory), np.nan, np.float32)
        old_logprobs[trajectory.policy_versions == version] = score.logprobs
        episodes.append(dataclasses.replace(trajectory, old_logprobs=old_logprobs))
    return episodes


def _make(past: Past, name: str) -> OldLogprobSource:
    foundation = past.foundation
    config = foundation.config
    source = SourceName.EWMA if name == WINDOWLESS else SourceName(name)
    config = dataclasses.replace(
        config,
        ewma=EwmaOptions(window=0) if name == WINDOWLESS else EwmaOptions(),
        snapshots=dataclasses.replace(config.snapshots, old_logprobs=source),
    )
    return dataclasses.replace(foundation, config=config).source(past.ring, past.scorer)


def _errors(past: Past, name: str, learner: Learner) -> dict[str, float]:
    figures = {}
    for staleness, episodes in past.episodes.items():
        source = _make(past, name)
        learner.restore(past.learner_state)
        for version in past.ring.versions:
            params = past.ring.get(version)
            source.published(version, params, params)
            if version < past.version:
                source.superseding(version, params, episodes)
        with contextlib.closing(source):
            found = _decompose(past, source, learner, episodes)
        figures[f"error_mean/{name}/{staleness}"] = found["approximation_error_mean"]
        figures[f"error_max/{name}/{staleness}"] = found["approximation_error_max"]
        if name == SourceName.SNAPSHOT.value:
            figures[f"engine_numerics/{staleness}"] = found["engine_numerics"]
    return figures


def _decompose(past: Past, source: OldLogprobSource, learner: Learner, episodes: list[Trajectory]) -> dict:
    """One learner step on the episodes, with its log ratios taken apart."""
    version, live = past.version, past.live
    anchored = dataclasses.replace(source.anchor(episodes, version, live), trajectories=episodes)  # with what was scored live
    decomposition = Decomposition(learner, source, past.ring, past.scorer, every=1)
    decomposition.begin(anchored, version, live)
    rng = np.random.default_rng(0)
    advantages = [np.where(episode.loss_mask, rng.normal(), 0.0).astype(np.float32) for episode in episodes]
    batch = make_batch(
        episodes,
        proximal_logprobs=anchored.proximal_logprobs,
        advantages=advantages,
        num_rows=len(episodes),
        length=past.foundation.lengths[-1],
    )
    return decomposition.finish(learner.step(batch, version=version, before_update=decomposition.before_update).forwards)


def _costs(past: Past, repetitions: int) -> dict[str, float]:
    config = past.foundation.config
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, num_layers=4, d_model=256, d_ff=768, head_dim=64),
        snapshots=dataclasses.replace(config.snapshots, score_rows=1),
        length_buckets=6,
    )
    foundation = Foundation.of(config)
    ring, scorer, figures = SnapshotRing(past.ring.capacity), foundation.scorer(), {}
    live = publish_cast(foundation.initial_params(), config.snapshots.publish_dtype)
    for version in past.ring.versions:
        ring.put(version, live)
    replay, recompute = SnapshotSource(ring, scorer), RecomputeSource(scorer)
    for count in NUM_VERSIONS:
        ages = list(past.episodes.values())[:count]
        episodes = [ages[index % count][index] for index in range(len(ages[0]))]
        ratios = []
        for _ in range(repetitions + 1):
            seconds = [_seconds(source.anchor, episodes, past.version, live) for source in (replay, recompute)]
            ratios.append(seconds[0] / seconds[1])
        replay.take_cost()
        replay.anchor(episodes, past.version, live)
        cost = replay.take_cost()
        figures[f"replay_over_recompute/{count}"] = statistics.median(ratios[1:])  # the first one compiles
        figures[f"padded_over_scored/{count}"] = cost.padded_tokens / cost.scored_tokens
    for name in ("replay_over_recompute", "padded_over_scored"):
        figures[name] = max(figures[f"{name}/{count}"] for count in NUM_VERSIONS)
    return figures


def _seconds(function: Callable, *arguments) -> float:
    started = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - started


def _show(figures: dict[str, float], display: Display) -> None:
    names = [*(source.value for source in SourceName), WINDOWLESS]
    for kind in ("mean", "max"):
        rows = [("staleness", *map(str, STALENESS))]
        rows += [(name, *(_nats(figures[f"error_{kind}/{name}/{age}"]) for age in STALENESS)) for name in names]
        display.table(f"{kind} distance from the exact old logprobs, nats", rows)
    rows = [("versions in the batch", "replay / recompute", "padded / scored tokens")]
    for count in NUM_VERSIONS:
        ratio, padded = (figures[f"{name}/{count}"] for name in ("replay_over_recompute", "padded_over_scored"))
        rows.append((str(count), f"{ratio:.2f}", f"{padded:.2f}"))
    display.table("cost of the replay", rows)


def _nats(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def draw(figures: dict[str, float]):
    """A matplotlib figure: the mean error of each source by staleness; what is exact at all of them shares a line."""
    from matplotlib.figure import Figure  # of the extra `notebooks`

    figure = Figure(figsize=(9, 4.6), layout="constrained")
    axes = figure.subplots()
    lines = {source.value: [figures[f"error_mean/{source.value}/{age}"] for age in STALENESS] for source in SourceName}
    exact = [name for name, errors in lines.items() if not any(errors)]
    if exact:
        axes.plot(STALENESS, [0] * len(STALENESS), linewidth=3, label="\n".join(exact), clip_on=False, **STYLES[exact[0]])
    for name, errors in lines.items():
        if name not in exact:
            axes.plot(STALENESS, errors, label=name, clip_on=False, **STYLES[name])
    axes.set_yscale("symlog", linthresh=1e-7)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="staleness (versions)", ylabel="mean distance from the exact\nold logprob (nats)", xticks=STALENESS)
    figure.legend(loc="outside right center", frameon=False)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
