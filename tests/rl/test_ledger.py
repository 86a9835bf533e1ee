"""The ledger: what a row says, that rows are chained, and that a run can stop anywhere and go on."""

import hashlib
import json

import numpy as np
import pytest

from rl.ledger import FIRST_PREVIOUS, Ledger, ScoredTrajectory, logprobs_digest, read_rows, read_step, row_hash, tokens_digest
from rl.types import FinishReason, Trajectory

NAN = float("nan")


def trajectory(request_id=7, *, exact=True, reward=1.0):
    """Prompt of two, two tokens by version 3, one by version 4, one of the environment, one by version 4 that is not trained."""
    return Trajectory(
        request_id=request_id,
        group_id=2,
        tokens=np.array([10, 11, 12, 13, 14, 15, 16], np.int32) + request_id,
        loss_mask=np.array([0, 0, 1, 1, 1, 0, 0], bool),
        sampler_logprobs=np.array([NAN, NAN, -1, -2, -3, NAN, -4], np.float32),
        policy_versions=np.array([-1, -1, 3, 3, 4, -1, 4], np.int32),
        context_versions=np.array([-1, -1, 3, 3, 3, -1, 4], np.int32),
        turn_starts=np.array([2, 6], np.int32),
        reward=reward,
        success=True,
        finish_reason=FinishReason.ENVIRONMENT,
        old_logprobs=np.array([NAN, NAN, -1.5, -0.0, -3.5, NAN, -4.5], np.float32) if exact else None,
    )


BUCKETS = {3: (1, 8), 4: (2, 16)}
DIGESTS = {3: "three", 4: "four"}


def record(ledger, step=0, trajectories=None):
    scored = [ScoredTrajectory(item, BUCKETS) for item in trajectories or [trajectory()]]
    ledger.record_step(step, 5, "snapshot", scored, DIGESTS)


def sha256(array):
    return hashlib.sha256(array.tobytes()).hexdigest()


def test_a_row_says_what_a_segment_was_anchored_to(tmp_path):
    record(Ledger(tmp_path), 12, [trajectory(1), trajectory(7)])
    rows = read_rows(tmp_path)
    assert [row["kind"] for row in rows] == ["step"] + ["segment"] * 6
    tokens = np.array([17, 18, 19, 20, 21, 22, 23], "<i4")
    assert rows[4] == {
        "kind": "segment",
        "step": 12,
        "learner_version": 5,
        "source": "snapshot",
        "request_id": 7,
        "row": 1,
        "start": 2,
        "stop": 4,
        "version": 3,
        "scored_version": 3,
        "context_digest": sha256(tokens[:2]),
        "tokens_digest": sha256(tokens[2:4]),
        "snapshot_digest": "three",
        "old_logprobs_digest": sha256(np.array([-1.5, -0.0], "<f4")),
        "bucket": {"rows": 1, "length": 8},
        "previous": rows[3]["hash"],
        "hash": rows[4]["hash"],
    }
    assert [(row["start"], row["stop"], row["version"], row["bucket"]) for row in rows[5:]] == [
        (4, 5, 4, {"rows": 2, "length": 16}),
        (6, 7, 4, {"rows": 2, "length": 16}),
    ]
    assert rows[0]["file"] == "step-000012.npz" and rows[0]["trajectories"] == 2
    assert rows[0]["file_digest"] == hashlib.sha256((tmp_path / "step-000012.npz").read_bytes()).hexdigest()


def test_a_source_that_is_not_exact_anchors_to_no_snapshot(tmp_path):
    Ledger(tmp_path).record_step(0, 5, "recompute", [ScoredTrajectory(trajectory(exact=False), BUCKETS)], {})
    for row in read_rows(tmp_path)[1:]:
        assert row["version"] in (3, 4)
        assert [row[key] for key in ("scored_version", "snapshot_digest", "old_logprobs_digest", "bucket")] == [None] * 4


