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


def assert_same(first, second) -> None:
    """Two trees, bit by bit."""
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for left, right in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()
