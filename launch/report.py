"""Writes the report of a run, while it goes on or when it is over: RUN_DIR/report.html, one file that needs nothing else.

    python -m launch.report RUN_DIR

Plots of the metrics over learner steps, a timeline of sampler and learner, and transcripts of trained trajectories that show
which policy version sampled which token. launch.train writes it at the end of each run.
"""

import dataclasses
import json
import os
import pathlib
import sys
from typing import Annotated

import tyro

from launch import run_directory
from launch.config import ConfigError
from launch.pretrained import locate
from launch.report_figures import Plot, number, percent, seconds, size, timeline
from launch.report_page import Node, navigation, node, page, section, table
from launch.summary import Table, tables
from models.text_files import read_text_files
from models.tokenizer import ByteTokenizer, Tokenizer
from rl.ledger import read_step, step_file
from rl.reporting import (
    Passage,
    Transcript,
    asynchrony,
    choose_steps,
    choose_trajectories,
    close_up,
    column,
    dropped_groups,
    step_ends,
    transcript,
)
from rl.types import NO_POLICY

REPORT = "report.html"
NUM_TRANSCRIPT_STEPS = 3  # early, middle, late
MAX_TRANSCRIPT_TOKENS = 800
CLOSE_UP_STEPS = 4
NUM_COLOURS = 5  # of the page's palette, for versions

