"""Checks a run: is every trained token anchored to the version that sampled it, and does scoring again give the same bits?

    python -m launch.audit RUN_DIR [--replay N]

The ledger's chain and digests are checked in full, persisted snapshots file by file; then N segments are scored again from
persisted snapshots, and their old logprobs must be bitwise equal. The exit status is 0 only when all of it holds.
"""

import collections
import dataclasses
import pathlib
import sys
from typing import Annotated

import numpy as np
import rich.console
import rich.progress
import tyro

from launch import run_directory
from launch.build import Foundation
from models.transformer import Params
from rl.auditing import Comparison, check_ledger, check_snapshots, choose_segments, compare
from rl.ledger import read_step
from rl.scorer import Bucket, Scorer
from rl.snapshot_store import SnapshotCorrupt, SnapshotStore

MAX_FAILURES_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class AuditOptions:
    """What to audit."""

    run_dir: Annotated[pathlib.Path, tyro.conf.Positional]  # of launch.train
    replay: int = 50  # segments to score again
    seed: int = 0  # of their choice


def main(arguments: list[str]) -> int:
    options = tyro.cli(AuditOptions, args=arguments, prog="python -m launch.audit", description=__doc__)
    console = rich.console.Console(highlight=False, soft_wrap=True)
    try:
        foundation = Foundation.of(run_directory.read_config(options.run_dir))
        failures = audit(foundation, options, console)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for failure in failures[:MAX_FAILURES_SHOWN]:
        console.print(f"  {failure}", markup=False)
    if len(failures) > MAX_FAILURES_SHOWN:
        console.print(f"  and {len(failures) - MAX_FAILURES_SHOWN} more")
    console.print(f"audit FAILED: {len(failures)} faults" if failures else "audit passed")
    return 1 if failures else 0


def audit(foundation: Foundation, options: AuditOptions, console: rich.console.Console) -> list[str]:
    """All faults, in words; empty when the run is what it says it is."""
    store = SnapshotStore(options.run_dir / "snapshots")
    ledgers = {part / "ledger": check_ledger(part / "ledger") for part in run_directory.parts(options.run_dir)}
    failures, rows = [], []
    for directory, ledger in ledgers.items():
        console.print(
            f"{directory.relative_to(options.run_dir)}: {ledger.num_rows:,} rows, {ledger.num_steps} learner steps, "
            f"{ledger.num_segments:,} segments, {ledger.num_trained_tokens:,} trained tokens, {ledger.num_exact_tokens:,} of "
            f"them anchored exactly; {len(ledger.failures)} faults"
        )
        failures += ledger.failures
        rows += ledger.rows
    snapshots = check_snapshots(store, rows)
    console.print(
        f"snapshots: {snapshots.num_snapshots} persisted, {snapshots.num_files} files; {len(snapshots.failures)} faults"
    )
    failures += snapshots.failures
    reports = ledgers.values()
    if any(report.num_segments for report in reports) and not any(report.num_exact_segments for report in reports):
        console.print("replay: none, for the run's old-logprob source is not exact")
        return failures
    num_chosen, compared = 0, []
    for directory, ledger in ledgers.items():
        chosen = choose_segments(ledger.rows, store.versions(), -(-options.replay // len(ledgers)), options.seed)
        replay_failures, comparisons = replay(foundation, store, directory, chosen, console)
        num_chosen, compared, failures = num_chosen + len(chosen), compared + comparisons, failures + replay_failures
    if options.replay and not num_chosen:
        return [*failures, f"{options.replay} segments to replay, but none has its snapshot persisted"]
    console.print(
        f"replay: {num_chosen} of {options.replay} segments scored again, {sum(c.num_tokens for c in compared):,} tokens, "
        f"{sum(c.num_mismatches for c in compared)} differ, "
        f"largest difference {max((c.max_error for c in compared), default=0.0):.1e} nats"
    )
    return failures


def replay(
    foundation: Foundation, store: SnapshotStore, ledger_dir: pathlib.Path, rows: list[dict], console: rich.console.Console
) -> tuple[list[str], list[Comparison]]:
    """Scores segments again under their persisted snapshots, in the buckets that the ledger records."""
    calls = collections.defaultdict(list)
    for row in rows:
        calls[row["scored_version"], Bucket(**row["bucket"])].append(row)
    scorers = {bucket: foundation.scorer(bucket) for _, bucket in calls}
    failures, compared = [], []
    with rich.progress.Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("replaying", total=len(rows))
        for (version, bucket), segments in sorted(calls.items()):
            try:
                params = store.load(version, like=foundation.published_shapes)
            except SnapshotCorrupt as error:
                failures.append(str(error))
                continue
            for row, comparison in zip(segments, score_again(scorers[bucket], params, ledger_dir, segments), strict=True):
                compared.append(comparison)
                if comparison.num_mismatches:
                    failures.append(
                        f"step {row['step']}, trajectory {row['request_id']}, tokens [{row['start']}, {row['stop']}), "
                        f"version {version}: {comparison.num_mismatches} of {comparison.num_tokens} old logprobs differ, "
                        f"by up to {comparison.max_error:.1e} nats"
                    )
            progress.advance(task, len(segments))
    return failures, compared


def score_again(scorer: Scorer, params: Params, ledger_dir: pathlib.Path, rows: list[dict]) -> list[Comparison]:
    """Recorded against replayed old logprobs of segments of one version and bucket."""
    contexts, recorded = [], []
    for row in rows:
        arrays = read_step(ledger_dir, row["step"])
        first = int(arrays["offsets"][row["row"]])
        contexts.append(arrays["tokens"][first : first + row["stop"]])
        recorded.append(arrays["old_logprobs"][first + row["start"] : first + row["stop"]])
    scores = scorer.score(params, contexts)
    return [
        compare(old, np.ascontiguousarray(scored.logprobs[row["start"] :]))
        for row, old, scored in zip(rows, recorded, scores, strict=True)
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
