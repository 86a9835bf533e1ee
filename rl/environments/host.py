"""A host plays episodes for somebody else, and nothing that an environment does to it gets past it as an error.

Whatever goes wrong becomes a `Failure` of the one episode in which it happened: an exception, an answer that is no text or no
step, a text that no context could hold. What a host cannot stop is an environment that never answers or ends the process; so
`serve` puts a host into a process of its own, for `rl.environments.worker_pool` to watch over. That process imports this package
and the environments, never jax. It guards against mistakes, not against malice.

An environment is a cache of its state: a host makes one from the state when it first needs it.
"""

import dataclasses
import enum
import json
import math
import numbers
import os
import pickle
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

from rl.environments.base import Environment, InvalidAnswer, Step

MAX_STATE_CHARACTERS = 1 << 18
"""Of an environment's state as JSON: it is written after every turn that a worker plays."""
MAX_MESSAGE_CHARACTERS = 400


class Fault(enum.Enum):
    """How an environment fails."""

    HUNG = "hung"  # no answer in time
    RAISED = "raised"
    EXITED = "exited"  # its process ended
    OVERSIZED = "oversized"  # an observation that the context cannot hold, or a state beyond all measure
    INVALID = "invalid"  # not text, not a step, not a finite reward, not JSON


@dataclasses.dataclass(frozen=True)
class Failure:
    """What became of an episode whose environment failed."""

    fault: Fault
    message: str  # short, ASCII, one line

    def __str__(self) -> str:
        return f"{self.fault.value}: {self.message}"

    def saved(self) -> dict[str, str]:
        """As JSON values."""
        return {"fault": self.fault.value, "message": self.message}

    @classmethod
    def of(cls, saved: dict[str, str]) -> "Failure":
        """The inverse of `saved`."""
        return cls(Fault(saved["fault"]), saved["message"])


@dataclasses.dataclass(frozen=True)
class Call:
    """What a worker is asked to do: to begin an episode (`seed`), or to take a turn in it (`state`, `action`)."""

    episode: int
    seed: int | None = None
    state: str | None = None  # before the turn; for a worker that does not hold the environment
    action: str | None = None


Reply = tuple[str | Step | Failure, str | None]
"""A worker's answer to one call, and the environment's state after it if the episode goes on."""


class _Oversized(ValueError):
    pass


class Host:
    """Environments by episode.

    Args:
      make_environment: one an episode.
      max_characters: of an observation.
    """

    def __init__(self, make_environment: Callable[[], Environment], max_characters: int):
        self._make_environment = make_environment
        self._max_characters = max_characters
        # An environment, or the state to make it from, or why there is none any more.
        self._episodes: dict[int, Environment | str | Failure] = {}

    def __contains__(self, episode: int) -> bool:
        return episode in self._episodes

    def reset(self, episode: int, seed: int) -> str | Failure:
        """Begins an episode; returns the first observation."""
        return self._guard(episode, self._reset, seed)

    def step(self, episode: int, action: str) -> Step | Failure:
        """Takes a turn. The step has exactly the types that it declares."""
        return self._guard(episode, self._step, action)

    def state(self, episode: int) -> str | Failure:
        """The state of a running episode as JSON, at its start or between two turns."""
        return self._guard(episode, self._state)

    def adopt(self, episode: int, state: str | Failure) -> None:
        """Goes on from what `state` returned, whoever's it was."""
        self._episodes[episode] = state

    def end(self, episode: int) -> None:
        """Forgets an episode, if it is here."""
        self._episodes.pop(episode, None)

    def _guard(self, episode: int, function: Callable, *arguments):
        known = self._episodes.get(episode)
        if isinstance(known, Failure):
            return known
        try:
            return function(episode, *arguments)
        except KeyboardInterrupt:  # the user's
            raise
        except InvalidAnswer as error:
            failure = Failure(Fault.INVALID, describe(error))
        except _Oversized as error:
            failure = Failure(Fault.OVERSIZED, describe(error))
        except BaseException as error:  # SystemExit, and what foreign code panics with, are no Exception
            failure = Failure(Fault.RAISED, describe(error))
        self._episodes[episode] = failure
        return failure

    def _reset(self, episode: int, seed: int) -> str:
        environment = self._episodes[episode] = self._make_environment()
        observation = _text(environment.reset(seed))
        self._check(observation)
        if not observation:
            raise InvalidAnswer("an empty first observation, wanted text")
        return observation

    def _step(self, episode: int, action: str) -> Step:
        environment = self._environment(episode)
        step = environment.step(action)
        if not _is_plain(step):
            step = _plain(step)
        self._check(step.observation)
        if not math.isfinite(step.reward):
            raise InvalidAnswer(f"a reward of {step.reward}, wanted a finite one")
        if not step.observation and not step.done:
            raise InvalidAnswer("an empty observation though the episode goes on, wanted text")
        return step

    def _state(self, episode: int) -> str:
        known = self._episodes[episode]
        if isinstance(known, str):
            return known
        state = known.state()
        try:
            text = json.dumps(state)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidAnswer(f"a state that is no JSON: {error}") from error
        if len(text) > MAX_STATE_CHARACTERS:
            raise _Oversized(f"a state of {len(text)} characters, wanted {MAX_STATE_CHARACTERS} at most")
        return text

    def _environment(self, episode: int) -> Environment:
        known = self._episodes[episode]
        if isinstance(known, str):
            environment = self._make_environment()
            environment.restore(json.loads(known))
            self._episodes[episode] = environment
            return environment
        return known

    def _check(self, observation: str) -> None:
        if len(observation) > self._max_characters:
            raise _Oversized(f"an observation of {len(observation)} characters, wanted {self._max_characters} at most")
        try:
            observation.encode()
        except UnicodeEncodeError as error:
            raise InvalidAnswer(f"an observation that is no UTF-8: {error.reason}") from error


