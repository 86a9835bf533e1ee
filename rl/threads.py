"""Sampler and learner at once; and the same run once more, in one thread.

Each side has a thread. They meet in the short operations of `rl.loop`, one at a time, and the order of these operations, the
interleaving, is all that distinguishes this run from another with its configuration and seed. So it is written down, a letter an
operation and a line a learner step, and `Repeat` does the same operations in the same order.

Queues are bounded by admission: the sampler waits when it has nothing to roll and no credit, the learner when no batch is ready.
"""

import enum
import pathlib
import threading
from collections.abc import Callable

from rl.loop import Loop

OnStep = Callable[[dict], None]
Stop = Callable[[], bool]


class Operation(enum.Enum):
    """What an interleaving is made of."""

    BEGIN_ROUND = "b"
    END_ROUND = "e"
    TAKE = "t"
    END_STEP = "s"
    OFFER = "o"
    STATE = "c"  # a checkpoint


class Interleaving:
    """The order of a run's operations, in a file that is one line longer after each learner step."""

    def __init__(self, path: pathlib.Path):
        self._path = pathlib.Path(path)
        self._num_lines = 0
        self._open_line = ""

    def note(self, operation: Operation) -> None:
        """Adds an operation."""
        self._open_line += operation.value

    def flush(self) -> None:
        """Ends the line."""
        with self._path.open("a") as file:
            file.write(self._open_line + "\n")
        self._num_lines, self._open_line = self._num_lines + 1, ""

    def state(self) -> dict:
        """Where it is, as JSON values."""
        return {"num_lines": self._num_lines, "open_line": self._open_line}

    def restore(self, state: dict) -> None:
        """Goes back to a `state`: what was written after it is cut off.

        Raises:
          ValueError: the file has fewer lines.
        """
        lines = self._path.read_text().splitlines(keepends=True) if self._path.exists() else []
        if len(lines) < state["num_lines"]:
            raise ValueError(f"{self._path} has {len(lines)} lines, wanted {state['num_lines']}; "
                             "resume from the checkpoint of this very run")
        self._path.write_text("".join(lines[: state["num_lines"]]))
        self._num_lines, self._open_line = state["num_lines"], state["open_line"]


def read_interleaving(path: pathlib.Path) -> list[list[Operation]]:
    """The operations of a run, a list for each learner step.

    Raises:
      ValueError: there is no such file, or it holds something else.
    """
    if not path.is_file():
        raise ValueError(f"there is no {path}; wanted the interleaving of a run with --schedule threads")
    try:
        return [[Operation(letter) for letter in line] for line in path.read_text().splitlines()]
    except ValueError as error:
        raise ValueError(f"{path} is no interleaving: {error}; wanted lines of the letters "
                         f"{', '.join(operation.value for operation in Operation)}") from error


