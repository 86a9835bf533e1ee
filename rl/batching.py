"""From ragged trajectories to a few fixed shapes.

Every distinct shape is a compilation, so lengths are rounded up to a short list of buckets, and rows to a fixed number.
"""

from collections.abc import Sequence

import jax
import numpy as np

from rl.types import NO_POLICY, Batch, Trajectory


def length_buckets(max_length: int, num_buckets: int) -> tuple[int, ...]:
    """`num_buckets` lengths up to `max_length`, equally spaced and rounded up to a multiple of 8 (the last is exact)."""
    if not 1 <= num_buckets <= max_length:
        raise ValueError(f"{num_buckets} length buckets for contexts of {max_length} tokens; wanted 1 to {max_length}")
    rounded = {min(max_length, -(-max_length * part // (8 * num_buckets)) * 8) for part in range(1, num_buckets + 1)}
    return tuple(sorted(rounded | {max_length}))


def bucket_length(length: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `length` tokens.

    Raises:
      ValueError: it fits in none.
    """
    for bucket in buckets:
        if length <= bucket:
            return bucket
    raise ValueError(f"{length} tokens do not fit the largest length bucket, {buckets[-1]}; "
                     "raise --model.max-length or shorten the episode")


def pad_rows(rows: Sequence[np.ndarray], length: int, *, fill, num_rows: int | None = None) -> np.ndarray:
    """Rows of any lengths to one array [num_rows, length] of the first row's type, padded on the right and below with `fill`."""
    padded = np.full((num_rows or len(rows), length), fill, rows[0].dtype)
    for index, row in enumerate(rows):
        padded[index, :len(row)] = row
    return padded


def batch_shapes(num_rows: int, length: int, sharding: jax.sharding.Sharding, *, has_reference: bool = False) -> Batch:
    """What `make_batch` makes, as `jax.ShapeDtypeStruct` [num_rows, length], once it lies on devices."""
    def tokens(dtype):
        return jax.ShapeDtypeStruct((num_rows, length), dtype, sharding=sharding)

    return Batch(tokens=tokens(np.int32), valid=tokens(bool), loss_mask=tokens(bool), sampler_logprobs=tokens(np.float32),
                 proximal_logprobs=tokens(np.float32), advantages=tokens(np.float32), policy_versions=tokens(np.int32),
                 reference_logprobs=tokens(np.float32) if has_reference else None)


def make_batch(trajectories: Sequence[Trajectory], *, proximal_logprobs: Sequence[np.ndarray], advantages: Sequence[np.ndarray],
               num_rows: int, length: int, reference_logprobs: Sequence[np.ndarray] | None = None) -> Batch:
    """One learner step's rows, in numpy.

    Args:
      trajectories: at most B of them; rows that are missing are empty: the batch keeps its shape when a group lost a member.
      proximal_logprobs: float32, one array a trajectory, of its length.
      advantages: float32, one array a trajectory, of its length; 0 at tokens that are not trained.
      num_rows: B.
      length: T, a bucket that holds the longest.
      reference_logprobs: as the proximal ones, where the objective wants them.

    Returns:
      A `Batch` of [B, T] arrays.

    Raises:
      ValueError: they do not fit, lengths differ, or a trained token has no anchor.
    """
    longest = max(map(len, trajectories))
    if len(trajectories) > num_rows or longest > length:
        raise ValueError(f"{len(trajectories)} trajectories of up to {longest} tokens do not fit a batch of {num_rows} rows of "
                         f"{length} tokens; use a larger bucket")
    for trajectory, row, values in zip(trajectories, proximal_logprobs, advantages, strict=True):
        if not len(row) == len(values) == len(trajectory):
            raise ValueError(f"trajectory {trajectory.request_id} has {len(trajectory)} tokens, {len(row)} proximal logprobs and "
                             f"{len(values)} advantages; give one a token")
        if not np.all(np.isfinite(row[trajectory.loss_mask])):
            raise ValueError(f"trajectory {trajectory.request_id}: a trained token has no finite proximal logprob; "
                             "the source must anchor every trained token")

    def in_float32(rows):
        return [np.asarray(row, np.float32) for row in rows]

    def pad(rows, fill):
        return pad_rows(rows, length, fill=fill, num_rows=num_rows)

    return Batch(
        tokens=pad([t.tokens for t in trajectories], 0),
        valid=pad([np.ones(len(t), bool) for t in trajectories], False),
        loss_mask=pad([t.loss_mask for t in trajectories], False),
        sampler_logprobs=pad([t.sampler_logprobs for t in trajectories], 0.0),
        proximal_logprobs=pad(in_float32(proximal_logprobs), 0.0),
        advantages=pad(in_float32(advantages), 0.0),
        policy_versions=pad([t.policy_versions for t in trajectories], NO_POLICY),
        reference_logprobs=None if reference_logprobs is None else pad(in_float32(reference_logprobs), 0.0))
