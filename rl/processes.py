"""Several processes, one run: where the host arrays of each become global ones, and what all of them must agree on.

The learner's mesh spans all processes; each one samples on devices of its own, and holds its own share of the groups, the queue
and the batch. Programs on the learner's mesh are collective: all processes call them in the same order, with the same shapes,
from one thread each. So what decides about such a call is agreed on first. With one process, agreeing costs nothing.
"""

import json
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils


def num_processes() -> int:
    return jax.process_count()


def index() -> int:
    return jax.process_index()


def is_first() -> bool:
    """Whether this process does what only one may do."""
    return jax.process_index() == 0


def share(count: int, what: str) -> int:
    """This process's part of `count` things.

    Raises:
      ValueError: they do not divide.
    """
    if count % num_processes():
        raise ValueError(f"{what}: {count} do not divide over {num_processes()} processes; make it a multiple")
    return count // num_processes()


def gather(values) -> np.ndarray:
    """What each process says, [processes, ...] in their order. The values have one shape and type on all of them."""
    values = np.asarray(values)
    if num_processes() == 1:
        return values[None]
    with jax.transfer_guard("allow"):
        return np.asarray(multihost_utils.process_allgather(values))


def gather_bytes(content: bytes) -> list[bytes]:
    """The content of each process, of any length."""
    if num_processes() == 1:
        return [content]
    sizes = gather(np.int32(len(content)))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(content)] = np.frombuffer(content, np.uint8)
    return [row[:size].tobytes() for row, size in zip(gather(padded), sizes, strict=True)]


def total(sums: np.ndarray) -> np.ndarray:
    """Adds float64 sums [n] over the processes, in their order and without rounding them to what devices compute with."""
    return np.sum([np.frombuffer(content, np.float64) for content in gather_bytes(np.float64(sums).tobytes())], axis=0)


def first_does(function: Callable[[], str]) -> str:
    """What the function returns in the first process, which alone calls it; the others wait.

    Raises:
      ValueError: it raised one; with the same message everywhere.
    """
    answer, error = "", ""
    if is_first():
        try:
            answer = function()
        except ValueError as raised:
            if num_processes() == 1:
                raise
            error = str(raised)
    answer, error = json.loads(gather_bytes(json.dumps([answer, error]).encode())[0])
    if error:
        raise ValueError(error)
    return answer


def from_rows(tree, sharding: jax.sharding.Sharding):
    """Global arrays [B, ...] from each process's own rows [B / processes, ...]."""
    if num_processes() == 1:
        return jax.device_put(tree, sharding)
    return jax.tree.map(lambda rows: jax.make_array_from_process_local_data(sharding, np.asarray(rows)), tree)


def from_whole(tree, shardings):
    """Global arrays from arrays that every process holds whole, each with its sharding or all with one."""
    if num_processes() == 1:
        return jax.device_put(tree, shardings)
    if isinstance(shardings, jax.sharding.Sharding):
        shardings = jax.tree.map(lambda _: shardings, tree)

    def place(array, sharding):
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree.map(place, tree, shardings)


def own_rows(array: jax.Array) -> np.ndarray:
    """This process's rows of a global array whose first axis alone is divided."""
    if array.is_fully_addressable:
        return np.asarray(array)
    parts = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)])


def whole(array: jax.Array) -> np.ndarray:
    """A global array in host memory, on every process."""
    if array.is_fully_addressable:
        return np.array(array)
    with jax.transfer_guard("allow"):
        return np.array(multihost_utils.process_allgather(array, tiled=True))


def own_copy(params, shardings):
    """Parameters on devices of this process alone. Collective.

    Args:
      params: on the learner's mesh.
      shardings: on a mesh [processes, ...] of the same devices, so that each process has all of them: no copy crosses processes,
        but programs do. None with one process, which has them already.
    """
    if shardings is None:
        return params

    def own_part(array, sharding):
        own = jax.sharding.Mesh(sharding.mesh.devices[index()], sharding.mesh.axis_names[1:])
        shards = [shard.data for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, jax.sharding.NamedSharding(own, sharding.spec), shards)

    return jax.tree.map(own_part, jax.device_put(params, shardings), shardings)
