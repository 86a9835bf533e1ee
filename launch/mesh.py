"""Devices to meshes: those of the learner and the scorer, and those of the sampler, which may be the same.

With several processes the learner's mesh spans them, with equally many devices of each; a sampler's lies inside its process.
"""

import jax
import numpy as np
from jax.experimental import mesh_utils

from launch.config import ConfigError, MeshOptions, SamplerOptions
from models.sharding import MESH_AXES
from rl import processes


def make_mesh(options: MeshOptions, *, reserved: int = 0) -> jax.sharding.Mesh:
    """The mesh of learner and scorer, of the first devices.

    Args:
      options: its sizes.
      reserved: devices of each process that it leaves over for others.

    Raises:
      ConfigError: more devices asked for than there are, or they do not divide.
    """
    num_processes = processes.num_processes()
    reserved *= num_processes
    devices = jax.devices()
    sizes = [options.data, options.fsdp, options.tensor]
    num_devices = len(devices) - reserved
    asked = f"mesh --data {options.data} --fsdp {options.fsdp} --tensor {options.tensor}"
    there = f"{num_devices}" + (f" beside --sampler-devices {reserved}" if reserved else "")
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
    each = processes.share(size, asked)
    used = [device for index in range(num_processes) for device in _devices_of(index)[:each]]
    return _arrange(sizes, used)


def make_sampler_mesh(options: SamplerOptions, mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """The mesh of this process's sampler: of the devices that come after the learner's, or else of the learner's.

    Raises:
      ConfigError: there are not so many devices, or they do not divide.
    """
    num_shared = mesh.size // processes.num_processes()
    if not options.sampler_devices and processes.num_processes() == 1:
        return mesh
    own = _devices_of(processes.index())
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


def _devices_of(process: int) -> list[jax.Device]:
    return [device for device in jax.devices() if device.process_index == process]


def _arrange(sizes, devices: list[jax.Device]) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True), MESH_AXES)
