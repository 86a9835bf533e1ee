"""The environments that a run can train on, by name, and what plays them."""

import enum
from collections.abc import Callable

from rl.environments.arithmetic import Arithmetic, ArithmeticOptions, Operator
from rl.environments.base import Environment, EpisodeError, NoExpert, Split, Step
from rl.environments.frozen_lake import FrozenLake, FrozenLakeOptions
from rl.environments.host import Failure, Fault
from rl.environments.reasoning_gym import ReasoningGym, ReasoningGymOptions
from rl.environments.runner import IN_PROCESS, InProcess, Runner, RunnerOptions
from rl.environments.toy_text import Game, ToyTextOptions, make_game
from rl.environments.worker_pool import WorkerPool

__all__ = ["IN_PROCESS", "Arithmetic", "ArithmeticOptions", "Environment", "EnvironmentName", "EnvironmentOptions",
           "EpisodeError", "Failure", "Fault", "FrozenLake", "FrozenLakeOptions", "Game", "NoExpert", "Operator", "ReasoningGym",
           "ReasoningGymOptions", "Runner", "RunnerOptions", "Split", "Step", "ToyTextOptions", "make", "make_runner"]

EnvironmentOptions = FrozenLakeOptions | ArithmeticOptions | ToyTextOptions | ReasoningGymOptions


class EnvironmentName(enum.Enum):
    """A family of environments."""

    FROZEN_LAKE = "frozen_lake"
    ARITHMETIC = "arithmetic"
    TOY_TEXT = "toy_text"
    REASONING_GYM = "reasoning_gym"


_FAMILIES = {
    EnvironmentName.FROZEN_LAKE: (FrozenLake, FrozenLakeOptions),
    EnvironmentName.ARITHMETIC: (Arithmetic, ArithmeticOptions),
    EnvironmentName.TOY_TEXT: (make_game, ToyTextOptions),
    EnvironmentName.REASONING_GYM: (ReasoningGym, ReasoningGymOptions),
}


def make(name: EnvironmentName, split: Split, options: EnvironmentOptions | None = None) -> Environment:
    """Builds one environment, which plays one episode at a time; build one for each rollout in flight.

    Args:
      name: the family.
      split: training or held-out instances.
      options: the family's own options; its defaults if None.

    Raises:
      ValueError: the options belong to another family.
    """
    family, options_type = _FAMILIES[name]
    if options is None:
        options = options_type()
    if not isinstance(options, options_type):
        raise ValueError(f"make: {name.value} got {type(options).__name__}, wanted {options_type.__name__}; "
                         "name the family that the options belong to")
    return family(split, options)


def make_runner(make_environment: Callable[[], Environment], options: RunnerOptions, *, max_characters: int) -> Runner:
    """The runner of the options. Close it.

    Args:
      make_environment: makes an environment; for workers it must pickle, and they must be able to import it.
      options: where environments run.
      max_characters: of an observation; a longer one is a fault.

    Raises:
      ValueError: there are workers, and the factory does not pickle.
    """
    if not options.environment_workers:
        return InProcess(make_environment, max_characters)
    return WorkerPool(make_environment, max_characters, options)
