"""Advantages of outcome rewards: each trajectory against the others of its prompt, then spread over its tokens.

    rewards -> each against its group (`AdvantageEstimator`) -> normalised per trajectory -> spread over the turns, later turns
            more (`turn_discount`) -> plus the turn against its equals (`step_weight`) -> normalised per token

Trajectories of one prompt form a group, and the group's rewards are the baseline. It runs on the host, in float64: a batch has a
few thousand rewards, and the same rewards must give the same advantages on every machine. A group lies in one process. What is
normalised over a batch that several processes share is made of sums, so a process needs the others' sums and no more of them.

A member without a reward (its environment failed) takes no part. A stale member does: it leaves the loss, by its mask, and stays
in the baseline, because its reward is as good an estimate of the prompt's value as any.
"""

import dataclasses
import enum
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from rl.types import NO_POLICY, Trajectory

Total = Callable[[np.ndarray], np.ndarray]
"""Adds an array of sums over the processes that share a batch; every process calls it equally often."""


class AdvantageEstimator(enum.Enum):
    """How a reward is compared with its group. R: rewards of the group, n of them, at least two; std over n - 1."""

    GROUP_RELATIVE = "group_relative"  # (R - mean) / (std + epsilon): GRPO, arXiv 2402.03300, section 4.1.2
    LEAVE_ONE_OUT = "leave_one_out"  # R - mean of the others: RLOO, arXiv 2402.14740
    MEAN_CENTERED = "mean_centered"  # R - mean: Dr. GRPO, arXiv 2503.20783, section 3.2
    LENGTH_WEIGHTED = "length_weighted"  # R - mean weighted by the tokens that the policy wrote: OPO, arXiv 2505.23585
    SCALED_BY_NONZERO = "scaled_by_nonzero"  # (R - mean) * rewards / nonzero rewards, counted in the batch: GPG, arXiv 2504.02546
    BEST_ONLY = "best_only"  # the best gets its lead over the second, the others 0: pass@k, arXiv 2503.19595
    BEST_ONLY_RELATIVE = "best_only_relative"  # the same / (std + epsilon)
    MEAN_NORMALIZED = "mean_normalized"  # (R - mean) / (mean + epsilon), for R >= 0: MaxRL, arXiv 2602.02710
    RAW = "raw"  # R, compared with nothing: REINFORCE


RELATIVE = frozenset({AdvantageEstimator.GROUP_RELATIVE, AdvantageEstimator.BEST_ONLY_RELATIVE})
"""The estimators in units of the group's standard deviation."""


class AdvantageNormalization(enum.Enum):
    """What advantages are normalised over a batch by. Both use the mean and the standard deviation over its N trained tokens.

    Where all tokens of a trajectory have one advantage the two agree, up to where the 1e-8 is added.
    """

    NONE = "none"
    WHITEN = "whiten"  # the tokens' final advantages, / sqrt(variance + 1e-8): REINFORCE++, arXiv 2501.03262
    TOKEN_MEASURE = "token_measure"  # the trajectories', before turns are told apart, / (std + 1e-8): SPO++, arXiv 2608.24870


@dataclasses.dataclass(frozen=True)
class AdvantageOptions:
    """How rewards become advantages of tokens.

    Raises:
      ValueError: a number is out of range.
    """

    advantages: AdvantageEstimator = AdvantageEstimator.GROUP_RELATIVE
    advantage_epsilon: float = 1e-6  # added to what an estimator divides by, in units of reward
    advantage_normalization: AdvantageNormalization = AdvantageNormalization.NONE
    turn_discount: float = 1.0  # per turn until the last one, of the trajectory's advantage: IPA (ROME), arXiv 2512.24873
    step_weight: float = 0.0  # of a turn's advantage among turns from the same state: GiGPO, arXiv 2505.10978
    step_discount: float = 1.0  # per turn until the last one, of the reward that a turn is compared by; read if step_weight > 0

    def __post_init__(self):
        _check_epsilon(self.advantage_epsilon)
        for name in ("turn_discount", "step_discount"):
            if not 0 <= self.__dict__[name] <= 1:
                raise ValueError(f"{name} is {self.__dict__[name]}, wanted within [0, 1]; 1 makes all turns count the same")
        if not 0 <= self.step_weight < np.inf:
            raise ValueError(f"step_weight is {self.step_weight}, wanted finite and at least 0; 0 leaves the step advantages out")


