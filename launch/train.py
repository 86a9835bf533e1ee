"""Trains a policy: warm start, asynchronous reinforcement learning, and a table of what came of it.

python -m launch.train [CONFIG] [--option value ...]
"""

import functools
import pathlib
import sys
import time

from launch import run_directory
from launch.build import Foundation, build_loop
from launch.config import check, parse
from launch.display import Display
from models.transformer import Params
from rl.environments import Split
from rl.evaluation import Evaluation, evaluate
from rl.loop import Loop
from rl.warmstart import warm_start


def main(arguments: list[str]) -> int:
    try:
        name, config = parse(arguments, program="python -m launch.train")
        check(config)
        foundation = Foundation.of(config)
        foundation.check()
        run_dir = run_directory.create(config, name)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with Display(config.steps) as display:
        train(foundation, run_dir, display)
    return 0


def train(foundation: Foundation, run_dir: pathlib.Path, display: Display) -> dict:
    """One run from random weights to `summary.json`, which it also returns."""
    started = time.perf_counter()
    config = foundation.config
    display.phase(f"{config.environment.value}: run directory {run_dir}")
    make_sampler = foundation.sampler_factory()
    params = _warm_started(foundation, display)
    scorer = foundation.scorer()
    loop = build_loop(foundation, run_dir, make_sampler(), scorer)
    loop.start(params)
    display.phase("self-test: is a replay bitwise on this platform?")
    exactness = scorer.self_test(loop.live)
    before = _evaluate_both(foundation, make_sampler, loop, display)
    if loop.source.caveat:
        display.phase(f"note: --old-logprobs {loop.source.name.value} is an approximation: {loop.source.caveat}")
    display.phase("training")
    rows = []
    loop.run(config.steps, on_step=lambda row: (rows.append(row), display.step(row)))
    loop.finish()
    after = _evaluate_both(foundation, make_sampler, loop, display)
    summary = _summary(rows, loop, exactness, before, after) | {"seconds": time.perf_counter() - started}
    run_directory.write_json(run_dir / run_directory.SUMMARY, summary)
    _show(summary, run_dir, display)
    return summary


def _warm_started(foundation: Foundation, display: Display) -> Params:
    config = foundation.config
    display.phase(f"warm start: imitating the scripted expert, {config.warm_start.updates} updates")
    return warm_start(
        foundation.model,
        foundation.initial_params(),
        foundation.mesh,
        functools.partial(config.make_environment, Split.TRAIN),
        config.warm_start,
        seed=config.seed,
        lengths=foundation.lengths,
    )


def _evaluate_both(foundation: Foundation, make_sampler, loop: Loop, display: Display) -> tuple[Evaluation, Evaluation]:
    """Held-out success of the live policy: greedy, and sampled at the training temperature."""
    config = foundation.config
    display.phase(f"evaluating version {loop.version} on {config.evaluation_episodes} held-out instances")
    results = []
    for greedy in (True, False):
        sampler = make_sampler()
        sampler.publish(loop.version, loop.live)
        results.append(
            evaluate(
                sampler,
                functools.partial(config.make_environment, Split.HELD_OUT),
                num_episodes=config.evaluation_episodes,
                greedy=greedy,
                max_length=config.model.max_length,
            )
        )
    return tuple(results)


def _summary(
    rows: list[dict], loop: Loop, exactness: dict, before: tuple[Evaluation, Evaluation], after: tuple[Evaluation, Evaluation]
) -> dict:
    trained = sum(row["trajectories"] for row in rows)
    return {
        "success_before": before[0].success,
        "success_after": after[0].success,
        "sampled_success_before": before[1].success,
        "sampled_success_after": after[1].success,
        "fraction_multi_version": sum(row["fraction_multi_version"] * row["trajectories"] for row in rows) / trained,
        "staleness_mean": sum(row["staleness_mean"] * row["tokens_trained"] for row in rows)
        / max(sum(row["tokens_trained"] for row in rows), 1),
        "staleness_max": max(row["staleness_max"] for row in rows),
        "old_logprobs": loop.source.name.value,
        "exactness_max_error": loop.probe.max_error if loop.probe.num_compared else None,
        "exactness_compared_tokens": loop.probe.num_compared,
        "exactness": exactness,
        "steps": loop.step,
        "versions": loop.version,
        "trajectories_trained": trained,
        "skipped_publishes": rows[-1]["skipped_publishes"],
        "dropped_stale": rows[-1]["dropped_stale"],
    }


def _show(summary: dict, run_dir: pathlib.Path, display: Display) -> None:
    def percent(name: str) -> str:
        return f"{summary[name]:.1%}"

    display.table(
        "held-out success",
        [
            ("", "before", "after"),
            ("greedy", percent("success_before"), percent("success_after")),
            ("sampled", percent("sampled_success_before"), percent("sampled_success_after")),
        ],
    )
    compared = "not compared: no exact old logprobs"
    if summary["exactness_max_error"] is not None:
        compared = f"{summary['exactness_max_error']:.1e} nats, {summary['exactness_compared_tokens']:,} tokens"
    display.table(
        "asynchrony and exactness",
        [
            ("trajectories with two or more versions", percent("fraction_multi_version")),
            ("staleness, mean and largest", f"{summary['staleness_mean']:.2f}, {summary['staleness_max']:.0f} versions"),
            ("replay on this platform", f"{summary['exactness']['replay']} ({summary['exactness']['platform']})"),
            ("old logprobs", summary["old_logprobs"]),
            ("ring replay against live scores", compared),
            ("seconds", f"{summary['seconds']:.0f}"),
        ],
    )
    display.phase(f"done; verify with: python -m launch.audit {run_dir} --replay 50")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
