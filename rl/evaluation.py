"""How good a policy is on the held-out instances: greedily, or sampled at the training temperature.

An episode whose environment fails is no success, and earns nothing.
"""

import contextlib
import dataclasses
from collections.abc import Callable

from models.conversation import Conversation
from rl.environments import IN_PROCESS, Environment, RunnerOptions
from rl.rollout import Rollouts
from rl.sampler import Sampler
from rl.types import Trajectory

REQUEST_OFFSET = 2**30
"""Evaluation's request ids start here, so that its noise is never that of a training episode."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Means over episodes."""

    success: float
    reward: float
    tokens: float  # an episode, prompt and observations included
    trajectories: list[Trajectory]


def evaluate(sampler: Sampler, make_environment: Callable[[], Environment], conversation: Conversation, *, num_episodes: int,
             greedy: bool, max_length: int, turn_tokens: int | None = None, options: RunnerOptions = IN_PROCESS) -> Evaluation:
    """Plays the held-out instances of seeds 0 to num_episodes - 1, once each, with the sampler's present policy.

    What is not named here is as in `Rollouts`.

    Raises:
      ValueError: no episodes, or a sampler that is paused or has other requests.
    """
    if num_episodes < 1:
        raise ValueError(f"evaluation of {num_episodes} episodes, wanted at least 1; raise --evaluation-episodes")
    if sampler.num_running or sampler.num_waiting or sampler.is_paused:
        raise ValueError(f"evaluation with a sampler of {sampler.num_running} running and {sampler.num_waiting} waiting requests"
                         f"{', paused' if sampler.is_paused else ''}; wanted an idle one, not paused: "
                         "give the evaluation a sampler of its own")
    trajectories = []
    rollouts = Rollouts(sampler, make_environment, conversation, max_length=max_length, options=options, turn_tokens=turn_tokens)
    with contextlib.closing(rollouts):
        for seed in range(num_episodes):
            rollouts.start(seed, [REQUEST_OFFSET + seed], seed=seed, greedy=greedy)
        while rollouts.num_running:
            trajectories.extend(rollouts.step(sampler.max_steps).finished)
    return Evaluation(success=sum(trajectory.success for trajectory in trajectories) / num_episodes,
                      reward=sum(trajectory.reward or 0.0 for trajectory in trajectories) / num_episodes,
                      tokens=sum(map(len, trajectories)) / num_episodes,
                      trajectories=sorted(trajectories, key=lambda trajectory: trajectory.request_id))
