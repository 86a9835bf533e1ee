"""The shape of a decoder: numbers only, hashable, so that it may be a static argument of jit."""

import dataclasses
import enum

import jax.numpy as jnp


class Precision(enum.Enum):
    """A floating-point type by name."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def dtype(self):
        return jnp.dtype(self.value)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A pre-norm decoder with rotary positions, grouped-query attention and SwiGLU (the Llama and Qwen family).

    Raises:
      ValueError: sizes that do not fit together.
    """

    vocab_size: int
    num_layers: int
    d_model: int
    d_ff: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int  # tokens in one context, prompt included
    vocab_multiple: int = 1  # rows of the embedding are padded to a multiple; padded ids are never sampled nor scored
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-6
    qk_norm: bool = False
    qkv_bias: bool = False
    tied_embeddings: bool = True
    compute_dtype: Precision = Precision.FLOAT32

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and value < 1:
                raise ValueError(f"model: {field.name} is {value}, wanted at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"model: {self.num_heads} query heads do not divide over {self.num_kv_heads} kv heads; "
                             "make num_heads a multiple of num_kv_heads")
        if self.head_dim % 2:
            raise ValueError(f"model: head_dim is {self.head_dim}, wanted an even number: rotary positions rotate pairs")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: `vocab_size` rounded up to `vocab_multiple`."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
