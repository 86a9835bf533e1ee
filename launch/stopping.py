"""A request to stop, made by a signal: the run ends its learner step, writes a checkpoint and leaves.

Signals reach several processes at different moments, so they agree on when to heed one.
"""

import contextlib
import signal
from collections.abc import Iterator

from rl import processes


class StopRequest:
    """Whether somebody asked the run to stop."""

    def __init__(self):
        self._requested = False

    @property
    def requested(self) -> bool:
        """Whether any process was asked. Collective."""
        return bool(processes.gather(self._requested).any())

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Takes SIGTERM and the first SIGINT as the request. A second SIGINT interrupts at once, as ever. Main thread only."""
        before = {number: signal.signal(number, self._request) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _request(self, number: int, frame) -> None:
        del frame
        self._requested = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
