"""An environment that does what it is told, mischief included. Workers import this module, so it must stay light."""

import enum
import math
import os
import signal
import subprocess
import sys
import time

from rl.environments import Environment, Fault, Step


class Mischief(enum.Enum):
    """What an environment can do instead of answering; the value is the kind of fault, and a number."""

    HANG = Fault.HUNG, 0
    RAISE = Fault.RAISED, 0
    RAISE_UNPICKLABLE = Fault.RAISED, 1
    RAISE_ENORMOUS = Fault.RAISED, 2
    RAISE_UNSPEAKABLE = Fault.RAISED, 3
    RAISE_SURROGATE = Fault.RAISED, 4
    SYSTEM_EXIT = Fault.RAISED, 5
    PANIC = Fault.RAISED, 6
    RECURSION = Fault.RAISED, 7
    EXIT = Fault.EXITED, 0
    KILLED = Fault.EXITED, 1
    MEGABYTE = Fault.OVERSIZED, 0
    SURROGATE = Fault.INVALID, 0
    BYTES = Fault.INVALID, 1
    NO_OBSERVATION = Fault.INVALID, 2
    EMPTY = Fault.INVALID, 3
    NO_STEP = Fault.INVALID, 4
    NUMBER = Fault.INVALID, 5
    NAN = Fault.INVALID, 6
    INFINITY = Fault.INVALID, 7
    HUGE_REWARD = Fault.INVALID, 8
    TEXT_REWARD = Fault.INVALID, 9
    TEXT_DONE = Fault.INVALID, 10

    @property
    def fault(self) -> Fault:
        return self.value[0]

    @property
    def needs_worker(self) -> bool:
        return self.fault in (Fault.HUNG, Fault.EXITED)


class StateMischief(enum.Enum):
    """The same for `state()`."""

    HANG = Fault.HUNG, 0
    RAISE = Fault.RAISED, 0
    EXIT = Fault.EXITED, 0
    MEGABYTE = Fault.OVERSIZED, 0
    NO_JSON = Fault.INVALID, 0
    CIRCULAR = Fault.INVALID, 1
    DEEP = Fault.INVALID, 2

    fault, needs_worker = Mischief.fault, Mischief.needs_worker


class Unpicklable(Exception):
    def __init__(self):
        super().__init__("a lambda cannot be sent")
        self.function = lambda: None


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("not even this")


class Panic(BaseException):
    """What foreign code raises: no Exception."""


def recurse():
    return recurse()


ACTS = {
    Mischief.HANG: lambda: time.sleep(1e6),
    Mischief.RAISE: lambda: 1 / 0,
    Mischief.EXIT: lambda: os._exit(7),
    Mischief.KILLED: lambda: os.kill(os.getpid(), signal.SIGKILL),
    Mischief.SYSTEM_EXIT: lambda: sys.exit(3),
    Mischief.RECURSION: recurse,
}
ERRORS = {
    Mischief.RAISE_UNPICKLABLE: Unpicklable,
    Mischief.RAISE_ENORMOUS: lambda: ValueError("x" * 10_000_000),
    Mischief.RAISE_UNSPEAKABLE: Unspeakable,
    Mischief.RAISE_SURROGATE: lambda: ValueError("\ud800\n\N{SNOWMAN}"),
    Mischief.PANIC: Panic,
}
STEPS = {
    Mischief.MEGABYTE: lambda: Step("x" * 1_000_000, 0.0, False),
    Mischief.SURROGATE: lambda: Step("\udc80", 0.0, False),
    Mischief.BYTES: lambda: Step(b"bytes", 0.0, False),
    Mischief.NO_OBSERVATION: lambda: Step(None, 0.0, False),
    Mischief.EMPTY: lambda: Step("", 0.0, False),
    Mischief.NO_STEP: lambda: None,
    Mischief.NUMBER: lambda: 7,
    Mischief.NAN: lambda: Step("x", math.nan, False),
    Mischief.INFINITY: lambda: Step("x", -math.inf, True),
    Mischief.HUGE_REWARD: lambda: Step("x", 10**400, False),
    Mischief.TEXT_REWARD: lambda: Step("x", "1", False),
    Mischief.TEXT_DONE: lambda: Step("x", 0.0, "no"),
}


def make_mischief(mischief: Mischief) -> Step:
    """Does it; what remains of it is to be returned."""
    if mischief in ACTS:
        ACTS[mischief]()
    if mischief in ERRORS:
        raise ERRORS[mischief]()
    return STEPS[mischief]()


def states(mischief: StateMischief) -> object:
    """A state, or not."""
    match mischief:
        case StateMischief.HANG | StateMischief.EXIT | StateMischief.RAISE:
            return ACTS[Mischief[mischief.name]]()
        case StateMischief.MEGABYTE:
            return "x" * 1_000_000
        case StateMischief.NO_JSON:
            return {1, 2}
    circle = []
    circle.append(circle)
    if mischief is StateMischief.CIRCULAR:
        return circle
    deep = []
    for _ in range(100_000):
        deep = [deep]
    return deep


class Hostile(Environment):
    """Four turns, each echoed. An action that names a mischief is obeyed.

    Args:
      on_reset: mischief by seed, when an episode begins.
      on_turn: mischief by seed, in the second turn, if its action begins with a character of an even number.
    """

    stop, max_turns, max_turn_tokens, max_observation_tokens, has_expert = None, 4, 1, 8, True

    def __init__(self, on_reset: dict[int, Mischief] | None = None, on_turn: dict[int, Mischief] | None = None):
        super().__init__()
        self.on_reset, self.on_turn = on_reset or {}, on_turn or {}
        self.seed, self.heard, self.in_state = 0, [], None

    def _begin(self, seed):
        self.seed, self.heard, self.in_state = seed, [], None
        if seed in self.on_reset:
            result = make_mischief(self.on_reset[seed])
            return result.observation if isinstance(result, Step) else result
        return f"seed {seed % 100}"

    def _advance(self, action):
        kind, _, name = action.partition(" ")
        self.heard.append(action)
        match kind:
            case "turn":
                return make_mischief(Mischief[name])
            case "state":
                self.in_state = name
            case "process":
                return Step(str(os.getpid()), 0.0, False)
            case "noise":
                os.write(1, b"noise\n" * 100_000)
                print("noise\n" * 100_000)
            case "fork":
                os.fork()
            case "child":
                child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"])
                return Step(str(child.pid), 0.0, False)
            case "slow":
                time.sleep(0.05)
        if len(self.heard) == 2 and self.seed in self.on_turn and action and ord(action[0]) % 2 == 0:
            return make_mischief(self.on_turn[self.seed])
        return Step(f"{len(self.heard)}{action[:1]}", len(self.heard) / 8, False, success=True)

    def _instance_state(self):
        if self.in_state is not None:
            return states(StateMischief[self.in_state])
        return {"seed": self.seed, "heard": self.heard}

    def _restore_instance(self, state):
        self.seed, self.heard = state["seed"], list(state["heard"])
