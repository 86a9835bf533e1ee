"""Trains a policy: warm start, asynchronous reinforcement learning, and a table of what came of it.

    python -m launch.train [CONFIG] [--option value ...]
    python -m launch.train --resume --run-dir DIR      goes on where a stopped run was
    python -m launch.train --repeat RUN_DIR            runs a threaded run again, in one thread, to the same bits

SIGTERM, or Ctrl-C, ends the learner step under way, writes a checkpoint and exits with status 0. A second Ctrl-C does not wait.
"""

import contextlib
import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Callable

from rich.console import Console

from launch import distributed, run_directory
from launch.build import Foundation, build_loop
from launch.config import Config, ConfigError, Invocation, check, parse, parse_options
from launch.display import Display
from launch.memory import anchor_table, check_disk
from launch.report import write_report
from launch.stopping import StopRequest
from launch.summary import show, summarise
from launch.tensorboard import TensorBoard
from models.transformer import Params
from rl import processes
from rl.checkpoint import RunCheckpoints
from rl.environments import Split
from rl.loop import Loop, Schedule
from rl.scorer import Scorer
from rl.threads import Interleaving, Operation, Repeat, Threads, read_interleaving
from rl.warmstart import warm_start

PROGRAM = "python -m launch.train"
INTERLEAVING = "interleaving.txt"


def main(arguments: list[str]) -> int:
    stop = StopRequest()
    try:
        name, invocation = parse(arguments, program=PROGRAM)
        distributed.join(invocation)
        if invocation.resume or invocation.repeat:
            invocation = _as_before(arguments, invocation)
        config = invocation.config
        check(config)
        foundation = Foundation.of(config)
        foundation.check()
        if not invocation.resume:  # which has written some of it already
            check_disk(foundation)
        order = read_interleaving(_own_order(invocation.repeat)) if invocation.repeat else None
        changes = run_directory.reopen(config.run_dir, config) if invocation.resume else None
        run_dir = config.run_dir if invocation.resume else run_directory.create(config, name)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console = None if processes.is_first() else Console(quiet=True)
    together = distributed.ending_together(invocation, go_on_command(run_dir))
    with together, Display(config.steps, console) as display, stop.listening():
        note_changes(display, changes)
        display.table(*anchor_table(foundation))
        Run(foundation, run_dir, display, stop=stop, order=order).train(resume=invocation.resume)
    return 0


def go_on_command(run_dir: pathlib.Path) -> str:
    """What a user types to go on with a run that has stopped."""
    return f"{PROGRAM} --resume --run-dir {run_dir}"


def note_changes(display: Display, changes: str | None) -> None:
    """Tells what has changed since a run was begun that now goes on, if anything has."""
    if changes:
        display.phase(f"note: not the packages or the commit that the run was begun with: {changes}")


def _as_before(arguments: list[str], invocation: Invocation) -> Invocation:
    """The invocation on top of the config of the run that it names.

    Raises:
      ConfigError: it names none, or its options are not those of that run.
    """
    if invocation.resume and invocation.repeat:
        raise ConfigError("--resume goes on with a run and --repeat does one again; give one of them")
    if invocation.resume and invocation.run_dir is None:
        raise ConfigError("--resume wants --run-dir, the directory of the run to go on with")
    before = run_directory.read_config(invocation.run_dir if invocation.resume else invocation.repeat)
    before = dataclasses.replace(before, run_dir=invocation.run_dir)
    options = arguments[not arguments[0].startswith("-") :]
    asked = parse_options(options, before, program=PROGRAM)
    for field in dataclasses.fields(Config):
        saved, wanted = before.__dict__[field.name], asked.__dict__[field.name]
        if saved != wanted and field.name != "steps":
            raise ConfigError(f"{field.name} is {wanted}, but that run has {saved}; only --steps may change")
    return asked


def _own_order(run_dir: pathlib.Path) -> pathlib.Path:
    return run_directory.parts(run_dir)[processes.index()] / INTERLEAVING


def warm_started(foundation: Foundation) -> Params:
    """Random or pretrained weights, and what the config's warm start makes of them."""
    config = foundation.config
    return warm_start(
        foundation.model,
        foundation.initial_params(),
        foundation.mesh,
        config.environment_factory(Split.TRAIN),
        foundation.conversation,
        config.warm_start,
        seed=config.seed,
        lengths=foundation.lengths,
    )