class Threads:
    """Runs a loop's two sides at once.

    Args:
      loop: started, or restored.
      interleaving: where the order of operations is written.
    """

    def __init__(self, loop: Loop, interleaving: Interleaving):
        self._loop, self._interleaving = loop, interleaving
        self._changed = threading.Condition()  # held by one operation at a time; told when one has been done
        self._is_stopping = self._is_idle = False
        self._is_rolling = False  # a round is under way
        self._is_pausing = False  # and no other may begin
        self._failure: BaseException | None = None  # of the sampler's thread

    def run(self, num_steps: int, on_step: OnStep = lambda metrics: None, stop: Stop = lambda: False) -> None:
        """Runs learner steps in the calling thread until `num_steps` are done in all; then the sampler's thread has ended.

        Args:
          num_steps: learner steps, those done before included.
          on_step: told each one's metrics.
          stop: asked before each one whether to end early.

        Raises:
          What either side raised; both have stopped.
        """
        self._is_stopping = self._is_idle = False
        sampler = threading.Thread(target=self._sample, name="sampler")
        sampler.start()
        try:
            while self._loop.step < num_steps and not stop():
                self._learn(on_step)
        finally:
            with self._changed:
                self._is_stopping = True
                self._changed.notify_all()
            sampler.join()
        if self._failure is not None:
            raise self._failure

    def state(self) -> dict:
        """The state of loop and interleaving, between two calls of `run`. Taking it changes what follows, so it is noted."""
        self._interleaving.note(Operation.STATE)
        state = self._loop.state()
        state["own"]["interleaving"] = self._interleaving.state()
        return state

    def restore(self, state: dict) -> None:
        """Takes a `state` back, into a loop built from the same configuration."""
        self._loop.restore(state)
        self._interleaving.restore(state["own"]["interleaving"])

    # --- the sampler's thread ---

    def _sample(self) -> None:
        try:
            while self._round():
                pass
        except BaseException as error:  # the learner raises it: a thread's own error reaches nobody
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _round(self) -> bool:
        """One round, or a wait until there may be something to roll; False when the run is over."""
        loop = self._loop
        with self._changed:
            if self._is_pausing:
                loop.timed("sampler_wait", self._changed.wait_for, lambda: self._is_stopping or not self._is_pausing)
            if self._is_stopping:
                return False
            self._interleaving.note(Operation.BEGIN_ROUND)
            if not loop.begin_round():
                self._is_idle = True
                self._changed.notify_all()
                loop.timed("sampler_wait", self._changed.wait_for, lambda: self._is_stopping or not self._is_idle)
                return True
            self._is_rolling = True
        rolled = loop.roll(loop.max_decode_steps)
        with self._changed:
            self._interleaving.note(Operation.END_ROUND)
            loop.end_round(rolled)
            self._is_rolling = False
            self._changed.notify_all()
        return True

    # --- the learner's ---

    def _learn(self, on_step: OnStep) -> None:
        """One learner step, or none when what was queued had grown too old."""
        loop = self._loop
        with self._changed:
            loop.timed("learner_wait", self._changed.wait_for, self._may_take)
            if self._failure is not None:
                raise self._failure
            if not loop.has_batch:
                raise RuntimeError(loop.stuck())
            self._interleaving.note(Operation.TAKE)
            groups = loop.take()
            self._is_idle = False  # what was dropped has given its credit back
            self._changed.notify_all()
        if groups is None:
            return
        facts = loop.learn(groups)
        with self._changed:
            due = self._end_step(groups)
            row = None if due else self._record(facts)
        if due:
            row = self._publish(facts)
        on_step(row)

    def _publish(self, facts: dict) -> dict:
        """The next version, put while the sampler goes on, unless the old-logprob source wants it to pause."""
        loop = self._loop
        params = None if loop.source.interrupts else loop.snapshot()
        with self._changed:
            if params is None:
                self._is_pausing = True
                loop.timed("learner_wait", self._changed.wait_for, lambda: not self._is_rolling or self._failure is not None)
                if self._failure is not None:
                    raise self._failure
                params = loop.snapshot()
                self._is_pausing = False
            self._interleaving.note(Operation.OFFER)
            loop.offer(params)
            self._changed.notify_all()
            return self._record(facts)

    def _may_take(self) -> bool:
        return self._loop.has_batch or self._is_idle or self._failure is not None

    def _end_step(self, groups) -> bool:
        self._interleaving.note(Operation.END_STEP)
        due = self._loop.end_step(groups)
        self._is_idle = False
        self._changed.notify_all()
        return due

    def _record(self, facts: dict) -> dict:
        row = self._loop.record(facts)
        self._interleaving.flush()
        return row


class Repeat:
    """Runs a loop in one thread, in the order that another run recorded.

    Args:
      loop: started, with the configuration and seed of that run.
      interleaving: from `read_interleaving`.
    """

    def __init__(self, loop: Loop, interleaving: list[list[Operation]]):
        self._loop = loop
        self._num_steps = len(interleaving)
        self._operations = (operation for line in interleaving for operation in line)
        self._rolled = self._groups = self._facts = None
        self._is_due = False

    def run(self, num_steps: int, on_step: OnStep = lambda metrics: None, stop: Stop = lambda: False) -> None:
        """Runs learner steps until `num_steps` are done in all.

        Raises:
          ValueError: fewer steps were recorded.
          RuntimeError: an operation finds something else than it did in that run: it is not the same run.
        """
        if self._num_steps < num_steps:
            raise ValueError(f"{self._num_steps} learner steps were recorded, wanted {num_steps}; lower --steps")
        while self._loop.step < num_steps and not stop():
            row = None
            while row is None:
                row = self._do(next(self._operations))
            on_step(row)

    def settle(self) -> None:
        """Ends the round that the recorded run was in the middle of when its last learner step ended; before `Loop.finish`."""
        if self._rolled is not None:
            self._loop.end_round(self._rolled)
            self._rolled = None

    def _do(self, operation: Operation) -> dict | None:
        """One operation; the row of metrics if it ends a learner step."""
        loop = self._loop
        match operation:
            case Operation.BEGIN_ROUND:
                self._rolled = loop.roll(loop.max_decode_steps) if loop.begin_round() else None
            case Operation.END_ROUND:
                self._require(self._rolled is not None, "rolled on")
                self.settle()
            case Operation.TAKE:
                self._groups = loop.take()
                self._facts = None if self._groups is None else loop.learn(self._groups)
            case Operation.END_STEP:
                self._require(self._facts is not None, "had a batch")
                if not loop.end_step(self._groups):
                    return loop.record(self._facts)
                self._is_due = True
            case Operation.OFFER:
                self._require(self._is_due, "published")
                self._is_due = False
                loop.offer(loop.snapshot())
                return loop.record(self._facts)
            case Operation.STATE:
                loop.state()
        return None

    def _require(self, is_so: bool, what: str) -> None:
        if not is_so:
            raise RuntimeError(f"learner step {self._loop.step}: the recorded run {what} here, and this one cannot; repeat it "
                               "with its own config, commit and packages")
