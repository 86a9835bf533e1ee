"""What a report shows of a run: nothing that matters is lost by making it small."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from models.tokenizer import ByteTokenizer, SubwordTokenizer
from rl.reporting import (
    Passage,
    Piece,
    asynchrony,
    choose_steps,
    choose_trajectories,
    close_up,
    column,
    dropped_groups,
    occupancy,
    step_ends,
    thin,
    throughput,
    transcript,
    visible,
)
from rl.types import NO_POLICY
from tests.chat import IM_END, train_tokenizer

BYTES = ByteTokenizer()
POINTS = st.lists(st.none() | st.floats(-10, 10), min_size=1, max_size=300)


def row(**metrics) -> dict:
    return {"skipped_publishes": 0, "dropped_stale": 0, "trajectories": 1, "tokens_trained": 1, **metrics}


def test_a_column_has_none_where_a_row_lacks_the_metric():
    assert column([{"loss": 1.0}, {"loss": None}, {}], "loss") == [1.0, None, None]


def test_asynchrony_weighs_each_step_by_what_it_trained():
    rows = [
        row(fraction_multi_version=0.5, staleness_mean=1.0, staleness_max=2.0, trajectories=2, tokens_trained=10),
        row(fraction_multi_version=1.0, staleness_mean=3.0, staleness_max=4.0, trajectories=6, tokens_trained=30),
        row(fraction_multi_version=None, staleness_mean=None, staleness_max=None, trajectories=2, tokens_trained=0),
    ]
    rows[-1]["dropped_stale"] = 5
    assert asynchrony(rows) == {
        "fraction_multi_version": pytest.approx(0.7),
        "staleness_mean": pytest.approx(2.5),
        "staleness_max": 4.0,
        "trajectories_trained": 10,
        "skipped_publishes": 0,
        "dropped_stale": 5,
    }


def test_throughput_is_over_the_time_that_a_stage_was_at_work_and_leaves_the_first_step_out():
    def step(generated, scored, trajectories, *, rollout, fetch=0.0, score=0.0, train):
        return row(tokens_generated=generated, scored_tokens=scored, trajectories=trajectories, trajectory_tokens_mean=10.0,
                   seconds_rollout=rollout, seconds_fetch=fetch, seconds_score=score, seconds_train=train)

    rows = [step(1000, 1000, 100, rollout=60, fetch=1, score=9, train=90), step(30, 8, 2, rollout=1, fetch=1, score=3, train=4),
            step(10, 0, 6, rollout=3, train=16)]
    assert throughput(rows) == {"sampling_tokens_per_second": 10, "replay_tokens_per_second": 2, "training_tokens_per_second": 4}
    assert throughput(rows[:1])["sampling_tokens_per_second"] == 1000 / 60
    assert throughput(rows[2:])["replay_tokens_per_second"] is None


def test_dropped_groups_are_counted_over_all_reasons():
    assert dropped_groups({"dropped_groups_stale": 2, "dropped_groups_timeout": 3, "dropped_stale": 100}) == 5


def test_a_short_run_keeps_every_point():
    assert thin([[1.0, None, 2.0]], 3) == [0, 1, 2]


@hypothesis.given(POINTS, st.integers(1, 20))
@hypothesis.example([1.0, 0.0, 2.0, 1.0], 1)
def test_thinning_keeps_ends_extremes_and_gaps_and_stays_small(points, num_bins):
    columns = [points, [None if value is None else -value * value for value in points]]
    kept = thin(columns, num_bins)
    assert kept == sorted(set(kept))
    assert kept[0] == 0 and kept[-1] == len(points) - 1
    assert len(kept) <= max(num_bins, 4 * len(columns) * num_bins + 2)
    for values in columns:
        present, shown = ([value for value in some if value is not None] for some in (values, [values[i] for i in kept]))
        assert [min(shown, default=None), max(shown, default=None)] == [min(present, default=None), max(present, default=None)]
        # No two points that are drawn as neighbours have a gap between them, of which nothing is left.
        for left, right in zip(kept, kept[1:], strict=False):
            if values[left] is not None and values[right] is not None:
                assert None not in values[left:right]


def span(lane, stage, start, stop, step=1) -> dict:
    return {"step": step, "lane": lane, "stage": stage, "start": start, "stop": stop}


def test_occupancy_is_the_share_of_each_bin():
    spans = [span("sampler", "rollout", 0.0, 1.5), span("learner", "train", 1.25, 1.5), span("learner", "train", 9.0, 9.5)]
    shares = occupancy(spans, 0.0, 4.0, 4)
    assert shares.keys() == {("sampler", "rollout"), ("learner", "train")}
    assert shares["sampler", "rollout"].tolist() == [1.0, 0.5, 0.0, 0.0]
    assert shares["learner", "train"].tolist() == [0.0, 0.25, 0.0, 0.0]


@hypothesis.given(st.lists(st.floats(0, 100), min_size=2, max_size=40), st.floats(0, 50), st.floats(1, 60), st.integers(1, 50))
def test_occupancy_loses_no_time(times, start, length, num_bins):
    times, stop = sorted(times), start + length
    spans = [span("learner", "train", *pair) for pair in zip(times[::2], times[1::2], strict=False)]
    share = sum(occupancy(spans, start, stop, num_bins).values(), np.zeros(num_bins))
    inside = sum(max(0.0, min(s["stop"], stop) - max(s["start"], start)) for s in spans)
    assert share.sum() * length / num_bins == pytest.approx(inside, abs=1e-6)
    assert share.min() >= -1e-6 and share.max() <= 1 + 1e-6


def steps_of(number: int) -> list[dict]:
    stages = ("learner", "train", 0.4, 0.8), ("learner", "publish", 0.8, 0.9), ("sampler", "rollout", 0.0, 0.95)
    return [span(lane, stage, step + start, step + stop, step + 1)
            for step in range(number) for lane, stage, start, stop in stages]  # fmt: skip


def test_the_close_up_is_of_whole_steps_in_the_middle():
    spans = steps_of(10)
    assert step_ends(spans) == {step: pytest.approx(step - 0.1) for step in range(1, 11)}
    assert close_up(spans, 4) == (pytest.approx(2.9), pytest.approx(6.9))
    assert close_up(spans[3:], 20) == (1.0, pytest.approx(9.9))
    assert close_up(spans[:3], 4) == (0.0, 0.9)


@pytest.mark.parametrize(("steps", "chosen"), [([7], [7]), ([1, 2], [1, 2]), ([1, 2, 4, 8, 9], [1, 4, 9])])
def test_transcripts_come_from_early_middle_and_late_steps(steps, chosen):
    assert choose_steps(steps, 3) == chosen


def arrays_of(*trajectories: tuple[list[int], list[int], float]) -> dict[str, np.ndarray]:
    """Of (tokens, policy versions, reward); the tokens of version 0 are not trained."""
    tokens, versions = ([entry for it in trajectories for entry in it[part]] for part in (0, 1))
    return {
        "offsets": np.cumsum([0, *(len(it[0]) for it in trajectories)]),
        "request_ids": np.arange(len(trajectories)) + 100,
        "rewards": np.array([it[2] for it in trajectories], np.float64),
        "tokens": np.array(tokens, np.int32),
        "policy_versions": np.array(versions, np.int32),
        "loss_mask": np.array(versions, np.int32) > 0,
    }


def test_the_best_and_the_worst_are_shown_and_of_those_the_most_interrupted():
    one, two = ([65, 66, 67], [-1, 1, 1]), ([65, 66, 67], [-1, 1, 2])
    arrays = arrays_of((*one, 0.0), (*two, 0.0), (*one, 1.0), (*two, 1.0), (*two, 0.5), (*two, np.nan))
    assert choose_trajectories(arrays) == [3, 1]
    assert choose_trajectories(arrays_of((*one, 0.0))) == [0]
    assert choose_trajectories(arrays_of((*one, np.nan), (*one, 0.0))) == [1, 0]
    assert choose_trajectories(arrays_of((*one, 1.0), (*one, 1.0))) == [0, 1]


def test_a_transcript_tells_authors_apart():
    tokens = [ByteTokenizer.bos, *b"go>", *b"LL", *b"ok>", *b"RRU"]
    versions = [-1] * 4 + [0, 3] + [-1] * 3 + [3, 3, 4]
    shown = transcript(arrays_of(([1], [-1], 0.0), (tokens, versions, -1.5)), 1, 100, BYTES)
    assert (shown.request_id, shown.reward, shown.versions, shown.num_sampled, shown.num_omitted) == (101, -1.5, (0, 3, 4), 5, 0)
    assert shown.parts == ((
        (
            Passage(NO_POLICY, False, (Piece("<bos>", True), Piece("go>", False))),
            Passage(0, False, (Piece("L", False),)),
            Passage(3, True, (Piece("L", False),)),
        ),
        (
            Passage(NO_POLICY, False, (Piece("ok>", False),)),
            Passage(3, True, (Piece("RR", False),)),
            Passage(4, True, (Piece("U", False),)),
        ),
    ),)  # fmt: skip


def test_a_transcript_without_reward_says_none():
    assert transcript(arrays_of(([65], [-1], np.nan)), 0, 10, BYTES).reward is None


@pytest.mark.parametrize(("length", "head", "tail"), [(8, 8, 0), (9, 6, 2), (1000, 6, 2)])
def test_a_long_transcript_loses_its_middle(length, head, tail):
    tokens = [65 + index % 26 for index in range(length)]
    shown = transcript(arrays_of((tokens, [1] * length, 0.0)), 0, 8, BYTES)
    texts = ["".join(piece.text for turn in part for passage in turn for piece in passage.pieces) for part in shown.parts]
    text = "".join(map(chr, tokens))
    assert texts == [text[:head], text[len(text) - tail :]][: 1 + bool(tail)]
    assert shown.num_omitted == length - head - tail


def test_nothing_in_a_text_is_invisible():
    tokens = [*"a\x00\x1b\u202e\u00a0é漢\t\n".encode(), 0xFF, ByteTokenizer.eos, ByteTokenizer.pad, 999]
    assert visible(tokens, BYTES) == (
        Piece("a", False), Piece("\\x00\\x1b\\u202e\\xa0", True), Piece("é漢", False),
        Piece("\\t\\n\n\\xff<eos><pad><999>", True),
    )  # fmt: skip


def test_a_models_own_tokens_are_shown_by_their_names_and_bytes():
    tokenizer = SubwordTokenizer(train_tokenizer())
    tokens = [*tokenizer.encode("hello\n漢"), *tokenizer.encode("漢")[:1], IM_END, tokenizer.vocab_size]
    assert visible(tokens, tokenizer) == (
        Piece("hello", False), Piece("\\n\n", True), Piece("漢", False), Piece(f"\\xe6<|im_end|><{tokenizer.vocab_size}>", True),
    )  # fmt: skip


@hypothesis.given(st.binary())
def test_every_byte_is_shown(data):
    pieces = visible(data, BYTES)
    assert all(character.isprintable() or character == "\n" and piece.is_mark for piece in pieces for character in piece.text)
    printed = "".join(piece.text for piece in pieces if not piece.is_mark)
    assert printed == "".join(filter(str.isprintable, data.decode(errors="ignore")))