class Run:
    """One run from random or pretrained weights, or from a checkpoint, to `summary.json`.

    Args:
      foundation: config, model and meshes.
      run_dir: where everything goes.
      display: what a person sees of it.
      stop: when to end early.
      order: that of a threaded run which this one repeats.
      start: gives the parameters that become version 0; by default the config's warm start.
    """

    def __init__(self, foundation: Foundation, run_dir: pathlib.Path, display: Display, *, stop: StopRequest | None = None,
                 order: list[list[Operation]] | None = None, start: Callable[[], Params] | None = None):
        self._foundation, self._config, self._run_dir, self._display = foundation, foundation.config, run_dir, display
        self._stop, self._order = stop or StopRequest(), order
        self._start = start or functools.partial(warm_started, foundation)
        self._started = time.perf_counter()
        self._facts: dict = {"seconds": 0.0}  # what is known of the run beside its rows: exactness, success before, time spent
        self._checkpoints = RunCheckpoints(run_dir / "checkpoints")

    def train(self, *, resume: bool = False) -> dict | None:
        """Trains, and writes and returns the summary; None when it was asked to stop."""
        self._display.phase(f"{self._config.environment.value}: run directory {self._run_dir}")
        self._make_sampler = self._foundation.sampler_factory()
        scorer = self._foundation.scorer()
        saved = self._checkpoints.latest() if resume else None
        if resume and saved is None:
            self._display.phase("note: no checkpoint yet, so the run begins anew")
            self._checkpoints.close()
            run_directory.clear(self._run_dir)
        params = self._begin() if saved is None else None
        loop = self._loop = build_loop(self._foundation, self._run_dir, self._make_sampler(), scorer)
        with contextlib.closing(loop):
            return self._train_loop(loop, scorer, params, saved)

    def _train_loop(self, loop: Loop, scorer: Scorer, params: Params | None, saved: tuple[int, dict, dict] | None) -> dict | None:
        """From fresh weights, or from what was saved of a run."""
        self._schedule = self._make_schedule(loop)
        if saved is None:
            loop.start(params)
        else:
            step, shared, own = saved
            self._display.phase(f"going on after learner step {step}")
            self._schedule.restore({"shared": shared, "own": own["run"]})
            if loop.half_written:
                self._display.phase(f"note: half-written snapshots are removed: {loop.half_written}")
            self._facts = own["facts"]
        if "before" not in self._facts and not self._stop.requested:
            self._display.phase("self-test: is a replay bitwise on this platform?")
            self._facts |= {"exactness": scorer.self_test(loop.live), "before": self._evaluate()}
            self._checkpoint()
        self._advance()
        if loop.step < self._config.steps:
            self._checkpoint()
            self._checkpoints.close()
            self._display.phase(f"stopped after learner step {loop.step}; go on with: {go_on_command(self._run_dir)}")
            return None
        return self._conclude()

    def _begin(self) -> Params:
        if self._config.pretrained.model_path is not None:
            self._display.phase(f"reading {self._config.pretrained.model_path}")
        elif not self._config.warm_start.updates:
            self._display.phase("note: random weights, whose tokens are bytes; --model-path names a pretrained model")
        if self._config.warm_start.updates:
            self._display.phase(f"warm start: imitating the scripted expert, {self._config.warm_start.updates} updates")
        return self._start()

    def _make_schedule(self, loop: Loop) -> Loop | Threads | Repeat:
        if self._order is not None:
            return Repeat(loop, self._order)
        if self._config.loop.schedule is Schedule.LOCKSTEP:
            return loop
        if self._foundation.shares_devices:
            self._display.phase("note: sampler and learner share their devices, so they take turns; see --sampler-devices")
        return Threads(loop, Interleaving(run_directory.own_part(self._run_dir) / INTERLEAVING))

    def _advance(self) -> None:
        """Learner steps, with a checkpoint every so many, until all are done or a stop is asked for."""
        loop, steps, every = self._loop, self._config.steps, self._config.checkpoint_every
        if loop.source.caveat:
            self._display.phase(f"note: --old-logprobs {loop.source.name.value} is an approximation: {loop.source.caveat}")
        for note in self._foundation.conversation.notes:
            self._display.phase(f"note: {note}")
        self._display.phase("training")
        with TensorBoard(run_directory.own_part(self._run_dir), after_step=loop.step) as board:
            while loop.step < steps and not self._stop.requested:
                until = min(steps, (loop.step // every + 1) * every) if every else steps
                self._schedule.run(until, functools.partial(self._show, board), lambda: self._stop.requested)
                if loop.step == until < steps and not self._stop.requested:
                    self._checkpoint()

    def _show(self, board: TensorBoard, metrics: dict) -> None:
        self._display.step(metrics)
        board.step(metrics)

    def _checkpoint(self) -> None:
        """A repeated run has none of its own: taking one is part of the order that it repeats."""
        if self._order is None and self._config.checkpoint_every or self._stop.requested:
            facts = self._facts | {"seconds": self._seconds()}
            state = self._schedule.state()
            self._checkpoints.save(self._loop.step, state["shared"], {"run": state["own"], "facts": facts})

    def _conclude(self) -> dict:
        if isinstance(self._schedule, Repeat):
            self._schedule.settle()
        self._loop.finish()
        self._checkpoints.close()
        after = self._evaluate()
        part = run_directory.own_part(self._run_dir)
        rows = run_directory.read_metrics(part)
        summary = summarise(rows, self._loop, self._facts | {"after": after, "seconds": self._seconds()})
        run_directory.write_json(part / run_directory.SUMMARY, summary)
        show(summary, self._display)
        if processes.is_first():
            self._display.phase(f"report: {write_report(self._run_dir)}")
        self._display.phase(f"done; verify with: python -m launch.audit {self._run_dir} --replay 50")
        return summary

    def _evaluate(self) -> dict[str, float]:
        """Held-out success of the live policy: greedy, and sampled at the training temperature."""
        config, loop = self._config, self._loop
        self._display.phase(f"evaluating version {loop.version} on {config.evaluation_episodes} held-out instances")
        success = {}
        for name, greedy in (("greedy", True), ("sampled", False)):
            sampler = self._make_sampler()
            sampler.publish(loop.version, loop.own_live())
            evaluation = self._foundation.evaluate(sampler, num_episodes=config.evaluation_episodes, greedy=greedy)
            success[name] = evaluation.success
        return success

    def _seconds(self) -> float:
        """Of the whole run, those before a stop included."""
        return self._facts["seconds"] + time.perf_counter() - self._started


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
