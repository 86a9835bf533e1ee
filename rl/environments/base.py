"""An environment is a conversation: it says something, the policy answers, until it says that the episode is over.

Text goes in and text comes out; the rollout turns it to tokens and back, so an environment needs no tokenizer. The policy's
answer is arbitrary text, U+FFFD for special tokens and broken bytes included: nonsense earns nothing, it is never an error. A
seed and a split decide the whole instance, and held-out instances never occur in training. Between turns an environment can write
down its state as JSON values, and another one of equal options goes on from it identically.
"""

import abc
import dataclasses
import enum

import numpy as np


class Split(enum.Enum):
    """Which instances an environment draws. The two never overlap, by content."""

    TRAIN = "train"
    HELD_OUT = "held_out"


class EpisodeError(ValueError):
    """No episode is running: nothing was reset yet, or the last step ended it."""


class InvalidAnswer(TypeError):
    """What an environment said is no observation, or no step."""


class NoExpert(ValueError):
    """The environment has no scripted expert, so it cannot give warm-start data."""


@dataclasses.dataclass(frozen=True)
class Step:
    """What the environment answers to one turn of the policy."""

    observation: str  # the next thing the policy reads; empty once done
    reward: float  # what this turn earned; an episode's reward is the sum over its turns
    done: bool
    success: bool = False  # the episode ended as the task wants
    truncated: bool = False  # done only because the turns ran out


class Environment(abc.ABC):
    """One episode at a time. A family implements the four hooks at the end and sets the attributes below.

    Attributes:
      stop: the text that ends a turn of the policy, one token of bytes, or None where only the number of tokens ends it. A chat
        model ends its turn in its own way, which an environment reads as this text.
      max_turns: turns of the policy in one episode, at most.
      max_turn_tokens: bytes the policy may write in one turn, `stop` included; of a chat model tokens, by default.
      max_observation_tokens: bytes of the longest observation.
      has_expert: whether `expert` works.
    """

    stop: str | None
    max_turns: int
    max_turn_tokens: int
    max_observation_tokens: int
    has_expert: bool = False

    def __init__(self):
        self._running = False
        self._turns_taken = 0

    @property
    def max_episode_tokens(self) -> int:
        """Upper bound on an episode's tokens with one token a byte, the start token included; a context this long holds it."""
        return 1 + self.max_turns * (self.max_observation_tokens + self.max_turn_tokens)

    def reset(self, seed: int) -> str:
        """Starts the episode that `seed` and the split decide, whether or not one is running.

        Returns:
          The first observation, never empty.

        Raises:
          ValueError: the seed is negative.
        """
        if seed < 0:
            raise ValueError(f"{type(self).__name__}.reset: seed is {seed}, wanted 0 or more; "
                             "derive seeds from a counter that starts at 0")
        self._running, self._turns_taken = True, 0
        return self._begin(seed)

    def step(self, action: str) -> Step:
        """Takes one turn of the policy.

        Args:
          action: what the policy wrote, `stop` included if it ended its turn.

        Raises:
          EpisodeError: before `reset`, or after a step that was done.
          InvalidAnswer: the family's code returned something else than a step.
        """
        self._require_episode("step")
        result = self._advance(action)
        if not isinstance(result, Step):
            raise InvalidAnswer(f"{type(self).__name__}._advance returned {type(result).__name__}, wanted a Step")
        self._turns_taken += 1
        if not result.done and self._turns_taken == self.max_turns:
            result = dataclasses.replace(result, observation="", done=True, truncated=True)
        self._running = not result.done
        return result

    def expert(self, rng: np.random.Generator) -> str:
        """What the scripted expert would answer now, `stop` included. It does not step, and draws only from `rng`.

        Raises:
          NoExpert: this family has none.
          EpisodeError: before `reset`, or after a step that was done.
        """
        self._require_episode("expert")
        return self._expert_action(rng)

    def state(self) -> dict:
        """JSON values from which `restore` goes on identically. Without a running episode there is nothing to keep."""
        if not self._running:
            return {"episode": None}
        return {"episode": {"turns_taken": self._turns_taken, "instance": self._instance_state()}}

    def restore(self, state: dict) -> None:
        """Goes on from `state()` of an environment of the same family and options; a running episode is dropped.

        Raises:
          ValueError: the state cannot come from an environment with these options.
        """
        episode = state["episode"]
        if episode is None:
            self._running = False
            return
        if episode["turns_taken"] >= self.max_turns:
            raise ValueError(f"{type(self).__name__}.restore: {episode['turns_taken']} turns were taken, but max_turns is "
                             f"{self.max_turns}; restore into an environment with the options that made the state")
        self._restore_instance(episode["instance"])
        self._running, self._turns_taken = True, episode["turns_taken"]

    def _require_episode(self, caller: str) -> None:
        if not self._running:
            raise EpisodeError(f"{type(self).__name__}.{caller}: no episode is running (not yet reset, or already done); "
                               "call reset(seed) first")

    def _expert_action(self, rng: np.random.Generator) -> str:
        raise NoExpert(f"{type(self).__name__} has no scripted expert; choose an environment whose has_expert is True, "
                       "or start from a pretrained model without a warm start")

    @abc.abstractmethod
    def _begin(self, seed: int) -> str:
        """Makes the instance of `seed`; returns the first observation."""

    @abc.abstractmethod
    def _advance(self, action: str) -> Step:
        """Takes the turn. The turn limit is not its business."""

    @abc.abstractmethod
    def _instance_state(self) -> dict:
        """The running instance as JSON values."""

    @abc.abstractmethod
    def _restore_instance(self, state: dict) -> None:
        """The inverse of `_instance_state`. Raises ValueError, and changes nothing, where the options do not allow the state."""
