"""A runner plays the episodes of rollouts, many at once: in this process, or in workers (`rl.environments.worker_pool`).

Whatever an environment does costs its own episode only: that one ends with a `Failure`, and everybody else's goes on. In this
process that holds for exceptions and for answers that are none. It costs next to nothing, and is meant for families that can be
trusted to answer at all: one that hangs hangs the run, and one that ends its process ends the run. Workers are proof against
both.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from rl.environments.base import Environment, Step
from rl.environments.host import Failure, Host

Saved = str | dict[str, str]
"""What is written down of an episode's environment: its state as JSON text, or why it failed."""


@dataclasses.dataclass(frozen=True)
class RunnerOptions:
    """Where environments run.

    Raises:
      ValueError: a number is out of range.
    """

    environment_workers: int = 0  # processes that play environments; 0: the run's own, which then must not hang or exit
    environment_timeout: float = 60.0  # seconds that a worker's environment may take for one answer

    def __post_init__(self):
        if self.environment_workers < 0:
            raise ValueError(f"--environment-workers is {self.environment_workers}, wanted 0 or more")
        if not 0 < self.environment_timeout < math.inf:
            raise ValueError(f"--environment-timeout is {self.environment_timeout} seconds, wanted more than 0")


IN_PROCESS = RunnerOptions()


class Runner(abc.ABC):
    """Episodes by number. Every one that was started or restored must be ended, unless the runner is closed."""

    @abc.abstractmethod
    def start(self, groups: Sequence[tuple[Sequence[int], int]]) -> list[str | Failure]:
        """Starts groups of episodes, each on the instance of its seed, which is made once.

        Args:
          groups: (episodes, seed) of each.

        Returns:
          The first observation of each group, or why none of it could start.
        """

    @abc.abstractmethod
    def step(self, turns: Sequence[tuple[int, str]]) -> list[Step | Failure]:
        """Takes one turn in each of some episodes: (episode, action) in, answers in the same order out."""

    @abc.abstractmethod
    def state(self, episode: int) -> Saved:
        """What `restore` goes on from."""

    @abc.abstractmethod
    def restore(self, episode: int, saved: Saved) -> None:
        """Takes up an episode where `state` left it."""

    @abc.abstractmethod
    def end(self, episodes: Iterable[int]) -> None:
        """Forgets episodes, however they ended."""

    @abc.abstractmethod
    def close(self) -> None:
        """Leaves no process behind. Calling it again is harmless; nothing else may be called any more."""


class InProcess(Runner):
    """Plays in the calling thread."""

    def __init__(self, make_environment: Callable[[], Environment], max_characters: int):
        self._host = Host(make_environment, max_characters)

    def start(self, groups: Sequence[tuple[Sequence[int], int]]) -> list[str | Failure]:
        return [self._start(*group) for group in groups]

    def _start(self, episodes: Sequence[int], seed: int) -> str | Failure:
        first, *others = episodes
        observation = self._host.reset(first, seed)
        if isinstance(observation, Failure) or not others:
            return observation
        state = self._host.state(first)
        if isinstance(state, Failure):
            return state
        for episode in others:
            self._host.adopt(episode, state)
        return observation

    def step(self, turns: Sequence[tuple[int, str]]) -> list[Step | Failure]:
        return [self._host.step(episode, action) for episode, action in turns]

    def state(self, episode: int) -> Saved:
        state = self._host.state(episode)
        return state.saved() if isinstance(state, Failure) else state

    def restore(self, episode: int, saved: Saved) -> None:
        self._host.adopt(episode, Failure.of(saved) if isinstance(saved, dict) else saved)

    def end(self, episodes: Iterable[int]) -> None:
        for episode in episodes:
            self._host.end(episode)

    def close(self) -> None:
        pass
