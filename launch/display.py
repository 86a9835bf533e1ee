"""What a person sees of a run: the phase it is in, a bar over the learner steps with the figures that matter, tables at the end.

On a terminal the last lines are alive, and each phase leaves a line behind when it ends. Anywhere else (a file, a pipe, a CI log)
the same comes as plain aligned lines, about twenty for the steps of a run, without escape codes or carriage returns.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

WIDTH = 80  # columns at most: figures far apart on a wide terminal are hard to read
PLAIN_LINES = 20  # for the steps of a run
RECENT_STEPS = 10  # over which tokens per second and the time left are measured
COLUMNS = {"reward": 7, "success": 9, "staleness": 11, "clipped": 9, "masked": 8, "tokens/s": 10}  # label: width
HEADS = "".join(f"{label:>{width}}" for label, width in COLUMNS.items())
MISSING = "-"
SPARKS = "▁▂▃▄▅▆▇█"
NUM_SPARKS = 20
DONE = ("✓ ", "green")
FAILED = ("✗ ", "bold red")


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where the learner is, ready to be shown."""

    step: int
    total_steps: int
    figures: str  # aligned under HEADS
    sparks: str  # the rewards so far
    seconds_left: float | None  # None: not known yet


class Display:
    """Live progress on a terminal, plain lines elsewhere. Use it as a context manager.

    Args:
      total_steps: learner steps of the whole run.
      console: where to write, standard output by default. Its clock is the one used.
    """

    def __init__(self, total_steps: int, console: Console | None = None):
        self._console = console or Console()
        # A terminal that cannot show the bar's characters gets plain lines, too.
        is_alive = self._console.is_interactive and not self._console.options.ascii_only
        self._view = _TerminalView(self._console) if is_alive else _PlainView(self._console)
        self._total_steps = total_steps
        self._rewards: list[float] = []
        self._recent = collections.deque(maxlen=RECENT_STEPS + 1)  # (time, tokens generated) of a phase's last steps

    def __enter__(self) -> "Display":
        self._view.open()
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._view.close(failed=error_type is not None)

    def phase(self, text: str) -> None:
        """The run enters a phase, and so has left the one before."""
        self._recent.clear()
        self._view.phase(text)

    def step(self, metrics: Mapping[str, float | None]) -> None:
        """A learner step is done.

        Args:
          metrics: its row of metrics.jsonl. `step` counts from 1; any other figure may be missing.
        """
        step = int(metrics["step"])
        if metrics.get("reward_mean") is not None:
            self._rewards.append(metrics["reward_mean"])
        self._recent.append((self._console.get_time(), metrics.get("tokens_generated", 0)))
        # Measured from step to step: the first one of a phase waits for compilation, and tells nothing of the others.
        num_steps, seconds = len(self._recent) - 1, self._recent[-1][0] - self._recent[0][0]
        tokens = sum(tokens for _, tokens in self._recent) - self._recent[0][1]
        self._view.step(Progress(
            step, self._total_steps, figures(metrics, tokens / seconds if seconds and tokens else None),
            sparkline(self._rewards, NUM_SPARKS), seconds / num_steps * (self._total_steps - step) if num_steps else None,
        ))  # fmt: skip

    def table(self, title: str, rows: Sequence[Sequence[str]]) -> None:
        """Ends the phase, and shows rows of equally many cells. A first row whose first cell is empty heads the columns."""
        has_heads = not rows[0][0]
        table = Table(title=Text(title, "bold"), title_justify="left", box=None, show_header=has_heads, padding=(0, 2))
        for index, head in enumerate(rows[0]):
            justify = "right" if has_heads and index else "left"
            table.add_column(Text(head) if has_heads else "", header_style="dim", overflow="fold", justify=justify)
        for row in rows[1:] if has_heads else rows:
            table.add_row(*map(Text, row))  # a string would be read as markup
        self._view.table(table)


