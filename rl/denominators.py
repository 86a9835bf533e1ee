"""What the summed loss is divided by: one global number, fixed before the minibatch is split."""

import enum

import jax
import jax.numpy as jnp

from rl.ratios import divide


class Denominator(enum.Enum):
    """What the summed loss is divided by."""

    TOKENS = "tokens"  # every token weighs the same (DAPO, arXiv 2503.14476)
    SEQUENCES = "sequences"  # every non-empty row weighs the same: mean over its tokens, then over rows (GRPO, arXiv 2402.03300)
    SEQUENCE_SUMS = "sequence_sums"  # sum over a row's tokens by a constant, then mean over rows (Dr. GRPO, arXiv 2503.20783)
    CONSTANT = "constant"  # a constant the caller states


CONSTANT_DENOMINATORS = (Denominator.SEQUENCE_SUMS, Denominator.CONSTANT)


def row_weights(mask: jax.Array, *, denominator: Denominator, constant: float | None = None) -> jax.Array:
    """The weight in the loss of one token of each row, over a whole minibatch.

    With N tokens in the mask, n_b of them in row b, and S rows that are not empty: 1/N (TOKENS), 1/(S n_b) (SEQUENCES),
    1/(S constant) (SEQUENCE_SUMS) or 1/constant (CONSTANT). A microbatch uses its rows of the result, so any split gives the same
    sum.

    Args:
      mask: bool [B, T], as a rule the *original* mask of the minibatch. Tokens that the loss later drops stay counted, as in
        AReaL, so that dropping tokens makes the step smaller and not the remaining tokens heavier; a mask of the tokens that are
        kept counts as verl does.
      denominator: the choice.
      constant: above 0; given with SEQUENCE_SUMS and CONSTANT, and only then.

    Returns:
      float32 [B], finite also for an empty minibatch; with SEQUENCES 0 for an empty row.

    Raises:
      ValueError: `constant` is missing, superfluous or not above 0.
    """
    if (denominator in CONSTANT_DENOMINATORS) != (constant is not None):
        wanted = " or ".join(repr(each.value) for each in CONSTANT_DENOMINATORS)
        raise ValueError(f"denominator {denominator.value!r} got constant {constant}; give one with {wanted}, and only then")
    if isinstance(constant, (int, float)) and not constant > 0:
        raise ValueError(f"denominator constant is {constant}, wanted above 0")
    num_row_tokens = jnp.sum(jnp.asarray(mask, bool), axis=1, dtype=jnp.int32)
    num_rows = jnp.sum(num_row_tokens > 0, dtype=jnp.int32)
    match denominator:
        case Denominator.TOKENS:
            return jnp.full(num_row_tokens.shape, divide(1.0, jnp.sum(num_row_tokens)))
        case Denominator.SEQUENCES:
            return divide(1.0, num_rows) * divide(1.0, num_row_tokens)
        case Denominator.SEQUENCE_SUMS:
            return jnp.full(num_row_tokens.shape, divide(1.0, num_rows) / jnp.asarray(constant, jnp.float32))
        case Denominator.CONSTANT:
            return jnp.full(num_row_tokens.shape, 1 / jnp.asarray(constant, jnp.float32))
