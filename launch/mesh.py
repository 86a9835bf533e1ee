"""Devices to meshes: those of the learner and the scorer, and those of the sampler, which may be the same."""

import jax
import numpy as np
from jax.experimental import mesh_utils

from launch.config import ConfigError, MeshOptions, SamplerOptions
from models.sharding import MESH_AXES


def make_mesh(options: MeshOptions, *, reserved: int = 0) -> jax.sharding.Mesh:
    """The mesh of learner and scorer, of the first devices.

    Args:
      options: its sizes.
      reserved: devices that it leaves over for others.

    Raises:
      ConfigError: more devices asked for than there are, or they do not divide.
    """
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
    return _arrange(sizes, devices[:size])


def make_sampler_mesh(options: SamplerOptions, mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """The mesh of the sampler: of the devices that come after the learner's; the learner's `mesh` if it has none of its own.

    Raises:
      ConfigError: there are not so many devices, or they do not divide.
    """
    if not options.sampler_devices:
        return mesh
    num_rows, rest = divmod(options.sampler_devices, options.sampler_tensor)
    if rest:
        raise ConfigError(
            f"--sampler-devices {options.sampler_devices} do not divide by --sampler-tensor {options.sampler_tensor}"
        )
    own = jax.devices()[mesh.size : mesh.size + options.sampler_devices]
    if len(own) < options.sampler_devices:
        raise ConfigError(
            f"--sampler-devices {options.sampler_devices}, but the learner's {mesh.size} leave {len(own)}; on a CPU set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={mesh.size + options.sampler_devices}"
        )
    return _arrange((1, num_rows, options.sampler_tensor), own)


def _arrange(sizes, devices: list[jax.Device]) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True), MESH_AXES)
