"""Three ways to the old logits: equal bits, whatever is in flight, and what each of them costs."""

import dataclasses
import json
import shutil
import threading
import time

import jax
import numpy as np
import pytest

from models.config import ModelConfig, Precision
from models.sharding import parameter_shardings
from models.transformer import Model
from rl.host_copy import params_digest
from rl.learner import publish_cast
from rl.loop import Schedule
from rl.old_logprobs import GonePolicy, SourceName
from rl.old_logprobs.exact import DedicatedSource, InterruptSource, SnapshotSource
from rl.scorer import Scorer
from rl.snapshots import SnapshotRing, VersionGone
from rl.threads import Interleaving, Repeat, Threads, read_interleaving
from rl.types import NO_POLICY, FinishReason, Trajectory
from tests.tiny import assert_same_weights, rows_of, tiny_config, tiny_loop, tiny_rooms, without_times

MODEL = Model(ModelConfig(vocab_size=32, num_layers=1, d_model=16, d_ff=24, num_heads=2, num_kv_heads=2, head_dim=8,
                          max_length=24))  # fmt: skip
NUM_VERSIONS, NUM_TRAJECTORIES = 5, 200
EXACT = (SourceName.SNAPSHOT, SourceName.DEDICATED, SourceName.INTERRUPT)


def mesh_of(first, count):
    return jax.sharding.Mesh(np.array(jax.devices()[first : first + count]).reshape(1, count, 1), ("data", "fsdp", "tensor"))


def params_of(version, mesh, precision):
    rng = np.random.default_rng(version)
    params = jax.tree.map(lambda leaf: rng.normal(scale=0.4, size=leaf.shape).astype(np.float32), MODEL.shapes)
    return publish_cast(jax.device_put(params, parameter_shardings(MODEL.axes, MODEL.shapes, mesh)), precision)


def make_trajectory(request_id):
    """A prompt, then a few segments of versions that never go back, with what an environment says in between."""
    rng = np.random.default_rng(request_id)
    versions, version = [NO_POLICY] * int(rng.integers(1, 4)), int(rng.integers(3))
    length = rng.integers(6, 25)
    while len(versions) < length:
        versions += [version] * int(rng.integers(1, 6)) + [NO_POLICY] * int(rng.integers(0, 3))
        version = min(version + int(rng.integers(3)), NUM_VERSIONS - 1)
    versions = np.array(versions[:24], np.int32)
    sampled = versions != NO_POLICY
    return Trajectory(
        request_id=request_id, group_id=0, tokens=rng.integers(32, size=len(versions)).astype(np.int32), loss_mask=sampled,
        policy_versions=versions, context_versions=versions, sampler_logprobs=np.where(sampled, -1, np.nan).astype(np.float32),
        turn_starts=np.array([], np.int32), reward=0.0, success=False, finish_reason=FinishReason.LENGTH)  # fmt: skip


TRAJECTORIES = [make_trajectory(request_id) for request_id in range(NUM_TRAJECTORIES)]


def until(trajectory, version):
    """The trajectory as it stood when `version` was about to be replaced; None if it had not begun."""
    later = np.flatnonzero(trajectory.policy_versions > version)
    stop = later[0] if len(later) else len(trajectory)
    if not (trajectory.policy_versions[:stop] >= 0).any():
        return None
    fields = ("tokens", "loss_mask", "policy_versions", "context_versions", "sampler_logprobs")
    return dataclasses.replace(trajectory, **{name: trajectory.__dict__[name][:stop] for name in fields})


def old_logprobs_of(anchored):
    for trajectory, row in zip(anchored.trajectories, anchored.proximal_logprobs, strict=True):
        assert trajectory.old_logprobs is row
        np.testing.assert_array_equal(np.isnan(row), trajectory.policy_versions == NO_POLICY)
    return np.concatenate(anchored.proximal_logprobs)


