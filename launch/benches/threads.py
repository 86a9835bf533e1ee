"""Threads: does a run with --schedule threads train as fast as its slower side alone?

A batch's generation and a learner step take stated times: they sleep for what their programs, of milliseconds, leave of them. The
ideal is one learner step every max(generation, training) seconds.
"""

import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Callable

from launch.benches._small import small_config
from launch.build import Foundation, build_loop
from launch.display import Display
from rl.threads import Interleaving, Threads

CASES = ((1.0, 1.0), (0.5, 1.0), (1.0, 0.5))
"""Generation and training, in units of the option."""
WARM_STEPS = 14  # compiled, and the queue as full as it will be


@dataclasses.dataclass(frozen=True)
class Options:
    """How long the stages take, and for how many steps that is measured."""

    seconds: float = 0.4  # of the slower stage, for a batch
    steps: int = 30  # learner steps measured


def run(options: Options, display: Display) -> dict[str, float]:
    """Figures: `share_of_ideal/G/T`, with G and T the slept seconds of generation and training for a batch."""
    figures, rows = {}, [("generation", "training", "step", "ideal", "share of ideal")]
    with tempfile.TemporaryDirectory() as directory:
        for index, case in enumerate(CASES):
            generation, training = (units * options.seconds for units in case)
            display.phase(f"generation {generation:.2f} s, training {training:.2f} s")
            seconds = _seconds_per_step(pathlib.Path(directory) / str(index), generation, training, options.steps)
            ideal = max(generation, training)
            figures[f"share_of_ideal/{generation:.2f}/{training:.2f}"] = ideal / seconds
            rows.append((*(f"{value:.3f} s" for value in (generation, training, seconds, ideal)), f"{ideal / seconds:.1%}"))
    display.table("learner steps of a run in threads", rows)
    return figures


def _seconds_per_step(run_dir: pathlib.Path, generation: float, training: float, num_steps: int) -> float:
    run_dir.mkdir()
    foundation = Foundation.of(small_config())
    loop = build_loop(foundation, run_dir, foundation.sampler_factory()(), foundation.scorer())
    loop.start(foundation.initial_params())
    threads = Threads(loop, Interleaving(run_dir / "interleaving.txt"))
    threads.run(WARM_STEPS // 2)
    # A round decodes a token of each of five batches, and a game has five: a round is worth a batch.
    loop.roll, loop.learn = _lasting(generation, loop.roll), _lasting(training, loop.learn)
    threads.run(WARM_STEPS)
    started = time.perf_counter()
    threads.run(WARM_STEPS + num_steps)
    seconds = time.perf_counter() - started
    loop.finish()
    return seconds / num_steps


def _lasting(seconds: float, function: Callable) -> Callable:
    """The function, but it sleeps until it has taken so long."""

    def lasting(*arguments):
        until = time.perf_counter() + seconds
        result = function(*arguments)
        time.sleep(max(0.0, until - time.perf_counter()))
        return result

    return lasting
