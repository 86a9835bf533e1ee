"""Workers: processes that play environments, watched by a parent that knows which one is at fault.

    The pool sends each worker the calls of a round, in one message. The worker executes them in order and answers one by one,
    each answer with the environment's new state. So when a worker is silent for too long, or dies, the first call without an
    answer is at fault; if it has not even acknowledged the message, none is. The worker is killed; another takes its place and
    the rest of its calls, and makes the other environments anew from their states.

What comes of a call depends on the episode's state alone, and answers are returned in the order of the calls: a run's bits depend
neither on how many workers there are nor on how fast they are. The states are here, so nobody is asked to write them down.
"""

import collections
import contextlib
import os
import pickle
import selectors
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection

from rl.environments.base import Environment, Step
from rl.environments.host import Call, Failure, Fault, Reply
from rl.environments.runner import Runner, RunnerOptions, Saved

START_SECONDS = 60.0
"""Within which a worker must have imported what it needs."""
MAX_LOST = 3
"""Workers lost one after the other, in one place, before they had anything to do: then something else is broken."""


class _Worker:
    """A process that serves calls, and the calls it has not answered yet."""

    def __init__(self, setup: bytes):
        self.calls: collections.deque[tuple[int, Call]] = collections.deque()  # with their places in the round
        self.ended: list[int] = []  # episodes that it has not been told of
        self.num_unacknowledged = 1  # messages; the first is the setup
        self.num_lost_before = 0  # workers in its place that were lost one after the other, idle
        self.deadline = time.monotonic() + START_SECONDS  # of the next thing that it says
        ours, theirs = socket.socketpair()
        # Not multiprocessing: it would import the parent's main module, and with it jax, into every worker.
        program = f"import sys; sys.path[:] = {sys.path!r}; from rl.environments.host import serve; serve({theirs.fileno()})"
        with theirs:
            # A process group of its own: Ctrl-C is the parent's, and whatever its environments start ends with it.
            self._process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.DEVNULL,
                                             stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()], process_group=0)
        # So that a worker that stands still in the middle of a message stops nobody else.
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(START_SECONDS), 0))
        self.connection = Connection(ours.detach())
        with contextlib.suppress(OSError):  # it has ended already, as the first answer will show
            self.connection.send_bytes(setup)

    def kill(self) -> int:
        """Ends the process and all that it has started; returns its exit status."""
        if not self.connection.closed:
            self.connection.close()
            # Before the process is waited for: until then its number is nobody else's.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()


