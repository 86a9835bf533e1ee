"""The arithmetic of a run's report: which points, which stretches of time and which tokens are shown. `launch.report` draws them.

A report must stay small, however long the run: points are thinned out, time is binned, long transcripts lose their middle. All of
it is deterministic, and keeps what one looks for: extremes, gaps, and the token at which a publish interrupted a rollout.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from models.tokenizer import Tokenizer
from rl.types import NO_POLICY

Points = Sequence[float | None]
"""One metric over the learner steps; None where a step has no value."""

_DROPPED = "dropped_groups_"


# --- metrics ---


def column(rows: Sequence[dict], name: str) -> list[float | None]:
    """The metric `name` of each row; None in the rows that lack it."""
    return [row.get(name) for row in rows]


def asynchrony(rows: Sequence[dict]) -> dict:
    """How asynchronous a run has been, from the rows of its metrics: shares and means over all that was trained.

    Args:
      rows: one or more. A step that trained no token has None for its means, and no weight.
    """
    def mean(name: str, count: str) -> float:
        return sum((row[name] or 0.0) * row[count] for row in rows) / max(sum(row[count] for row in rows), 1)

    return {
        "fraction_multi_version": mean("fraction_multi_version", "trajectories"),
        "staleness_mean": mean("staleness_mean", "tokens_trained"),
        "staleness_max": max(row["staleness_max"] or 0.0 for row in rows),
        "trajectories_trained": sum(row["trajectories"] for row in rows),
        "skipped_publishes": rows[-1]["skipped_publishes"],
        "dropped_stale": rows[-1]["dropped_stale"],
    }


def throughput(rows: Sequence[dict]) -> dict[str, float | None]:
    """Tokens a second that each stage got through while it was at work; None of a stage that there was not.

    Args:
      rows: one or more. The first is left out if there are others: it waits for compilation.
    """
    rows = rows[1:] or rows

    def rate(tokens: Callable[[dict], float], *stages: str) -> float | None:
        seconds = sum(row[f"seconds_{stage}"] for row in rows for stage in stages)
        return sum(map(tokens, rows)) / seconds if seconds else None

    return {
        "sampling_tokens_per_second": rate(lambda row: row["tokens_generated"], "rollout"),
        "replay_tokens_per_second": rate(lambda row: row["scored_tokens"], "fetch", "score"),
        "training_tokens_per_second": rate(lambda row: row["trajectories"] * row["trajectory_tokens_mean"], "train"),
    }


def dropped_groups(row: dict) -> int:
    """Groups dropped since the run began, whatever the reason."""
    return sum(count for name, count in row.items() if name.startswith(_DROPPED))


def thin(columns: Sequence[Points], num_bins: int) -> list[int]:
    """The points that a plot of several metrics needs: all of a short run, of a long one the extremes and gaps of each bin.

    Args:
      columns: metrics, all of one length.
      num_bins: stretches of equally many points. Each keeps at most four points a column: where it is lowest and highest, and
        the first and last where it has no value.

    Returns:
      Indices into the columns, increasing, the first and the last included.
    """
    length = len(columns[0])
    kept = {0, length - 1}
    edges = [length * number // num_bins for number in range(num_bins + 1)]
    for (start, stop), points in itertools.product(itertools.pairwise(edges), columns):
        present = [index for index in range(start, stop) if points[index] is not None]
        absent = [index for index in range(start, stop) if points[index] is None]
        if present:
            kept |= {min(present, key=points.__getitem__), max(present, key=points.__getitem__)}
        kept |= {*absent[:1], *absent[-1:]}
    return sorted(kept)


# --- timeline ---


def occupancy(spans: Sequence[dict], start: float, stop: float, num_bins: int) -> dict[tuple[str, str], np.ndarray]:
    """How busy each lane was with each stage.

    Args:
      spans: rows of `timeline.jsonl`, in any order.
      start: seconds; what lies before is left out.
      stop: seconds, more than `start`; what lies after is left out.
      num_bins: equal parts of that time.

    Returns:
      For each (lane, stage) with any time in the window, the fraction of each bin that it took: float64 [num_bins].
    """
    shares: dict[tuple[str, str], np.ndarray] = {}
    for span in spans:
        first, last = (min(max((span[end] - start) / (stop - start), 0.0), 1.0) * num_bins for end in ("start", "stop"))
        if first >= last:
            continue
        share = shares.setdefault((span["lane"], span["stage"]), np.zeros(num_bins))
        low, high = int(first), min(int(last), num_bins - 1)
        share[low : high + 1] += 1.0
        share[low] -= first - low
        share[high] -= high + 1 - last
    return shares


def step_ends(spans: Sequence[dict]) -> dict[int, float]:
    """When the learner was done with each of its steps, in seconds."""
    ends: dict[int, float] = {}
    for span in spans:
        if span["lane"] == "learner":
            ends[span["step"]] = max(span["stop"], ends.get(span["step"], 0.0))
    return ends


def close_up(spans: Sequence[dict], num_steps: int) -> tuple[float, float]:
    """Start and stop, in seconds, of so many learner steps in the middle of the run, or of all when there are fewer.

    A step begins where the learner ends the one before; the first one, where anything begins.
    """
    ends = list(step_ends(spans).values())
    first = max(0, (len(ends) - num_steps) // 2)
    last = min(len(ends), first + num_steps) - 1
    return ends[first - 1] if first else min(span["start"] for span in spans), ends[last]


# --- transcripts ---


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of text; `is_mark` when it stands for what cannot be printed, such as `\\x00` for that byte."""

    text: str
    is_mark: bool


