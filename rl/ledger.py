"""The ledger: what every trained token was anchored to, written so that nobody can change it later without being noticed.

Each learner step leaves two things in the directory:

    step-000012.npz   the arrays of its trajectories, laid end to end, so that anyone can score them again
    segments.jsonl    one row that digests that file, then one row a segment that a policy wrote: trajectory, start, stop,
                      policy version, snapshot it was scored with, bucket, digests of its context, tokens and old logprobs

Rows are chained: each holds the SHA-256 of the row before it, and its own. `head.json` holds the number of rows and the last
hash, so that a tail cut off is noticed too. The arrays are renamed into place before their rows are written, and the rows before
the head; what a crash leaves half done is therefore visible, and `Ledger.restore` cuts it off. `rl.auditing` checks all of it.
"""

import dataclasses
import hashlib
import json
import os
import pathlib

import numpy as np

from rl.types import NO_POLICY, Segment, Trajectory

ROWS = "segments.jsonl"
HEAD = "head.json"
FIRST_PREVIOUS = "0" * 64
"""What the first row names as the hash before it."""

_PER_TOKEN = {
    "tokens": "<i4",
    "loss_mask": "?",
    "policy_versions": "<i4",
    "context_versions": "<i4",
    "sampler_logprobs": "<f4",
    "old_logprobs": "<f4",
}


@dataclasses.dataclass(frozen=True)
class ScoredTrajectory:
    """A trajectory of a learner step and how it was scored.

    Attributes:
      trajectory: with `old_logprobs` where the source is exact, without where it is not.
      buckets: for each policy version that was scored, (rows of all devices, padded length) of its call. A version of an
        exact trajectory that is missing here was not scored, so none of its tokens may be trained.
    """

    trajectory: Trajectory
    buckets: dict[int, tuple[int, int]]


def step_file(step: int) -> str:
    return f"step-{step:06d}.npz"


