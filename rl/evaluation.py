"""How good a policy is on the held-out instances: greedily, or sampled at the training temperature."""

import dataclasses
from collections.abc import Callable

from rl.environments import Environment
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


def evaluate(sampler: Sampler, make_environment: Callable[[], Environment], *, num_episodes: int, greedy: bool, max_length: int) -> Evaluation:
    """Plays the held-out instances of seeds 0 to num_episodes - 1, once each, with the sampler's present policy."""
    rollouts = Rollouts(sampler, make_environment, max_length=max_length)
    for seed in range(num_episodes):
        rollouts.start(seed, [REQUEST_OFFSET + seed], seed=seed, greedy=greedy)
    trajectories = []
    while rollouts.num_running:
        trajectories.extend(rollouts.step(sampler.max_steps).finished)
    return Evaluation(success=sum(t.success for t in trajectories) / num_episodes, reward=sum(t.reward for t in trajectories) / num_episodes,
                      tokens=sum(map(len, trajectories)) / num_episodes, trajectories=sorted(trajectories, key=lambda t: t.request_id))
