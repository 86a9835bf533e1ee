"""Both sides at once: nothing is lost or waits in vain, and the recorded order gives the same bits in one thread."""

import dataclasses
import threading
import time

import pytest

from rl.loop import RingFullPolicy
from rl.threads import Interleaving, Operation, Repeat, Threads, read_interleaving
from tests.tiny import assert_same_weights, rows_of, tiny_config, tiny_loop, tiny_rooms, without_times


def threaded_config(**loop_options):
    """The learner on two devices, the sampler on two others."""
    config = tiny_config()
    return dataclasses.replace(
        config,
        loop=dataclasses.replace(config.loop, **loop_options),
        sampler=dataclasses.replace(config.sampler, sampler_devices=2),
        step=dataclasses.replace(config.step, minibatches=1),
    )


DEVICES = (1, 2, 1)


def threaded(directory, config=None):
    loop = tiny_loop(directory, config or threaded_config(), devices=DEVICES)
    return loop, Threads(loop, Interleaving(directory / "interleaving.txt"))


def samplers_left():
    return [thread for thread in threading.enumerate() if thread.name == "sampler"]


def test_a_run_is_repeated_bit_by_bit_in_one_thread(tmp_path):
    loop, threads = threaded(tmp_path / "threads")
    threads.run(12)
    assert loop.step == 12 and not samplers_left()
    assert max(row["versions_per_trajectory_max"] for row in rows_of(tmp_path / "threads")) > 1
    assert loop.probe.num_compared > 0 and loop.probe.max_error == 0.0
    order = read_interleaving(tmp_path / "threads" / "interleaving.txt")
    assert len(order) == 12
    again = tiny_loop(tmp_path / "again", threaded_config(), devices=DEVICES)
    repeat = Repeat(again, order)
    repeat.run(12)
    assert_same_weights(loop, again)
    repeat.settle()
    for run in (loop, again):
        run.finish()
        assert run._rooms.ring.pins == {}
    assert without_times(rows_of(tmp_path / "threads")) == without_times(rows_of(tmp_path / "again"))
    ledgers = [(tmp_path / name / "ledger" / "segments.jsonl").read_bytes() for name in ("threads", "again")]
    assert ledgers[0] == ledgers[1]


@pytest.mark.slow
def test_another_order_is_another_run(tmp_path):
    """Or the test before this one would show nothing."""
    loops = []
    for staleness in (0, 4):
        loop, threads = threaded(tmp_path / str(staleness), threaded_config(max_staleness=staleness))
        threads.run(6)
        loops.append(loop)
    with pytest.raises(AssertionError):
        assert_same_weights(*loops)


@pytest.mark.slow
def test_a_checkpoint_in_the_middle_is_part_of_the_order_and_a_run_goes_on_from_it(tmp_path):
    loop, threads = threaded(tmp_path / "threads")
    threads.run(4)
    state = threads.state()
    threads.run(7)  # goes further than the checkpoint
    loop._rooms.store.wait()
    resumed_loop = tiny_rooms(tmp_path / "threads", threaded_config(), devices=DEVICES)
    resumed = Threads(resumed_loop, Interleaving(tmp_path / "threads" / "interleaving.txt"))
    resumed.restore(state)
    assert resumed_loop.step == 4
    resumed.run(8)
    again = tiny_loop(tmp_path / "again", threaded_config(), devices=DEVICES)
    Repeat(again, read_interleaving(tmp_path / "threads" / "interleaving.txt")).run(8)
    assert_same_weights(resumed_loop, again)
    assert without_times(rows_of(tmp_path / "threads")) == without_times(rows_of(tmp_path / "again"))


def slowed(loop, *, seconds_per_batch, seconds_per_step):
    """Sleeps in the place of generation and training."""
    roll, learn, per_round = loop.roll, loop.learn, seconds_per_batch / 5  # a tiny game takes five rounds, five batches at once

    def slow_roll(num_steps):
        time.sleep(per_round)
        return roll(num_steps)

    def slow_learn(groups):
        time.sleep(seconds_per_step)
        return learn(groups)

    loop.roll, loop.learn = slow_roll, slow_learn


