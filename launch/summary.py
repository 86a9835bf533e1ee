"""What came of a run, in figures for `summary.json` and in tables for a person."""

from launch.display import Display
from rl.loop import Loop
from rl.reporting import asynchrony, throughput

Table = tuple[str, list[tuple[str, ...]]]
"""A title, and rows of equally many cells; a first row whose first cell is empty heads the columns."""


def summarise(rows: list[dict], loop: Loop, facts: dict) -> dict:
    """The summary of a finished run.

    Args:
      rows: its metrics.
      loop: after the last step.
      facts: `exactness` (what the self-test found), success `before` and `after` (each greedy and sampled), `seconds`.
    """
    return {
        "success_before": facts["before"]["greedy"],
        "success_after": facts["after"]["greedy"],
        "sampled_success_before": facts["before"]["sampled"],
        "sampled_success_after": facts["after"]["sampled"],
        **asynchrony(rows),
        **throughput(rows),
        "old_logprobs": loop.source.name.value,
        "exactness_max_error": loop.probe.max_error if loop.probe.num_compared else None,
        "exactness_compared_tokens": loop.probe.num_compared,
        "exactness": facts["exactness"],
        "steps": loop.step,
        "versions": loop.version,
        "seconds": facts["seconds"],
    }


def show(summary: dict, display: Display) -> None:
    """The tables at the end of a run."""
    for title, rows in tables(summary):
        display.table(title, rows)


def tables(summary: dict) -> list[Table]:
    """What a person wants to know of a finished run."""

    def percent(name: str) -> str:
        return f"{summary[name]:.1%}"

    def rate(stage: str) -> str:
        figure = summary[f"{stage}_tokens_per_second"]
        return "none" if figure is None else f"{figure:,.0f}"

    compared = "not compared: no exact old logprobs"
    if summary["exactness_max_error"] is not None:
        compared = f"{summary['exactness_max_error']:.1e} nats, {summary['exactness_compared_tokens']:,} tokens"
    return [
        (
            "held-out success",
            [
                ("", "before", "after"),
                ("greedy", percent("success_before"), percent("success_after")),
                ("sampled", percent("sampled_success_before"), percent("sampled_success_after")),
            ],
        ),
        (
            "asynchrony and exactness",
            [
                ("trajectories with two or more versions", percent("fraction_multi_version")),
                ("staleness, mean and largest", f"{summary['staleness_mean']:.2f}, {summary['staleness_max']:.0f} versions"),
                ("old logprobs", summary["old_logprobs"]),
                ("replay on this platform", f"{summary['exactness']['replay']} ({summary['exactness']['platform']})"),
                ("ring replay against live scores", compared),
                ("tokens a second: sampled, replayed, trained", "; ".join(map(rate, ("sampling", "replay", "training")))),
                ("seconds", f"{summary['seconds']:.0f}"),
            ],
        ),
    ]