def overlong_penalty(lengths: np.ndarray, *, max_length: int, buffer: int, penalty: float) -> np.ndarray:
    """What is added to the rewards of long responses (DAPO, arXiv 2503.14476, section 3.4).

    0 up to `max_length - buffer` tokens, then linearly down to `-penalty` at `max_length`, and on along the same line beyond it,
    where the paper stays at -1.

    Args:
      lengths: int [B], tokens of the responses.
      max_length: tokens at which the full penalty is due.
      buffer: tokens, above 0.
      penalty: in units of reward, at least 0.

    Returns:
      float64 [B], at most 0, in units of reward.

    Raises:
      ValueError: `buffer` or `penalty` is out of range.
    """
    if not buffer > 0 or not 0 <= penalty < np.inf:
        raise ValueError(
            f"overlong shaping has buffer {buffer} and penalty {penalty}, wanted a buffer of at least 1 token and a finite "
            "penalty of at least 0; it is subtracted from the reward"
        )
    excess = np.asarray(lengths, np.float64) - (max_length - buffer)
    return np.minimum(-excess / buffer * penalty, 0.0)


def group_advantages(
    rewards: np.ndarray,
    group_ids: np.ndarray,
    has_reward: np.ndarray,
    *,
    estimator: AdvantageEstimator,
    epsilon: float = 1e-6,
    lengths: np.ndarray | None = None,
    total: Total = lambda sums: sums,
) -> np.ndarray:
    """Advantages of B trajectories, to be spread over the tokens of each.

    A member without a reward gets 0 and does not enter the baseline. A group with fewer than two rewards has no baseline, so its
    advantage is 0; only RAW needs none. (Some systems give a lone member its reward as advantage; then adding a constant to all
    rewards, which changes nothing about the task, changes the gradient. Such groups are dropped and refilled before they come
    here.)

    A group whose rewards are all equal gets exactly 0, without rounding, unless it is RAW: it teaches nothing.

    MEAN_NORMALIZED is meant for rewards of at least 0. It takes others as they are, and a negative mean turns the sign.

    Args:
      rewards: float [B]; any value where `has_reward` is False.
      group_ids: int [B], any integers; equal ids make a group.
      has_reward: bool [B].
      estimator: the comparison.
      epsilon: added to the standard deviation, or to the mean, in units of reward; the RELATIVE and MEAN_NORMALIZED read it.
      lengths: int [B], tokens that the policy wrote; LENGTH_WEIGHTED reads it. A group without any weighs its members equally.
      total: adds sums over the processes that share the batch; SCALED_BY_NONZERO calls it, once.

    Returns:
      float32 [B].

    Raises:
      ValueError: shapes differ, a reward that exists is not finite, lengths are missing, or epsilon is not above 0.
    """
    advantages = _group_advantages(
        rewards, group_ids, has_reward, estimator=estimator, epsilon=epsilon, lengths=lengths, total=total
    )
    return advantages.astype(np.float32)


def step_advantages(
    returns: np.ndarray, group_ids: np.ndarray, states: Sequence[Hashable], *, divide_by_std: bool, epsilon: float = 1e-6
) -> np.ndarray:
    """Advantages of single turns, each against the turns of its group that began in the same state (GiGPO, arXiv 2505.10978).

    Args:
      returns: float [S], one a turn, in units of reward.
      group_ids: int [S]: turns of different prompts are never compared.
      states: [S], what the policy saw before the turn; anything that can be compared for equality.
      divide_by_std: (return - mean) / (std + epsilon), and 0 where std <= 1e-6; otherwise return - mean.
      epsilon: in units of reward.

    Returns:
      float64 [S]; 0 for a turn whose state nobody else was in.

    Raises:
      ValueError: lengths differ, a return is not finite, or epsilon is not above 0.
    """
    if not len(returns) == len(group_ids) == len(states):
        raise ValueError(
            f"got {len(returns)} returns, {len(group_ids)} group ids, {len(states)} states, wanted as many of each; "
            "give one entry a turn"
        )
    numbers: dict[tuple, int] = {}
    cells = [numbers.setdefault(place, len(numbers)) for place in zip(group_ids, states, strict=True)]
    estimator = AdvantageEstimator.GROUP_RELATIVE if divide_by_std else AdvantageEstimator.MEAN_CENTERED
    return _group_advantages(
        returns,
        np.asarray(cells, int),
        np.ones(len(cells), bool),
        estimator=estimator,
        epsilon=epsilon,
        smallest_std=1e-6 if divide_by_std else 0.0,  # the returns of equal outcomes may differ by rounding
    )