def test_rows_are_chained_by_the_hash_of_their_canonical_json(tmp_path):
    ledger = Ledger(tmp_path)
    record(ledger)
    ledger.record_snapshot(4, "four")
    ledger.close()
    previous = FIRST_PREVIOUS
    for row in read_rows(tmp_path):
        content = {key: value for key, value in row.items() if key != "hash"}
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        assert row["previous"] == previous and row["hash"] == hashlib.sha256(canonical).hexdigest() == row_hash(row)
        previous = row["hash"]
    assert json.loads((tmp_path / "head.json").read_text()) == {"kind": "head", "rows": 5, "hash": previous, "closed": True}
    assert row["kind"] == "snapshot" and row["version"] == 4 and row["digest"] == "four"


def test_the_head_follows_every_write(tmp_path):
    ledger = Ledger(tmp_path)
    for step in range(3):
        record(ledger, step)
        rows = read_rows(tmp_path)
        expected = {"kind": "head", "rows": 4 * (step + 1), "hash": rows[-1]["hash"], "closed": False}
        assert json.loads((tmp_path / "head.json").read_text()) == expected
    assert not list(tmp_path.glob("*.tmp"))


def test_the_arrays_of_a_step_can_be_read_back(tmp_path):
    items = [trajectory(1), trajectory(7, exact=False, reward=None)]
    record(Ledger(tmp_path), 3, items)
    arrays = read_step(tmp_path, 3)
    assert arrays["offsets"].tolist() == [0, 7, 14]
    assert arrays["request_ids"].tolist() == [1, 7] and arrays["group_ids"].tolist() == [2, 2]
    assert arrays["exact"].tolist() == [True, False]
    np.testing.assert_array_equal(arrays["rewards"], [1.0, NAN])
    for name in ("tokens", "loss_mask", "policy_versions", "context_versions", "sampler_logprobs"):
        for row, item in enumerate(items):
            part = arrays[name][7 * row : 7 * row + 7]
            assert part.dtype == item.__dict__[name].dtype and part.tobytes() == item.__dict__[name].tobytes()
    assert arrays["old_logprobs"][:7].tobytes() == items[0].old_logprobs.tobytes()
    assert np.isnan(arrays["old_logprobs"][7:]).all()


def test_a_step_without_trajectories_is_recorded(tmp_path):
    Ledger(tmp_path).record_step(0, 0, "snapshot", [], {})
    assert [row["trajectories"] for row in read_rows(tmp_path)] == [0]
    assert read_step(tmp_path, 0)["tokens"].dtype == np.int32


def test_digests_count_every_bit():
    assert tokens_digest(np.array([1, 2])) == sha256(np.array([1, 2], "<i4"))
    assert tokens_digest(np.arange(8)[::2]) == tokens_digest(np.array([0, 2, 4, 6]))
    payloads = np.array([0x7FC00000, 0x7FC00001, 0xFFC00000, 0, 0x80000000], np.uint32).view(np.float32)
    assert len({logprobs_digest(payloads[index : index + 1]) for index in range(5)}) == 5


def test_a_trained_token_without_its_snapshot_is_refused_and_nothing_is_written(tmp_path):
    ledger = Ledger(tmp_path)
    with pytest.raises(ValueError, match=r"trajectory 7: tokens \[4, 5\) are trained, but their version 4 was not scored"):
        ledger.record_step(0, 5, "snapshot", [ScoredTrajectory(trajectory(), {3: (1, 8)})], DIGESTS)
    with pytest.raises(ValueError, match=r"version 4 was scored, but snapshot digests were given for \[3\] only"):
        ledger.record_step(0, 5, "snapshot", [ScoredTrajectory(trajectory(), BUCKETS)], {3: "three"})
    assert list(tmp_path.iterdir()) == []


def test_an_untrained_version_need_not_be_scored(tmp_path):
    item = trajectory()
    item.loss_mask[4] = False
    Ledger(tmp_path).record_step(0, 5, "snapshot", [ScoredTrajectory(item, {3: (1, 8)})], DIGESTS)
    assert [row["scored_version"] for row in read_rows(tmp_path)[1:]] == [3, None, None]


def test_steps_increase_and_snapshots_are_recorded_once(tmp_path):
    ledger = Ledger(tmp_path)
    record(ledger, 4)
    for step in (4, 3):
        with pytest.raises(ValueError, match=f"step {step} recorded after step 4"):
            record(ledger, step)
    ledger.record_snapshot(2, "two")
    assert ledger.snapshots == {2}
    with pytest.raises(ValueError, match="snapshot version 2 is in the ledger already"):
        ledger.record_snapshot(2, "two")


def test_another_runs_ledger_is_not_written_to(tmp_path):
    record(Ledger(tmp_path))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other = Ledger(tmp_path)
    calls = [lambda: record(other, 9), lambda: other.record_snapshot(0, ""), other.close]
    for call in calls:
        with pytest.raises(ValueError, match="holds the rows of another run, wanted none; resume that run, or choose another"):
            call()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("crash", ["none", "torn row", "arrays without rows", "rows without head"])
def test_a_resumed_ledger_is_the_ledger_of_a_run_that_never_stopped(tmp_path, crash):
    straight = Ledger(tmp_path / "straight")
    for step in range(4):
        record(straight, step)
        if step == 1:
            straight.record_snapshot(3, "three")
    straight.close()

    stopped = Ledger(tmp_path / "stopped")
    record(stopped, 0)
    record(stopped, 1)
    stopped.record_snapshot(3, "three")
    state = json.loads(json.dumps(stopped.state()))
    head = (tmp_path / "stopped" / "head.json").read_bytes()
    record(stopped, 2, [trajectory(99)])
    stopped.record_snapshot(4, "four")
    if crash == "torn row":
        rows = tmp_path / "stopped" / "segments.jsonl"
        rows.write_bytes(rows.read_bytes()[:-30])
    elif crash == "arrays without rows":
        (tmp_path / "stopped" / "step-000003.npz").write_bytes(b"half")
        (tmp_path / "stopped" / "step-000004.npz.tmp").write_bytes(b"half")
    elif crash == "rows without head":
        (tmp_path / "stopped" / "head.json").write_bytes(head)

    resumed = Ledger(tmp_path / "stopped")
    resumed.restore(state)
    assert resumed.snapshots == {3} and resumed.state() == state
    assert json.loads((tmp_path / "stopped" / "head.json").read_text())["rows"] == state["rows"]
    with pytest.raises(ValueError, match="step 1 recorded after step 1"):
        record(resumed, 1)
    record(resumed, 2)
    record(resumed, 3)
    resumed.close()
    straight_files, resumed_files = (
        {path.name: path.read_bytes() for path in (tmp_path / side).iterdir()} for side in ("straight", "stopped"))
    assert straight_files == resumed_files
    assert resumed.state()["rows"] == straight.state()["rows"] == 17


def test_restore_refuses_another_position(tmp_path):
    ledger = Ledger(tmp_path)
    record(ledger)
    state = ledger.state()
    for wrong in ({**state, "rows": 3}, {**state, "rows": 5}, {**state, "hash": FIRST_PREVIOUS}):
        with pytest.raises(ValueError, match=r"has 4 rows and hash .*, wanted hash .* at row \d; resume from the checkpoint"):
            Ledger(tmp_path).restore(wrong)
    with pytest.raises(ValueError, match="has 0 rows"):
        Ledger(tmp_path / "empty").restore(state)
    assert len(read_rows(tmp_path)) == 4
    fresh = Ledger(tmp_path / "fresh")
    fresh.restore(Ledger(tmp_path / "new").state())
    record(fresh)


def test_restore_to_the_beginning_starts_anew(tmp_path):
    state = Ledger(tmp_path).state()
    record(Ledger(tmp_path))
    ledger = Ledger(tmp_path)
    ledger.restore(state)
    assert not list(tmp_path.glob("step-*")) and read_rows(tmp_path) == []
    record(ledger)
