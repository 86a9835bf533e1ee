"""From ragged trajectories to a few fixed shapes.

Every distinct shape is a compilation, so lengths are rounded up to a short list of buckets, and rows to a fixed number.
"""

from collections.abc import Sequence

import numpy as np

from rl.types import Batch, Trajectory


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
    raise ValueError(f"{length} tokens do not fit the largest length bucket, {buckets[-1]}; raise --max-length or shorten the episode")


def pad_rows(rows: Sequence[np.ndarray], length: int, *, fill, num_rows: int | None = None) -> np.ndarray:
    """Rows of any lengths to one array [num_rows, length] of the first row's type, padded on the right and below with `fill`."""
    padded = np.full((num_rows or len(rows), length), fill, rows[0].dtype)
    for index, row in enumerate(rows):
        padded[index, :len(row)] = row
    return padded


def make_batch(trajectories: Sequence[Trajectory], *, proximal_logprobs: Sequence[np.ndarray], advantages: np.ndarray, length: int) -> Batch:
    """One learner step's rows, in numpy.

    Args:
      trajectories: B of them.
      proximal_logprobs: float32, one array a trajectory, of its length.
      advantages: float32 [B], given to each trained token of the row.
      length: T, a bucket that holds the longest.

    Returns:
      A `Batch` of [B, T] arrays.
    """
    masks = pad_rows([t.loss_mask for t in trajectories], length, fill=False)
    return Batch(
        tokens=pad_rows([t.tokens for t in trajectories], length, fill=0),
        valid=pad_rows([np.ones(len(t), bool) for t in trajectories], length, fill=False),
        loss_mask=masks,
        sampler_logprobs=pad_rows([t.sampler_logprobs for t in trajectories], length, fill=0.0),
        proximal_logprobs=pad_rows([np.asarray(row, np.float32) for row in proximal_logprobs], length, fill=0.0),
        advantages=np.where(masks, advantages[:, None].astype(np.float32), np.float32(0)),
        policy_versions=pad_rows([t.policy_versions for t in trajectories], length, fill=-1))
