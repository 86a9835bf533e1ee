"""Runners: whatever an environment does costs its own episode, everybody else's goes on, and nothing is left behind."""

import contextlib
import functools
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
import types

import psutil
import pytest

from rl.environments import EnvironmentName, Failure, RunnerOptions, Split, Step, make, make_runner, worker_pool
from tests.rl.environments.hostile import Hostile, Mischief, StateMischief

ROOT = pathlib.Path(__file__).resolve().parents[3]
TIMEOUT = 1.5
LIMIT = 60  # characters
WORKERS = RunnerOptions(environment_workers=2, environment_timeout=TIMEOUT)
MANY_WORKERS = RunnerOptions(environment_workers=3, environment_timeout=TIMEOUT)
IN_PROCESS = RunnerOptions()
ON_RESET = dict(enumerate((kind for kind in Mischief if kind not in (
    Mischief.NAN, Mischief.INFINITY, Mischief.HUGE_REWARD, Mischief.TEXT_REWARD, Mischief.TEXT_DONE)), start=1000))
HOSTILE = functools.partial(Hostile, on_reset=ON_RESET)
FROZEN_LAKE = functools.partial(make, EnvironmentName.FROZEN_LAKE, Split.TRAIN)
BOTH = pytest.mark.parametrize("kind", ["in process", "workers"])

numbers = itertools.count()  # of episodes


def processes():
    return psutil.Process().children(recursive=True)


@pytest.fixture(scope="module")
def runners():
    """One runner of each kind for most tests: workers take a while to start."""
    with runner_of(IN_PROCESS) as in_process, runner_of(MANY_WORKERS) as pool:
        yield {"in process": in_process, "workers": pool}
    assert processes() == []


def runner_of(options, factory=HOSTILE):
    return contextlib.closing(make_runner(factory, options, max_characters=LIMIT))


def begin(runner, seeds=(1,), members=1):
    """Episodes that have just begun, a group for each seed."""
    groups = [([next(numbers) for _ in range(members)], seed) for seed in seeds]
    assert runner.start(groups) == [f"seed {seed % 100}" for seed in seeds]
    return [episode for group, _ in groups for episode in group]


def say(runner, episodes, action):
    return runner.step([(episode, action) for episode in episodes])


def echo(turn, action):
    return Step(f"{turn}{action[:1]}", turn / 8, done=False, success=True)


def assert_failure(answer, fault):
    assert isinstance(answer, Failure) and answer.fault is fault, answer
    assert 0 < len(answer.message) <= 2_400 and answer.message.isascii() and answer.message.isprintable()


def able(mischief, kind):
    return [each for each in mischief if kind == "workers" or not each.needs_worker]


@BOTH
def test_episodes_of_a_group_begin_alike_and_go_their_ways(runners, kind):
    runner = runners[kind]
    one, two, other = (*begin(runner, [3], members=2), *begin(runner, [4]))
    assert runner.step([(other, "x"), (one, "y")]) == [echo(1, "x"), echo(1, "y")]
    assert runner.step([(two, "a"), (one, "b"), (other, "c")]) == [echo(1, "a"), echo(2, "b"), echo(2, "c")]
    assert runner.step([(one, "c")]) == [echo(3, "c")]
    assert runner.step([(one, "d")]) == [Step("", 0.5, done=True, success=True, truncated=True)]
    runner.end([one, two, other])
    assert runner.start([([one], 5)]) == ["seed 5"]  # the number is free again
    assert runner.step([(one, "z")]) == [echo(1, "z")]


@BOTH
def test_mischief_in_a_turn_costs_its_episode_and_no_other(runners, kind):
    runner = runners[kind]
    for mischief in able(Mischief, kind):
        innocents, [culprit] = begin(runner, [2], members=4), begin(runner)
        assert say(runner, innocents, "a") == [echo(1, "a")] * 4
        turns = [(episode, "b") for episode in innocents]
        turns.insert(2, (culprit, f"turn {mischief.name}"))
        answers = runner.step(turns)
        assert_failure(answers.pop(2), mischief.fault)
        assert answers == [echo(2, "b")] * 4, mischief
        assert say(runner, innocents, "c") == [echo(3, "c")] * 4, mischief
        runner.end([culprit, *innocents])


