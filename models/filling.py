"""A tree of parameters, filled from stored tensors without ever holding the weights twice.

It is filled leaf by leaf: a buffer for each part of the leaf that a device of this process holds, into which the stored tensors
are read in small pieces, each of them once, turned to our layout and rounded to the target's type on the way. So the layers of a
stacked leaf come one after the other into their place. The buffers then become the leaf: an accelerator is sent them and they are
let go, on a CPU they are its memory.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Protocol

import jax
import numpy as np

from models.config import ModelConfig, Precision
from models.families import Place, WeightsError, places
from models.parameters import Params, by_path
from models.transformer import Model

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PIECE_BYTES = 2**21  # read at a time
ALIGNMENT = 64  # bytes; what jax asks of memory that it is to take over without a copy


class Source(Protocol):
    """Stored tensors by Hugging Face's names."""

    shapes: Mapping[str, tuple[int, ...]]

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of a tensor, in a floating-point type."""


def fill(source: Source, config: ModelConfig, *, precision: Precision, shardings: Params | None = None) -> Params:
    """The parameters that a source holds; see `models.weights.import_folder`.

    Raises:
      WeightsError: see `check_tensors`.
    """
    tensors = check_tensors(source, config)
    shapes = Model(config).shapes
    if shardings is None:
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: here, shapes)

    leaves = [_fill_leaf(source, tensors[path], leaf.shape, sharding, precision.dtype)
              for (path, leaf), sharding in zip(by_path(shapes).items(), jax.tree.leaves(shardings), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def check_tensors(source: Source, config: ModelConfig) -> dict[str, dict[str, Place]]:
    """The places of all tensors, by leaf and name. Reads none but those that should be equal.

    Raises:
      WeightsError: a tensor that is missing, too many, or of another shape.
    """
    wanted, tensors = set(), {}
    for name, place in places(config):
        got = source.shapes.get(name)
        if got != place.shape:
            raise WeightsError(f"tensor {name} {'is missing' if got is None else f'has shape {got}'}, wanted shape {place.shape}")
        wanted.add(name)
        tensors.setdefault(place.path, {})[name] = place
    for name in sorted(source.shapes.keys() - wanted):
        if config.tied_embeddings and name == HEAD and _are_equal(source, HEAD, EMBEDDING):
            continue  # some tools write a tied head a second time
        if name.endswith(".rotary_emb.inv_freq"):
            continue  # older folders keep what follows from their config.json
        raise WeightsError(f"tensor {name} of shape {source.shapes[name]} is one too many, wanted the {len(wanted)} of "
                           f"{config.num_layers} layers with {'a tied head' if config.tied_embeddings else 'a head'}")
    return tensors


def _are_equal(source: Source, first: str, second: str) -> bool:
    if source.shapes[first] != source.shapes[second]:
        return False
    return all(np.array_equal(source.read(first, start, stop), source.read(second, start, stop))
               for start, stop in _pieces(source.shapes[first]))


def _pieces(shape: tuple[int, ...], fold: int = 1) -> Iterator[tuple[int, int]]:
    """Divides a tensor's rows into ranges of about `PIECE_BYTES`, each of a multiple of `fold` rows."""
    row_bytes = 4 * fold * math.prod(shape[1:])
    step = fold * max(1, PIECE_BYTES // row_bytes)
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


# A part of a leaf: [start, stop) along each axis.
Box = tuple[tuple[int, int], ...]


def _fill_leaf(source: Source, tensors: Mapping[str, Place], shape: tuple[int, ...], sharding: jax.sharding.Sharding,
               dtype: np.dtype) -> jax.Array:
    """One leaf; devices with the same part of it share a buffer until it is sent to them."""
    def box_of(index) -> Box:
        return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))

    boxes = {box_of(index) for index in sharding.addressable_devices_indices_map(shape).values()}
    buffers = {box: _zeros([stop - start for start, stop in box], dtype) for box in boxes}
    for name, place in tensors.items():
        _scatter(source, name, place, buffers)
    return jax.make_array_from_callback(shape, sharding, lambda index: buffers[box_of(index)])


def _zeros(shape: list[int], dtype: np.dtype) -> np.ndarray:
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % ALIGNMENT
    return memory[offset:offset + num_bytes].view(dtype).reshape(shape)


def _scatter(source: Source, name: str, place: Place, buffers: Mapping[Box, np.ndarray]) -> None:
    """Copies one stored tensor to wherever its parts belong."""
    if place.layer is not None:
        buffers = {box[1:]: buffer[place.layer - box[0][0]] for box, buffer in buffers.items()
                   if box[0][0] <= place.layer < box[0][1]}
    fold = place.shape[0] // place.unfolded[0]  # stored rows to one along the first unfolded axis
    axis = place.order.index(0)  # ours, that the stored rows run along
    for first_row, last_row in _pieces(place.shape, fold):
        start, stop = first_row // fold, last_row // fold
        touched = {box: buffer for box, buffer in buffers.items() if box[axis][0] < stop and start < box[axis][1]}
        if not touched:
            continue
        piece = source.read(name, first_row, last_row).reshape(stop - start, *place.unfolded[1:]).transpose(place.order)
        for box, buffer in touched.items():
            low, high = max(start, box[axis][0]), min(stop, box[axis][1])
            theirs, ours = [slice(*part) for part in box], [slice(None)] * len(box)
            theirs[axis], ours[axis] = slice(low - start, high - start), slice(low - box[axis][0], high - box[axis][0])
            buffer[tuple(ours)] = piece[tuple(theirs)]
