"""The arithmetic of an audit: is the ledger whole, every trained token anchored to the version that sampled it, replay equal?

    check_ledger       the chain, the head, every digest recomputed from the arrays, every trained token in one row of its version
    check_snapshots    every file and every value of every persisted snapshot, and that segments were scored with these very ones
    choose_segments    a sample of the segments that can be scored again
    compare            recorded old logprobs against replayed ones, bit by bit

A check does not stop at the first fault: it returns a report that names all of them.
"""

import collections
import dataclasses
import hashlib
import json
import pathlib
import zipfile
from collections.abc import Iterable

import jax
import numpy as np

from rl import ledger
from rl.snapshot_store import SnapshotCorrupt, SnapshotStore

_COMMON = {"kind": str, "previous": str, "hash": str}
_OF_STEP = {**_COMMON, "step": int, "learner_version": int, "source": str}
_FORMS = {
    "step": {**_OF_STEP, "file": str, "file_digest": str, "trajectories": int},
    "segment": {
        **_OF_STEP, "request_id": int, "row": int, "start": int, "stop": int, "version": int, "scored_version": int | None,
        "context_digest": str, "tokens_digest": str, "snapshot_digest": str | None, "old_logprobs_digest": str | None,
        "bucket": dict | None,
    },
    "snapshot": {**_COMMON, "version": int, "digest": str},
}  # fmt: skip
_UNREADABLE = (ValueError, OSError, EOFError, RuntimeError, zipfile.BadZipFile)  # what numpy raises on damaged archives