@BOTH
def test_mischief_at_the_start_costs_its_group_and_no_other(runners, kind):
    runner = runners[kind]
    seeds = [seed for seed, mischief in ON_RESET.items() if mischief in able(Mischief, kind)]
    groups = [([next(numbers), next(numbers)], seed) for seed in (1, *seeds, 2)]
    first, *failures, last = runner.start(groups)
    assert (first, last) == ("seed 1", "seed 2")
    for seed, failure in zip(seeds, failures, strict=True):
        assert_failure(failure, ON_RESET[seed].fault)
    assert say(runner, [groups[0][0][1], groups[-1][0][1]], "a") == [echo(1, "a")] * 2


def test_a_state_that_cannot_be_written_costs_its_episode(runners):
    """A worker tells it after each turn."""
    runner = runners["workers"]
    for mischief in StateMischief:
        [culprit], innocents = begin(runner), begin(runner, members=2)
        answer, *others = runner.step([(culprit, f"state {mischief.name}"), *((episode, "a") for episode in innocents)])
        assert_failure(answer, mischief.fault)
        assert others == [echo(1, "a")] * 2


def test_a_state_that_cannot_be_written_costs_its_episode_when_it_is_asked_for(runners):
    with runner_of(IN_PROCESS) as resumed:
        runner = runners["in process"]
        for mischief in able(StateMischief, "in process"):
            [culprit] = begin(runner)
            assert runner.step([(culprit, f"state {mischief.name}")]) == [echo(1, "s")]
            resumed.restore(culprit, json.loads(json.dumps(runner.state(culprit))))
            [failure] = runner.step([(culprit, "a")])
            assert_failure(failure, mischief.fault)
            assert resumed.step([(culprit, "a")]) == [failure]


@pytest.mark.parametrize("before", ["in process", "workers"])
@pytest.mark.parametrize("after", ["in process", "workers"])
def test_episodes_go_on_from_their_states_wherever_they_were_played(runners, before, after):
    first, second = runners[before], runners[after]
    episodes = begin(first, [5, 6], members=2)
    first.step([(episodes[0], "a"), (episodes[2], "b")])
    copies = [next(numbers) for _ in episodes]
    for copy, episode in reversed(list(zip(copies, episodes, strict=True))):
        second.restore(copy, json.loads(json.dumps(first.state(episode))))
    assert say(first, episodes, "c") == say(second, copies, "c") == [echo(turn, "c") for turn in (2, 1, 2, 1)]


@BOTH
def test_a_restored_episode_replaces_the_one_of_its_number(runners, kind):
    runner = runners[kind]
    [episode] = begin(runner)
    saved = runner.state(episode)
    for _ in range(MANY_WORKERS.environment_workers + 1):  # so that some worker sees it twice
        say(runner, [episode], "a")
        runner.end([episode])
        runner.restore(episode, saved)
        assert say(runner, [episode], "b") == [echo(1, "b")]


# --- workers ---


@pytest.fixture
def pool(runners):
    return runners["workers"]


def is_gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_worker_killed_between_two_rounds_costs_nothing(pool):
    episodes = begin(pool, members=4)
    for turn in (1, 2):
        killed = processes()
        for worker in killed:
            worker.kill()
        wait_until(lambda: all(is_gone(worker.pid) for worker in killed))  # noqa: B023
        assert say(pool, episodes, "x") == [echo(turn, "x")] * 4


def test_answers_come_in_the_order_of_the_calls_however_slow_a_worker_is(pool):
    episodes = begin(pool, members=6)
    actions = ["slow", "1", "slow", "3", "slow", "5"]
    assert pool.step(list(zip(episodes, actions, strict=True))) == [echo(1, action) for action in actions]


def test_copies_of_its_process_do_no_harm(pool):
    episodes = begin(pool, members=4)
    for turn, action in enumerate(("fork", "x", "y"), start=1):
        assert say(pool, episodes, action) == [echo(turn, action)] * 4


def test_noise_goes_nowhere(capfd):
    with runner_of(RunnerOptions(environment_workers=1)) as runner:
        episodes = begin(runner, members=2)
        assert say(runner, episodes, "noise") == [echo(1, "noise")] * 2
    assert capfd.readouterr() == ("", "")