PLOTS = {
    "Learning": (
        Plot("Reward and success", "Means over the trained trajectories.",
             (("reward", "reward_mean"), ("success", "success_mean"))),
        Plot("Entropy", "Of the policy at trained tokens, in nats.", (("entropy", "entropy"),)),
        Plot("Loss and gradient norm", "The loss is of decoupled PPO; the norm is that before clipping.",
             (("loss", "loss"), ("gradient norm", "gradient_norm"))),
    ),
    "Asynchrony": (
        Plot("Staleness", "Of trained tokens: publishes since they were sampled.",
             (("mean", "staleness_mean"), ("largest", "staleness_max"), ("smallest", "staleness_min"))),
        Plot("Versions per trajectory", "Policy versions that wrote one trajectory.",
             (("mean", "versions_per_trajectory_mean"), ("most", "versions_per_trajectory_max"))),
        Plot("Interrupted trajectories", "Written by two or more versions.", (("share", "fraction_multi_version"),), percent),
        Plot("Groups under way", "Being rolled out, and waiting to be trained.",
             (("in flight", "groups_in_flight"), ("queued", "groups_queued"))),
        Plot("Lost so far", "Groups dropped for any reason, trajectories that failed, publishes that found no room.",
             (("dropped groups", "dropped_groups"), ("failed trajectories", "failed_members"),
              ("skipped publishes", "skipped_publishes"))),
        Plot("Tokens in a learner step", "Sampled meanwhile, and trained.",
             (("sampled", "tokens_generated"), ("trained", "tokens_trained"))),
    ),
    "Ratios": (
        Plot("Clipped and masked", "Share of trained tokens that PPO clips, and that the discrepancy bound drops.",
             (("clipped", "clip_fraction"), ("discrepancy-masked", "discrepancy_masked_fraction")), percent),
        Plot("Active", "Share of trained tokens that are neither clipped nor dropped.", (("active", "active_fraction"),), percent,
             from_zero=False),
        Plot("Staleness KL", "Anchor against the current policy, in nats: how far it has moved.",
             (("k1", "staleness_kl"), ("k3", "staleness_kl_k3"))),
        Plot("Discrepancy KL", "Sampling engine against the anchor, in nats.",
             (("k1", "discrepancy_kl"), ("k3", "discrepancy_kl_k3"))),
        Plot("Engine numerics", "Sampling engine against exact old logprobs, absolute, in nats. Logarithmic.",
             (("mean", "engine_numerics"), ("largest", "engine_numerics_max")), is_logarithmic=True),
        Plot("Ring replay against live scores", "Largest difference so far, in nats. 0: bit for bit the same.",
             (("largest", "exactness_error_max"),)),
    ),
    "Cost": (
        Plot("Seconds per stage", "Of each learner step; the first one compiles. Logarithmic.",
             tuple((stage.replace("_", " "), f"seconds_{stage}") for stage in
                   ("rollout", "replay", "train", "publish", "sampler_wait", "learner_wait")), seconds, is_logarithmic=True),
        Plot("Ring: bytes", "Of all snapshots that it holds.", (("bytes", "ring_bytes"),), size),
        Plot("Ring: versions", "Snapshots that it holds.", (("versions", "ring_versions"),)),
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """What to report on."""

    run_dir: Annotated[pathlib.Path, tyro.conf.Positional]  # of launch.train


def main(arguments: list[str]) -> int:
    options = tyro.cli(ReportOptions, args=arguments, prog="python -m launch.report", description=__doc__)
    try:
        path = write_report(options.run_dir)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(path)
    return 0


def write_report(run_dir: pathlib.Path) -> pathlib.Path:
    """Writes the report of a run from what lies in its directory so far.

    Returns:
      Its path.

    Raises:
      ConfigError: no run lies there, or it has no learner step yet.
    """
    content = run_directory.read_content(run_dir)
    rows = [{**row, "dropped_groups": dropped_groups(row)} for row in run_directory.read_metrics(run_dir)]
    if not rows:
        raise ConfigError(f"{run_dir / run_directory.METRICS} holds no learner step, wanted one or more; "
                          "try again when the first one is done")
    title = f"{content['name']}, seed {content['config']['seed']}"
    sections = {
        **{name: node("div", *(plot.draw(rows) for plot in plots), class_="plots") for name, plots in PLOTS.items()},
        "Timeline": _timelines(run_directory.read_rows(run_dir / "timeline.jsonl")),
        "Transcripts": _transcripts(run_dir / "ledger", {row["step"]: row["version"] for row in rows}, content["config"]),
    }
    text = page(
        f"{title} · Exactor run report",
        _header(title, content, rows, run_dir / run_directory.SUMMARY, list(sections)),
        node("main", *(section(name, body) for name, body in sections.items())),
    )
    path = run_dir / REPORT
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(text, encoding="utf-8")
    os.replace(unfinished, path)
    return path


def _header(title: str, content: dict, rows: list[dict], summary_path: pathlib.Path, sections: list[str]) -> Node:
    config, done = content["config"], f"{rows[-1]['step']:,} of {content['config']['steps']:,} learner steps"
    if summary_path.is_file():
        status, figures = f"Finished: {done}.", _tables(summary_path)
    else:
        status, figures = f"Not finished, or still under way: {done}. There is no summary yet.", _tables_so_far(rows, config)
    versions = "\n".join(f"{package} {version or 'not installed'}" for package, version in content["versions"].items())
    return node(
        "header",
        node("p", "Exactor run report", class_="muted"),
        node("h1", title),
        node("p", status),
        node("div", *(table(caption, cells) for caption, cells in figures), class_="tables"),
        node("p", f"Environment {config['environment']}. Commit {content['commit'] or 'unknown'}.", class_="muted"),
        node("details", node("summary", "Versions of packages"), node("pre", versions)),
        node("details", node("summary", "Resolved configuration"), node("pre", json.dumps(config, indent=2))),
        navigation(sections),
    )


def _tables(summary_path: pathlib.Path) -> list[Table]:
    try:
        return tables(json.loads(summary_path.read_text()))
    except KeyError as error:
        raise ConfigError(f"{summary_path} has no {error}, which every run of this version has; check out the commit that "
                          f"{run_directory.CONFIG} names") from error


def _tables_so_far(rows: list[dict], config: dict) -> list[Table]:
    so_far = asynchrony(rows)
    errors = [error for error in column(rows, "exactness_error_max") if error is not None]
    return [("so far", [
        ("trajectories with two or more versions", percent(so_far["fraction_multi_version"])),
        ("staleness, mean and largest", f"{so_far['staleness_mean']:.2f}, {so_far['staleness_max']:.0f} versions"),
        ("old logprobs", config["snapshots"]["old_logprobs"]),
        ("ring replay against live scores", f"{max(errors):.1e} nats" if errors else "not compared"),
        ("seconds of training", number(sum(filter(None, column(rows, "seconds_step"))))),
    ])]  # fmt: skip


def _timelines(spans: list[dict]) -> Node:
    if not step_ends(spans):
        return node("p", "This run has no timeline.jsonl, which says who was busy when.")
    start, stop = min(span["start"] for span in spans), max(span["stop"] for span in spans)
    return node(
        "div",
        timeline("The whole run", "Each column is a stretch of time; a stage fills its share of it.", spans, start, stop,
                 mark_steps=False),
        timeline("A close-up", "A few learner steps in the middle of the run. A line is where the learner ends a step.", spans,
                 *close_up(spans, CLOSE_UP_STEPS), mark_steps=True),
    )  # fmt: skip


def _tokenizer(config: dict) -> Tokenizer:
    """That of a run, which may have another version's config.

    Raises:
      ValueError: its model is no longer where it was.
    """
    model_path = config.get("pretrained", {}).get("model_path")
    if model_path is None:
        return ByteTokenizer()
    return read_text_files(locate(model_path), vocab_size=config["model"]["vocab_size"]).tokenizer


def _transcripts(ledger_dir: pathlib.Path, learner_versions: dict[int, int], config: dict) -> Node:
    """Of the steps whose arrays are there.

    Args:
      ledger_dir: of the run.
      learner_versions: by learner step, the version that was trained.
      config: of the run.
    """
    there = [step for step in learner_versions if (ledger_dir / step_file(step)).is_file()]
    if not there:
        return node("p", "This run's ledger holds no trajectories.")
    try:
        tokenizer = _tokenizer(config)
    except ValueError as error:
        return node("p", f"What was said cannot be shown without the model's tokenizer: {error}.")
    articles = []
    for step in choose_steps(there, NUM_TRANSCRIPT_STEPS):
        arrays = read_step(ledger_dir, step)
        for row in choose_trajectories(arrays):
            shown = transcript(arrays, row, MAX_TRANSCRIPT_TOKENS, tokenizer)
            articles.append(_transcript(step, learner_versions[step], shown))
    return node(
        "div",
        node(
            "p",
            "Trained trajectories of an early, a middle and a late learner step: each time one of the best reward and one of the "
            "worst. What the environment wrote is grey. What the policy sampled is underlined in the colour of the version that "
            "sampled it, and a label such as ", node("span", "v3", class_="tag s3"), " stands where a version begins: there a "
            "publish interrupted the rollout. A dotted line is under tokens that were not trained.",
        ),
        *articles,
    )


def _transcript(step: int, learner_version: int, shown: Transcript) -> Node:
    versions = f"{'version' if len(shown.versions) == 1 else 'versions'} {', '.join(map(str, shown.versions))}"
    reward = "none" if shown.reward is None else number(shown.reward)
    parts, previous = [], NO_POLICY
    for index, turns in enumerate(shown.parts):
        if index:
            parts.append(node("p", f"{shown.num_omitted:,} tokens are left out here.", class_="muted"))
        nodes = []
        for turn in turns:
            passages = []
            for passage in turn:
                passages.append(_passage(passage, is_new=passage.version not in (NO_POLICY, previous)))
                previous = previous if passage.version == NO_POLICY else passage.version
            nodes.append(node("span", *passages, class_="turn"))
        parts.append(node("div", *nodes, class_="turns"))
    return node(
        "article",
        node("h3", f"Step {step:,}, reward {reward}"),
        node("p", f"Request {shown.request_id}: {shown.num_sampled:,} tokens sampled by {versions}; trained at "
                  f"version {learner_version}.", class_="muted"),
        *parts,
        class_="transcript",
    )


def _passage(passage: Passage, *, is_new: bool) -> Node:
    pieces = [node("span", piece.text, class_="unprintable") if piece.is_mark else piece.text for piece in passage.pieces]
    if passage.version == NO_POLICY:
        return node("span", *pieces)
    colour = f"s{passage.version % NUM_COLOURS}"
    tag = node("span", f"v{passage.version}", class_=f"tag {colour}") if is_new else None
    return node("span", tag, node("span", *pieces, class_=f"policy {colour}{'' if passage.is_trained else ' untrained'}"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
