"""Parameters in which any change shows, on meshes of eight devices, and a step that donates them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

MESHES = {
    "fsdp=8": ((8,), ("fsdp",), P("fsdp")),
    "2x4": ((2, 4), ("fsdp", "tensor"), P("fsdp", "tensor")),
    "4x2": ((4, 2), ("fsdp", "tensor"), P("tensor", "fsdp")),
}


def arrays(seed=0):
    """Values that arithmetic would not preserve: every bfloat16 bit pattern (NaN payloads, both zeros) is among them.

    Two seeds differ in two rows of the kernel, everywhere in `odd`, nowhere in `scale`.
    """
    generator = np.random.default_rng(seed)
    kernel = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    kernel[37 * seed % 256] ^= 1  # neighbours change places
    return {
        "block": {"kernel": kernel.view(jnp.bfloat16), "nothing": {}},
        "odd": generator.integers(0, 2**32, 64, dtype=np.uint32).view(np.float32),
        "scale": np.array([-0.0, 0.0, 1.0, np.inf], np.float32),
        "step": np.array(seed, np.float32),
    }


def put(values, mesh="fsdp=8"):
    """On eight devices: the kernel is sharded, one vector is sharded along one axis only, the rest is replicated."""
    shape, names, spec = MESHES[mesh]
    device_mesh = Mesh(np.array(jax.devices()).reshape(shape), names)
    specs = {"block": {"kernel": spec, "nothing": {}}, "odd": P(names[-1]), "scale": P(), "step": P()}
    return jax.tree.map(lambda array, part: jax.device_put(array, NamedSharding(device_mesh, part)), values, specs)


def bits(tree):
    return [(leaf.dtype.name, leaf.shape, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(tree)]


def describe(params):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), params)


def total_bytes(params):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


@jax.jit
def fresh(params):
    """Buffers that belong to XLA alone, as those of a learner do, so that donation can reuse them."""
    return jax.tree.map(lambda leaf: leaf + 1, params)


@functools.partial(jax.jit, donate_argnums=0)
def donating_step(params):
    return jax.tree.map(lambda leaf: leaf * 2 + 1, params)
