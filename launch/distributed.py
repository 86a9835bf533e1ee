"""Joining the processes of one run: JAX's own distributed runtime, and ending when one of them is gone."""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator

import jax

from launch.config import ConfigError, Invocation

HEARTBEAT_SECONDS = 30
"""Without a sign of life for so long, a process is taken to be gone, and the others end."""


def join(invocation: Invocation) -> None:
    """Waits for the other processes of a run with --distributed. Called before JAX looks for devices.

    Raises:
      ConfigError: some of the options that name the processes are missing, or they are given without --distributed.
    """
    named = {
        "--coordinator": invocation.coordinator,
        "--num-processes": invocation.num_processes,
        "--process-id": invocation.process_id,
    }
    given = [option for option, value in named.items() if value is not None]
    if given and not invocation.distributed:
        raise ConfigError(f"{', '.join(given)} want --distributed")
    if given and len(given) < len(named):
        raise ConfigError(f"{', '.join(given)} without {', '.join(sorted(named.keys() - set(given)))}; give all or none of them")
    if not invocation.distributed:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # of CPUs only
    jax.distributed.initialize(
        coordinator_address=invocation.coordinator,
        num_processes=invocation.num_processes,
        process_id=invocation.process_id,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
    )


@contextlib.contextmanager
def ending_together(invocation: Invocation, go_on: str) -> Iterator[None]:
    """Ends this process at once when the run fails, so that the others do not wait for it, and says what happened.

    Leaving in order would wait for processes that are gone, or that wait for this one in the middle of a collective.

    Args:
      invocation: one without --distributed is left alone.
      go_on: the command that goes on with the run.
    """
    try:
        yield
    except Exception as error:
        if not invocation.distributed:
            raise
        if isinstance(error, jax.errors.JaxRuntimeError):
            print(f"error: process {jax.process_index()} cannot go on, because another process of the run is gone or has failed: "
                  f"{str(error).splitlines()[0]}\nstart all of them again with: {go_on}", file=sys.stderr)
        else:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
