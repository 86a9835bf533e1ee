"""From logical axes to the mesh: arrays say what their axes mean once, and one table says where that goes."""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "tensor")

RULES = {
    "layers": None,
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head": None,
    "mlp": "tensor",
    "vocab": "tensor",
}
"""Logical axis of a parameter to mesh axis; None keeps it whole on every device."""

DECODE_RULES = {**RULES, "embed": None}
"""For sampling: no weight is gathered at each decode step; only the tensor axis divides them."""

BATCH_AXES = ("data", "fsdp")
"""Rows of a batch, and the slots of a sampler, spread over both."""


class ShardingError(ValueError):
    """An array axis does not divide over the mesh axes it is mapped to."""


def parameter_sharding(name: str, axes: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh, rules=RULES) -> NamedSharding:
    """The sharding of one parameter: each logical axis over the mesh axis that `rules` names.

    Raises:
      ShardingError: an axis that does not divide.
    """
    for axis, size in zip(axes, shape, strict=True):
        mesh_axis = rules[axis]
        if mesh_axis is not None and size % mesh.shape[mesh_axis]:
            raise ShardingError(f"parameter {name}: axis '{axis}' has size {size}, which does not divide over "
                                f"{mesh.shape[mesh_axis]} devices of mesh axis '{mesh_axis}'; change --{mesh_axis} or the "
                                f"model's '{axis}' size")
    return NamedSharding(mesh, PartitionSpec(*(rules[axis] for axis in axes)))


def parameter_shardings(axes, shapes, mesh: Mesh, rules=RULES):
    """A tree of shardings for a tree of logical axes and a tree of shapes (`Model.axes`, `Model.shapes`)."""
    def sharding(path, shape, leaf_axes):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return parameter_sharding(name, leaf_axes, shape.shape, mesh, rules)

    return jax.tree.map_with_path(sharding, shapes, axes)


def placed(shapes, shardings):
    """A tree of `jax.ShapeDtypeStruct` with the shardings of another tree: what arrays will be, before they are."""
    def place(shape, sharding):
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    return jax.tree.map(place, shapes, shardings)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Leading axis over `BATCH_AXES`, everything else whole."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def lookup_shardings(mesh: Mesh) -> tuple[NamedSharding, NamedSharding]:
    """Where to look up tokens [B, T] in a table with sharded columns, and where the rows [B, T, D] are that come of it."""
    columns = RULES["embed"]  # a mesh axis, and so not free for rows
    rows = tuple(axis for axis in BATCH_AXES if axis != columns)
    return NamedSharding(mesh, PartitionSpec(rows)), NamedSharding(mesh, PartitionSpec(rows, None, columns))


def num_batch_shards(mesh: Mesh) -> int:
    """How many parts a batch's rows are divided into."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def check_rows(what: str, rows: int, mesh: Mesh) -> None:
    """Raises ShardingError when rows do not divide over the mesh."""
    if rows % num_batch_shards(mesh):
        raise ShardingError(f"{what}: {rows} rows do not divide over data x fsdp = {mesh.shape['data']} x {mesh.shape['fsdp']} = "
                            f"{num_batch_shards(mesh)} devices; make it a multiple of {num_batch_shards(mesh)}")


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())
