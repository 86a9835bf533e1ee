"""Rollouts: environments on one side, the sampler on the other, trajectories out.

Token-in, token-out: what the policy sampled is kept as ids and decoded only to let the environment read it; what the environment
writes is encoded once and appended. Nothing is ever tokenised again. A publish in the middle of an episode leaves no trace but
the versions of its tokens.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from models.tokenizer import ByteTokenizer
from rl.environments import Environment
from rl.sampler import Request, SampledTokens, Sampler
from rl.types import NO_POLICY, FinishReason, Trajectory

_TOKEN_ARRAYS = {"tokens": np.int32, "sampler_logprobs": np.float32, "policy_versions": np.int32, "context_versions": np.int32}


@dataclasses.dataclass
class _Episode:
    """An episode under way; each list has one entry a token."""

    request_id: int
    group_id: int
    greedy: bool
    environment: Environment
    tokens: list[int] = dataclasses.field(default_factory=list)
    sampler_logprobs: list[float] = dataclasses.field(default_factory=list)
    policy_versions: list[int] = dataclasses.field(default_factory=list)
    context_versions: list[int] = dataclasses.field(default_factory=list)
    turn_starts: list[int] = dataclasses.field(default_factory=list)
    turn_tokens: int = 0  # of the present turn, already sampled
    newest_version: int = NO_POLICY  # among the tokens
    reward: float = 0.0

    def observe(self, tokens: np.ndarray) -> None:
        """Appends what the environment wrote."""
        self.tokens.extend(tokens.tolist())
        self.sampler_logprobs.extend([np.nan] * len(tokens))
        self.policy_versions.extend([NO_POLICY] * len(tokens))
        self.context_versions.extend([NO_POLICY] * len(tokens))

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
        if versions[-1] == self.newest_version:  # versions only grow
            return []
        new_versions = sorted(set(versions) - {self.newest_version})
        self.newest_version = new_versions[-1]
        return new_versions

    def trajectory(self, *, reward: float | None, success: bool, finish_reason: FinishReason) -> Trajectory:
        arrays = {name: np.asarray(self.__dict__[name], dtype) for name, dtype in _TOKEN_ARRAYS.items()}
        # Greedy tokens were not drawn from the distribution whose logprob they carry: no ratio of theirs means anything.
        loss_mask = (arrays["policy_versions"] != NO_POLICY) & (not self.greedy)
        turn_starts = np.asarray(self.turn_starts, np.int32)
        return Trajectory(request_id=self.request_id, group_id=self.group_id, **arrays, loss_mask=loss_mask,
                          turn_starts=turn_starts, reward=reward, success=success, finish_reason=finish_reason)


@dataclasses.dataclass(frozen=True)
class RolloutStep:
    """What one step brought."""

    finished: list[Trajectory]
    new_versions: list[int]  # the version of each (trajectory, version) that met for the first time
    num_tokens: int  # sampled


class Rollouts:
    """Plays episodes with a sampler.

    Args:
      sampler: what samples.
      make_environment: one environment an episode.
      max_length: tokens that a context may hold; an episode that would outgrow it ends there, truncated.
    """

    def __init__(self, sampler: Sampler, make_environment: Callable[[], Environment], *, max_length: int):
        self._sampler = sampler
        self._make_environment = make_environment
        self._max_length = max_length
        self._tokenizer = ByteTokenizer()
        self._episodes: dict[int, _Episode] = {}

    def start(self, group_id: int, request_ids: Sequence[int], *, seed: int, greedy: bool = False) -> None:
        """Starts one episode a request id, all on the instance that `seed` decides. It is made once: that may be slow."""
        environments = [self._make_environment() for _ in request_ids]
        prompt = np.insert(self._tokenizer.encode(environments[0].reset(seed)), 0, self._tokenizer.bos)
        for request_id, environment in zip(request_ids, environments, strict=True):
            environment.restore(environments[0].state())
            self._sampler.submit(Request(request_id, group_id, prompt, environment.max_turn_tokens, greedy))
            episode = _Episode(request_id, group_id, greedy, environment)
            episode.observe(prompt)
            self._episodes[request_id] = episode

    def step(self, num_steps: int) -> RolloutStep:
        """Lets the sampler take up to `num_steps` decode steps, then the environments answer."""
        finished, new_versions, num_tokens = [], [], 0
        for sampled in self._sampler.step(num_steps):
            episode = self._episodes[sampled.request_id]
            new_versions.extend(episode.act(sampled))
            num_tokens += len(sampled.tokens)
            if sampled.turn_over:
                trajectory = self._answer(episode)
                if trajectory is not None:
                    finished.append(trajectory)
        return RolloutStep(finished, new_versions, num_tokens)

    def partial(self) -> list[Trajectory]:
        """The episodes under way as they stand, without reward."""
        return [episode.trajectory(reward=None, success=False, finish_reason=FinishReason.LENGTH)
                for episode in self._episodes.values()]

    def cancel(self, request_ids: Sequence[int]) -> list[Trajectory]:
        """Ends episodes where they are and returns them as they stand, so that their versions can be released."""
        cancelled = [self._episodes.pop(request_id) for request_id in request_ids]
        for episode in cancelled:
            self._sampler.release(episode.request_id)
        return [episode.trajectory(reward=None, success=False, finish_reason=FinishReason.FAILED) for episode in cancelled]

    @property
    def num_running(self) -> int:
        return len(self._episodes)

    def _answer(self, episode: _Episode) -> Trajectory | None:
        """The environment's answer to a finished turn; the trajectory if that ends the episode."""
        action = self._tokenizer.decode(episode.tokens[-episode.turn_tokens:])
        episode.turn_tokens = 0
        answer = episode.environment.step(action)
        episode.reward += answer.reward
        if answer.done:
            return self._finish(episode, answer.success, FinishReason.LENGTH if answer.truncated else FinishReason.ENVIRONMENT)
        observation = self._tokenizer.encode(answer.observation)
        if len(episode.tokens) + len(observation) >= self._max_length:
            return self._finish(episode, answer.success, FinishReason.LENGTH)
        episode.observe(observation)
        self._sampler.extend(episode.request_id, observation)
        return None

    def _finish(self, episode: _Episode, success: bool, reason: FinishReason) -> Trajectory:
        self._sampler.release(episode.request_id)
        del self._episodes[episode.request_id]
        return episode.trajectory(reward=episode.reward, success=success, finish_reason=reason)

    def state(self) -> list[dict]:
        """The episodes under way, environments included, as plain arrays and JSON values."""
        return [{**episode.__dict__, **{name: np.asarray(episode.__dict__[name], dtype) for name, dtype in _TOKEN_ARRAYS.items()},
                 "turn_starts": np.asarray(episode.turn_starts, np.int32), "environment": episode.environment.state()}
                for episode in self._episodes.values()]

    def restore(self, state: list[dict]) -> None:
        """Takes a `state` back; the sampler is restored beside it."""
        self._episodes = {}
        for saved in state:
            environment = self._make_environment()
            environment.restore(saved["environment"])
            lists = {name: saved[name].tolist() for name in (*_TOKEN_ARRAYS, "turn_starts")}
            self._episodes[saved["request_id"]] = _Episode(**{**saved, **lists, "environment": environment})