@pytest.mark.slow
def test_the_sampler_never_runs_further_ahead_than_admission_allows(tmp_path):
    loop, threads = threaded(tmp_path, threaded_config(max_staleness=2))
    threads.run(3)
    slowed(loop, seconds_per_batch=0.0, seconds_per_step=0.1)
    threads.run(12)
    rows = rows_of(tmp_path)
    assert max(row["staleness_max"] for row in rows) <= 2
    for row in rows:
        assert row["groups_in_flight"] + row["groups_queued"] + row["groups_trained"] <= (2 + row["step"] + 1) * 4


@pytest.mark.slow
def test_a_full_ring_stops_neither_side(tmp_path):
    for policy in RingFullPolicy:
        config = threaded_config(max_staleness=2, ring_full=policy)
        config = dataclasses.replace(config, snapshots=dataclasses.replace(config.snapshots, ring_capacity=3))
        loop, threads = threaded(tmp_path / policy.value, config)
        for version in (0, 1, 2):  # somebody else holds what the ring may hold
            threads.run(version + 1)
            loop._rooms.ring.pin([min(version, loop.version)])
        threads.run(6)
        count = "evicted_versions" if policy is RingFullPolicy.EVICT else "skipped_publishes"
        assert loop.step == 6 and rows_of(tmp_path / policy.value)[-1][count] > 0


@pytest.mark.parametrize("side", ["roll", "learn"])
def test_what_one_side_raises_ends_both(tmp_path, side):
    loop, threads = threaded(tmp_path)
    threads.run(2)
    operation, calls = getattr(loop, side), []

    def failing(argument):
        calls.append(argument)
        if len(calls) == 3:
            raise OSError("the disk is full")
        return operation(argument)

    setattr(loop, side, failing)
    with pytest.raises(OSError, match="the disk is full"):
        threads.run(40)
    assert not samplers_left()
    assert loop.step < 40


def test_a_run_that_cannot_go_on_says_so(tmp_path):
    loop, threads = threaded(tmp_path)
    threads.run(1)
    loop._rooms.admission.credit = lambda steps: 0
    with pytest.raises(RuntimeError, match="no rollout is running, none may start, and no batch is ready"):
        threads.run(40)
    assert not samplers_left()


def test_a_stop_is_heeded_before_the_next_step(tmp_path):
    loop, threads = threaded(tmp_path)
    threads.run(40, stop=lambda: loop.step == 3)
    assert loop.step == 3 and not samplers_left()
    loop.finish()
    assert loop._rooms.ring.pins == {}


def test_an_order_is_written_and_read_and_cut(tmp_path):
    path = tmp_path / "interleaving.txt"
    order = Interleaving(path)
    for operation in (Operation.BEGIN_ROUND, Operation.END_ROUND, Operation.TAKE, Operation.END_STEP):
        order.note(operation)
    order.flush()
    order.note(Operation.STATE)
    state = order.state()
    order.flush()
    assert read_interleaving(path) == [
        [Operation.BEGIN_ROUND, Operation.END_ROUND, Operation.TAKE, Operation.END_STEP],
        [Operation.STATE],
    ]
    again = Interleaving(path)
    again.restore(state)
    assert path.read_text() == "bets\n"
    again.note(Operation.TAKE)
    again.flush()
    assert path.read_text() == "bets\nct\n"
    path.write_text("")
    with pytest.raises(ValueError, match="has 0 lines, wanted 1"):
        again.restore(state)


def test_what_is_no_order_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no .*--schedule threads"):
        read_interleaving(tmp_path / "nothing.txt")
    (tmp_path / "other.txt").write_text("hello\n")
    with pytest.raises(ValueError, match="is no interleaving"):
        read_interleaving(tmp_path / "other.txt")


def test_a_repeat_of_another_run_is_noticed(tmp_path):
    loop = tiny_loop(tmp_path, threaded_config(), devices=DEVICES)
    with pytest.raises(ValueError, match="1 learner steps were recorded, wanted 2"):
        Repeat(loop, [[Operation.TAKE]]).run(2)
    with pytest.raises(RuntimeError, match="the recorded run had a batch here"):
        Repeat(loop, [[Operation.BEGIN_ROUND, Operation.TAKE, Operation.END_STEP]]).run(1)
