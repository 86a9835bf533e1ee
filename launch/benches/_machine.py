"""What this machine can do, for benchmarks that say how near they come to it."""

import statistics
import time

import jax
import jax.numpy as jnp

from models.transformer import outputs_first_product

MATRIX = (2048, 2048)
"""Large enough to be read from memory, in a chain as in a decoder."""
REPEATS = 10
MIB = 2**20


def matrix_peak(rows: int, products: int = 12) -> float:
    """Operations a second of matrix products with so many rows, one after the other: the best of three layouts."""
    outputs, inputs = MATRIX
    keys = jax.random.split(jax.random.key(0), products)
    kernels = [jax.random.normal(key, MATRIX) * inputs**-0.5 for key in keys]
    layouts = {
        "inputs first": (lambda x, kernel: x @ kernel, [kernel.T.copy() for kernel in kernels]),
        "outputs first": (lambda x, kernel: x @ kernel.T, kernels),
        "rows as columns": (lambda x, kernel: outputs_first_product(kernel, x, 1), kernels),
    }
    return max(2 * rows * outputs * inputs * products / _chain_seconds(multiply, kernels, rows)
               for multiply, kernels in layouts.values())


def _chain_seconds(multiply, kernels: list[jax.Array], rows: int) -> float:
    def chain(x, kernels):
        for kernel in kernels:
            x = jax.lax.optimization_barrier(multiply(x, kernel))
        return x

    program, x = jax.jit(chain), jnp.ones((rows, MATRIX[1]))
    return _median_seconds(lambda: program(x, kernels))


def read_bandwidth() -> float:
    """Bytes a second of adding up numbers that no cache holds."""
    numbers = jnp.ones((64, MIB), jnp.float32)
    program = jax.jit(jnp.sum)
    return numbers.nbytes / _median_seconds(lambda: program(numbers))


def _median_seconds(function) -> float:
    jax.block_until_ready(function())
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - started)
    return statistics.median(times)
