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
class RingOptions:
    """A ring, as far as it takes memory."""

    capacity: int  # versions
    replays: bool  # whether versions are got from it
    persist_every: int  # versions
    keyframe_every: int  # versions
    host_bytes: int | None = None  # for the newest version and the differences; None for no limit


@dataclasses.dataclass(frozen=True)
class AnchorBytes:
    """What anchors, and their comparison with the exact ones, cost a run in memory beside its newest and its sampler's policy."""

    held: int  # on each device of the learner, at all times; the reference policy included, where there is one
    replay: int  # on each device that scores, while it does
    host: int  # on the process that holds most: whole versions, and at most these differences
    differences: int  # of that, differences: as many bytes if all weights differed in all versions, or their budget
    most_differences: int  # the same without the budget
    disk: int  # in all, when the run ends, likewise at most
    keyframes: int  # of that, versions written whole


LIKELY_DIFFERENCE = 0.05
"""Of a version in bfloat16, at learning rates up to 1e-5: what its difference to the next takes at most (`launch.bench ring`)."""


def anchor_bytes(
    source: SourceName,
    shapes: Params,
    *,
    scored_shapes: Params,
    ring: RingOptions,
    num_publishes: int,
    has_reference: bool = False,
) -> AnchorBytes:
    """The bytes of a source, tier by tier.

    Args:
      source: of the anchors.
      shapes: of the published parameters, with shardings.
      scored_shapes: the same on the mesh that scores; it is another one for a dedicated scorer.
      ring: where versions are got from, by the source, or to compare it with the exact old logprobs.
      num_publishes: of the whole run.
      has_reference: whether the policy that the run starts with is kept, for a KL penalty.
    """
    published, whole = device_bytes(shapes), sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    held = {
        SourceName.LAGGED: published,  # the version before
        SourceName.EWMA: published + _float32_bytes(shapes),  # what scores, and the average behind it
    }
    each = host_copy_bytes(shapes)
    differences, keyframes = _most_differences(each, ring), num_keyframes(num_publishes, ring)
    written_differences = num_publishes if ring.persist_every == 1 else 0
    return AnchorBytes(
        held=held.get(source, 0) + has_reference * published,
        replay=2 * device_bytes(scored_shapes) if ring.replays else 0,  # one that scores, and the next one that is on its way
        host=_whole_versions(ring) * each + differences,
        differences=differences,
        most_differences=_most_differences(each, dataclasses.replace(ring, host_bytes=None)),
        disk=(keyframes + written_differences) * whole,
        keyframes=keyframes * whole,
    )


def _whole_versions(ring: RingOptions) -> int:
    """Versions that are whole on the host at the worst moment: the newest, the one before until it is encoded, one that is
    written as a keyframe, and two that are replayed: one on its way to the devices, and the next."""
    return 3 + 2 * ring.replays


def _most_differences(each: int, ring: RingOptions) -> int:
    most = max(ring.capacity - 1, 1) * each  # a ring of one tells each version from the one before too, for the disk
    return most if ring.host_bytes is None else min(most, max(ring.host_bytes - each, 0))


def _float32_bytes(shapes: Params) -> int:
    return sum(4 * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(shapes))


def num_persisted(num_publishes: int, persist_every: int) -> int:
    """Versions on disk after so many publishes: version 0, every `persist_every`th, and the last."""
    return len({*range(0, num_publishes + 1, persist_every), num_publishes})


