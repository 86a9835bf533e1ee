"""An ablation: one experiment for every old-logprob source, staleness and seed asked for, as tables and a figure.

    python -m launch.ablate [CONFIG] --run-dir DIR --sources snapshot ewma --staleness 1 4 --seeds 0 1 2 [--option value ...]

Each cell of the grid is a run of `launch.train` in a directory of its own below DIR, from the same version 0 for the same seed.
The same command again goes on where it was stopped or killed, and takes up new cells. A cell whose loss is no number any more
has diverged: that is a result, too. All cells are checked before the first one runs.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import pathlib
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence

import jax
from rich.console import Console

from launch import run_directory
from launch.build import Foundation
from launch.config import Config, ConfigError, check, parse
from launch.display import Display
from launch.stopping import StopRequest
from launch.styles import STYLES
from launch.train import Run, note_changes, warm_started
from models.transformer import Params
from rl.old_logprobs import SourceName
from rl.training import NonFiniteLoss

PROGRAM = "python -m launch.ablate"
FIGURES, PICTURE = "ablation.json", "ablation.png"
SMOOTHED_STEPS = 8  # of a learning curve


@dataclasses.dataclass(frozen=True)
class Ablation(Config):
    """An experiment and the axes of its grid. `--run-dir` is that of the whole grid."""

    sources: tuple[SourceName, ...] = (SourceName.SNAPSHOT, SourceName.EWMA, SourceName.RECOMPUTE)
    staleness: tuple[int, ...] = (4,)  # each is a --max-staleness
    seeds: tuple[int, ...] = (0,)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    source: SourceName
    staleness: int
    seed: int
    config: Config

    @property
    def name(self) -> str:
        return f"{self.source.value}, staleness {self.staleness}, seed {self.seed}"


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a cell; figures over all its trained tokens."""

    source: str
    staleness: int
    seed: int
    run_dir: str
    diverged: str | None  # why, if it has
    rewards: list[float | None]  # mean reward, step by step
    figures: dict[str, float | None]


def main(arguments: list[str]) -> int:
    stop = StopRequest()
    try:
        name, ablation = parse(arguments, program=PROGRAM, options_of=Ablation)
        cells = grid(ablation)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with stop.listening():
        results = run(cells, name, stop=stop)
    if len(results) < len(cells):
        print(f"stopped after {len(results)} of {len(cells)} cells; the same command goes on with them")
    if results:
        write(results, ablation.run_dir)
        with Display(0) as display:
            for title, rows in tables(results):
                display.table(title, rows)
            display.phase(f"figures: {ablation.run_dir / FIGURES}, {ablation.run_dir / PICTURE}")
    return 0


def grid(ablation: Ablation) -> list[Cell]:
    """The cells, seed by seed; every one is checked.

    Raises:
      ValueError: one of them cannot run, or lies where another experiment has run.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    if ablation.run_dir is None:
        raise ConfigError("an ablation wants --run-dir: the same directory again goes on with it")
    if ablation.run_dir.exists() and not ablation.run_dir.is_dir():
        raise ConfigError(f"--run-dir {ablation.run_dir} is a file; wanted a directory, there or not")
    if ablation.seed != defaults["seed"]:
        raise ConfigError(f"--seed is {ablation.seed}; the seeds of an ablation are --seeds")
    base = Config(**{name: ablation.__dict__[name] for name in defaults})
    axes = {"--sources": ablation.sources, "--staleness": ablation.staleness, "--seeds": ablation.seeds}
    for option, values in axes.items():
        if not values or len(set(values)) < len(values):
            raise ConfigError(f"{option} names {len(values)} values, {len(set(values))} of them distinct; wanted each once")
    cells = [
        Cell(source, staleness, seed, _config(base, source, staleness, seed))
        for seed in ablation.seeds
        for staleness in ablation.staleness
        for source in ablation.sources
    ]
    meshes = []
    for cell in cells:
        try:
            check(cell.config)
            foundation = Foundation.of(cell.config)
            foundation.check()
            _check_directory(cell.config)
        except ValueError as error:
            raise ConfigError(f"{cell.name}: {error}") from error
        meshes.append(foundation.mesh)
        if foundation.mesh != meshes[0]:
            raise ConfigError(
                f"{cell.name}: the learner has {foundation.mesh.size} devices, and {meshes[0].size} in {cells[0].name}; give "
                "--data, --fsdp and --tensor sizes that leave --scorer-devices free in every cell"
            )
    return cells


def _config(base: Config, source: SourceName, staleness: int, seed: int) -> Config:
    scorer_devices = base.snapshots.scorer_devices if source is SourceName.DEDICATED else 0
    return dataclasses.replace(
        base,
        seed=seed,
        run_dir=base.run_dir / f"{source.value}-staleness-{staleness}-seed-{seed}",
        loop=dataclasses.replace(base.loop, max_staleness=staleness),
        snapshots=dataclasses.replace(base.snapshots, old_logprobs=source, scorer_devices=scorer_devices),
    )


def _check_directory(config: Config) -> None:
    """Refuses to take the run of another experiment, or something that is no run, for this cell's."""
    run_dir = config.run_dir
    if not (run_dir / run_directory.CONFIG).exists():
        if run_dir.exists() and any(run_dir.iterdir()):
            raise ConfigError(f"{run_dir} is not empty and holds no {run_directory.CONFIG}; empty it, or change --run-dir")
    else:
        before = dataclasses.replace(run_directory.read_config(run_dir), run_dir=run_dir)
        names = [name for name, value in config.__dict__.items() if before.__dict__[name] != value]
        if names:
            raise ConfigError(f"{run_dir} holds a run with other options ({', '.join(names)}); choose another --run-dir")