@dataclasses.dataclass(frozen=True)
class Passage:
    """Text of one author: the environment (`NO_POLICY`), or one policy version."""

    version: int
    is_trained: bool
    pieces: tuple[Piece, ...]


Turn = tuple[Passage, ...]
"""What the environment said and what the policy answered."""


@dataclasses.dataclass(frozen=True)
class Transcript:
    """One trained trajectory, readable. A long one has two parts, and between them tokens that are left out."""

    request_id: int
    reward: float | None
    versions: tuple[int, ...]  # those that wrote it, oldest first
    num_sampled: int  # tokens that a policy wrote
    parts: tuple[tuple[Turn, ...], ...]
    num_omitted: int


def choose_steps(steps: Sequence[int], number: int) -> list[int]:
    """At most `number` of one or more steps: the first, the last, and evenly between."""
    return [steps[index] for index in sorted({round(share * (len(steps) - 1)) for share in np.linspace(0.0, 1.0, number)})]


def choose_trajectories(arrays: dict[str, np.ndarray]) -> list[int]:
    """Two rows of a learner step, or the only one: of the best reward and of the worst, each with the most versions there are.

    Args:
      arrays: of `rl.ledger.read_step`. A trajectory without a reward comes after all others.
    """
    rewards, rows = arrays["rewards"], range(len(arrays["rewards"]))

    def rank(row: int, sign: float) -> tuple:
        return np.isnan(rewards[row]), sign * np.nan_to_num(rewards[row]), -len(_versions(_tokens_of(arrays, row)[1])), row

    best = min(rows, key=lambda row: rank(row, -1.0), default=None)
    worst = min((row for row in rows if row != best), key=lambda row: rank(row, 1.0), default=None)
    return [row for row in (best, worst) if row is not None]


def transcript(arrays: dict[str, np.ndarray], row: int, max_tokens: int, tokenizer: Tokenizer) -> Transcript:
    """What was said in one trajectory of a learner step, and by whom.

    Args:
      arrays: of `rl.ledger.read_step`.
      row: of the trajectory.
      max_tokens: a longer one keeps its first three quarters of as many, and its last quarter.
      tokenizer: of the policy.
    """
    tokens, versions, trained = _tokens_of(arrays, row)
    num_omitted = max(0, len(tokens) - max_tokens)
    tail = max_tokens // 4 if num_omitted else 0
    parts = [slice(0, len(tokens) - num_omitted - tail), slice(len(tokens) - tail, len(tokens))]
    reward = float(arrays["rewards"][row])
    return Transcript(
        request_id=int(arrays["request_ids"][row]),
        reward=None if np.isnan(reward) else reward,
        versions=_versions(versions),
        num_sampled=int(np.sum(versions != NO_POLICY)),
        parts=tuple(_turns(tokens[part], versions[part], trained[part], tokenizer) for part in parts if part.start < part.stop),
        num_omitted=num_omitted,
    )


def visible(tokens: Sequence[int], tokenizer: Tokenizer) -> tuple[Piece, ...]:
    """Tokens as text in which nothing is invisible: control and formatting characters, bytes that are no UTF-8, special ids."""
    names, size = tokenizer.special_names, tokenizer.vocab_size
    marked: list[tuple[str, bool]] = []
    for is_text, run in itertools.groupby(map(int, tokens), lambda token: token < size and token not in names):
        if is_text:
            marked += map(_visible_character, tokenizer.to_bytes(run).decode("utf-8", errors="surrogateescape"))
        else:
            marked += [(names.get(token, f"<{token}>"), True) for token in run]
    return tuple(Piece("".join(text for text, _ in run), is_mark) for is_mark, run in itertools.groupby(marked, lambda it: it[1]))


def _visible_character(character: str) -> tuple[str, bool]:
    if character == "\n":
        return "\\n\n", True
    if character.isprintable():
        return character, False
    if "\udc80" <= character <= "\udcff":  # surrogateescape: a byte that is no UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}", True
    return character.encode("unicode_escape").decode(), True


def _tokens_of(arrays: dict[str, np.ndarray], row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, policy versions and loss mask of one trajectory."""
    part = slice(int(arrays["offsets"][row]), int(arrays["offsets"][row + 1]))
    return arrays["tokens"][part], arrays["policy_versions"][part], arrays["loss_mask"][part]


def _versions(policy_versions: np.ndarray) -> tuple[int, ...]:
    return tuple(int(version) for version in np.unique(policy_versions) if version != NO_POLICY)


def _turns(tokens: np.ndarray, versions: np.ndarray, trained: np.ndarray, tokenizer: Tokenizer) -> tuple[Turn, ...]:
    """A turn begins where the environment speaks."""
    turns: list[list[Passage]] = []
    by_author = itertools.groupby(range(len(tokens)), lambda index: (int(versions[index]), bool(trained[index])))
    for (version, is_trained), indices in by_author:
        if version == NO_POLICY or not turns:
            turns.append([])
        turns[-1].append(Passage(version, is_trained, visible([tokens[index] for index in indices], tokenizer)))
    return tuple(map(tuple, turns))