def row_hash(row: dict) -> str:
    """SHA-256 of the canonical JSON of a row without its `hash`."""
    content = {key: value for key, value in row.items() if key != "hash"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def tokens_digest(tokens: np.ndarray) -> str:
    """SHA-256 of token ids as little-endian int32."""
    return hashlib.sha256(np.ascontiguousarray(tokens, "<i4").tobytes()).hexdigest()


def logprobs_digest(logprobs: np.ndarray) -> str:
    """SHA-256 of logprobs as little-endian float32: NaN payloads and the sign of zero count."""
    return hashlib.sha256(np.ascontiguousarray(logprobs, "<f4").tobytes()).hexdigest()


def read_rows(directory: str | pathlib.Path) -> list[dict]:
    """All rows, unchecked. `rl.auditing.check_ledger` says whether they are to be believed."""
    return [json.loads(line) for line in (pathlib.Path(directory) / ROWS).read_bytes().splitlines()]


def read_step(directory: str | pathlib.Path, step: int) -> dict[str, np.ndarray]:
    """The arrays of one learner step, unchecked.

    Trajectory `row` has the tokens [offsets[row], offsets[row + 1]) of the per-token arrays `tokens`, `loss_mask`,
    `policy_versions`, `context_versions`, `sampler_logprobs` and `old_logprobs` (NaN where `exact` is False), and entry `row` of
    `request_ids`, `group_ids`, `rewards` (NaN for none) and `exact`.
    """
    with np.load(pathlib.Path(directory) / step_file(step), allow_pickle=False) as arrays:
        return dict(arrays)


class Ledger:
    """Appends to the ledger of one run, from one process. A directory that has rows already must be restored first."""

    def __init__(self, directory: str | pathlib.Path):
        self.directory = pathlib.Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._num_rows = 0
        self._hash = FIRST_PREVIOUS
        self._step = -1  # the last one recorded
        self._snapshots: set[int] = set()

    @property
    def snapshots(self) -> frozenset[int]:
        """The versions of the persisted snapshots that have a row."""
        return frozenset(self._snapshots)

    def record_step(self, step: int, learner_version: int, source_name: str, scored: list[ScoredTrajectory],
                    snapshot_digests: dict[int, str]) -> None:
        """Writes the trajectories of one learner step.

        Args:
          step: larger than every step before.
          learner_version: the policy version when the step began.
          source_name: the old-logprob source.
          scored: the trajectories that were trained.
          snapshot_digests: `SnapshotRing.digest` of each version that was scored.

        Raises:
          ValueError: steps do not increase, or a trained token of an exact trajectory was scored with no known snapshot.
        """
        if step <= self._step:
            raise ValueError(f"step {step} recorded after step {self._step}, wanted a larger one; to go back call restore")
        common = {"step": int(step), "learner_version": int(learner_version), "source": source_name}
        segments = [
            {**common, **_segment_row(row, item, segment, snapshot_digests)}
            for row, item in enumerate(scored)
            for segment in item.trajectory.segments
            if segment.version != NO_POLICY
        ]
        self._check_fresh()
        file_digest = self._write_arrays(step, [item.trajectory for item in scored])
        header = {**common, "kind": "step", "file": step_file(step), "file_digest": file_digest, "trajectories": len(scored)}
        self._append([header, *segments])
        self._step = step

    def record_snapshot(self, version: int, digest: str) -> None:
        """Writes that a snapshot was persisted, with its `params_digest`.

        Its files are in the snapshot's own manifest, not here: they hold times, and equal runs have equal ledgers.

        Raises:
          ValueError: this version was recorded before.
        """
        if version in self._snapshots:
            raise ValueError(f"snapshot version {version} is in the ledger already, wanted each once; ask `snapshots` first")
        self._check_fresh()
        self._append([{"kind": "snapshot", "version": version, "digest": digest}])
        self._snapshots.add(version)

    def close(self) -> None:
        """Marks the ledger as ended by its run, not by a crash."""
        self._check_fresh()
        self._write_head(closed=True)

    def state(self) -> dict:
        """The position in the ledger, as JSON values."""
        return {"rows": self._num_rows, "hash": self._hash}

    def restore(self, state: dict) -> None:
        """Goes back to the position of a `state`: what was recorded after it is cut off, and recording goes on from there.

        Raises:
          ValueError: the ledger in the directory is not a continuation of that position.
        """
        path = self.directory / ROWS
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        kept = lines[: state["rows"]]
        rows = [json.loads(line) for line in kept]
        found = rows[-1]["hash"] if rows else FIRST_PREVIOUS
        if len(kept) < state["rows"] or found != state["hash"]:
            raise ValueError(f"the ledger in {self.directory} has {len(lines)} rows and hash {found} at row {len(kept)}, wanted "
                             f"hash {state['hash']} at row {state['rows']}; resume from the checkpoint of this very run")
        self._num_rows, self._hash = state["rows"], state["hash"]
        self._step = max((row["step"] for row in rows if row["kind"] == "step"), default=-1)
        self._snapshots = {row["version"] for row in rows if row["kind"] == "snapshot"}
        if lines:
            os.truncate(path, sum(map(len, kept)))
        for arrays in {*self.directory.glob("step-*")} - {self.directory / row["file"] for row in rows if row["kind"] == "step"}:
            arrays.unlink()
        self._write_head(closed=False)

    def _check_fresh(self) -> None:
        """Raises ValueError when a new ledger would write into another run's."""
        if self._num_rows == 0 and (path := self.directory / ROWS).exists() and path.stat().st_size:
            raise ValueError(f"{path} holds the rows of another run, wanted none; resume that run, or choose another --run-dir")

    def _write_arrays(self, step: int, trajectories: list[Trajectory]) -> str:
        """Writes the arrays of a step in one rename; returns the SHA-256 of the file."""
        rewards = [np.nan if trajectory.reward is None else trajectory.reward for trajectory in trajectories]
        arrays = {
            "offsets": np.cumsum([0, *map(len, trajectories)], dtype=np.int64),
            "request_ids": np.array([trajectory.request_id for trajectory in trajectories], np.int64),
            "group_ids": np.array([trajectory.group_id for trajectory in trajectories], np.int64),
            "rewards": np.array(rewards, np.float64),
            "exact": np.array([trajectory.old_logprobs is not None for trajectory in trajectories], bool),
        }
        for name, dtype in _PER_TOKEN.items():
            parts = [_per_token(trajectory, name).astype(dtype) for trajectory in trajectories]
            arrays[name] = np.concatenate([np.zeros(0, dtype), *parts])
        unfinished = self.directory / f"{step_file(step)}.tmp"
        with unfinished.open("wb") as file:
            np.savez(file, **arrays)
        with unfinished.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.replace(unfinished, self.directory / step_file(step))
        return digest

    def _append(self, rows: list[dict]) -> None:
        """Chains the rows, writes them in one write, and moves the head."""
        previous, lines = self._hash, []
        for row in rows:
            row = {**row, "previous": previous}
            previous = row_hash(row)
            lines.append(json.dumps({**row, "hash": previous}) + "\n")
        with (self.directory / ROWS).open("ab") as file:
            file.write("".join(lines).encode())
        self._num_rows, self._hash = self._num_rows + len(lines), previous
        self._write_head(closed=False)

    def _write_head(self, *, closed: bool) -> None:
        unfinished = self.directory / f"{HEAD}.tmp"
        unfinished.write_text(json.dumps({"kind": "head", "rows": self._num_rows, "hash": self._hash, "closed": closed}))
        os.replace(unfinished, self.directory / HEAD)


def _per_token(trajectory: Trajectory, name: str) -> np.ndarray:
    array = trajectory.__dict__[name]
    return np.full(len(trajectory), np.nan) if array is None else array


def _segment_row(row: int, item: ScoredTrajectory, segment: Segment, snapshot_digests: dict[int, str]) -> dict:
    trajectory = item.trajectory
    part = slice(segment.start, segment.stop)
    scored = trajectory.old_logprobs is not None and segment.version in item.buckets
    if trajectory.old_logprobs is not None and not scored and trajectory.loss_mask[part].any():
        raise ValueError(f"trajectory {trajectory.request_id}: tokens [{segment.start}, {segment.stop}) are trained, but their "
                         f"version {segment.version} was not scored (only {sorted(item.buckets)}); score it or mask them")
    if scored and segment.version not in snapshot_digests:
        raise ValueError(f"trajectory {trajectory.request_id}: version {segment.version} was scored, but snapshot digests were "
                         f"given for {sorted(snapshot_digests)} only; give the digest of every scored version")
    bucket = dict(zip(("rows", "length"), map(int, item.buckets[segment.version]), strict=True)) if scored else None
    return {
        "kind": "segment",
        "request_id": int(trajectory.request_id),
        "row": row,
        "start": segment.start,
        "stop": segment.stop,
        "version": segment.version,
        "scored_version": segment.version if scored else None,
        "context_digest": tokens_digest(trajectory.tokens[: segment.start]),
        "tokens_digest": tokens_digest(trajectory.tokens[part]),
        "snapshot_digest": snapshot_digests[segment.version] if scored else None,
        "old_logprobs_digest": logprobs_digest(trajectory.old_logprobs[part]) if scored else None,
        "bucket": bucket,
    }