def run(cells: Sequence[Cell], name: str, *, console: Console | None = None, stop: StopRequest | None = None) -> list[Result]:
    """Runs what is not done yet, and returns the result of each cell up to a stop.

    Args:
      cells: of a `grid`.
      name: of the config.
      console: where each run shows itself; by default the standard output.
      stop: when to end early; the cell under way then has a checkpoint.
    """
    stop, results = stop or StopRequest(), []
    starts: dict[int, Params] = {}  # of the present seed alone, when a cell of it has begun
    for index, cell in enumerate(cells):
        if stop.requested:
            break
        diverged = None
        if not (cell.config.run_dir / run_directory.SUMMARY).exists():
            with Display(cell.config.steps, console) as display:
                display.phase(f"cell {index + 1} of {len(cells)}: {cell.name}")
                try:
                    if _train(cell, name, functools.partial(_start, cell, starts), display, stop) is None:
                        break
                except NonFiniteLoss as error:
                    diverged = str(error)
                    display.phase(f"diverged: {diverged}")
            jax.clear_caches()  # no other cell has these programs
        results.append(_result(cell, diverged))
    return results


def _start(cell: Cell, starts: dict[int, Params]) -> Params:
    """Version 0 of a cell, which all cells of its seed share."""
    if cell.seed not in starts:
        starts.clear()
        starts[cell.seed] = warm_started(Foundation.of(cell.config))
    return starts[cell.seed]


def _train(cell: Cell, name: str, start: Callable[[], Params], display: Display, stop: StopRequest) -> dict | None:
    run_dir = cell.config.run_dir
    is_begun = (run_dir / run_directory.CONFIG).exists()
    if is_begun:
        note_changes(display, run_directory.reopen(run_dir, cell.config))
    else:
        run_directory.create(cell.config, name)
    return Run(Foundation.of(cell.config), run_dir, display, stop=stop, start=start).train(resume=is_begun)


def _result(cell: Cell, diverged: str | None) -> Result:
    run_dir = cell.config.run_dir
    rows = run_directory.read_metrics(run_dir)
    names = ("staleness_mean", "clip_fraction", "discrepancy_masked_fraction", "active_fraction")
    figures = {name: _mean(rows, name, "tokens_trained") for name in names}
    errors = [row["approximation_error_max"] for row in rows if row.get("approximation_error_max") is not None]
    figures |= {
        "approximation_error_mean": _mean(rows, "approximation_error_mean", "decomposed_tokens"),
        "approximation_error_max": max(errors, default=None),
        "seconds_step": statistics.median(row["seconds_step"] for row in rows) if rows else None,
    }
    if not diverged:
        summary = json.loads((run_dir / run_directory.SUMMARY).read_text())
        figures |= {name: summary[name] for name in ("success_after", "sampled_success_after", "seconds")}
    rewards = [row["reward_mean"] for row in rows]
    return Result(cell.source.value, cell.staleness, cell.seed, run_dir.name, diverged, rewards, figures)


def _mean(rows: Sequence[dict], name: str, count: str) -> float | None:
    """Over all that the rows count, where the metric is known."""
    known = [(row[name], row[count]) for row in rows if row.get(name) is not None and row[count]]
    return sum(value * number for value, number in known) / sum(number for _, number in known) if known else None


def write(results: Sequence[Result], directory: pathlib.Path) -> None:
    """Writes the results as JSON, and draws them where there is matplotlib."""
    run_directory.write_json(directory / FIGURES, {"cells": [dataclasses.asdict(result) for result in results]})
    with contextlib.suppress(ImportError):
        draw(results).savefig(directory / PICTURE, dpi=150)


