"""Devices to meshes."""

import jax
import numpy as np
from jax.experimental import mesh_utils

from launch.config import ConfigError, MeshOptions
from models.sharding import MESH_AXES


def make_mesh(options: MeshOptions) -> jax.sharding.Mesh:
    """The mesh that learner, scorer and, in lockstep, the sampler share.

    Raises:
      ConfigError: more devices asked for than there are, or they do not divide.
    """
    sizes = [options.data, options.fsdp, options.tensor]
    num_devices = jax.device_count()
    asked = f"mesh --data {options.data} --fsdp {options.fsdp} --tensor {options.tensor}"
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ConfigError(f"{asked}: wanted positive sizes, and -1 (all that is left) at most once")
    if -1 in sizes:
        known = -int(np.prod(sizes))
        if num_devices % known:
            raise ConfigError(f"{asked}: {num_devices} devices do not divide by {known}")
        sizes[sizes.index(-1)] = num_devices // known
    if int(np.prod(sizes)) > num_devices:
        raise ConfigError(
            f"{asked} needs {int(np.prod(sizes))} devices, "
            f"there are {num_devices}; on a CPU set XLA_FLAGS=--xla_force_host_platform_device_count={int(np.prod(sizes))}"
        )
    devices = mesh_utils.create_device_mesh(sizes, jax.devices()[: int(np.prod(sizes))], allow_split_physical_axes=True)
    return jax.sharding.Mesh(devices, MESH_AXES)