class _TerminalView:
    """Finished phases above, the present one alive below."""

    def __init__(self, console: Console):
        self._console = console
        self._width = min(console.width, WIDTH)
        self._spinner = Spinner("dots", style="cyan")
        self._phase: str | None = None
        self._started = 0.0
        self._progress: Progress | None = None
        self._is_below_table = False
        self._live = Live(console=console, get_renderable=self._frame, transient=True, refresh_per_second=8)

    def open(self) -> None:
        self._live.start()

    def close(self, *, failed: bool) -> None:
        self._end_phase(FAILED if failed else DONE)
        self._live.stop()

    def phase(self, text: str) -> None:
        self._end_phase(DONE)
        self._started, self._phase = self._console.get_time(), text

    def step(self, progress: Progress) -> None:
        if self._phase is None:
            self.phase("training")
        self._progress = progress

    def table(self, table: Table) -> None:
        self._end_phase(DONE)
        self._console.print("", table)
        self._is_below_table = True

    def _end_phase(self, mark: tuple[str, str]) -> None:
        if self._phase is None:
            return
        phase, progress, seconds = self._phase, self._progress, self._console.get_time() - self._started
        self._phase = self._progress = None
        self._live.refresh()  # or the old frame would stay below what is printed now
        text = f"{phase}, {progress.step}/{progress.total_steps} steps" if progress else phase
        # Soft wrap: a long line keeps its text whole, to be copied. A phase of no length is a message.
        spent = f"  {duration(seconds)}" if seconds >= 0.05 else ""
        gap = " " * max(0, self._width - 2 - len(text) - len(spent))
        if self._is_below_table:
            self._console.print()
            self._is_below_table = False
        self._console.print(Text.assemble(mark, text, gap, (spent, "dim")), soft_wrap=True)
        if progress:
            self._console.print(self._figures(progress))

    def _frame(self) -> RenderableType:
        phase, progress = self._phase, self._progress
        if phase is None:
            return Text("")
        seconds = self._console.get_time() - self._started
        line = Table.grid(padding=(0, 1))
        if progress is None:
            line.add_row(self._spinner, phase, Text(duration(seconds), "dim"))
            return line
        left = "" if progress.seconds_left is None else f"{clock(progress.seconds_left)} left"
        # Constant widths right of the bar, or it would jump.
        counts = f"{f'{progress.step}/{progress.total_steps}':>9}{clock(seconds):>8}{left:>13}"
        name = Text(phase, no_wrap=True, overflow="ellipsis")
        name.truncate(self._width // 4)
        bar_width = max(10, self._width - len(name) - len(counts) - 4)
        bar = ProgressBar(progress.total_steps, progress.step, width=bar_width, complete_style="cyan", finished_style="green")
        line.add_row(self._spinner, name, bar, counts)
        return Group(line, self._figures(progress))

    def _figures(self, progress: Progress) -> RenderableType:
        return Group(
            Text(f"  {HEADS}  reward so far", "dim", no_wrap=True, overflow="crop"),
            Text.assemble("  ", (progress.figures, "bold"), "  ", (progress.sparks, "cyan"), no_wrap=True, overflow="crop"),
        )


class _PlainView:
    """One line a phase and one line every few steps; each begins with the time since the start."""

    def __init__(self, console: Console):
        self._console = console
        self._opened = 0.0
        self._phase = "starting"
        self._needs_heads = True
        self._is_below_table = False

    def open(self) -> None:
        self._opened = self._console.get_time()

    def close(self, *, failed: bool) -> None:
        if failed:
            self._line(f"FAILED in: {self._phase}")

    def phase(self, text: str) -> None:
        self._phase, self._needs_heads = text, True
        self._line(text)

    def step(self, progress: Progress) -> None:
        every = max(1, progress.total_steps // PLAIN_LINES)
        if not self._needs_heads and progress.step % every and progress.step != progress.total_steps:
            return
        if self._needs_heads:
            self._console.print(f"{'time':>7}{'step':>11}{HEADS}", highlight=False, soft_wrap=True)
        self._needs_heads = False
        self._line(f"{f'{progress.step}/{progress.total_steps}':>9}{progress.figures}")

    def table(self, table: Table) -> None:
        self._console.print("", table)
        self._is_below_table = True

    def _line(self, text: str) -> None:
        if self._is_below_table:
            self._console.print()
            self._is_below_table = False
        elapsed = clock(self._console.get_time() - self._opened)
        self._console.print(f"{elapsed:>7}  {text}", markup=False, highlight=False, soft_wrap=True)


def figures(metrics: Mapping[str, float | None], tokens_per_second: float | None) -> str:
    """The figures of one step, aligned under HEADS; staleness is the mean and, in brackets, the largest."""

    def shown(value: float | None, pattern: str) -> str:
        return MISSING if value is None or math.isnan(value) else pattern.format(value)

    largest = shown(metrics.get("staleness_max"), " ({:.0f})")
    values = (
        shown(metrics.get("reward_mean"), "{:.3f}"),
        shown(metrics.get("success_mean"), "{:.1%}"),
        shown(metrics.get("staleness_mean"), "{:.1f}" + largest),
        shown(metrics.get("clip_fraction"), "{:.1%}"),
        shown(metrics.get("discrepancy_masked_fraction"), "{:.1%}"),
        shown(tokens_per_second, "{:,.0f}"),
    )
    return "".join(f"{value:>{width}}" for value, width in zip(values, COLUMNS.values(), strict=True))


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of `values` in at most `width` characters, from the smallest (▁) to the largest (█); means of stretches."""
    num_marks = min(width, len(values))
    bounds = [index * len(values) // num_marks for index in range(num_marks + 1)] if values else [0]
    means = [sum(values[start:stop]) / (stop - start) for start, stop in zip(bounds, bounds[1:], strict=False)]
    low, high = min(means, default=0), max(means, default=0)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0
    return "".join(SPARKS[round((mean - low) * scale)] for mean in means)


def duration(seconds: float) -> str:
    """Seconds for a reader: 4.2 s, 1:23, 1:02:03."""
    return f"{seconds:.1f} s" if seconds < 60 else clock(seconds)


def clock(seconds: float) -> str:
    """Whole seconds as minutes:seconds, or hours:minutes:seconds."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