@dataclasses.dataclass
class LedgerReport:
    """What `check_ledger` saw. The counts are over what could be read; `failures` names what is wrong, empty if nothing is."""

    num_rows: int = 0
    num_steps: int = 0
    num_segments: int = 0
    num_exact_segments: int = 0
    num_snapshots: int = 0
    num_trained_tokens: int = 0
    num_exact_tokens: int = 0  # trained tokens of segments that were scored with a snapshot
    closed: bool = False  # the run ended by itself
    rows: list[dict] = dataclasses.field(default_factory=list, repr=False)  # those that are as they were written
    failures: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class SnapshotReport:
    """What `check_snapshots` saw."""

    num_snapshots: int = 0
    num_files: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Recorded against replayed old logprobs.

    Attributes:
      num_tokens: how many were compared.
      num_mismatches: how many differ in any bit.
      max_error: largest absolute difference in nats; infinite where two values differ and one of them is not finite.
    """

    num_tokens: int
    num_mismatches: int
    max_error: float


def check_ledger(directory: str | pathlib.Path) -> LedgerReport:
    """Checks a whole ledger against itself and its arrays."""
    directory = pathlib.Path(directory)
    report = LedgerReport()
    _check_chain(directory, report)
    steps, segments = {}, collections.defaultdict(list)
    for row in report.rows:
        if row["kind"] == "segment":
            segments[row["step"]].append(row)
        elif row["kind"] == "step" and row["step"] not in steps:
            steps[row["step"]] = row
        elif row["kind"] == "step":
            report.failures.append(f"{_name(row)}: a second row for this step")
    report.num_steps = len(steps)
    report.num_segments = sum(map(len, segments.values()))
    report.num_snapshots = sum(row["kind"] == "snapshot" for row in report.rows)
    for step in sorted(segments.keys() - steps.keys()):
        report.failures.append(f"step {step}: it has segment rows, but no row that digests its arrays")
    for step in sorted(steps):
        _check_step(directory, steps[step], segments[step], report)
    named = {ledger.step_file(step) for step in steps}
    for path in sorted(path for path in directory.glob("step-*") if path.name not in named):
        report.failures.append(f"{path}: no row names this file; a stopped run left it, or its rows were removed")
    return report


def check_snapshots(store: SnapshotStore, rows: Iterable[dict]) -> SnapshotReport:
    """Checks the persisted snapshots against the ledger.

    Args:
      store: where the run persisted its snapshots.
      rows: those of the ledger, as in `LedgerReport.rows`.
    """
    report = SnapshotReport()
    digests = collections.defaultdict(dict)  # version -> digest -> the row that names it first
    recorded = set()
    for row in rows:
        if row["kind"] == "snapshot":
            recorded.add(row["version"])
            digests[row["version"]].setdefault(row["digest"], _name(row))
            report.num_snapshots += 1
            try:
                files, failures = _snapshot_files(store, row["version"])
                report.num_files += len(files)
                report.failures += failures or _value_failures(store, row)
            except SnapshotCorrupt as error:
                report.failures.append(str(error))
        elif row["kind"] == "segment" and row["scored_version"] is not None:
            digests[row["scored_version"]].setdefault(row["snapshot_digest"], _name(row))
    for version, names in sorted(digests.items()):
        if len(names) > 1:
            differing = "; ".join(f"{digest} in {name}" for digest, name in names.items())
            report.failures.append(f"snapshot version {version}: the ledger names different digests: {differing}")
    for version in sorted(set(store.versions()) - recorded):
        report.failures.append(f"snapshot version {version} at {store.path(version)}: no row of the ledger names it")
    return report


def choose_segments(rows: Iterable[dict], persisted_versions: Iterable[int], count: int, seed: int) -> list[dict]:
    """Draws segments to score again: those of exact sources whose snapshot is persisted. The same arguments give the same ones.

    Args:
      rows: those of the ledger.
      persisted_versions: those of the snapshot store.
      count: how many, at least 0; where fewer can be replayed, all of these.
      seed: of the draw.

    Returns:
      Segment rows in the order of the ledger, each at most once.
    """
    if count < 0:
        raise ValueError(f"{count} segments to replay, wanted 0 or more; set --replay")
    persisted = set(persisted_versions)
    replayable = [row for row in rows if row["kind"] == "segment" and row["scored_version"] in persisted]
    chosen = np.random.default_rng(seed).permutation(len(replayable))[:count]
    return [replayable[index] for index in sorted(chosen)]


def compare(recorded: np.ndarray, replayed: np.ndarray) -> Comparison:
    """Compares float32 logprobs bit by bit: NaN equals the same NaN, and 0 is not -0.

    Raises:
      ValueError: another dtype, or shapes differ.
    """
    for name, array in (("recorded", recorded), ("replayed", replayed)):
        if array.dtype != np.float32 or array.shape != recorded.shape:
            raise ValueError(f"{name} old logprobs are {array.dtype} {array.shape}, wanted float32 {recorded.shape}; "
                             "compare the same tokens, as they were scored")
    differ = np.ascontiguousarray(recorded).view(np.uint32) != np.ascontiguousarray(replayed).view(np.uint32)
    recorded, replayed = recorded[differ].astype(np.float64), replayed[differ].astype(np.float64)
    finite = np.isfinite(recorded) & np.isfinite(replayed)
    errors = np.where(finite, np.abs(np.where(finite, recorded, 0) - np.where(finite, replayed, 0)), np.inf)
    return Comparison(differ.size, int(differ.sum()), float(errors.max(initial=0.0)))


def _name(row: dict) -> str:
    """Which row this is, in words."""
    if row["kind"] == "segment":
        return f"step {row['step']}, trajectory {row['request_id']}, tokens [{row['start']}, {row['stop']})"
    return f"step {row['step']}" if row["kind"] == "step" else f"snapshot version {row['version']}"


def _is_row(row) -> bool:
    """Whether this is a row of some kind, with all of its fields and no others."""
    if not isinstance(row, dict) or row.get("kind") not in _FORMS:
        return False
    form = _FORMS[row["kind"]]
    return row.keys() == form.keys() and all(isinstance(row[key], kind) for key, kind in form.items())


def _check_chain(directory: pathlib.Path, report: LedgerReport) -> None:
    """Reads the rows, each of which must hash to what it says and follow the one before it; then the head, which closes them."""
    path = directory / ledger.ROWS
    lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
    report.num_rows = len(lines)
    previous = ledger.FIRST_PREVIOUS
    for number, line in enumerate(lines, 1):
        place = f"{path}, row {number}"
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not _is_row(row) or not line.endswith(b"\n"):
            report.failures.append(f"{place}: this is no row; it was changed or cut off")
            previous = None
            continue
        if row["previous"] != previous and previous is not None:
            report.failures.append(f"{place} ({_name(row)}): does not follow the row before it: previous is {row['previous']}, "
                                   f"wanted {previous}; rows were removed, added or moved here")
        previous = row["hash"]
        if previous == ledger.row_hash(row):
            report.rows.append(row)
        else:
            report.failures.append(f"{place} ({_name(row)}): was changed: hash is {previous}, wanted {ledger.row_hash(row)}")
    head_path = directory / ledger.HEAD
    try:
        head = json.loads(head_path.read_bytes())
        report.closed = head["closed"]
        found = (head["rows"], head["hash"])
    except (OSError, ValueError, KeyError, TypeError):
        report.failures.append(f"{head_path}: missing or damaged, so rows may be missing at the end")
        return
    if found != (len(lines), previous):
        report.failures.append(f"{head_path}: names {found[0]} rows and hash {found[1]}, but {path} has {len(lines)} rows and "
                               f"ends with {previous}; rows were removed or added at the end, or the run stopped while it wrote")


def _check_step(directory: pathlib.Path, header: dict, segments: list[dict], report: LedgerReport) -> None:
    """Checks the arrays of one step, its segments against them, and that every trained token lies in exactly one segment."""
    step = header["step"]
    path = directory / ledger.step_file(step)
    if not path.is_file() or header["file"] != path.name:
        report.failures.append(f"{path}: missing, or not the file {header['file']} that the row of step {step} names")
        return
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != header["file_digest"]:
        report.failures.append(f"{path}: was changed: SHA-256 {digest}, wanted {header['file_digest']}")
    try:
        arrays = ledger.read_step(directory, step)
        lengths = np.diff(arrays["offsets"])
        fits = len(lengths) == header["trajectories"] == len(arrays["request_ids"]) == len(arrays["exact"]) and all(
            arrays[name].shape == (lengths.sum(),) for name in ("tokens", "loss_mask", "policy_versions", "old_logprobs"))
    except (*_UNREADABLE, KeyError):
        fits = False
    if not fits:
        report.failures.append(f"{path}: cannot be read as the arrays of {header['trajectories']} trajectories")
        return
    num_rows = np.zeros(len(arrays["tokens"]), np.int32)  # that cover each token
    for row in segments:
        if not 0 <= row["row"] < len(lengths) or not 0 <= row["start"] < row["stop"] <= lengths[row["row"]]:
            report.failures.append(f"{_name(row)}: there are no such tokens in row {row['row']} of the arrays")
            continue
        report.failures += [f"{_name(row)}: {fault}" for fault in _segment_faults(row, header, arrays)]
        part = _part(row, arrays)
        num_rows[part] += 1
        if row["scored_version"] is not None:
            report.num_exact_segments += 1
            report.num_exact_tokens += int(arrays["loss_mask"][part].sum())
    report.num_trained_tokens += int(arrays["loss_mask"].sum())
    for row, (start, stop) in enumerate(zip(arrays["offsets"][:-1], arrays["offsets"][1:], strict=True)):
        wrong = np.flatnonzero(arrays["loss_mask"][start:stop] & (num_rows[start:stop] != 1))
        if len(wrong):
            report.failures.append(f"step {step}, trajectory {arrays['request_ids'][row]}: {len(wrong)} trained tokens are not "
                                   f"in exactly one segment row; the first is token {wrong[0]}, in {num_rows[start + wrong[0]]}")


def _part(row: dict, arrays: dict[str, np.ndarray]) -> slice:
    """Where the tokens of a segment lie in the per-token arrays of its step."""
    offset = int(arrays["offsets"][row["row"]])
    return slice(offset + row["start"], offset + row["stop"])


def _segment_faults(row: dict, header: dict, arrays: dict[str, np.ndarray]) -> list[str]:
    """What is wrong with a segment row, given the row and the arrays of its step."""
    part = _part(row, arrays)
    context, tokens = arrays["tokens"][part.start - row["start"] : part.start], arrays["tokens"][part]
    authors = np.unique(arrays["policy_versions"][part]).tolist()
    request_id, exact = int(arrays["request_ids"][row["row"]]), bool(arrays["exact"][row["row"]])
    version, scored_version = row["version"], row["scored_version"]
    scored = scored_version is not None
    anchors = [row[key] for key in ("snapshot_digest", "old_logprobs_digest", "bucket")]
    old_logprobs_digest = ledger.logprobs_digest(arrays["old_logprobs"][part])
    checks = [
        (row["request_id"] == request_id, f"row {row['row']} of the arrays is trajectory {request_id}"),
        (row["source"] == header["source"], f"source {row['source']}, but that of the step is {header['source']}"),
        (row["learner_version"] == header["learner_version"], f"learner version differs from {header['learner_version']}"),
        (authors == [version], f"policy version {version}, but the tokens were sampled by {authors}"),
        (0 <= version <= row["learner_version"], f"policy version {version} at learner version {row['learner_version']}"),
        (row["context_digest"] == ledger.tokens_digest(context), "a token of the context was changed"),
        (row["tokens_digest"] == ledger.tokens_digest(tokens), "a token was changed"),
        (not scored or row["old_logprobs_digest"] == old_logprobs_digest, "an old logprob was changed"),
        (not scored or scored_version == version, f"sampled by version {version}, but scored with version {scored_version}"),
        (not scored or exact, f"scored with version {scored_version}, but the arrays hold no old logprobs of it"),
        (scored or not exact or not arrays["loss_mask"][part].any(), "trained under an exact source, but not scored"),
        (all((anchor is not None) == scored for anchor in anchors),
         "a scored segment has a snapshot digest, an old-logprob digest and a bucket, and any other has none of them"),
    ]
    return [fault for holds, fault in checks if not holds]


def _snapshot_files(store: SnapshotStore, version: int) -> tuple[dict[str, str], list[str]]:
    """The files that a snapshot's manifest names, and what is wrong with them now."""
    name = f"snapshot version {version} at {store.path(version)}"
    files, now = store.files(version), store.files_now(version)
    failures = [f"{name}: {file} is missing" for file in sorted(files.keys() - now.keys())]
    failures += [f"{name}: {file} is there, but the manifest does not name it" for file in sorted(now.keys() - files.keys())]
    failures += [f"{name}: {file} was changed: SHA-256 {now[file]}, wanted {files[file]}"
                 for file in sorted(files.keys() & now.keys()) if files[file] != now[file]]
    return files, failures


def _value_failures(store: SnapshotStore, row: dict) -> list[str]:
    """What is wrong with the values of a persisted snapshot whose files are whole, given its row."""
    version = row["version"]
    name = f"snapshot version {version} at {store.path(version)}"
    if store.digest(version) != row["digest"]:
        return [f"{name}: its manifest names digest {store.digest(version)}, but the ledger {row['digest']}"]
    try:  # a manifest can be forged together with the files; values cannot
        store.load(version, store.abstract(version, jax.sharding.SingleDeviceSharding(jax.local_devices()[0])))
    except _UNREADABLE as error:  # SnapshotCorrupt is one of them
        return [f"{name}: {error}"]
    return []
