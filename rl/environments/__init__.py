"""The environments that a run can train on, by name."""

import enum

from rl.environments.arithmetic import Arithmetic, ArithmeticOptions, Operator
from rl.environments.base import Environment, EpisodeError, NoExpert, Split, Step
from rl.environments.frozen_lake import FrozenLake, FrozenLakeOptions

__all__ = ["Arithmetic", "ArithmeticOptions", "Environment", "EnvironmentName", "EnvironmentOptions", "EpisodeError",
           "FrozenLake", "FrozenLakeOptions", "NoExpert", "Operator", "Split", "Step", "make"]

EnvironmentOptions = FrozenLakeOptions | ArithmeticOptions


class EnvironmentName(enum.Enum):
    """A family of environments."""

    FROZEN_LAKE = "frozen_lake"
    ARITHMETIC = "arithmetic"


_FAMILIES = {
    EnvironmentName.FROZEN_LAKE: (FrozenLake, FrozenLakeOptions),
    EnvironmentName.ARITHMETIC: (Arithmetic, ArithmeticOptions),
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
