"""A TPU that is not there: its devices, the memory of its chips, and its compiler, which needs neither.

All of it is libtpu, which one process at a time may hold on a machine.
"""

import contextlib
import dataclasses
import fcntl
import importlib.util
import math
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from launch.config import ConfigError

_EXCEEDED = re.compile(r"([\d.]+)([KMGTP]?)\)? (?:exceeds available HBM|of) \(?([\d.]+)([KMGTP]?)")
_UNITS = {unit: 1024**power for power, unit in enumerate(("", "K", "M", "G", "T", "P"))}


class HbmExceeded(Exception):
    """The compiler refuses a program that one chip's memory cannot hold.

    Attributes:
      needed, available: bytes, arguments and results included; None where the compiler's message gives no numbers.
    """

    def __init__(self, message: str):
        super().__init__(message)
        found = _EXCEEDED.search(message)
        self.needed, self.available = (_bytes(*found.group(1, 2)), _bytes(*found.group(3, 4))) if found else (None, None)


@dataclasses.dataclass(frozen=True)
class ProgramMemory:
    """What a program takes of one chip's memory, in bytes."""

    arguments: int
    temporary: int
    peak: int  # arguments, temporary arrays, and those results that do not take an argument's place


@contextlib.contextmanager
def sole_use(on_wait: Callable[[], None]) -> Iterator[None]:
    """Waits until no other process of this user compiles with libtpu; `on_wait` is called if one does."""
    path = pathlib.Path(tempfile.gettempdir()) / f"exactor-libtpu-{os.getuid()}.lock"
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file, or the end of the process, gives the lock back


def devices_of(topology: str) -> list[jax.Device]:
    """The devices of a topology such as v5e:8x8: kind, coordinates and process, but nothing that could run.

    Raises:
      ConfigError: there is no such topology, or libtpu is not installed or in use.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError("a plan is compiled by libtpu, which is not installed; pip install -e '.[plan]'")
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except jax.errors.JaxRuntimeError as error:
        if "lockfile" in str(error):
            raise ConfigError(f"another program holds libtpu, which only one may use; wait for its end ({error})") from error
        raise ConfigError(
            f"--topology is {topology!r}, wanted a kind of TPU and its shape, such as v5e:8x8, v5p:2x2x1 or v6e:4x4 ({error})"
        ) from error


def by_itself(mesh: jax.sharding.Mesh, topology: str) -> jax.sharding.Mesh:
    """A mesh of some of a topology's chips, on a topology of just these: libtpu compiles for whole ones (and for single chips).

    Chips that lie apart move together, so what runs there takes the same memory, but other ways between them.

    Raises:
      ConfigError: they form no rectangle, or there is no such topology.
    """
    kind, _, shape = topology.partition(":")
    coordinates = np.array([device.coords for device in mesh.devices.flat])
    ranks = np.stack([np.unique(axis, return_inverse=True)[1] for axis in coordinates.T], axis=1)
    sizes = ranks.max(axis=0) + 1
    if mesh.size == 1 or sizes.prod() == math.prod(int(size) for size in shape.split("x")):
        return mesh
    if sizes.prod() != mesh.size:
        raise ConfigError(f"{mesh.size} chips of {topology} are no rectangle of it; change the mesh's size, or --sampler-devices")
    own_shape = "x".join(str(size) for size in sizes[: shape.count("x") + 1])
    at = {tuple(device.coords): device for device in devices_of(f"{kind}:{own_shape}")}
    moved = np.array([at[tuple(rank)] for rank in ranks.tolist()]).reshape(mesh.devices.shape)
    return jax.sharding.Mesh(moved, mesh.axis_names)


def hbm_bytes(device: jax.Device) -> int:
    """Memory of one chip that programs may use. Only the compiler knows it, so it is asked for more than any chip has."""
    boundless = jax.ShapeDtypeStruct((2**40,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    try:
        compile_program("a program without bounds", jax.jit(jnp.sin).lower(boundless))
    except HbmExceeded as exceeded:
        if exceeded.available is not None:
            return exceeded.available
        raise ConfigError(f"libtpu does not say what memory a {device.device_kind} has, but: {exceeded}") from exceeded
    raise ConfigError(f"libtpu knows no end to the memory of a {device.device_kind}; use the libtpu that setup.py names")


def compile_program(name: str, lowered: jax.stages.Lowered) -> ProgramMemory:
    """Compiles a program, and tells what memory it takes.

    Raises:
      HbmExceeded: more than a chip has.
      ConfigError: the compiler refuses it for another reason.
    """
    try:
        analysis = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error) and "hbm" in str(error).lower():
            raise HbmExceeded(str(error)) from error
        raise ConfigError(f"the TPU's compiler refuses {name}: {error}") from error
    # Not the analysis's own peak: that counts the core's fast memory too, and not what lies idle between temporary arrays.
    arguments, temporary = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return ProgramMemory(arguments, temporary, arguments + temporary + results)


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * _UNITS[unit])
