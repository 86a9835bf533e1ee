"""Rollouts: environments on one side, the sampler on the other, trajectories out.

Token-in, token-out: what the policy sampled is kept as ids and decoded only to let the environment read it; what the environment
writes is encoded once, as a `models.conversation` does it, and appended. Nothing is ever tokenised again. A publish in the middle
of an episode leaves no trace but the versions of its tokens.

An environment that fails (`rl.environments.runner`) costs its trajectory: it ends as it stands, FAILED and without a reward. One
that is too late or too old ends likewise, CANCELLED.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

from models.chat_template import TemplateError
from models.conversation import Conversation
from rl.environments import IN_PROCESS, Environment, Failure, Fault, RunnerOptions, Step, make_runner
from rl.requests import Request, SampledTokens
from rl.sampler import Sampler
from rl.types import NO_POLICY, FinishReason, SamplingContract, Trajectory

MAX_FAILED_IN_A_ROW = 256
"""Episodes after which an environment is taken for broken: a run that only starts episodes anew would never end."""

_TOKEN_ARRAYS = {"tokens": np.int32, "sampler_logprobs": np.float32, "policy_versions": np.int32, "context_versions": np.int32}


@dataclasses.dataclass
class _Episode:
    """An episode under way; each list has one entry a token."""

    request_id: int
    group_id: int
    greedy: bool
    seed: int | None  # of its instance, until the environment has begun it
    tokens: list[int] = dataclasses.field(default_factory=list)
    sampler_logprobs: list[float] = dataclasses.field(default_factory=list)
    policy_versions: list[int] = dataclasses.field(default_factory=list)
    context_versions: list[int] = dataclasses.field(default_factory=list)
    turn_starts: list[int] = dataclasses.field(default_factory=list)
    turn_tokens: int = 0  # of the present turn, already sampled
    newest_version: int = NO_POLICY  # among the tokens
    reward: float = 0.0
    contract: SamplingContract | None = None  # of what was sampled

    def observe(self, tokens: np.ndarray) -> None:
        """Appends what the environment wrote."""
        self.tokens.extend(tokens.tolist())
        self.sampler_logprobs.extend([np.nan] * len(tokens))
        self.policy_versions.extend([NO_POLICY] * len(tokens))
        self.context_versions.extend([NO_POLICY] * len(tokens))

    @property
    def num_sampled(self) -> int:
        return sum(version != NO_POLICY for version in self.policy_versions)

    def act(self, sampled: SampledTokens) -> list[int]:
        """Appends what the policy sampled; returns the versions that are new to this episode, in order."""
        if not self.turn_tokens:
            self.turn_starts.append(len(self.tokens))
        versions = sampled.policy_versions.tolist()
        self.tokens.extend(sampled.tokens.tolist())
        self.sampler_logprobs.extend(sampled.logprobs.tolist())
        self.policy_versions.extend(versions)
        self.context_versions.extend(sampled.context_versions.tolist())
        self.turn_tokens += len(versions)
        self.contract = sampled.contract
        if versions[-1] == self.newest_version:  # versions only grow
            return []
        new_versions = sorted(set(versions) - {self.newest_version})
        self.newest_version = new_versions[-1]
        return new_versions

    def trajectory(self, *, reward: float | None, success: bool, finish_reason: FinishReason) -> Trajectory:
        arrays = {name: np.asarray(self.__dict__[name], dtype) for name, dtype in _TOKEN_ARRAYS.items()}
        # Tokens that were not drawn from the distribution whose logprob they carry: no ratio of theirs means anything.
        loss_mask = (arrays["policy_versions"] != NO_POLICY) & (self.contract is not None and self.contract.is_trainable)
        turn_starts = np.asarray(self.turn_starts, np.int32)
        return Trajectory(request_id=self.request_id, group_id=self.group_id, **arrays, loss_mask=loss_mask,
                          turn_starts=turn_starts, reward=reward, success=success, finish_reason=finish_reason,
                          contract=self.contract)


@dataclasses.dataclass(frozen=True)
class RolloutStep:
    """What one step brought."""

    finished: list[Trajectory]
    new_versions: list[int]  # the version of each (trajectory, version) that met for the first time
    num_tokens: int  # sampled
    failures: list[Failure]  # of environments, one for each trajectory that failed


class Rollouts:
    """Plays episodes with a sampler. Close it: environments may run in processes of their own.

    Args:
      sampler: what samples.
      make_environment: one environment an episode; for workers it must pickle.
      conversation: turns what they say into tokens, and the policy's tokens into what they read.
      max_length: tokens that a context may hold; an episode that would outgrow it ends there, truncated. A single observation
        of more characters, and of more than the environment said it would write, is its fault.
      options: where environments run.
      turn_tokens: that the policy may sample in one turn; None: as many as the environment has bytes for it.
      max_tokens: that an episode may sample; one that has goes as far as its environment's answer, and ends there, truncated.
      deadline: decode steps after which an episode is cancelled.
    """

    def __init__(self, sampler: Sampler, make_environment: Callable[[], Environment], conversation: Conversation, *,
                 max_length: int, options: RunnerOptions = IN_PROCESS, turn_tokens: int | None = None,
                 max_tokens: int | None = None, deadline: int | None = None):
        self._sampler, self._conversation = sampler, conversation
        self._max_length, self._max_tokens, self._deadline = max_length, max_tokens, deadline
        environment = make_environment()
        self._max_turn_tokens = turn_tokens or environment.max_turn_tokens
        self._runner = make_runner(make_environment, options, max_characters=max(max_length, environment.max_observation_tokens))
        self._episodes: dict[int, _Episode] = {}
        self._failures: list[Failure] = []  # of the step under way
        self._failed_in_a_row = 0
        self._last_failure: str | None = None

    def start(self, group_id: int, request_ids: Sequence[int], *, seed: int, greedy: bool = False) -> None:
        """Takes on one episode a request id, all on the instance that `seed` decides; the next step makes it, once, and begins.

        Raises:
          RuntimeError: of late, every episode has failed.
        """
        if self._failed_in_a_row >= MAX_FAILED_IN_A_ROW:
            raise RuntimeError(f"the environments of {self._failed_in_a_row} episodes in a row have failed, the last one thus: "
                               f"{self._last_failure}; repair the environment")
        for request_id in request_ids:
            self._episodes[request_id] = _Episode(request_id, group_id, greedy, seed)

    def step(self, num_steps: int) -> RolloutStep:
        """Lets the sampler take up to `num_steps` decode steps, then the environments answer."""
        self._failures = []
        finished, turns, new_versions, num_tokens = self._begin(), [], [], 0
        for sampled in self._sampler.step(num_steps):
            episode = self._episodes[sampled.request_id]
            if sampled.expired:
                finished.append(self._cancel(episode))
                continue
            new_versions.extend(episode.act(sampled))
            num_tokens += len(sampled.tokens)
            if sampled.turn_over:
                turns.append(episode)
        finished += self._answer(turns)
        return RolloutStep(finished, new_versions, num_tokens, self._failures)

    def partial(self) -> list[Trajectory]:
        """The episodes under way as they stand, without reward."""
        return [episode.trajectory(reward=None, success=False, finish_reason=FinishReason.LENGTH)
                for episode in self._episodes.values()]

    def cancel(self, request_ids: Sequence[int]) -> list[Trajectory]:
        """Ends episodes where they are and returns them as they stand, so that their versions can be released."""
        return [self._cancel(self._episodes[request_id]) for request_id in request_ids]

    def outdated(self, oldest: int) -> list[int]:
        """Request ids of the episodes that hold a token of an older version than this; versions only grow, so the first tells."""
        return [episode.request_id for episode in self._episodes.values()
                if episode.turn_starts and episode.policy_versions[episode.turn_starts[0]] < oldest]

    @property
    def num_running(self) -> int:
        return len(self._episodes)

    def close(self) -> None:
        """Ends the processes of environments, if there are any. Nothing can be played any more."""
        self._runner.close()

    def _begin(self) -> list[Trajectory]:
        """Makes the instances of new groups, all at once, and submits their prompts; returns what failed."""
        groups: dict[tuple[int, int], list[_Episode]] = {}
        for episode in self._episodes.values():
            if episode.seed is not None:
                groups.setdefault((episode.group_id, episode.seed), []).append(episode)
        if not groups:
            return []
        starts = [([episode.request_id for episode in group], seed) for (_, seed), group in groups.items()]
        failed = []
        for group, observation in zip(groups.values(), self._runner.start(starts), strict=True):
            prompt = observation if isinstance(observation, Failure) else self._prompt(observation)
            for episode in group:
                if isinstance(prompt, Failure):
                    failed.append(self._fail(episode, prompt))
                    continue
                episode.observe(prompt)
                episode.seed = None
                self._sampler.submit(Request(episode.request_id, episode.group_id, prompt, self._max_turn_tokens, episode.greedy,
                                             self._max_tokens, self._deadline))
        return failed

    def _prompt(self, observation: str) -> np.ndarray | Failure:
        """The tokens of a first observation, if a policy can answer them."""
        try:
            prompt = self._conversation.first(observation)
        except TemplateError as error:
            return Failure(Fault.INVALID, f"a first observation that the chat template refuses: {error}")
        if len(prompt) >= self._max_length:
            return Failure(Fault.OVERSIZED, f"a first prompt of {len(prompt)} tokens, wanted less than {self._max_length}; "
                                            "raise --model.max-length, or shorten what is said first")
        return prompt

    def _answer(self, episodes: list[_Episode]) -> list[Trajectory]:
        """The environments' answers to finished turns; returns the trajectories that end with them."""
        turns = [(episode.request_id, self._conversation.answer(np.asarray(episode.tokens[-episode.turn_tokens:], np.int32)))
                 for episode in episodes]
        finished = [self._hear(episode, answer) for episode, answer in zip(episodes, self._runner.step(turns), strict=True)]
        return [trajectory for trajectory in finished if trajectory is not None]

    def _hear(self, episode: _Episode, answer: Step | Failure) -> Trajectory | None:
        """Takes in an environment's answer; the trajectory if that ends the episode."""
        if isinstance(answer, Failure):
            return self._fail(episode, answer)
        episode.turn_tokens = 0
        episode.reward += answer.reward
        if not math.isfinite(episode.reward):
            return self._fail(episode, Failure(Fault.INVALID, f"rewards that sum to {episode.reward}"))
        if answer.done:
            return self._finish(episode, answer.success, FinishReason.LENGTH if answer.truncated else FinishReason.ENVIRONMENT)
        try:
            observation = self._conversation.reply(answer.observation, last_token=episode.tokens[-1])
        except TemplateError as error:
            return self._fail(episode, Failure(Fault.INVALID, f"an observation that the chat template refuses: {error}"))
        is_spent = self._max_tokens is not None and episode.num_sampled == self._max_tokens
        if is_spent or len(episode.tokens) + len(observation) >= self._max_length:
            return self._finish(episode, answer.success, FinishReason.LENGTH)
        episode.observe(observation)
        self._sampler.extend(episode.request_id, observation)
        return None

    def _finish(self, episode: _Episode, success: bool, reason: FinishReason) -> Trajectory:
        self._failed_in_a_row = 0
        self._leave(episode)
        return episode.trajectory(reward=episode.reward, success=success, finish_reason=reason)

    def _fail(self, episode: _Episode, failure: Failure) -> Trajectory:
        self._failures.append(failure)
        self._failed_in_a_row += 1
        self._last_failure = str(failure)
        self._leave(episode)
        return episode.trajectory(reward=None, success=False, finish_reason=FinishReason.FAILED)

    def _cancel(self, episode: _Episode) -> Trajectory:
        self._leave(episode)
        return episode.trajectory(reward=None, success=False, finish_reason=FinishReason.CANCELLED)

    def _leave(self, episode: _Episode) -> None:
        self._sampler.release(episode.request_id)
        self._runner.end([episode.request_id])
        del self._episodes[episode.request_id]

    def state(self) -> dict:
        """The episodes under way, environments included, as plain arrays and JSON values."""
        episodes = []
        for episode in self._episodes.values():
            arrays = {name: np.asarray(episode.__dict__[name], dtype) for name, dtype in _TOKEN_ARRAYS.items()}
            contract = None if episode.contract is None else dict(episode.contract.__dict__)
            environment = None if episode.seed is not None else self._runner.state(episode.request_id)
            episodes.append({**episode.__dict__, **arrays, "turn_starts": np.asarray(episode.turn_starts, np.int32),
                             "environment": environment, "contract": contract})
        return {"episodes": episodes, "failed_in_a_row": self._failed_in_a_row, "last_failure": self._last_failure}

    def restore(self, state: dict) -> None:
        """Takes a `state` back; the sampler is restored beside it."""
        self._runner.end(self._episodes)
        self._episodes = {}
        for saved in state["episodes"]:
            saved = {**saved, **{name: saved[name].tolist() for name in (*_TOKEN_ARRAYS, "turn_starts")}}
            environment = saved.pop("environment")
            saved["contract"] = saved["contract"] and SamplingContract(**saved["contract"])
            episode = self._episodes[saved["request_id"]] = _Episode(**saved)
            if episode.seed is None:
                self._runner.restore(episode.request_id, environment)
        self._failed_in_a_row, self._last_failure = state["failed_in_a_row"], state["last_failure"]
