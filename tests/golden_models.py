"""The tiny Hugging Face models under `golden/hf_tiny`, imported."""

import contextlib
import dataclasses
import enum
import functools
import pathlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from models.config import Precision
from models.families import model_config
from models.weights import import_folder, read_config

FOLDERS = {path.parent.name: path.parent
           for path in sorted((pathlib.Path(__file__).parent / "golden" / "hf_tiny").glob("*/config.json"))}


@functools.cache
def golden_model(name: str):
    """Config, parameters and golden arrays of one of them."""
    folder = FOLDERS[name]
    config = model_config(read_config(folder))
    return config, import_folder(folder, config, precision=Precision.FLOAT32), dict(np.load(folder / "golden.npz"))


class Double(enum.Enum):
    """A precision that models do not offer, since no device that they are made for computes in it."""

    FLOAT64 = "float64"

    @property
    def dtype(self):
        return np.dtype(self.value)


@contextlib.contextmanager
def float64_for_float32():
    """What a model computes in float32 whatever its config says, such as softmax, is traced in float64, too.

    With integers of 64 bits come sums of them and of 32, which strict promotion refuses.
    """
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), mock.patch.object(jnp, "float32", jnp.float64):
        yield


@functools.cache
def double_model(name: str):
    """`golden_model` in float64, where two programs that compute the same agree whatever the machine's order of summation."""
    config, params, golden = golden_model(name)
    return (dataclasses.replace(config, compute_dtype=Double.FLOAT64),
            jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params), golden)


def assert_equal_but_for_rounding(found: np.ndarray, expected: np.ndarray) -> None:
    """Logits of float64 within 1e-11; of float32 within 2e-5, in proportion where the largest exceeds 8.

    Some models have logits of 18, where float32 has steps of 1.9e-6; ten such steps lie between two orders of summation.
    """
    assert found.dtype == expected.dtype and found.dtype in (np.float32, np.float64)
    within = 1e-11 if found.dtype == np.float64 else 2e-5
    np.testing.assert_allclose(found, expected, rtol=0, atol=within * max(1.0, np.abs(expected).max() / 8))


def assert_same(first, second) -> None:
    """Two trees, bit by bit."""
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for left, right in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()