def three_ways(num_devices, precision, lengths):
    """The old logprobs of all trajectories by each exact source, and their buckets."""
    mesh, other = mesh_of(0, num_devices), mesh_of(4, num_devices)
    options = {"rows_per_device": 4, "lengths": lengths, "temperature": 0.7}
    scorer = Scorer(MODEL, mesh, **options)
    ring = SnapshotRing(NUM_VERSIONS)
    interrupt = InterruptSource(scorer)
    for version in range(NUM_VERSIONS):
        live = params_of(version, mesh, precision)
        ring.put(version, live)
        held = [part for part in (until(trajectory, version) for trajectory in TRAJECTORIES) if part is not None]
        if version < NUM_VERSIONS - 1:
            interrupt.superseding(version, live, held)
    dedicated = DedicatedSource(ring, Scorer(MODEL, other, **options))
    for start in range(0, NUM_TRAJECTORIES, 7):
        dedicated.finished(TRAJECTORIES[start : start + 7])
    sources = {"snapshot": SnapshotSource(ring, scorer), "dedicated": dedicated, "interrupt": interrupt}
    found = {name: source.anchor(TRAJECTORIES, NUM_VERSIONS - 1, live) for name, source in sources.items()}
    dedicated.close()
    return {name: old_logprobs_of(anchored) for name, anchored in found.items()}, {name: a.buckets for name, a in found.items()}


@pytest.mark.parametrize("num_devices", [1, 4])
@pytest.mark.parametrize("precision", [Precision.FLOAT32, Precision.BFLOAT16])
def test_the_three_exact_sources_give_equal_bits(num_devices, precision):
    assert max(len(trajectory.versions) for trajectory in TRAJECTORIES) == NUM_VERSIONS
    found, buckets = three_ways(num_devices, precision, (24,))
    assert np.isfinite(found["snapshot"]).sum() > 1000
    for name in ("dedicated", "interrupt"):
        assert found[name].tobytes() == found["snapshot"].tobytes()
        assert buckets[name] == buckets["snapshot"]


def test_with_several_buckets_too():
    """The bucket is that of the last token of a version, whoever scores and when."""
    found, buckets = three_ways(1, Precision.FLOAT32, (8, 16, 24))
    assert {bucket.length for by_version in buckets["snapshot"] for bucket in by_version.values()} == {8, 16, 24}
    for name in ("dedicated", "interrupt"):
        assert found[name].tobytes() == found["snapshot"].tobytes()


@pytest.fixture(scope="module")
def scorer():
    return Scorer(MODEL, mesh_of(0, 1), rows_per_device=4, lengths=(24,), temperature=0.7)


def make_ring(*versions):
    ring = SnapshotRing(NUM_VERSIONS)
    for version in versions:
        ring.put(version, params_of(version, mesh_of(0, 1), Precision.FLOAT32))
    return ring


def test_interrupt_names_what_it_was_not_told_about(scorer):
    trajectory = next(trajectory for trajectory in TRAJECTORIES if len(trajectory.versions) > 1)
    source = InterruptSource(scorer)
    newest = trajectory.versions[-1]
    words = f"{trajectory.request_id} holds trained tokens of versions \\[{trajectory.versions[0]}"
    with pytest.raises(VersionGone, match=words):
        source.anchor([trajectory], newest, params_of(newest, mesh_of(0, 1), Precision.FLOAT32))


def exact_sources(scorer, ring, gone=GonePolicy.ERROR):
    """Each exact source, when it can know of no version but the ring's."""
    interrupt = InterruptSource(scorer, gone)
    for version in ring.versions:
        interrupt.superseding(version, ring.get(version), TRAJECTORIES)
    yield interrupt
    yield SnapshotSource(ring, scorer, gone)
    dedicated = DedicatedSource(ring, scorer, gone)
    yield dedicated
    dedicated.close()


def test_a_version_that_is_gone_is_an_error(scorer):
    ring = make_ring(1, 2, 3)
    for source in exact_sources(scorer, ring):
        with pytest.raises(VersionGone, match=r"trained tokens of versions \[.*--version-gone"):
            source.anchor(TRAJECTORIES, 3, ring.get(3))


@pytest.mark.parametrize("gone", [GonePolicy.MASK, GonePolicy.DROP])
def test_or_what_holds_its_tokens_leaves_the_loss_and_is_counted(scorer, gone):
    whole, ring = SnapshotSource(make_ring(*range(NUM_VERSIONS)), scorer), make_ring(1, 2, 3)
    expected = [t.old_logprobs for t in whole.anchor(TRAJECTORIES, NUM_VERSIONS - 1, None).trajectories]
    assert whole.cost.gone_trajectories == whole.cost.gone_tokens == 0
    for source in exact_sources(scorer, ring, gone):
        anchored = source.anchor(TRAJECTORIES, 3, ring.get(3))
        num_tokens = 0
        for before, after, old in zip(TRAJECTORIES, anchored.trajectories, expected, strict=True):
            is_gone = np.isin(before.policy_versions, (0, 4))
            left = before.loss_mask & ~(is_gone if gone is GonePolicy.MASK else is_gone.any())
            np.testing.assert_array_equal(after.loss_mask, left)
            np.testing.assert_array_equal(after.policy_versions, before.policy_versions)
            assert after.old_logprobs.tobytes() == np.where(is_gone, np.float32(np.nan), old).tobytes()
            num_tokens += before.loss_mask.sum() - left.sum()
        holders = sum(0 in t.versions or 4 in t.versions for t in TRAJECTORIES)
        assert (source.cost.gone_trajectories, source.cost.gone_tokens) == (holders, num_tokens)
        assert 0 < holders < NUM_TRAJECTORIES


def test_what_a_dedicated_scorer_knows_does_not_depend_on_how_fast_it_was(scorer):
    """A version that is evicted after it was scored is as gone as one that was evicted before."""
    anchored = []
    for is_fast in (True, False):
        ring = make_ring(*range(NUM_VERSIONS))
        source = DedicatedSource(ring, scorer, GonePolicy.MASK)
        if is_fast:
            source.finished(TRAJECTORIES)
            source._waiting.put(None)
            source._thread.join()
        assert ring.evict(keep=NUM_VERSIONS - 1)
        anchored.append(source.anchor(TRAJECTORIES, NUM_VERSIONS - 1, None))
        if not is_fast:
            source.close()
    fast, slow = anchored
    assert fast.buckets == slow.buckets and not any(0 in by_version for by_version in fast.buckets)
    for first, second in zip(fast.trajectories, slow.trajectories, strict=True):
        np.testing.assert_array_equal(first.loss_mask, second.loss_mask)
        assert first.old_logprobs.tobytes() == second.old_logprobs.tobytes()


def test_time_under_way_is_counted_when_it_is_over(scorer):
    source = SnapshotSource(make_ring(0), scorer)
    taken = []

    def slow():
        taken.append(source.take_cost())  # a row of metrics is written meanwhile
        time.sleep(0.05)

    source.timed("score", slow)
    assert taken[0].seconds["score"] == 0.0 and source.take_cost().seconds["score"] >= 0.05


def test_tokens_that_are_not_trained_miss_no_version(scorer):
    ring = make_ring(1, 2, 3, 4)
    aged = [dataclasses.replace(t, loss_mask=t.loss_mask & (t.policy_versions > 0)) for t in TRAJECTORIES]
    for source in exact_sources(scorer, ring):
        for before, after in zip(aged, source.anchor(aged, 4, ring.get(4)).trajectories, strict=True):
            assert after.loss_mask is before.loss_mask and np.isfinite(after.old_logprobs[after.loss_mask]).all()


def test_a_version_goes_from_host_memory_to_where_it_is_wanted(scorer):
    """Whatever the learner's sharding; its devices see nothing of it."""
    params = params_of(0, mesh_of(0, 4), Precision.BFLOAT16)
    ring = SnapshotRing(1)
    ring.put(0, params)
    wanted = Scorer(MODEL, mesh_of(4, 2), rows_per_device=1, lengths=(24,), temperature=1.0).parameter_shardings
    for leaf, expected, sharding in zip(*map(jax.tree.leaves, (ring.get(0, wanted), params, wanted)), strict=True):
        assert leaf.sharding == sharding and leaf.dtype == expected.dtype
        assert np.asarray(leaf).tobytes() == np.asarray(expected).tobytes()


def test_interrupt_forgets_and_remembers(scorer):
    source, again = InterruptSource(scorer), InterruptSource(scorer)
    params = params_of(0, mesh_of(0, 1), Precision.FLOAT32)
    held = [trajectory for trajectory in TRAJECTORIES if trajectory.versions == (0,)]
    source.superseding(0, params, held)
    again.restore(source.state(), params)
    source.forget(held)
    assert source.state()["own"]["scores"] == []
    remembered = old_logprobs_of(again.anchor(held, 1, params))  # of a later version, whose parameters do not matter
    assert remembered.tobytes() == old_logprobs_of(source.anchor(held, 0, params)).tobytes()
    assert again.cost.scored_tokens == 0 and again.state()["own"]["scores"] == []


def test_a_dedicated_scorer_raises_its_thread_s_failure_where_the_learner_waits(scorer, monkeypatch):
    source = DedicatedSource(make_ring(0), scorer)

    def fail(*arguments):
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(scorer, "start", fail)
    trajectory = next(trajectory for trajectory in TRAJECTORIES if 0 in trajectory.versions)
    with pytest.raises(RuntimeError, match="the device is lost"):
        source.anchor([trajectory], 0, None)
    source.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "scorer"]


def test_a_dedicated_scorer_passes_over_what_was_forgotten(scorer):
    ring = make_ring(2)
    source = DedicatedSource(ring, scorer)
    gone = [trajectory for trajectory in TRAJECTORIES if 0 in trajectory.versions][:3]
    kept = [trajectory for trajectory in TRAJECTORIES if trajectory.versions == (2,)][:3]
    hold, get = threading.Event(), ring.get

    def late_get(*arguments):
        assert hold.wait(60)
        return get(*arguments)

    ring.get = late_get
    source.finished(kept[:1])  # the thread is held up by this one
    source.finished(gone)
    source.forget(gone)
    source.finished(kept[1:])
    hold.set()
    assert np.isfinite(old_logprobs_of(source.anchor(kept, 2, None))).any()
    source.close()


# --- in a run ---


def config_of(name, *, schedule=Schedule.LOCKSTEP, **changes):
    config = tiny_config(**changes)
    snapshots = dataclasses.replace(
        config.snapshots,
        old_logprobs=name,
        ring_capacity=1 if name is SourceName.INTERRUPT else 8,
        scorer_devices=1 if name is SourceName.DEDICATED else 0,
    )
    loop = dataclasses.replace(config.loop, schedule=schedule)
    return dataclasses.replace(config, snapshots=snapshots, loop=loop)


def segments_of(run_dir):
    """The ledger's segment rows, but for the source's name and the hashes that come of it."""
    rows = map(json.loads, (run_dir / "ledger" / "segments.jsonl").read_text().splitlines())
    differing = ("source", "hash", "previous")
    return [{name: row[name] for name in row if name not in differing} for row in rows if row["kind"] == "segment"]


@pytest.mark.slow
def test_a_run_with_either_of_them_ends_with_the_same_weights(tmp_path):
    loops = {name: tiny_loop(tmp_path / name.value, config_of(name)) for name in EXACT}
    for name, loop in loops.items():
        loop.run(9)
        rows = rows_of(tmp_path / name.value)
        assert rows[-1]["versions_per_trajectory_max"] == 5 and loop.probe.max_error == 0.0 and loop.probe.num_compared > 100
        assert rows[-1]["ring_versions"] <= (1 if name is SourceName.INTERRUPT else 8)
        loop.finish()
    assert not [thread for thread in threading.enumerate() if thread.name == "scorer"]
    first, *others = loops.values()
    for other in others:
        assert_same_weights(first, other)
    assert segments_of(tmp_path / "snapshot") == segments_of(tmp_path / "dedicated") == segments_of(tmp_path / "interrupt")


