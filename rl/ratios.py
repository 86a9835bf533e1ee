"""Ratios of policies: which tokens have one, and at what level it is taken.

A ratio lives in log space, in nats, until the last moment. Of a token it is the difference of two logprobs; of a sequence, a turn
or a whole row it is made from those of its tokens, and every token of it then has the same one.
"""

import enum
import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to +-20 nats, so that no ratio, and no square of one, overflows float32."""

_MEANINGLESS = 1e6  # nats


class Anchor(enum.Enum):
    """The policy that a ratio of the current one is taken to."""

    PROXIMAL = "proximal"  # the trainer's logprobs of an older version: what the old-logprob source gives
    SAMPLER = "sampler"  # the sampling engine's own logprobs: the ratio then holds discrepancy and staleness

    def among(self, *, proximal: jax.Array, sampler: jax.Array) -> jax.Array:
        """Its logprobs."""
        return proximal if self is Anchor.PROXIMAL else sampler


class Level(enum.Enum):
    """What has one value: over which tokens of a row, and how, those of the single tokens are put together."""

    TOKEN = "token"  # each token its own
    SEQUENCE = "sequence"  # sum over the row: of log ratios, the log ratio of whole sequences
    GEOMETRIC = "geometric"  # mean over the row: of log ratios, the log of their geometric mean (GSPO, arXiv 2507.18071)
    SEGMENT = "segment"  # mean over each maximal run of trained tokens: a turn, or a chunk up to a tool call
    MAXIMUM = "maximum"  # over the row
    MINIMUM = "minimum"  # over the row


def pool(values: jax.Array, mask: jax.Array, level: Level, *, runs: jax.Array | None = None) -> jax.Array:
    """Values of tokens, put together at a level.

    Args:
      values: float [B, T]; where `mask` is False they may be anything that is finite, and do not matter.
      mask: bool [B, T].
      level: the choice.
      runs: bool [B, T], whose maximal runs are the segments; by default those of the mask. A token that leaves a turn does not
        make two of it.

    Returns:
      float [B, T]: at each token of the mask the value of what it belongs to; 0 elsewhere, so that a row without tokens has none.
    """
    values = jnp.where(mask, values, 0)
    match level:
        case Level.TOKEN:
            return values
        case Level.SEQUENCE:
            pooled = jnp.sum(values, axis=1, keepdims=True)
        case Level.GEOMETRIC:
            pooled = divide(jnp.sum(values, axis=1, keepdims=True), jnp.sum(mask, axis=1, keepdims=True))
        case Level.SEGMENT:
            pooled = _segment_mean(values, mask, segments(mask if runs is None else runs))
        case Level.MAXIMUM:
            pooled = jnp.max(jnp.where(mask, values, -jnp.inf), axis=1, keepdims=True)
        case Level.MINIMUM:
            pooled = jnp.min(jnp.where(mask, values, jnp.inf), axis=1, keepdims=True)
    return jnp.where(mask, jnp.broadcast_to(pooled, values.shape), 0)


def difference(logprobs: jax.Array, other_logprobs: jax.Array) -> jax.Array:
    """The log ratio of two policies in nats, before any bound that means something.

    Logprobs are finite, but a difference of the largest float32 numbers, or a sum of two, need not be.
    """
    return clamp(logprobs - other_logprobs, limit=_MEANINGLESS)


def clamp(log_ratio: jax.Array, limit: float = LOG_RATIO_LIMIT) -> jax.Array:
    """Log ratios within +-limit nats; beyond it the gradient is 0."""
    return jnp.clip(log_ratio, -limit, limit)


def magnitude(log_ratio: jax.Array) -> jax.Array:
    """|log ratio|, with the gradient 0 where it is 0; that of `jnp.abs` there is 1."""
    return jax.lax.stop_gradient(jnp.sign(log_ratio)) * log_ratio


def segments(mask: jax.Array) -> jax.Array:
    """int32 [B, T]: numbers the maximal runs of True in each row from 1; a token outside has the number of the run before it."""
    before = jnp.pad(mask[:, :-1], ((0, 0), (1, 0)))
    return jnp.cumsum(mask & ~before, axis=1, dtype=jnp.int32)


def select_finite(mask: jax.Array, arrays: Iterable[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
    """The tokens of the mask whose every value is finite, and the arrays as floats with 0 at the other tokens."""
    arrays = [as_float(array) for array in arrays]
    finite = functools.reduce(jnp.logical_and, map(jnp.isfinite, arrays), jnp.asarray(mask, bool))
    # Select before the arithmetic: after it, the gradient of a value that is selected away would still be 0 * inf = NaN.
    return finite, [jnp.where(finite, array, 0) for array in arrays]


def as_float(array: jax.Array) -> jax.Array:
    """In float32; float64 stays what it is."""
    array = jnp.asarray(array)
    return array if array.dtype == jnp.float64 else array.astype(jnp.float32)


def divide(total: jax.Array | float, count: jax.Array) -> jax.Array:
    """total / count as floats, 0 where count is 0."""
    total = as_float(total)
    count = jnp.asarray(count).astype(total.dtype)
    return jnp.where(count > 0, total / jnp.where(count > 0, count, 1), 0)


def ranks(values: jax.Array) -> jax.Array:
    """int32, of the shape of `values`: the place of each in ascending order, from 0; of equal ones the earlier comes first."""
    order = jnp.argsort(values, axis=None, stable=True)
    places = jnp.zeros(values.size, jnp.int32).at[order].set(jnp.arange(values.size, dtype=jnp.int32))
    return places.reshape(values.shape)


def is_number(value) -> bool:
    """Whether it can be looked at: a traced option cannot."""
    return isinstance(value, (int, float))


def check_token_arrays(**arrays: jax.Array) -> None:
    """Raises ValueError unless all arrays have one shape [B, T]; broadcasting would hide a wrong one."""
    shapes = {name: jnp.shape(array) for name, array in arrays.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 2 for shape in shapes.values()):
        raise ValueError(f"per-token arrays have shapes {shapes}, wanted one shape [B, T] for all; broadcast before the call")


def _segment_mean(values: jax.Array, mask: jax.Array, numbers: jax.Array) -> jax.Array:
    length = mask.shape[1]

    def of_row(numbers, values, mask):
        def total(array):
            return jax.ops.segment_sum(jnp.where(mask, array, 0), numbers, num_segments=length + 1)

        return divide(total(values), total(jnp.ones_like(values)))[numbers]

    return jax.vmap(of_row)(numbers, values, mask)