def _is_plain(step: object) -> bool:
    """Whether it is a step with exactly the types that it declares, as nearly all are."""
    return (type(step) is Step and type(step.observation) is str and type(step.reward) is float
            and type(step.done) is type(step.success) is type(step.truncated) is bool)


def _plain(step: object) -> Step:
    """Such a step, out of one with types as good, such as numpy's."""
    if not isinstance(step, Step):
        raise InvalidAnswer(f"an answer of type {type(step).__name__}, wanted a Step")
    flags = (step.done, step.success, step.truncated)
    if not all(isinstance(flag, (bool, np.bool_)) for flag in flags):
        raise InvalidAnswer(f"done, success and truncated are {flags}, wanted truth values")
    if not isinstance(step.reward, numbers.Real):
        raise InvalidAnswer(f"a reward of type {type(step.reward).__name__}, wanted a number")
    try:
        reward = float(step.reward)
    except OverflowError:
        reward = math.inf
    return Step(_text(step.observation), reward, *map(bool, flags))


def _text(observation: object) -> str:
    if not isinstance(observation, str):
        raise InvalidAnswer(f"an observation of type {type(observation).__name__}, wanted text")
    return str.__str__(observation)  # without its subclass


def describe(error: BaseException) -> str:
    """An exception in a few words, whatever it says of itself."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = f"{type(error).__name__}, which cannot be put into words"
    return " ".join(text[:MAX_MESSAGE_CHARACTERS].encode("ascii", "backslashreplace").decode().split())


def serve(handle: int) -> None:
    """A worker's whole life: answers calls, one by one and in order, until nobody asks any more.

    The first message holds the factory, the most characters of an observation and the seconds that a call may take, pickled; it
    is answered with None, or with why it cannot be used. Each later one is (episodes that have ended, calls); its receipt is
    acknowledged with None, and then each call is answered with (observation, step or failure; the state after it).

    Args:
      handle: the worker's end of the socket. When the other end closes, the worker ends.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # whoever stops a run tells its parent, which then ends its workers
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(handle)
    try:
        make_environment, max_characters, timeout = pickle.loads(connection.recv_bytes())
    except Exception as error:
        connection.send(describe(error))
        return
    connection.send(None)
    try:
        _serve(connection, Host(make_environment, max_characters), timeout)
    except (EOFError, OSError):  # the parent has closed its end, or is gone
        os._exit(0)  # whatever threads environments have left behind


def _serve(connection: Connection, host: Host, timeout: float) -> None:
    process = os.getpid()
    while True:
        ended, calls = connection.recv()
        connection.send(None)
        for episode in ended:
            host.end(episode)
        for call in calls:
            # Should the parent die while an environment hangs, nobody but this alarm is left to end the process.
            signal.setitimer(signal.ITIMER_REAL, 2 * timeout)
            reply = _answer(host, call)
            signal.setitimer(signal.ITIMER_REAL, 0)
            if os.getpid() != process:
                os._exit(0)  # an environment forked, and this is the copy
            connection.send_bytes(pickle.dumps(reply))  # `send` takes twice as long


def _answer(host: Host, call: Call) -> Reply:
    if call.seed is not None:
        result = host.reset(call.episode, call.seed)
    else:
        if call.episode not in host:
            host.adopt(call.episode, call.state)
        result = host.step(call.episode, call.action)
    if isinstance(result, Failure) or isinstance(result, Step) and result.done:
        host.end(call.episode)
        return result, None
    state = host.state(call.episode)
    if isinstance(state, Failure):
        host.end(call.episode)
        return state, None
    return result, state
