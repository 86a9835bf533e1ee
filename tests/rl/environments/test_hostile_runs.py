"""Whole runs on environments that misbehave in every way: they finish, they count, and they are the same run again."""

import dataclasses
import functools
import shutil

import psutil
import pytest

from launch.config import Config
from rl.environments import Fault, RunnerOptions, Split
from rl.evaluation import evaluate
from rl.loop import instance_seed
from rl.rollout import MAX_FAILED_IN_A_ROW
from rl.threads import Interleaving, Repeat, Threads, read_interleaving
from rl.types import FinishReason
from tests.rl.environments.hostile import Hostile, Mischief
from tests.tiny import BYTES, assert_same_weights, rows_of, tiny_config, tiny_loop, tiny_rooms, without_times

WORKERS = RunnerOptions(environment_workers=2, environment_timeout=1.5)
TAME = (Mischief.RAISE, Mischief.MEGABYTE, Mischief.SURROGATE, Mischief.NAN)
ON_RESET = {1: Mischief.RAISE_ENORMOUS, 4: Mischief.EXIT, 6: Mischief.MEGABYTE, 7: Mischief.BYTES}  # by group
ON_TURN = {0: Mischief.HANG, 2: Mischief.KILLED, 3: Mischief.RAISE, 5: Mischief.MEGABYTE, 8: Mischief.NAN,
           9: Mischief.SYSTEM_EXIT, 10: Mischief.NO_STEP}


@dataclasses.dataclass(frozen=True)
class HostileConfig(Config):
    """A run on `Hostile`."""

    on_reset: tuple[tuple[int, Mischief], ...] = ()  # by seed
    on_turn: tuple[tuple[int, Mischief], ...] = ()

    def environment_factory(self, split):
        del split
        return functools.partial(Hostile, on_reset=dict(self.on_reset), on_turn=dict(self.on_turn))


def hostile_config(runner=WORKERS, *, on_reset=ON_RESET, on_turn=ON_TURN):
    """Mischief in groups of four, of which some members may get through."""
    config = tiny_config(runner=runner)
    config = dataclasses.replace(config, loop=dataclasses.replace(config.loop, group_size=4, groups_per_step=2, max_staleness=2))

    def by_seed(mischief):
        return tuple((instance_seed(config.seed, group), kind) for group, kind in mischief.items())

    return HostileConfig(**config.__dict__, on_reset=by_seed(on_reset), on_turn=by_seed(on_turn))


def watched(loop):
    """The trajectories that rollouts hand in, as they come."""
    trajectories = []
    finish = loop._rooms.admission.finish
    loop._rooms.admission.finish = lambda trajectory: (trajectories.append(trajectory), finish(trajectory))
    return trajectories


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = psutil.Process().children(recursive=True)
    yield
    assert psutil.Process().children(recursive=True) == before


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory):
    """A run through all mischief, its directory, its trajectories, and its state on the way."""
    directory = tmp_path_factory.mktemp("hostile")
    loop = tiny_loop(directory, hostile_config())
    trajectories = watched(loop)
    loop.run(3)
    state = loop.state()
    loop.run(6)
    loop.close()
    loop._rooms.store.wait()
    return loop, directory, trajectories, state


def test_a_hostile_run_finishes_and_its_counts_are_right(hostile_run):
    loop, directory, trajectories, _ = hostile_run
    last = rows_of(directory)[-1]
    assert loop.step == 6 and last["groups_trained"] == 12
    expected = dict.fromkeys(Fault, 0)
    for trajectory in trajectories:
        mischief = ON_RESET.get(trajectory.group_id) or ON_TURN.get(trajectory.group_id)
        if trajectory.finish_reason is FinishReason.FAILED:
            assert trajectory.reward is None
            assert len(trajectory.turn_starts) == (0 if trajectory.group_id in ON_RESET else 2)
            expected[mischief.fault] += 1
        else:
            assert trajectory.group_id not in ON_RESET and len(trajectory.turn_starts) == 4
    assert all(count > 0 for count in expected.values())
    assert {fault: last[f"environment_{fault.value}"] for fault in Fault} == expected
    assert last["failed_members"] == sum(expected.values())
    assert last["environment_last_failure"]
    kinds = {(trajectory.group_id, trajectory.finish_reason is FinishReason.FAILED) for trajectory in trajectories}
    assert any((group, True) in kinds and (group, False) in kinds for group in ON_TURN)  # a group goes on without a member
    assert last["dropped_groups_too_few_rewards"] >= len(ON_RESET)