def token_advantages(
    trajectories: Sequence[Trajectory],
    options: AdvantageOptions,
    *,
    total: Total = lambda sums: sums,
    rewards: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Advantages of every token of a batch; the module docstring has the order of its stages.

    A turn's state, for `step_weight`, is what the environment said last: the tokens between those the policy wrote before and the
    turn, which for the first turn is the prompt. Its return is the reward, discounted by the turns until the last one.

    Normalising over the batch leaves out the tokens of trajectories without reward, and no others.

    Args:
      trajectories: of this process, whole groups; B of them.
      options: what to compute.
      total: adds an array of float64 sums over the processes that share the batch.
      rewards: float [B], in place of the trajectories' own, once they are shaped; read only where a trajectory has a reward.

    Returns:
      One float32 [T] a trajectory: 0 where `loss_mask` is False, and 0 for a trajectory without reward.

    Raises:
      ValueError: there are not B rewards, or one that is read is not finite.
    """
    has_reward = np.asarray([trajectory.reward is not None for trajectory in trajectories], bool)
    group_ids = np.asarray([trajectory.group_id for trajectory in trajectories], int)
    if rewards is None:
        rewards = np.asarray([trajectory.reward or 0.0 for trajectory in trajectories], np.float64)
    counted = [trajectory.loss_mask & exists for trajectory, exists in zip(trajectories, has_reward, strict=True)]
    trained = np.asarray([np.count_nonzero(mask) for mask in counted], int)
    # A stale member stays in the baseline, with the length that the policy wrote.
    written = np.asarray([np.count_nonzero(each.policy_versions != NO_POLICY) for each in trajectories], int)
    values = _group_advantages(
        rewards,
        group_ids,
        has_reward,
        estimator=options.advantages,
        epsilon=options.advantage_epsilon,
        lengths=written,
        total=total,
    )
    if options.advantage_normalization is AdvantageNormalization.TOKEN_MEASURE:
        centered, variance = _centered(values, trained, total)
        values = centered / (np.sqrt(variance) + 1e-8)
    # -1 before the first turn: no token there is trained.
    turns = [np.searchsorted(each.turn_starts, np.arange(len(each)), side="right") - 1 for each in trajectories]
    spread = [value * _discounts(each, options.turn_discount)[turn]
              for value, each, turn in zip(values, trajectories, turns, strict=True)]  # fmt: skip
    if options.step_weight:
        steps = _steps(trajectories, np.where(has_reward, rewards, 0.0), has_reward, options)
        spread = [values + options.step_weight * step[turn] for values, step, turn in zip(spread, steps, turns, strict=True)]
    if options.advantage_normalization is AdvantageNormalization.WHITEN:
        lone = np.zeros(0)  # so that a process without trajectories takes part
        centered, variance = _centered(np.concatenate([lone, *spread]), np.concatenate([lone, *counted]), total)
        stops = np.cumsum([len(each) for each in trajectories], dtype=int)
        spread = np.split(centered / np.sqrt(variance + 1e-8), stops)[:-1]
    return [np.where(mask, values, 0.0).astype(np.float32) for mask, values in zip(counted, spread, strict=True)]


def _steps(
    trajectories: Sequence[Trajectory], rewards: np.ndarray, has_reward: np.ndarray, options: AdvantageOptions
) -> list[np.ndarray]:
    """Step advantages, float64 [turns + 1] a trajectory; the last entry is 0, for what lies before the first turn."""
    returns = [reward * _discounts(each, options.step_discount)[:-1] for reward, each in zip(rewards, trajectories, strict=True)]
    owners = np.repeat(np.arange(len(trajectories)), [len(values) for values in returns])
    states = [state for trajectory in trajectories for state in _states(trajectory)]
    taking_part = np.flatnonzero(has_reward[owners])
    advantages = np.zeros(len(owners))
    advantages[taking_part] = step_advantages(
        np.concatenate([np.zeros(0), *returns])[taking_part],
        np.asarray([trajectories[owner].group_id for owner in owners[taking_part]], int),
        [states[turn] for turn in taking_part],
        divide_by_std=options.advantages in RELATIVE,
        epsilon=options.advantage_epsilon,
    )
    return [np.append(advantages[owners == row], 0.0) for row in range(len(trajectories))]


def _discounts(trajectory: Trajectory, discount: float) -> np.ndarray:
    """discount ** turns until the last one, float64 [turns + 1]; the last entry, 1, is for what lies before the first turn."""
    return np.append(discount ** np.arange(len(trajectory.turn_starts) - 1, -1, -1, dtype=np.float64), 1.0)


def _states(trajectory: Trajectory) -> list[bytes]:
    """What the environment said before each turn."""
    wrote = np.where(trajectory.policy_versions != NO_POLICY, np.arange(1, len(trajectory) + 1), 0)
    ends = np.maximum.accumulate(np.append(0, wrote))  # [T + 1]: where the policy's last token before a position ends
    return [trajectory.tokens[ends[start] : start].tobytes() for start in trajectory.turn_starts]


def _centered(values: np.ndarray, weights: np.ndarray, total: Total) -> tuple[np.ndarray, float]:
    """Values minus their weighted mean over the batch, and their weighted variance, over the sum of weights minus 1.

    Two rounds of sums: a variance from the sums of squares of uncentred values would cancel.
    """
    sum_weights, sum_values = total(np.asarray([np.sum(weights), np.sum(weights * values)], np.float64))
    centered = values - sum_values / max(sum_weights, 1.0)
    (sum_squares,) = total(np.asarray([np.sum(weights * centered**2)], np.float64))
    return centered, sum_squares / max(sum_weights - 1.0, 1.0)


def _group_advantages(
    rewards: np.ndarray,
    group_ids: np.ndarray,
    has_reward: np.ndarray,
    *,
    estimator: AdvantageEstimator,
    epsilon: float,
    lengths: np.ndarray | None = None,
    total: Total = lambda sums: sums,
    smallest_std: float = 0.0,
) -> np.ndarray:
    """`group_advantages` in float64; a group whose standard deviation is at most `smallest_std` gets 0."""
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
    _check_epsilon(epsilon)
    if estimator is AdvantageEstimator.LENGTH_WEIGHTED and np.shape(lengths) != rewards.shape:
        raise ValueError(
            f"lengths has shape {None if lengths is None else np.shape(lengths)}, wanted {rewards.shape} like rewards; "
            "give the tokens that the policy wrote in each trajectory"
        )
    lengths = np.ones(rewards.shape) if lengths is None else np.asarray(lengths, np.float64)
    if estimator is AdvantageEstimator.RAW:
        return np.where(has_reward, rewards, 0.0)
    advantages = np.zeros(rewards.shape)
    for group_id in np.unique(group_ids[has_reward]):
        members = np.flatnonzero(has_reward & (group_ids == group_id))
        if len(members) >= 2 and np.std(rewards[members] - rewards[members[0]], ddof=1) > smallest_std:
            advantages[members] = _compare(rewards[members], lengths[members], estimator, epsilon)
    if estimator is AdvantageEstimator.SCALED_BY_NONZERO:
        num_rewards, num_nonzero = total(np.asarray([np.sum(has_reward), np.sum(has_reward & (rewards != 0))], np.float64))
        advantages *= num_rewards / max(num_nonzero, 1.0)
    return advantages


def _compare(rewards: np.ndarray, lengths: np.ndarray, estimator: AdvantageEstimator, epsilon: float) -> np.ndarray:
    """One group of at least two rewards, not all equal."""
    num_rewards = len(rewards)
    # Shifting by a member first: a reward far from 0 would otherwise leave its rounding in the differences.
    shifted = rewards - rewards[0]
    compared = shifted - np.mean(shifted)
    match estimator:
        case AdvantageEstimator.LEAVE_ONE_OUT:
            compared = compared * num_rewards / (num_rewards - 1)  # R - (sum - R) / (n - 1)
        case AdvantageEstimator.LENGTH_WEIGHTED:
            compared = shifted - np.average(shifted, weights=lengths if np.any(lengths) else None)
        case AdvantageEstimator.BEST_ONLY | AdvantageEstimator.BEST_ONLY_RELATIVE:
            second, best = np.sort(shifted)[-2:]
            compared = np.where(shifted == best, best - second, 0.0)  # two that share the lead have none
        case AdvantageEstimator.MEAN_NORMALIZED:
            compared = compared / (np.mean(rewards) + epsilon)
    return compared / (np.std(shifted, ddof=1) + epsilon) if estimator in RELATIVE else compared


def _check_epsilon(epsilon: float) -> None:
    if not epsilon > 0:
        raise ValueError(f"epsilon is {epsilon}, wanted above 0; it keeps a group of equal rewards from dividing 0 by 0")