def test_signals_that_stop_a_run_are_its_parent_s(pool):
    episodes = begin(pool, members=3)
    pids = [int(answer.observation) for answer in say(pool, episodes, "process")]
    assert len({*pids, os.getpid()}) == 4
    assert [os.getpgid(pid) for pid in pids] == pids  # a terminal's Ctrl-C does not reach them
    for pid in pids:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    assert [int(answer.observation) for answer in say(pool, episodes, "process")] == pids


def test_a_worker_that_stands_still_between_two_rounds_costs_nothing(pool):
    episodes = begin(pool, members=4)
    assert say(pool, episodes, "a") == [echo(1, "a")] * 4
    for worker in processes():
        worker.suspend()
    assert say(pool, episodes, "b") == [echo(2, "b")] * 4


def test_what_an_environment_has_started_ends_with_its_worker(pool):
    [episode] = begin(pool)
    [answer] = say(pool, [episode], "child")
    assert not is_gone(int(answer.observation))
    say(pool, [episode], "turn EXIT")
    wait_until(lambda: is_gone(int(answer.observation)))


def test_close_leaves_nothing_behind_whatever_environments_are_doing():
    before = processes()
    with runner_of(WORKERS) as runner:
        [episode] = begin(runner)
        [answer] = say(runner, [episode], "child")
        assert len(processes()) == len(before) + 3
    assert processes() == before
    wait_until(lambda: is_gone(int(answer.observation)))
    runner.close()


def test_workers_are_light():
    """Neither jax nor TensorFlow, and none of what the parent's main module imports."""
    before = processes()
    with runner_of(WORKERS, FROZEN_LAKE) as runner:
        runner.start([([1, 2], 1)])
        runner.step([(1, "D"), (2, "D")])
        for worker in set(processes()) - set(before):
            libraries = {part for mapped in worker.memory_maps() for part in pathlib.Path(mapped.path).parts}
            assert "numpy" in libraries and not libraries & {"jax", "jaxlib", "tensorflow", "torch", "scipy"}


def test_workers_do_not_outlive_a_parent_that_is_killed():
    """Neither an idle one nor one whose environment hangs."""
    program = textwrap.dedent(f"""
        import os, threading, psutil
        from rl.environments import RunnerOptions, make_runner
        from tests.rl.environments.hostile import Hostile
        options = RunnerOptions(environment_workers=2, environment_timeout={TIMEOUT})
        runner = make_runner(Hostile, options, max_characters=60)
        runner.start([([1], 1), ([2], 1)])
        runner.step([(1, "a"), (2, "a")])
        def die():
            print(*(child.pid for child in psutil.Process().children()), flush=True)
            os.kill(os.getpid(), 9)
        threading.Timer(0.2, die).start()
        runner.step([(1, "turn HANG")])
    """)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2, done
    wait_until(lambda: all(map(is_gone, pids)))


def test_a_factory_that_cannot_be_sent_is_refused():
    with pytest.raises(ValueError, match="cannot be sent to workers: .*wanted a function that a module defines"):
        make_runner(lambda: Hostile(), WORKERS, max_characters=LIMIT)


def test_a_factory_that_workers_cannot_import_ends_the_run(monkeypatch):
    module = types.ModuleType("only_here")
    exec("def factory(): pass", module.__dict__)
    monkeypatch.setitem(sys.modules, "only_here", module)
    with runner_of(WORKERS, module.factory) as runner:
        with pytest.raises(RuntimeError, match="cannot use the factory: ModuleNotFoundError: .*'only_here'; wanted one that"):
            runner.start([([1], 1)])


def test_workers_that_cannot_begin_end_the_run(monkeypatch):
    monkeypatch.setattr(worker_pool.sys, "executable", "/bin/false")
    with runner_of(WORKERS) as runner:
        with pytest.raises(RuntimeError, match="3 environment workers, .* ended .the last with status 1. or fell silent"):
            runner.start([([1], 1)])


@pytest.mark.parametrize(("options", "message"), [
    ({"environment_workers": -1}, "--environment-workers is -1, wanted 0 or more"),
    ({"environment_timeout": 0.0}, "--environment-timeout is 0.0 seconds, wanted more than 0"),
    ({"environment_timeout": float("nan")}, "--environment-timeout is nan seconds, wanted more than 0"),
])
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RunnerOptions(**options)