@pytest.mark.slow
def test_failures_are_part_of_the_run_whatever_the_number_of_workers(hostile_run, tmp_path):
    loop, directory, _, _ = hostile_run
    again = tiny_loop(tmp_path, hostile_config(dataclasses.replace(WORKERS, environment_workers=3)))
    again.run(3)
    again.state()  # a checkpoint is a version boundary
    again.run(6)
    again.finish()
    assert again._rooms.ring.pins == {}
    assert again._rooms.rollouts._runner._states == again._rooms.rollouts._runner._homes == {}
    assert_same_weights(loop, again)
    assert without_times(rows_of(directory)) == without_times(rows_of(tmp_path))


def test_a_hostile_run_goes_on_from_a_state(hostile_run, tmp_path):
    loop, directory, _, state = hostile_run
    assert any(state["own"]["failures"][fault.value] for fault in Fault)
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    resumed = tiny_rooms(tmp_path, hostile_config())
    resumed.restore(state)
    resumed.run(6)
    resumed.close()
    assert_same_weights(loop, resumed)
    assert without_times(rows_of(directory)) == without_times(rows_of(tmp_path))


@pytest.mark.parametrize("environment", ["frozen_lake", "hostile"])
def test_a_run_does_not_depend_on_where_its_environments_run(tmp_path, environment):
    tame = {group: TAME[group % len(TAME)] for group in range(1, 12, 2)}
    configs = {0: tiny_config(), 2: tiny_config(runner=WORKERS)}
    if environment == "hostile":
        configs = {0: hostile_config(RunnerOptions(), on_reset={0: Mischief.RAISE}, on_turn=tame),
                   2: hostile_config(on_reset={0: Mischief.RAISE}, on_turn=tame)}
    loops = {workers: tiny_loop(tmp_path / str(workers), config) for workers, config in configs.items()}
    for loop in loops.values():
        loop.run(6)
        loop.close()
    assert_same_weights(loops[0], loops[2])
    rows = [without_times(rows_of(tmp_path / str(workers))) for workers in loops]
    assert rows[0] == rows[1]
    failed = sum(rows[0][-1][f"environment_{fault.value}"] for fault in Fault)
    assert failed > 4 if environment == "hostile" else failed == 0


@pytest.mark.slow
def test_evaluation_counts_a_failed_episode_as_no_success(tmp_path):
    config = hostile_config(on_reset={}, on_turn={})
    loop = tiny_loop(tmp_path, config)
    factory = functools.partial(Hostile, on_reset={1: Mischief.EXIT, 4: Mischief.HANG, 5: Mischief.RAISE})
    result = evaluate(_fresh_sampler(loop), factory, BYTES, num_episodes=8, greedy=True, max_length=config.model.max_length,
                      options=WORKERS)
    assert [trajectory.finish_reason is FinishReason.FAILED for trajectory in result.trajectories] == [
        seed in (1, 4, 5) for seed in range(8)]
    assert result.success == 5 / 8
    assert result.reward == 5 / 8 * (1 + 2 + 3 + 4) / 8
    loop.close()


def _fresh_sampler(loop):
    """A sampler of its own, over the loop's engine."""
    sampler = type(loop._rooms.sampler)(loop._rooms.sampler._engine, lengths=(40,), refill_rows=8, swap=loop._rooms.sampler._swap)
    sampler.publish(0, loop.live)
    return sampler


def test_an_environment_that_always_fails_ends_the_run(tmp_path):
    """A run that only starts episodes anew would never end."""
    every = {group: Mischief.RAISE for group in range(200)}
    loop = tiny_loop(tmp_path, hostile_config(RunnerOptions(), on_reset=every))
    with pytest.raises(RuntimeError, match="in a row have failed, the last one thus: raised: ZeroDivisionError") as error:
        loop.run(1)
    assert int(str(error.value).split()[3]) >= MAX_FAILED_IN_A_ROW


def test_the_config_s_factory_is_the_family(tmp_path):
    environment = tiny_config().environment_factory(Split.HELD_OUT)()
    assert environment.split is Split.HELD_OUT and environment.max_turns == 5


@pytest.mark.slow
def test_a_threaded_hostile_run_is_repeated_with_all_its_failures(tmp_path):
    config = hostile_config()
    config = dataclasses.replace(config, step=dataclasses.replace(config.step, minibatches=1),
                                 sampler=dataclasses.replace(config.sampler, sampler_devices=2))
    loop = tiny_loop(tmp_path / "threads", config, devices=(1, 2, 1))
    Threads(loop, Interleaving(tmp_path / "threads" / "interleaving.txt")).run(8)
    again = tiny_loop(tmp_path / "again", config, devices=(1, 2, 1))
    Repeat(again, read_interleaving(tmp_path / "threads" / "interleaving.txt")).run(8)
    for each in (loop, again):
        each.close()
    assert_same_weights(loop, again)
    rows = without_times(rows_of(tmp_path / "threads"))
    assert rows == without_times(rows_of(tmp_path / "again"))
    assert all(rows[-1][f"environment_{fault.value}"] for fault in Fault)
