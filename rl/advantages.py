"""Advantages of outcome rewards: each trajectory against the others of its prompt.

Trajectories of one prompt form a group, and the group's rewards are the baseline. It runs on the host, in float64: a batch has a
few thousand rewards, and the same rewards must give the same advantages on every machine.

A member without a reward (its environment failed) takes no part. A stale member does: it leaves the loss, by its mask, and stays
in the baseline, because its reward is as good an estimate of the prompt's value as any.
"""

import enum

import numpy as np


class AdvantageEstimator(enum.Enum):
    """How a reward is compared with its group. R: rewards of the group, n of them, at least two."""

    GROUP_RELATIVE = "group_relative"  # (R - mean) / (std + epsilon), std over n - 1: GRPO, arXiv 2402.03300, section 4.1.2
    LEAVE_ONE_OUT = "leave_one_out"  # R - mean of the others: RLOO, arXiv 2402.14740
    MEAN_CENTERED = "mean_centered"  # R - mean: Dr. GRPO, arXiv 2503.20783, section 3.2


def group_advantages(
    rewards: np.ndarray,
    group_ids: np.ndarray,
    has_reward: np.ndarray,
    *,
    estimator: AdvantageEstimator,
    epsilon: float = 1e-6,
) -> np.ndarray:
    """Advantages of B trajectories, to be spread over the tokens of each.

    A member without a reward gets 0 and does not enter the baseline. A group with fewer than two rewards has no baseline, so its
    advantage is 0. (Some systems give a lone member its reward as advantage; then adding a constant to all rewards, which changes
    nothing about the task, changes the gradient. Such groups are dropped and refilled before they get here.)

    A group whose rewards are all equal gets exactly 0, without rounding: it teaches nothing.

    Args:
      rewards: float [B]; any value where `has_reward` is False.
      group_ids: int [B], any integers; equal ids make a group.
      has_reward: bool [B].
      estimator: the comparison.
      epsilon: added to the standard deviation, in units of reward; only GROUP_RELATIVE reads it.

    Returns:
      float32 [B].

    Raises:
      ValueError: shapes differ, a reward that exists is not finite, or epsilon is not above 0.
    """
    rewards, group_ids, has_reward = np.asarray(rewards, np.float64), np.asarray(group_ids), np.asarray(has_reward, bool)
    if rewards.ndim != 1 or group_ids.shape != rewards.shape or has_reward.shape != rewards.shape:
        raise ValueError(
            f"rewards, group_ids, has_reward have shapes {rewards.shape}, {group_ids.shape}, {has_reward.shape}, "
            "wanted one shape [B]; give one entry a trajectory"
        )
    if not np.all(np.isfinite(rewards[has_reward])):
        rows = np.flatnonzero(has_reward & ~np.isfinite(rewards))
        raise ValueError(
            f"rewards {rewards[rows]} at rows {rows}, wanted finite numbers; clear has_reward where an episode earned no reward"
        )
    if not epsilon > 0:
        raise ValueError(f"epsilon is {epsilon}, wanted above 0; it keeps a group of equal rewards from dividing 0 by 0")
    advantages = np.zeros(rewards.shape)
    for group_id in np.unique(group_ids[has_reward]):
        members = np.flatnonzero(has_reward & (group_ids == group_id))
        if len(members) >= 2:
            advantages[members] = _compare(rewards[members], estimator, epsilon)
    return advantages.astype(np.float32)


def _compare(rewards: np.ndarray, estimator: AdvantageEstimator, epsilon: float) -> np.ndarray:
    num_rewards = len(rewards)
    # Shifting by a member first makes equal rewards exactly 0; their mean may be a rounding off, which 1 / epsilon would magnify.
    shifted = rewards - rewards[0]
    centered = shifted - np.mean(shifted)
    match estimator:
        case AdvantageEstimator.GROUP_RELATIVE:
            return centered / (np.std(shifted, ddof=1) + epsilon)
        case AdvantageEstimator.LEAVE_ONE_OUT:
            return centered * num_rewards / (num_rewards - 1)  # R - (sum - R) / (n - 1)
        case AdvantageEstimator.MEAN_CENTERED:
            return centered