def num_keyframes(num_publishes: int, ring: RingOptions) -> int:
    """Those of them that are written whole: where the version before is not there, that is all."""
    persisted = num_persisted(num_publishes, ring.persist_every)
    return persisted if ring.persist_every > 1 else -(-persisted // ring.keyframe_every)


def check_ring_fits(shapes: Params, ring: RingOptions, *, available: int | None = None) -> None:
    """Refuses a ring that this host cannot hold.

    Args:
      shapes: of the published parameters, with shardings.
      ring: what it is to hold.
      available: bytes of host memory that may be used; by default what the system says is available now.

    Raises:
      ValueError: what it takes at most is more than is available, or its budget is less than one version.
    """
    available = psutil.virtual_memory().available if available is None else available
    each, whole = host_copy_bytes(shapes), _whole_versions(ring)
    if ring.host_bytes is not None and ring.host_bytes < each:
        raise ValueError(f"--ring-host-gib allows {ring.host_bytes / GIB:.3g} GiB, wanted at least {each / GIB:.3g} GiB, for the "
                         "newest version is always in host memory; raise it, or halve versions with --publish-dtype bfloat16")
    differences = _most_differences(each, ring)
    wanted = whole * each + differences
    if wanted > available:
        left = available - (whole - 1) * each
        remedy = (f"set --persist-every 1 and --ring-host-gib {math.floor(1000 * left / GIB) / 1000}, and differences beyond it "
                  "go to disk; or lower --ring-capacity (with --max-staleness)")
        if left < each:
            remedy = "halve versions with --publish-dtype bfloat16, or take more hosts"
        raise ValueError(f"a ring of {ring.capacity} versions takes {whole} x {each / GIB:.3g} GiB of host memory for whole "
                         f"versions, and at most {differences / GIB:.3g} GiB for differences, but {available / GIB:.3g} GiB are "
                         f"available; {remedy}")


def check_disk_fits(anchors: AnchorBytes, *, available: int) -> None:
    """Refuses a run whose keyframes alone are more than the disk has room for.

    Raises:
      ValueError: so it is.
    """
    if anchors.keyframes > available:
        raise ValueError(f"the run's keyframes take {anchors.keyframes / GIB:.3g} GiB of disk, but {available / GIB:.3g} GiB are "
                         "free where the run directory is; set --persist-every 1 with a larger --keyframe-every, which writes "
                         "differences in between, or another --run-dir")


NUM_PREFIXES = 3
"""Prompts of a sampler's that are in memory at most on their way into slots, beside short ones: one that came in whole and that
others of its group wait for, and one that is coming in, before and after its next chunk."""


def check_sampler_fits(weights, state, prefix_cache, *, num_slots: int, num_samplers: int, available: int) -> None:
    """Refuses slots whose KV cache a device cannot hold.

    While a new policy is laid out for decoding the one before is still there, and an evaluation decodes in slots of its own.

    Args:
      weights, state, prefix_cache: of `rl.sampling_programs.SamplingPrograms`, as `jax.ShapeDtypeStruct` with shardings.
      num_slots: of the state.
      num_samplers: that are there at one time, each with a state and with prompts on their way into it.
      available: bytes of each device that may be used.

    Raises:
      ValueError: caches and weights take more, and how many slots there could be.
    """
    cache, prompts = num_samplers * device_bytes(state), num_samplers * NUM_PREFIXES * device_bytes(prefix_cache)
    policies = 2 * device_bytes(weights)
    if cache + prompts + policies <= available:
        return
    fitting = max(available - policies - prompts, 0) * num_slots // cache
    remedy = f"about {fitting} slots would fit: lower --slots or --model.max-length" if fitting else "not even one slot would fit"
    raise ValueError(f"the KV cache of {num_slots} sampler slots takes {cache / GIB:.3g} GiB a device "
                     f"({num_samplers} of them), beside {prompts / GIB:.3g} GiB for prompts on their way into slots and "
                     f"{policies / GIB:.3g} GiB for two versions of the weights, but {available / GIB:.3g} GiB are available; "
                     f"{remedy}, or divide it with --sampler-devices and --sampler-tensor")


def available_bytes(mesh: jax.sharding.Mesh) -> int | None:
    """Bytes that each device of a mesh may still take; devices of a CPU share the host's. None where the devices do not tell."""
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        return psutil.virtual_memory().available // mesh.size
    stats = device.memory_stats()
    return None if not stats or "bytes_limit" not in stats else stats["bytes_limit"] - stats["bytes_in_use"]
