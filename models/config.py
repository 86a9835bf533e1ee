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
class RopeScaling:
    """Rotary positions stretched for contexts longer than those of pre-training, as Llama 3.1 does ("llama3").

    A frequency that turns more than `high_frequency_factor` times within `original_max_length` tokens stays, one that turns less
    than `low_frequency_factor` times is divided by `factor`, and what lies between is mixed of both.

    Raises:
      ValueError: numbers that mean nothing.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_max_length: int

    def __post_init__(self):
        if not (self.factor > 0 and 0 < self.low_frequency_factor < self.high_frequency_factor and self.original_max_length > 0):
            raise ValueError(f"model: {self} has no meaning, wanted positive numbers and low_frequency_factor below "
                             "high_frequency_factor")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A pre-norm decoder with rotary positions, grouped-query attention and SwiGLU (the Llama and Qwen families).

    What differs between those families are fields here; `models.families` reads them from Hugging Face's configurations.

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
    rope_scaling: RopeScaling | None = None
    norm_epsilon: float = 1e-6
    qk_norm: bool = False
    qkv_bias: bool = False
    sliding_window: int | None = None  # tokens that the sliding layers attend to, the query's own among them
    sliding_layers: tuple[int, ...] = ()  # which layers those are; the others attend to all that came before
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
        self._check_windows()

    def _check_windows(self) -> None:
        if (self.sliding_window is not None) != bool(self.sliding_layers):
            raise ValueError(f"model: sliding_window is {self.sliding_window} and sliding_layers are {self.sliding_layers}; "
                             "wanted both or neither")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"model: sliding_window is {self.sliding_window}, wanted at least 1")
        if not all(0 <= layer < self.num_layers for layer in self.sliding_layers):
            raise ValueError(f"model: sliding_layers are {self.sliding_layers}, wanted layers from 0 to {self.num_layers - 1}")

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer, the tokens that it attends to; None: all."""
        return tuple(self.sliding_window if layer in self.sliding_layers else None for layer in range(self.num_layers))

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: `vocab_size` rounded up to `vocab_multiple`."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple
