"""The test bed: eight virtual CPU devices, strict shapes and dtypes, reproducible property tests."""

import os
import time

# Read when jax is first imported, so they come before every other import.
os.environ["JAX_PLATFORMS"] = "cpu"
# Most of the suite's time is compilation, and optimising machine code that runs once is a third of that. What bits a user's
# optimised programs compute is asked again by .ci/run and by the slow tests.
if "--xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
if "--xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
# The suite's processes share the cores: a program cut into parts to be compiled side by side only costs more.
os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
# Bitwise claims must be about programs compiled here and now, whatever cache the user's environment names.
jax.config.update("jax_enable_compilation_cache", False)

hypothesis.settings.register_profile("exactor", deadline=None, derandomize=True, database=None, max_examples=25)
hypothesis.settings.load_profile("exactor")

START_TIME = pytest.StashKey[float]()


def pytest_addoption(parser):
    parser.addoption("--time-budget", type=float, metavar="SECONDS", help="skip the tests not yet begun when this time is over")


def pytest_sessionstart(session):
    session.config.stash[START_TIME] = time.monotonic()


def pytest_runtest_setup(item):
    budget = item.config.getoption("--time-budget")
    if budget is not None and time.monotonic() - item.config.stash[START_TIME] > budget:
        pytest.skip(f"the time budget of {budget:.0f} s is spent")