def tables(results: Sequence[Result]) -> list[tuple[str, list[tuple[str, ...]]]]:
    """What came of the cells, over their seeds: success with its standard deviation, and what the anchors did."""
    success = [("", "bound", "greedy", "sampled", "seeds", "diverged")]
    anchors = [("", "bound", "age", "error", "clipped", "masked", "s/step")]
    for (source, staleness), group in sorted(_by_curve(results).items(), key=lambda item: item[0][1]):
        done = [result for result in group if not result.diverged]
        held_out = [_over(done, name, "{:.1%}", spread=True) for name in ("success_after", "sampled_success_after")]
        success.append((source, str(staleness), *held_out, str(len(group)), str(len(group) - len(done))))
        formats = {
            "staleness_mean": "{:.2f}",
            "approximation_error_mean": "{:.1e}",
            "clip_fraction": "{:.1%}",
            "discrepancy_masked_fraction": "{:.1%}",
            "seconds_step": "{:.2f}",
        }
        anchors.append((source, str(staleness), *(_over(group, name, text) for name, text in formats.items())))
    return [("held-out success, by bound on staleness", success), ("mean age of tokens and error of anchors, nats", anchors)]


def _over(group: Sequence[Result], name: str, text: str, *, spread: bool = False) -> str:
    """A figure's mean over the seeds, and its standard deviation."""
    values = _known(group, name)
    if not values:
        return "-"
    deviation = f" ±{text.format(statistics.stdev(values))}" if spread and len(values) > 1 else ""
    return (text.format(statistics.mean(values)) if any(values) else "0") + deviation


def draw(results: Sequence[Result]):
    """A matplotlib figure: the anchors' error against the tokens' mean age, and the learning curves of each staleness."""
    from matplotlib.figure import Figure  # of the extra `notebooks`

    sources, ages = (list(dict.fromkeys(values)) for values in zip(*((r.source, r.staleness) for r in results), strict=True))
    groups = _by_curve(results)
    figure = Figure(figsize=(4.2 * (1 + len(ages)), 4), layout="constrained")
    errors, *curves = figure.subplots(1, 1 + len(ages))
    for source in sources:
        of_source = [group for (name, _), group in groups.items() if name == source]
        points = sorted(_means(group, ("staleness_mean", "approximation_error_mean")) for group in of_source)
        errors.plot(*zip(*points, strict=True), label=source, clip_on=False, **STYLES[source])
    errors.set_yscale("symlog", linthresh=1e-7)
    errors.set_ylim(bottom=0)
    errors.set_xlim(-0.1, max(ages) + 0.1)  # no token is older than the bound
    errors.set(xlabel="mean age of trained tokens (versions)", ylabel="nats", title="Error of the anchor")
    for axes, age in zip(curves, ages, strict=True):
        for source in sources:
            _draw_curve(axes, groups.get((source, age), []), STYLES[source]["color"])
        axes.set(xlabel="learner step", ylim=(0, None), title=f"Reward, staleness up to {age}")
    figure.legend(*errors.get_legend_handles_labels(), loc="outside lower center", ncols=len(sources), frameon=False)
    for axes in (errors, *curves):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
    return figure


def _draw_curve(axes, group: Sequence[Result], colour: str) -> None:
    """The mean over the seeds, and their range."""
    smooth = [list(_smoothed(result.rewards)) for result in group]
    columns = list(zip(*smooth, strict=False))  # as far as all have come
    if not columns:
        return
    steps = range(1, len(columns) + 1)
    axes.plot(steps, [statistics.mean(column) for column in columns], color=colour)
    low, high = [min(column) for column in columns], [max(column) for column in columns]
    axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)


def _smoothed(rewards: Iterable[float | None]) -> Iterable[float]:
    recent: collections.deque[float] = collections.deque(maxlen=SMOOTHED_STEPS)
    for reward in rewards:
        recent.append(reward or 0.0)
        yield statistics.mean(recent)


def _means(group: Sequence[Result], names: Sequence[str]) -> tuple[float, ...]:
    """Over the seeds; not a number where nothing is known."""
    columns = [_known(group, name) for name in names]
    return tuple(statistics.mean(column) if column else float("nan") for column in columns)


def _known(group: Sequence[Result], name: str) -> list[float]:
    return [result.figures[name] for result in group if result.figures.get(name) is not None]


def _by_curve(results: Sequence[Result]) -> dict[tuple[str, int], list[Result]]:
    groups: dict[tuple[str, int], list[Result]] = {}
    for result in results:
        groups.setdefault((result.source, result.staleness), []).append(result)
    return groups


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
