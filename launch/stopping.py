"""A request to stop, made by a signal: the run ends its learner step, writes a checkpoint and leaves."""

import contextlib
import signal
from collections.abc import Iterator


class StopRequest:
    """Whether somebody asked the run to stop."""

    def __init__(self):
        self.requested = False

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
        self.requested = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)
