"""What a run will hold in host memory, reckoned before it starts.

A ring that outgrows the machine does so in the middle of a run, after hours: the versions fill up one publish at a time. So the
arithmetic is done at the start, from shapes alone.
"""

import math

import jax
import psutil

from models.transformer import Params

GIB = 2**30


def host_copy_bytes(shapes: Params) -> int:
    """Bytes of one snapshot on this process: each distinct shard that its devices hold, once.

    Args:
      shapes: `jax.ShapeDtypeStruct` leaves with shardings.
    """
    def leaf_bytes(leaf: jax.ShapeDtypeStruct) -> int:
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        num_shards = len({str(index) for index in indices})
        return num_shards * math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize

    return sum(leaf_bytes(leaf) for leaf in jax.tree.leaves(shapes))


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