@pytest.mark.parametrize("name", [SourceName.SNAPSHOT, *(
    pytest.param(name, marks=pytest.mark.slow)
    for name in (SourceName.DEDICATED, SourceName.INTERRUPT, SourceName.EWMA, SourceName.LAGGED, SourceName.RECOMPUTE))])
def test_scoring_leaves_the_live_parameters_as_they_are(tmp_path, name):
    """Also when the next learner step donates its own weights, and when what is scored lies in the same memory."""
    loop = tiny_loop(tmp_path, config_of(name), devices=(1, 4, 1) if name is SourceName.SNAPSHOT else (1, 1, 1))
    loop.run(6)
    loop.begin_round()
    loop.end_round(loop.roll(1))  # tokens of the newest version

    def facts(params):
        return params_digest(params), [(leaf.sharding, leaf.dtype) for leaf in jax.tree.leaves(params)]

    live, state = loop.live, loop._rooms.learner.train_state
    before = facts(live), facts(state.params), [np.asarray(leaf) for leaf in jax.tree.leaves(state.optimizer)]
    queued = [trajectory for trajectory in loop._unscored() if trajectory.versions]
    loop.source.take_cost()
    if name is SourceName.INTERRUPT:
        loop.source.superseding(loop.version, live, queued)
    else:
        assert len(loop.source.anchor(queued, loop.version, live).proximal_logprobs) == len(queued) > 8
    assert loop.source.take_cost().scored_tokens > 8
    assert (facts(live), facts(state.params)) == before[:2]
    for leaf, expected in zip(jax.tree.leaves(state.optimizer), before[2], strict=True):
        np.testing.assert_array_equal(leaf, expected)
    loop.run(7)  # donates the state, and live was a copy of its own
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    assert facts(live) == before[0]
    loop.finish()


@pytest.mark.slow
def test_an_interrupted_run_in_threads_is_repeated_bit_by_bit(tmp_path):
    config = config_of(SourceName.INTERRUPT)
    config = dataclasses.replace(
        config,
        sampler=dataclasses.replace(config.sampler, sampler_devices=1),
        step=dataclasses.replace(config.step, minibatches=1),
    )
    loop = tiny_loop(tmp_path / "threads", config)
    roll = loop.roll

    def slow_roll(num_steps):  # slower than the learner, so that publishes come between the rounds
        time.sleep(0.1)
        return roll(num_steps)

    loop.roll = slow_roll
    Threads(loop, Interleaving(tmp_path / "threads" / "interleaving.txt")).run(14)
    rows = rows_of(tmp_path / "threads")
    assert max(row["versions_per_trajectory_max"] for row in rows) > 1 and loop.probe.max_error == 0.0
    assert sum(row["seconds_stall"] for row in rows) > 0
    again = tiny_loop(tmp_path / "again", config)
    Repeat(again, read_interleaving(tmp_path / "threads" / "interleaving.txt")).run(14)
    assert_same_weights(loop, again)
    assert without_times(rows) == without_times(rows_of(tmp_path / "again"))


def test_an_interrupted_run_goes_on_as_if_it_had_not_been_stopped(tmp_path):
    """What was scored when its version was replaced is part of the state."""
    straight = tiny_loop(tmp_path / "straight", config_of(SourceName.INTERRUPT))
    straight.run(6)
    state = straight.state()
    assert state["own"]["source"]["scores"]
    straight.run(9)
    straight._rooms.store.wait()
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    resumed = tiny_rooms(tmp_path / "resumed", config_of(SourceName.INTERRUPT))
    resumed.restore(state)
    resumed.run(9)
    assert_same_weights(straight, resumed)
    assert without_times(rows_of(tmp_path / "straight")) == without_times(rows_of(tmp_path / "resumed"))
