"""Parameters are declared first and drawn later, all of them by one generator.

To compile a random number generator for every leaf takes longer than to compile a train step. So the matrices of a layer share
one draw of noise [D, columns]: each of them has the axis "embed", of size D. It leads the draw, so that a mesh which shards it
shards the noise as well.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from flax import nnx

Params = dict
"""Nested dict of arrays. Leaves under "blocks" carry a leading axis of size L."""


def by_path(tree: Params, is_leaf: Callable | None = None) -> dict:
    """The leaves of a tree by their paths, as in "blocks/query/kernel"."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=is_leaf)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


@dataclasses.dataclass(frozen=True)
class Declaration:
    """What a parameter will be: float32 normal numbers; of deviation 0, a constant. A leaf to jax."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]  # logical ones, see `models.sharding`
    mean: float
    deviation: float

    def stacked(self, num_layers: int) -> "Declaration":
        """The same for all layers together."""
        return dataclasses.replace(self, shape=(num_layers, *self.shape), axes=("layers", *self.axes))

    @property
    def num_columns(self) -> int:
        """Columns of noise that it takes."""
        return math.prod(self.shape) // self.shape[self.axes.index("embed")] if self.deviation else 0

    def fill(self, noise: jax.Array) -> jax.Array:
        """The parameter, from standard normal noise [D, num_columns]."""
        if not self.deviation:
            return jnp.full(self.shape, self.mean, jnp.float32)
        axis = self.axes.index("embed")
        others = self.shape[:axis] + self.shape[axis + 1:]
        return self.mean + self.deviation * jnp.moveaxis(noise.reshape(-1, *others), 0, axis)


def declare(shape: Iterable[int], axes: Iterable[str], *, mean: float = 0.0, deviation: float = 0.0) -> nnx.Param:
    """A module's parameter without numbers."""
    declaration = Declaration(tuple(shape), tuple(axes), mean, deviation)
    return nnx.Param(jax.ShapeDtypeStruct(declaration.shape, jnp.float32), declaration=declaration)


def declarations(state: nnx.State) -> Params:
    """The declarations of a module's parameters, in a tree like theirs."""
    return nnx.to_pure_dict(nnx.map_state(lambda _, variable: variable.get_metadata()["declaration"], state))


def draw(key: jax.Array, block: Params, others: Params, *, d_model: int, num_layers: int) -> Params:
    """Random parameters: a function of the key, whatever the mesh.

    Args:
      key: a jax key.
      block: the declarations of one layer.
      others: those of what exists once.
      d_model: D.
      num_layers: L.
    """
    num_columns = _num_columns(block)
    share = -(-_num_columns(others) // num_layers)  # the others' columns, dealt out among the layers

    def draw_layer(layer_key):
        noise = jax.random.normal(layer_key, (d_model, num_columns + share))
        return _fill(block, noise[:, :num_columns]), noise[:, num_columns:]

    # Layer after layer: little is drawn at one time that is not in its place yet.
    blocks, shares = jax.lax.map(draw_layer, jax.random.split(key, num_layers))
    return {**_fill(others, jnp.moveaxis(shares, 0, 1).reshape(d_model, -1)), "blocks": blocks}


def _num_columns(tree: Params) -> int:
    return sum(leaf.num_columns for leaf in jax.tree.leaves(tree))


def _fill(tree: Params, noise: jax.Array) -> Params:
    leaves, structure = jax.tree.flatten(tree)
    stops = list(itertools.accumulate(leaf.num_columns for leaf in leaves))
    parts = jnp.split(noise, stops, axis=1)[:-1]  # what is left over is not used
    return jax.tree.unflatten(structure, [leaf.fill(part) for leaf, part in zip(leaves, parts, strict=True)])
