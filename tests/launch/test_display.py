"""The display: alive and within 80 columns on a terminal, plain lines without escape codes anywhere else."""

import io
import math
import re

import pytest
from rich.console import Console

from launch.display import NUM_SPARKS, Display, clock, duration, figures, sparkline

ROW = {"reward_mean": 0.25, "success_mean": 0.125, "staleness_mean": 1.5, "staleness_max": 3.0, "clip_fraction": 0.0312,
       "discrepancy_masked_fraction": 0.004, "tokens_generated": 1500}  # fmt: skip
HEADS = ["reward", "success", "staleness", "clipped", "masked", "tokens/s"]


class Clock:
    """A time that only the test moves."""

    def __init__(self):
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def run_training(display: Display, clock: Clock, total_steps: int, **changes):
    """Half a minute of compilation, then half a second a step."""
    display.phase("training")
    clock.seconds += 29.5
    for step in range(1, total_steps + 1):
        clock.seconds += 0.5
        display.step({**ROW, **changes, "step": step})


def plain_output(use) -> str:
    """What `use(display, clock)` writes into a file."""
    file, clock = io.StringIO(), Clock()
    with Display(60, Console(file=file, get_time=clock)) as display:
        use(display, clock)
    return file.getvalue()


def terminal_output(use, width=80) -> tuple[str, str]:
    """What `use` leaves on a terminal: as text, and as it was written."""
    file, clock = io.StringIO(), Clock()
    console = Console(file=file, get_time=clock, force_terminal=True, width=width, record=True, color_system="standard")
    with Display(60, console) as display:
        use(display, clock)
    return console.export_text(), file.getvalue()


def last_frame(display: Display, width=80, styles=False) -> list[str]:
    """The lines that are alive now."""
    console = Console(file=io.StringIO(), width=width, force_terminal=True, record=True, color_system="standard")
    console.print(display._view._frame())
    return [line.rstrip() for line in console.export_text(styles=styles).splitlines()]


# Plain lines.


def test_a_file_gets_neither_escape_codes_nor_carriage_returns():
    output = plain_output(lambda display, clock: (run_training(display, clock, 60), display.table("t", [("", "a"), ("x", "1")])))
    assert "\x1b" not in output and "\r" not in output and output.isascii()


def test_plain_lines_are_few_aligned_and_within_80_columns():
    lines = plain_output(lambda display, clock: run_training(display, clock, 60)).splitlines()
    phase, heads, *rows = lines
    assert phase == "   0:00  training"
    assert heads.split() == ["time", "step", *HEADS]
    # The first step, every third one, and so the last.
    assert [row.split()[1] for row in rows] == ["1/60", *(f"{step}/60" for step in range(3, 61, 3))]
    assert {len(row) for row in rows} == {len(heads)} and len(heads) <= 80
    assert rows[1].split() == ["0:31", "3/60", "0.250", "12.5%", "1.5", "(3)", "3.1%", "0.4%", "3,000"]
    for label, value in zip(HEADS, ["0.250", "12.5%", "1.5 (3)", "3.1%", "0.4%", "3,000"], strict=True):
        assert heads.index(label) + len(label) == rows[1].index(value) + len(value), f"{value} is not under {label}"


def test_the_last_step_is_always_shown():
    file, clock = io.StringIO(), Clock()
    with Display(47, Console(file=file, get_time=clock)) as display:
        run_training(display, clock, 47)
    assert file.getvalue().splitlines()[-1].split()[1] == "47/47"


def test_each_phase_is_a_line_with_the_time_since_the_start():
    def use(display, clock):
        clock.seconds += 5
        display.phase("warm start [red]")
        clock.seconds += 3600
        display.phase("verify with: " + "long/" * 30 + " --replay 50")

    assert plain_output(use).splitlines() == [
        "   0:05  warm start [red]", "1:00:05  verify with: " + "long/" * 30 + " --replay 50",
    ]  # fmt: skip


def test_heads_are_repeated_after_another_phase():
    def use(display, clock):
        run_training(display, clock, 2)
        display.phase("evaluation")
        run_training(display, clock, 2)

    assert plain_output(use).count("staleness") == 2


def test_a_failure_names_its_phase_and_passes_on():
    file = io.StringIO()
    with pytest.raises(KeyError), Display(5, Console(file=file)) as display:
        display.phase("warm start")
        raise KeyError
    assert file.getvalue().splitlines()[-1].endswith("FAILED in: warm start")


def test_a_terminal_that_knows_only_ascii_gets_plain_lines():
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    clock = Clock()
    with Display(5, Console(file=file, force_terminal=True, get_time=clock)) as display:
        run_training(display, clock, 5)
    assert b"5/5" in file.buffer.getvalue() and b"\x1b[2K" not in file.buffer.getvalue()


# Terminal.


def test_finished_phases_stay_with_their_durations():
    def use(display, clock):
        display.phase("warm start")
        clock.seconds += 12.25
        run_training(display, clock, 60)
        display.phase("done; verify with: x")

    text, written = terminal_output(use)
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    assert lines[0].startswith("✓ warm start ") and lines[0].endswith(" 12.2 s") and len(lines[0]) == 80
    assert lines[1].startswith("✓ training, 60/60 steps ") and lines[1].endswith(" 59.5 s")
    assert lines[2].split() == [*HEADS, "reward", "so", "far"]
    assert lines[3].split()[:3] == ["0.250", "12.5%", "1.5"]
    assert lines[4:] == ["✓ done; verify with: x"]
    assert "\x1b[32m✓ \x1b[0m" in written, "only the mark is green"


