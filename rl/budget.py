"""The one place that counts a run's bytes, on devices, in host memory and on disk, before it starts.

A run that outgrows its machines does so late: the ring fills up one publish at a time. So the arithmetic is done at the start,
from shapes and shardings alone. It needs no devices: a mesh of a TPU that is elsewhere will do.
"""

import dataclasses
import math

import jax
import psutil

from models.transformer import Params
from rl.old_logprobs import SourceName

GIB = 2**30


def device_bytes(shapes) -> int:
    """Bytes of a tree on each device that holds its shards.

    Args:
      shapes: `jax.ShapeDtypeStruct` leaves with shardings.
    """
    return sum(_shard_bytes(leaf) for leaf in jax.tree.leaves(shapes))


def host_copy_bytes(shapes: Params) -> int:
    """Bytes of one snapshot on the process that holds most: each distinct shard of its devices, once.

    Args:
      shapes: `jax.ShapeDtypeStruct` leaves with shardings.
    """
    def bytes_by_process(leaf: jax.ShapeDtypeStruct) -> dict[int, int]:
        indices: dict[int, set[str]] = {}
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            indices.setdefault(device.process_index, set()).add(str(index))
        return {process: len(distinct) * _shard_bytes(leaf) for process, distinct in indices.items()}

    leaves = [bytes_by_process(leaf) for leaf in jax.tree.leaves(shapes)]
    return max(sum(leaf[process] for leaf in leaves) for process in leaves[0])


def _shard_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class AnchorBytes:
    """What anchors, and their comparison with the exact ones, cost a run in memory beside its newest and its sampler's policy."""

    held: int  # on each device of the learner, at all times
    replay: int  # on each device that scores, while it does
    host: int  # on the process that holds most: the ring's versions, and the copy that a save under way holds
    disk: int  # in all, when the run ends


def anchor_bytes(
    source: SourceName, shapes: Params, *, scored_shapes: Params, replays: bool, capacity: int, num_persisted: int
) -> AnchorBytes:
    """The bytes of a source, tier by tier.

    Args:
      source: of the anchors.
      shapes: of the published parameters, with shardings.
      scored_shapes: the same on the mesh that scores; it is another one for a dedicated scorer.
      replays: whether versions are got from the ring: by the source, or to compare it with the exact old logprobs.
      capacity: versions in the ring.
      num_persisted: versions that the run writes to disk.
    """
    published, whole = device_bytes(shapes), sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    held = {
        SourceName.LAGGED: published,  # the version before
        SourceName.EWMA: published + _float32_bytes(shapes),  # what scores, and the average behind it
    }
    return AnchorBytes(
        held=held.get(source, 0),
        replay=2 * device_bytes(scored_shapes) if replays else 0,  # one that scores, and the next one that is on its way
        host=(capacity + 1) * host_copy_bytes(shapes),
        disk=num_persisted * whole,
    )


def _float32_bytes(shapes: Params) -> int:
    return sum(4 * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(shapes))


def num_persisted(num_publishes: int, persist_every: int) -> int:
    """Versions on disk after so many publishes: version 0, every `persist_every`th, and the last."""
    return len({*range(0, num_publishes + 1, persist_every), num_publishes})


def check_ring_fits(shapes: Params, *, capacity: int, available: int | None = None) -> None:
    """Refuses a ring that this host cannot hold.

    Args:
      shapes: of the published parameters, with shardings.
      capacity: versions in the ring.
      available: bytes of host memory that may be used; by default what the system says is available now.

    Raises:
      ValueError: the versions, and the copy that a save under way holds, take more than is available.
    """
    available = psutil.virtual_memory().available if available is None else available
    each = host_copy_bytes(shapes)
    wanted = (capacity + 1) * each
    if wanted > available:
        raise ValueError(f"a ring of {capacity} versions, and one more while a version is saved, takes {capacity + 1} x "
                         f"{each / GIB:.3g} GiB = {wanted / GIB:.3g} GiB of host memory, but {available / GIB:.3g} GiB are "
                         "available; lower --ring-capacity (with --max-staleness), or halve it with --publish-dtype bfloat16")