class WorkerPool(Runner):
    """Plays in worker processes.

    Raises:
      ValueError: the factory does not pickle.
      RuntimeError: (whenever a worker is started) a worker cannot import the factory, or ends before it can begin.
    """

    def __init__(self, make_environment: Callable[[], Environment], max_characters: int, options: RunnerOptions):
        self._timeout = options.environment_timeout
        try:
            self._setup = pickle.dumps((make_environment, max_characters, self._timeout))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(f"{make_environment} cannot be sent to workers: {error}; wanted a function that a module defines, "
                             "or functools.partial of one; or set --environment-workers 0") from error
        self._states: dict[int, str] = {}
        self._homes: dict[int, int] = {}  # which worker plays an episode
        self._num_housed = 0
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        for index in range(options.environment_workers):
            self._workers.append(self._begin(index))

    def start(self, groups: Sequence[tuple[Sequence[int], int]]) -> list[str | Failure]:
        for episodes, _ in groups:
            for episode in episodes:
                self._house(episode)
        answers = self._ask([Call(episodes[0], seed=seed) for episodes, seed in groups])
        for (episodes, _), (_, state) in zip(groups, answers, strict=True):
            if state is not None:
                self._states.update(dict.fromkeys(episodes, state))
        return [observation for observation, _ in answers]

    def step(self, turns: Sequence[tuple[int, str]]) -> list[Step | Failure]:
        answers = self._ask([Call(episode, state=self._states[episode], action=action) for episode, action in turns])
        for (episode, _), (_, state) in zip(turns, answers, strict=True):
            if state is not None:
                self._states[episode] = state
        return [step for step, _ in answers]

    def state(self, episode: int) -> Saved:
        return self._states[episode]

    def restore(self, episode: int, saved: Saved) -> None:
        self._house(episode)
        self._states[episode] = saved

    def end(self, episodes: Iterable[int]) -> None:
        for episode in episodes:
            self._states.pop(episode, None)
            if episode in self._homes:
                self._workers[self._homes.pop(episode)].ended.append(episode)

    def close(self) -> None:
        self._selector.close()
        while self._workers:
            self._workers.pop().kill()

    def _house(self, episode: int) -> None:
        self._homes[episode] = self._num_housed % len(self._workers)
        self._num_housed += 1

    def _begin(self, index: int) -> _Worker:
        worker = _Worker(self._setup)
        self._selector.register(worker.connection, selectors.EVENT_READ, index)
        return worker

    def _ask(self, calls: Sequence[Call]) -> list[Reply]:
        """All the answers of a round."""
        for place, call in enumerate(calls):
            self._workers[self._homes[call.episode]].calls.append((place, call))
        answers: list[Reply | None] = [None] * len(calls)
        for index in range(len(self._workers)):
            self._send(index, answers)
        while busy := [index for index, worker in enumerate(self._workers) if worker.calls]:
            earliest = min(self._workers[index].deadline for index in busy)
            ready = [key.data for key, _ in self._selector.select(max(0.0, earliest - time.monotonic()))]
            for index in ready:
                self._receive(index, answers)
            for index in busy:
                if index not in ready and time.monotonic() >= self._workers[index].deadline:
                    self._replace(index, answers, Fault.HUNG)
        return answers

    def _send(self, index: int, answers: list[Reply | None]) -> None:
        """Tells a worker its calls, if it has any."""
        worker = self._workers[index]
        if not worker.calls:
            return
        if not worker.num_unacknowledged:
            worker.deadline = time.monotonic() + self._timeout
        worker.num_unacknowledged += 1
        try:
            worker.connection.send((worker.ended, [call for _, call in worker.calls]))
            worker.ended = []
        except OSError:
            self._replace(index, answers, Fault.EXITED)

    def _receive(self, index: int, answers: list[Reply | None]) -> None:
        worker = self._workers[index]
        try:
            reply = worker.connection.recv()
            if not worker.num_unacknowledged:
                place, _ = worker.calls.popleft()
                answers[place] = reply
        except Exception:  # the end of the process, or something that no worker says
            self._replace(index, answers, Fault.EXITED)
            return
        if worker.num_unacknowledged:
            if reply is not None:
                raise RuntimeError(f"an environment worker cannot use the factory: {reply}; wanted one that a module defines "
                                   "which workers can import; or set --environment-workers 0")
            worker.num_unacknowledged -= 1
        if not worker.num_unacknowledged:
            worker.num_lost_before = 0
        worker.deadline = time.monotonic() + self._timeout

    def _replace(self, index: int, answers: list[Reply | None], fault: Fault) -> None:
        """Puts a new worker in the place of one that is silent or gone. The call that it was busy with, if any, has failed."""
        worker = self._workers[index]
        self._selector.unregister(worker.connection)
        status = worker.kill()
        if worker.num_unacknowledged and worker.num_lost_before + 1 == MAX_LOST:
            raise RuntimeError(f"{MAX_LOST} environment workers, one in the other's place, ended (the last with status {status}) "
                               "or fell silent before they had anything to do; look at the memory of this machine, or set "
                               "--environment-workers 0")
        if worker.calls and not worker.num_unacknowledged:
            place, _ = worker.calls.popleft()
            if fault is Fault.HUNG and status == -signal.SIGKILL:
                answers[place] = Failure(fault, f"no answer in {self._timeout:g} seconds"), None
            else:
                answers[place] = Failure(Fault.EXITED, f"its process ended with status {status}"), None
        successor = self._workers[index] = self._begin(index)
        successor.calls = worker.calls
        successor.num_lost_before = worker.num_lost_before + 1 if worker.num_unacknowledged else 0
        self._send(index, answers)