def test_a_running_phase_shows_its_time():
    clock = Clock()
    with Display(60, Console(file=io.StringIO(), force_terminal=True, width=80, get_time=clock)) as display:
        display.phase("warm start")
        clock.seconds += 3.5
        assert re.fullmatch(r". warm start 3\.5 s", last_frame(display)[0])


@pytest.mark.parametrize("width", [80, 200])
def test_the_bar_and_its_figures_stay_within_80_columns(width):
    clock = Clock()
    with Display(60, Console(file=io.StringIO(), force_terminal=True, width=width, get_time=clock)) as display:
        for steps in (1, 30, 60):
            run_training(display, clock, steps, tokens_generated=10**6)
            bar, heads, values = last_frame(display, width)
            assert max(map(len, (bar, heads, values))) <= 80
            assert f" {steps}/60 " in bar and heads.split()[:6] == HEADS


def test_the_bar_fills_in_proportion_and_does_not_jump():
    clock, done, rest = Clock(), [], []
    with Display(60, Console(file=io.StringIO(), force_terminal=True, width=80, get_time=clock)) as display:
        for steps in (2, 15, 30, 60):
            run_training(display, clock, steps)
            bar = last_frame(display, styles=True)[0]
            done.append(sum(map(len, re.findall("\x1b\\[3[26]m([━╸]+)", bar))))
            rest.append(sum(map(len, re.findall("\x1b\\[90m([━╺]+)", bar))))
    width = done[-1]
    assert width > 30 and [left + right for left, right in zip(done, rest, strict=True)] == [width] * 4
    assert done == pytest.approx([width / 30, width / 4, width / 2, width], abs=1)


def test_the_time_left_is_measured_between_steps_not_from_compilation():
    clock = Clock()
    with Display(60, Console(file=io.StringIO(), force_terminal=True, width=80, get_time=clock)) as display:
        run_training(display, clock, 1)
        assert last_frame(display)[0].endswith(" 1/60    0:30")
        run_training(display, clock, 2)
        assert last_frame(display)[0].endswith(" 2/60    0:30    0:29 left"), "58 steps of half a second"
        run_training(display, clock, 20)
        bar, _, values = last_frame(display)
    assert bar.endswith(" 20/60    0:39    0:20 left"), "40 steps of half a second"
    assert values.split()[6] == "3,000", "1,500 tokens in half a second"


def test_the_course_of_the_reward_is_drawn():
    def use(display, clock):
        for step, reward in enumerate([0.0, 0.5, None, 1.0]):
            display.step({"step": step + 1, "reward_mean": reward})

    text, _ = terminal_output(use)
    assert "✓ training, 4/60 steps" in text and "▁▅█" in text


def test_a_failed_phase_is_marked():
    console = Console(file=io.StringIO(), force_terminal=True, width=80, record=True)
    with pytest.raises(RuntimeError), Display(5, console) as display:
        display.phase("warm start")
        raise RuntimeError
    assert "✗ warm start" in console.export_text()


def test_a_long_line_keeps_its_text_whole():
    command = "done; verify with: python -m launch.audit " + "runs/" * 20 + " --replay 50"
    text, _ = terminal_output(lambda display, clock: display.phase(command))
    assert command in text


# Tables.


@pytest.mark.parametrize("output", [plain_output, lambda use: terminal_output(use)[0]])
def test_tables_are_aligned_and_take_text_literally(output):
    def use(display, clock):
        display.phase("evaluation")
        display.table("held-out [b]", [("", "before", "after"), ("greedy", "4.3%", "86.3%"), ("[red]noisy", "4.0%", "8.1%")])
        display.table("facts", [("replay", "bitwise"), ("steps", "60")])
        display.phase("done")

    lines = [line.rstrip() for line in output(use).splitlines()]
    assert "evaluation" in lines[0], "a table ends the phase before it"
    lines = [line for line in lines[1:] if line and "done" not in line]
    assert lines == [
        "held-out [b]",
        "                before    after",
        "  greedy          4.3%    86.3%",
        "  [red]noisy      4.0%     8.1%",
        "facts",
        "  replay    bitwise",
        "  steps     60",
    ]


# Text.


def test_missing_figures_are_marked_missing():
    assert figures({}, None).split() == ["-"] * 6
    assert figures({"reward_mean": math.nan, "staleness_mean": None, "staleness_max": None}, None).split() == ["-"] * 6


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ""),
        ([0.5], "▁"),
        ([2.0, 2.0, 2.0], "▁▁▁"),
        ([0.0, 1.0], "▁█"),
        (list(range(8)), "▁▂▃▄▅▆▇█"),
        ([-1.0, -3.0], "█▁"),
    ],
)
def test_sparkline(values, expected):
    assert sparkline(values, NUM_SPARKS) == expected


def test_a_long_sparkline_averages_equal_stretches():
    assert sparkline([0, 0, 7, 7, 0, 7, 3, 4], 4) == "▁█▅▅"
    assert sparkline([0, 0, 0, 0, 0, 8], 4) == "▁▁▁█", "to the last value, also when lengths do not divide"
    assert len(sparkline(list(range(1000)), NUM_SPARKS)) == NUM_SPARKS


@pytest.mark.parametrize(
    ("seconds", "short", "long"),
    [(0.04, "0.0 s", "0:00"), (59.94, "59.9 s", "0:59"), (60, "1:00", "1:00"), (3599, "59:59", "59:59"),
     (3661, "1:01:01", "1:01:01")],
)
def test_times(seconds, short, long):
    assert (duration(seconds), clock(seconds)) == (short, long)
