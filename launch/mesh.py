"""Devices to meshes: those of the learner and the scorer, and those of the sampler, which may be the same.

With several processes the learner's mesh spans them, with equally many devices of each; a sampler's lies inside its process.
"""

import itertools
import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils

from launch.config import ConfigError, MeshOptions, SamplerOptions
from models.sharding import MESH_AXES

THREADS_PER_DEVICE = 4  # of a CPU: with 1 runs hung, with 4 they did not


def by_process(devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
    """The devices of each process."""
    ordered = sorted(devices, key=lambda device: device.process_index)  # stable
    return [list(group) for _, group in itertools.groupby(ordered, key=lambda device: device.process_index)]


def make_mesh(options: MeshOptions, devices: Sequence[jax.Device], *, reserved: int = 0) -> jax.sharding.Mesh:
    """The mesh of learner and scorer, of the first devices of each process.

    Args:
      options: its sizes.
      devices: all there are.
      reserved: devices of each process that it leaves over for others.

    Raises:
      ConfigError: more devices asked for than there are, or they do not divide.
    """
    groups = by_process(devices)
    reserved *= len(groups)
    sizes = [options.data, options.fsdp, options.tensor]
    num_devices = len(devices) - reserved
    asked = f"mesh --data {options.data} --fsdp {options.fsdp} --tensor {options.tensor}"
    there = f"{num_devices}" + (f" beside the {reserved} of --sampler-devices and --scorer-devices" if reserved else "")
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ConfigError(f"{asked}: wanted positive sizes, and -1 (all that is left) at most once")
    if -1 in sizes:
        known = -int(np.prod(sizes))
        if num_devices < known or num_devices % known:
            raise ConfigError(f"{asked}: {there} devices do not divide by {known}")
        sizes[sizes.index(-1)] = num_devices // known
    size = int(np.prod(sizes))
    if size > num_devices:
        raise ConfigError(
            f"{asked} needs {size} devices, there are {there}; on a CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={size + reserved}"
        )
    each, rest = divmod(size, len(groups))
    if rest:
        raise ConfigError(f"{asked}: {size} devices do not divide over {len(groups)} processes; make it a multiple")
    return _arrange(sizes, [device for group in groups for device in group[:each]])


def make_sampler_mesh(
    options: SamplerOptions, devices: Sequence[jax.Device], mesh: jax.sharding.Mesh, process: int
) -> jax.sharding.Mesh:
    """The mesh of a process's sampler: of those of its `devices` that come after the learner's, or else of the learner's `mesh`.

    Raises:
      ConfigError: there are not so many devices, or they do not divide.
    """
    groups = by_process(devices)
    num_shared = mesh.size // len(groups)
    if not options.sampler_devices and len(groups) == 1:
        return mesh
    own = groups[process]
    own = own[num_shared : num_shared + options.sampler_devices] if options.sampler_devices else own[:num_shared]
    num_rows, rest = divmod(len(own), options.sampler_tensor)
    if rest:
        raise ConfigError(f"{len(own)} devices of the sampler do not divide by --sampler-tensor {options.sampler_tensor}")
    if len(own) < options.sampler_devices:
        raise ConfigError(
            f"--sampler-devices {options.sampler_devices}, but the learner's {num_shared} leave {len(own)}; on a CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={num_shared + options.sampler_devices}"
        )
    return _arrange((1, num_rows, options.sampler_tensor), own)


def make_scorer_mesh(
    num_scorer: int, num_sampler: int, devices: Sequence[jax.Device], mesh: jax.sharding.Mesh
) -> jax.sharding.Mesh:
    """The mesh of a dedicated scorer: of the devices after the learner's and the sampler's.

    With as many devices as the learner it has the learner's shape, and so scores to the same bits.

    Raises:
      ConfigError: there are not so many devices.
    """
    first = mesh.size + num_sampler
    own = list(devices)[first : first + num_scorer]
    if len(own) < num_scorer:
        raise ConfigError(
            f"--scorer-devices {num_scorer}, but learner and sampler leave {len(own)}; on a CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={first + num_scorer}"
        )
    return _arrange(mesh.devices.shape if num_scorer == mesh.size else (1, num_scorer, 1), own)


def check_threads(learner: jax.sharding.Mesh, scorer: jax.sharding.Mesh) -> None:
    """Refuses two meshes on which programs wait for each other at once, where XLA has too few threads for the waiting.

    XLA runs virtual devices of a CPU in one pool of threads, as many as there are cores or devices. A program that waits in a
    collective holds a thread on each of its devices; two at once, and what they wait for may find none.

    Raises:
      ConfigError: the meshes are such, and the pool has not been made larger.
    """
    platforms = {device.platform for device in (*learner.devices.flat, *scorer.devices.flat)}
    wanted = THREADS_PER_DEVICE * (learner.size + scorer.size)
    threads = int(os.environ.get("NPROC") or os.cpu_count())
    if platforms == {"cpu"} and min(learner.size, scorer.size) > 1 and threads < wanted:
        raise ConfigError(
            f"a learner on {learner.size} and a scorer on {scorer.size} devices of a CPU may wait for each other for ever: XLA "
            f"has {threads} threads, wanted {wanted}; set the environment variable NPROC={wanted}"
        )


def make_serving_mesh(
    options: SamplerOptions, devices: Sequence[jax.Device], mesh: jax.sharding.Mesh
) -> jax.sharding.Mesh | None:
    """The learner's devices once more, process by process: [processes, *MESH_AXES], each laid out as its sampler wants weights.

    Over it a policy is gathered, whole, into each process: no copy crosses processes. None where there is one process only.
    """
    groups = by_process(mesh.devices.flat)
    if len(groups) == 1:
        return None
    if options.sampler_devices:  # they are not the learner's, so the weights are only divided evenly, and copied on
        parts = [np.array(group).reshape(1, len(group), 1) for group in groups]
    else:
        parts = [make_sampler_mesh(options, devices, mesh, process).devices for process in range(len(groups))]
    return jax.sharding.Mesh(np.stack(parts), ("process", *MESH_AXES))


def _arrange(sizes, devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
    try:
        return jax.sharding.Mesh(mesh_utils.create_device_mesh(sizes, list(devices), allow_split_physical_axes=True), MESH_AXES)
    except AssertionError as error:  # of a TPU's neighbours, which talk to each other directly
        raise ConfigError(
            f"these {len(devices)} devices are no rectangle of the TPU's topology, so they cannot be a mesh; change the "
            "mesh's size, or --sampler-devices"
        ) from error
