"""What came of a run, in figures for `summary.json` and in tables for a person."""

from launch.display import Display
from rl.loop import Loop


def summarise(rows: list[dict], loop: Loop, facts: dict) -> dict:
    """The summary of a finished run.

    Args:
      rows: its metrics.
      loop: after the last step.
      facts: `exactness` (what the self-test found), success `before` and `after` (each greedy and sampled), `seconds`.
    """

    def total(mean: str, count: str) -> float:
        """Over the run, from each step's mean; None where a step trained no token."""
        return sum((row[mean] or 0.0) * row[count] for row in rows)

    trajectories = sum(row["trajectories"] for row in rows)
    tokens = sum(row["tokens_trained"] for row in rows)
    return {
        "success_before": facts["before"]["greedy"],
        "success_after": facts["after"]["greedy"],
        "sampled_success_before": facts["before"]["sampled"],
        "sampled_success_after": facts["after"]["sampled"],
        "fraction_multi_version": total("fraction_multi_version", "trajectories") / trajectories,
        "staleness_mean": total("staleness_mean", "tokens_trained") / max(tokens, 1),
        "staleness_max": max(row["staleness_max"] or 0.0 for row in rows),
        "old_logprobs": loop.source.name.value,
        "exactness_max_error": loop.probe.max_error if loop.probe.num_compared else None,
        "exactness_compared_tokens": loop.probe.num_compared,
        "exactness": facts["exactness"],
        "steps": loop.step,
        "versions": loop.version,
        "trajectories_trained": trajectories,
        "skipped_publishes": rows[-1]["skipped_publishes"],
        "dropped_stale": rows[-1]["dropped_stale"],
        "seconds": facts["seconds"],
    }


def show(summary: dict, display: Display) -> None:
    """The table at the end of a run."""

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
            ("old logprobs", summary["old_logprobs"]),
            ("replay on this platform", f"{summary['exactness']['replay']} ({summary['exactness']['platform']})"),
            ("ring replay against live scores", compared),
            ("seconds", f"{summary['seconds']:.0f}"),
        ],
    )
