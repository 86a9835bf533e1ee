"""The tiny Hugging Face models under `golden/hf_tiny`, imported."""

import functools
import pathlib

import jax
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


def assert_equal_but_for_rounding(found: np.ndarray, expected: np.ndarray) -> None:
    """Logits of float32 within 1e-5; in proportion where the largest exceeds 8, from where on float32 has steps of 1e-6.

    Some of the models have logits of 18, and another order of summation moves these by more than 1e-5.
    """
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * max(1.0, np.abs(expected).max() / 8))


def assert_same(first, second) -> None:
    """Two trees, bit by bit."""
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for left, right in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()
