"""The audit, by fraud: whatever is changed, removed, moved or added in a finished run is found, and named."""

import json
import shutil

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from rl import ledger as ledger_module
from rl.auditing import check_ledger, check_snapshots, choose_segments, compare
from rl.host_copy import params_digest
from rl.ledger import Ledger, ScoredTrajectory, read_rows, read_step, row_hash
from rl.snapshot_store import SnapshotStore, _manifest_bytes
from rl.types import FinishReason, Trajectory

NAN = float("nan")
VERSIONS = (0, 1, 2)


def params(version):
    return {"layer": {"kernel": jnp.full((8, 4), version, jnp.bfloat16)}, "bias": jnp.array([version, -0.0], jnp.float32)}


def trajectory(request_id, first_version, *, exact=True):
    """Prompt of two, two tokens by one version, one of the environment, three by the next version; the last is not trained."""
    policy_versions = np.array([-1, -1, 0, 0, -1, 1, 1, 1], np.int32)
    sampled = policy_versions >= 0
    policy_versions[sampled] += first_version
    logprobs = np.where(sampled, -np.arange(8.0) - request_id, NAN).astype(np.float32)
    return Trajectory(
        request_id=request_id,
        group_id=request_id // 2,
        tokens=np.arange(8, dtype=np.int32) + 100 * request_id,
        loss_mask=sampled & (np.arange(8) < 7),
        sampler_logprobs=logprobs,
        policy_versions=policy_versions,
        context_versions=policy_versions,
        turn_starts=np.array([2, 5], np.int32),
        reward=1.0,
        success=True,
        finish_reason=FinishReason.ENVIRONMENT,
        old_logprobs=logprobs * np.float32(1.01) if exact else None,
    )


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A finished run: two exact steps of two trajectories, one step of an approximate source, three snapshots."""
    directory = tmp_path_factory.mktemp("run")
    store = SnapshotStore(directory / "snapshots")
    digests = {version: params_digest(params(version)) for version in VERSIONS}
    for version in VERSIONS:
        store.save(version, params(version))
    store.wait()
    ledger = Ledger(directory / "ledger")
    buckets = {version: (1, 8 * (version + 1)) for version in VERSIONS}
    for step in (0, 1):
        scored = [ScoredTrajectory(trajectory(2 * step + member, step), buckets) for member in (0, 1)]
        ledger.record_step(step, step + 1, "snapshot", scored, digests)
        ledger.record_snapshot(step, digests[step])
    ledger.record_step(2, 2, "recompute", [ScoredTrajectory(trajectory(9, 1, exact=False), {})], {})
    ledger.record_snapshot(2, digests[2])
    ledger.close()
    return directory


@pytest.fixture
def run(original, tmp_path):
    shutil.copytree(original, tmp_path / "run")
    return tmp_path / "run"


def audit(run):
    """All failures of both checks."""
    report = check_ledger(run / "ledger")
    return report.failures + check_snapshots(SnapshotStore(run / "snapshots"), report.rows).failures


def write_rows(run, rows):
    (run / "ledger" / "segments.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def forge(run, rows):
    """Rewrites the whole ledger with consistent hashes, as a clever forger would: only the meaning can give it away."""
    previous = ledger_module.FIRST_PREVIOUS
    for row in rows:
        row["previous"] = previous
        row["hash"] = previous = row_hash(row)
    write_rows(run, rows)
    head = {"kind": "head", "rows": len(rows), "hash": previous, "closed": True}
    (run / "ledger" / "head.json").write_text(json.dumps(head))


def forge_arrays(run, step, change):
    """Changes the arrays of a step, and the ledger so that it names the new file."""
    path = run / "ledger" / f"step-{step:06d}.npz"
    arrays = read_step(run / "ledger", step)
    change(arrays)
    np.savez(path, **arrays)
    rows = read_rows(run / "ledger")
    header = next(row for row in rows if row["kind"] == "step" and row["step"] == step)
    header["file_digest"] = ledger_module.hashlib.sha256(path.read_bytes()).hexdigest()
    forge(run, rows)


def segment(rows, step, row, start):
    return next(r for r in rows if r["kind"] == "segment" and (r["step"], r["row"], r["start"]) == (step, row, start))


def test_an_honest_run_has_no_failures(original):
    report = check_ledger(original / "ledger")
    assert report.failures == [] and report.rows == read_rows(original / "ledger")
    counts = (report.num_rows, report.num_steps, report.num_segments, report.num_exact_segments, report.num_snapshots)
    assert counts == (16, 3, 10, 8, 3)
    assert (report.num_trained_tokens, report.num_exact_tokens, report.closed) == (20, 16, True)
    snapshots = check_snapshots(SnapshotStore(original / "snapshots"), report.rows)
    assert snapshots.failures == [] and snapshots.num_snapshots == 3
    assert snapshots.num_files == sum(len(SnapshotStore(original / "snapshots").files(version)) for version in VERSIONS)


def test_a_ledger_that_goes_on_or_was_resumed_has_no_failures(run):
    ledger = Ledger(run / "ledger")
    rows = read_rows(run / "ledger")
    ledger.restore({"rows": 6, "hash": rows[5]["hash"]})
    report = check_ledger(run / "ledger")
    assert report.failures == [] and not report.closed and report.num_steps == 1


@pytest.mark.parametrize(
    "key", ["version", "stop", "request_id", "scored_version", "snapshot_digest", "bucket", "previous", "hash"])
def test_a_changed_row_is_named(run, key):
    rows = read_rows(run / "ledger")
    row = segment(rows, 1, 0, 5)
    row[key] = {"bucket": None, "version": 1, "stop": 7, "request_id": 3, "scored_version": 1}.get(key, "0" * 64)
    write_rows(run, rows)
    name = f"row {rows.index(row) + 1} (step 1, trajectory {row['request_id']}, tokens [5, {row['stop']}))"
    assert any(name in failure for failure in audit(run))


def test_any_flipped_byte_of_the_ledger_is_found(run):
    for name in ("segments.jsonl", "step-000001.npz"):
        path = run / "ledger" / name
        content = path.read_bytes()
        for position in range(0, len(content), 67 if name.endswith("npz") else 211):
            path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
            failures = check_ledger(run / "ledger").failures
            assert any(name in failure for failure in failures), position
        path.write_bytes(content)
    assert audit(run) == []


def test_a_deleted_row_is_found(run):
    rows = read_rows(run / "ledger")
    for number in range(len(rows)):
        write_rows(run, rows[:number] + rows[number + 1 :])
        failures = check_ledger(run / "ledger").failures
        place = f"row {number + 1} (" if number + 1 < len(rows) else "head.json: names 16 rows"
        assert any(place in failure for failure in failures), number


def test_swapped_rows_are_found(run):
    rows = read_rows(run / "ledger")
    rows[2], rows[3] = rows[3], rows[2]
    write_rows(run, rows)
    failures = check_ledger(run / "ledger").failures
    for number in (3, 4, 5):
        assert any(f"row {number} (step 0" in failure and "does not follow the row before it" in failure for failure in failures)


@pytest.mark.parametrize("cut", [1, 40, 2000])
def test_a_truncated_tail_is_found(run, cut):
    path = run / "ledger" / "segments.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    assert any("head.json: names 16 rows" in failure or "row 16: this is no row" in failure for failure in audit(run))


def test_a_tail_cut_at_a_step_is_found_by_head_and_by_the_arrays_left(run):
    rows = read_rows(run / "ledger")
    write_rows(run, rows[:12])
    failures = check_ledger(run / "ledger").failures
    assert any("head.json: names 16 rows" in failure and "has 12 rows" in failure for failure in failures)
    assert any("step-000002.npz: no row names this file" in failure for failure in failures)


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{}", b'{"rows": 16}'])
def test_a_damaged_head_is_found(run, content):
    path = run / "ledger" / "head.json"
    path.unlink() if content is None else path.write_bytes(content)
    assert [failure for failure in audit(run) if "head.json: missing or damaged" in failure]


def test_a_missing_ledger_is_found(tmp_path):
    assert any("head.json: missing" in failure for failure in check_ledger(tmp_path).failures)


def test_missing_and_stray_arrays_are_named(run):
    path = run / "ledger" / "step-000001.npz"
    path.rename(run / "ledger" / "step-000007.npz")
    failures = check_ledger(run / "ledger").failures
    assert any("step-000001.npz: missing" in failure for failure in failures)
    assert any("step-000007.npz: no row names this file" in failure for failure in failures)


@pytest.mark.parametrize(
    ("name", "position", "value", "message"),
    [
        ("tokens", 8 + 5, 1, "step 1, trajectory 3, tokens [5, 8): a token was changed"),
        ("tokens", 8 + 4, 1, "step 1, trajectory 3, tokens [5, 8): a token of the context was changed"),
        ("tokens", 0, 1, "step 1, trajectory 2, tokens [2, 4): a token of the context was changed"),
        ("old_logprobs", 8 + 2, -0.5, "step 1, trajectory 3, tokens [2, 4): an old logprob was changed"),
        ("policy_versions", 6, 1, "step 1, trajectory 2, tokens [5, 8): policy version 2, but the tokens were sampled by [1, 2]"),
        ("loss_mask", 4, True, "step 1, trajectory 2: 1 trained tokens are not in exactly one segment row; the first is token 4"),
        ("request_ids", 0, 5, "step 1, trajectory 2, tokens [2, 4): row 0 of the arrays is trajectory 5"),
        ("exact", 1, False, "step 1, trajectory 3, tokens [2, 4): scored with version 1, but the arrays hold no old logprobs"),
    ],
)
def test_changed_arrays_are_named_even_if_the_ledger_was_forged_with_them(run, name, position, value, message):
    def change(arrays):
        arrays[name][position] = value

    forge_arrays(run, 1, change)
    assert any(message in failure for failure in audit(run)), audit(run)


def test_changed_arrays_are_named_by_file_and_by_segment(run):
    arrays = read_step(run / "ledger", 0)
    arrays["tokens"][3] = 77
    np.savez(run / "ledger" / "step-000000.npz", **arrays)
    failures = audit(run)
    assert any("step-000000.npz: was changed: SHA-256" in failure for failure in failures)
    assert any("step 0, trajectory 0, tokens [2, 4): a token was changed" in failure for failure in failures)


def test_changed_sampler_logprobs_are_found_by_the_digest_of_the_file(run):
    arrays = read_step(run / "ledger", 0)
    arrays["sampler_logprobs"][3] += 1
    np.savez(run / "ledger" / "step-000000.npz", **arrays)
    assert any("step-000000.npz: was changed: SHA-256" in failure for failure in audit(run))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scored_version": 2}, "sampled by version 1, but scored with version 2"),
        ({"version": 2, "scored_version": 2}, "policy version 2, but the tokens were sampled by [1]"),
        ({"scored_version": None, "bucket": None, "snapshot_digest": None, "old_logprobs_digest": None},
         "trained under an exact source, but not scored"),
        ({"bucket": None}, "a scored segment has a snapshot digest, an old-logprob digest and a bucket"),
        ({"snapshot_digest": None}, "a scored segment has a snapshot digest"),
        ({"stop": 3}, "1 trained tokens are not in exactly one segment row; the first is token 3, in 0"),
        ({"stop": 9}, "there are no such tokens in row 0"),
        ({"start": -1}, "there are no such tokens in row 0"),
        ({"row": 2}, "there are no such tokens in row 2"),
        ({"row": -1}, "there are no such tokens in row -1"),
        ({"source": "sampler"}, "source sampler, but that of the step is snapshot"),
        ({"learner_version": 7}, "learner version differs from 2"),
        ({"learner_version": 0}, "policy version 1 at learner version 0"),
        ({"step": 5}, "step 5: it has segment rows, but no row that digests its arrays"),
        ({"version": "1"}, "this is no row"),
        ({"extra": 1}, "this is no row"),
        ({"kind": "segments"}, "this is no row"),
    ],
)
def test_a_forged_segment_row_is_found_by_its_meaning(run, changes, message):
    rows = read_rows(run / "ledger")
    segment(rows, 1, 0, 2).update(changes)
    forge(run, rows)
    assert any(message in failure for failure in audit(run)), audit(run)


def test_a_segment_twice_or_not_at_all_is_found_in_a_forged_chain(run):
    rows = read_rows(run / "ledger")
    row = segment(rows, 0, 1, 5)
    forge(run, [*rows, dict(row)])
    message = "step 0, trajectory 1: 2 trained tokens are not in exactly one segment row; the first is token 5, in "
    assert message + "2" in audit(run)
    rows.remove(row)
    forge(run, rows)
    assert message + "0" in audit(run)


def test_a_second_row_for_a_step_is_found(run):
    rows = read_rows(run / "ledger")
    forge(run, [*rows, dict(rows[0])])
    assert "step 0: a second row for this step" in audit(run)


def test_every_file_of_a_persisted_snapshot_is_guarded(run):
    store = SnapshotStore(run / "snapshots")
    rows = read_rows(run / "ledger")
    for path in sorted(path for path in store.path(1).rglob("*") if path.is_file()):
        content = path.read_bytes()
        middle = len(content) // 2
        name = path.relative_to(store.path(1)).as_posix()
        damages = {"appended": content + b"x"}
        if content:
            damages |= {"flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]}
        for damage, damaged in damages.items():
            path.write_bytes(damaged)
            failures = check_snapshots(store, rows).failures
            assert any(f"version 1 at {store.path(1)}" in failure and name in failure for failure in failures), (name, damage)
        path.unlink()
        failures = check_snapshots(store, rows).failures
        assert any(f"snapshot version 1 at {store.path(1)}" in failure and "missing" in failure for failure in failures), name
        path.write_bytes(content)
    (store.path(1) / "keyframe" / "state" / "stray").touch()
    stray = f"snapshot version 1 at {store.path(1)}: keyframe/state/stray"
    assert [f"{stray} is there, but the manifest does not name it"] == audit(run)


def test_missing_and_unrecorded_snapshots_are_named(run):
    store = SnapshotStore(run / "snapshots")
    shutil.rmtree(store.path(0))
    store.save(6, params(6))
    store.wait()
    failures = audit(run)
    assert any("snapshot version 0 at" in failure and "is missing" in failure for failure in failures)
    assert f"snapshot version 6 at {store.path(6)}: no row of the ledger names it" in failures


def test_segments_scored_with_another_snapshot_are_found(run):
    rows = read_rows(run / "ledger")
    segment(rows, 1, 0, 2)["snapshot_digest"] = "f" * 64
    forge(run, rows)
    failure, = audit(run)
    assert failure.startswith("snapshot version 1: the ledger names different digests: ")
    assert f"{'f' * 64} in step 1, trajectory 2, tokens [2, 4)" in failure


def test_a_snapshot_that_was_replaced_with_its_manifest_is_found(run):
    store = SnapshotStore(run / "snapshots")
    shutil.rmtree(store.path(1))
    store.save(1, params(5))
    store.wait()
    assert any("its manifest names digest" in failure for failure in audit(run))


def test_values_that_a_forged_manifest_vouches_for_are_found(run):
    """Files and manifest agree with each other and the manifest with the ledger: only the values tell."""
    store = SnapshotStore(run / "snapshots")
    digest = store.digest(1)
    shutil.rmtree(store.path(1))
    store.save(1, params(5))
    store.wait()
    (store.path(1) / "manifest.json").write_bytes(
        _manifest_bytes({"version": 1, "digest": digest, "frozen": [], "depth": 0, "base": None, "files": store.files_now(1)})
    )
    assert store.digest(1) == digest
    assert any("snapshot version 1" in failure and "gave values of digest" in failure for failure in audit(run))


def test_segments_to_replay_are_drawn_by_seed_from_those_that_can_be(original):
    rows = read_rows(original / "ledger")
    everything = choose_segments(rows, VERSIONS, 100, 0)
    assert everything == [row for row in rows if row["kind"] == "segment" and row["step"] < 2]
    assert {row["scored_version"] for row in choose_segments(rows, [1], 100, 0)} == {1}
    assert choose_segments(rows, [], 3, 0) == [] == choose_segments(rows, VERSIONS, 0, 0)
    draws = [choose_segments(rows, VERSIONS, 3, seed) for seed in range(20)]
    assert draws == [choose_segments(rows, VERSIONS, 3, seed) for seed in range(20)]
    assert all(len(draw) == 3 and draw == sorted(draw, key=rows.index) for draw in draws)
    assert all(row in sum(draws, []) for row in everything)
    with pytest.raises(ValueError, match="-1 segments to replay"):
        choose_segments(rows, VERSIONS, -1, 0)


def floats(*patterns):
    return np.array(patterns, np.uint32).view(np.float32)


def test_compare_counts_bits_and_measures_nats():
    one, payload, nan, negative_zero = 0x3F800000, 0x7FC00001, 0x7FC00000, 0x80000000
    same = compare(floats(one, payload, negative_zero), floats(one, payload, negative_zero))
    assert (same.num_tokens, same.num_mismatches, same.max_error) == (3, 0, 0.0)
    zeros = compare(floats(0), floats(negative_zero))
    assert (zeros.num_mismatches, zeros.max_error) == (1, 0.0)
    near = compare(np.array([-1.0, -2.0, -3.0], np.float32), np.array([-1.0, -2.5, -3.25], np.float32))
    assert (near.num_tokens, near.num_mismatches, near.max_error) == (3, 2, 0.5)
    for recorded, replayed in [((nan,), (payload,)), ((one,), (nan,)), ((0xFF800000,), (one,))]:
        assert compare(floats(*recorded), floats(*replayed)).max_error == float("inf")
    assert compare(np.zeros(0, np.float32), np.zeros(0, np.float32)).max_error == 0.0


def test_compare_refuses_other_shapes_and_dtypes():
    with pytest.raises(ValueError, match=r"replayed old logprobs are float32 \(2,\), wanted float32 \(3,\)"):
        compare(np.zeros(3, np.float32), np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="recorded old logprobs are float64"):
        compare(np.zeros(3), np.zeros(3, np.float32))


@hypothesis.given(
    hypothesis.extra.numpy.arrays(np.uint32, st.tuples(st.integers(0, 4), st.just(2)), elements=st.integers(0, 2**32 - 1)))
@hypothesis.settings(max_examples=50, deadline=None)
def test_compare_agrees_with_bytes(patterns):
    recorded, replayed = patterns.view(np.float32).T  # strided, too
    mismatches = sum(a.tobytes() != b.tobytes() for a, b in zip(recorded, replayed, strict=True))
    assert compare(recorded, replayed).num_mismatches == mismatches
