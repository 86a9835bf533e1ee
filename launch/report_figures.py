"""The figures of a report, as SVG: plots of metrics over learner steps, and the timeline of sampler and learner.

A drawing is stretched to the width that the page has for it, on a desk or on a phone, while lines keep their thickness and the
labels are text of the page beside it. Each has a description in words for those who do not see it.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from launch.report_page import Node, node
from rl.loop import STAGES
from rl.reporting import Points, column, occupancy, step_ends, thin

WIDTH, HEIGHT = 1000, 400  # of a plot's own coordinates
NUM_BINS = 100  # of thinned plots
NUM_TIME_BINS = 600
MAX_TICKS = 5
MAX_DECADES = 5  # of a logarithmic axis
LANES = ("sampler", "learner")
LANE_HEIGHT, LANE_PITCH = 100, 130


def number(value: float, digits: int = 3) -> str:
    """So many digits at most, without needless zeros or exponents."""
    exponent = math.floor(math.log10(abs(value))) if value else 0
    if -4 < exponent < 7:
        text = f"{value:,.{max(0, digits - 1 - exponent)}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    mantissa, power = f"{value:.{digits - 1}e}".split("e")
    return f"{float(mantissa):g}e{int(power)}"


def percent(value: float, digits: int = 3) -> str:
    return f"{number(100 * value, digits)}%"


def size(value: float, digits: int = 3) -> str:
    """Bytes."""
    power = next((power for power in (4, 3, 2, 1) if abs(value) >= 1000**power), 0)
    return f"{number(value / 1000**power, digits)} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def seconds(value: float, digits: int = 3) -> str:
    return f"{number(value, digits)} s" if value >= 1 or not value else f"{number(1000 * value, digits)} ms"


Text = Callable[[float, int], str]
"""How values of one kind are written, with at most so many digits."""


@dataclasses.dataclass(frozen=True)
class Axis:
    """Values from `low` to `high`, and those that are labelled. On a logarithmic one, what is less than `low` lies at `low`."""

    low: float
    high: float
    ticks: tuple[float, ...]
    is_logarithmic: bool = False

    def place(self, value: float) -> float:
        """From 0 at `low` to 1 at `high`."""
        if self.is_logarithmic:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def labels(self, text: Text) -> list[tuple[float, str]]:
        """Each tick's place and what is written there, in as many digits as tell them apart."""
        for digits in range(3, 16):
            texts = [text(tick, digits) for tick in self.ticks]
            if len(set(texts)) == len(texts):
                break
        return list(zip(map(self.place, self.ticks), texts, strict=True))

    @classmethod
    def linear(cls, values: Sequence[float], *, from_zero: bool) -> "Axis":
        """Round numbers around the values, and around 0 if asked."""
        values = [*values, 0.0] if from_zero or not values else values
        low, high = min(values), max(values)
        if low == high:
            low, high = (0.0, 1.0) if low == 0 else (low - abs(low) / 2, low + abs(low) / 2)
        step = nice_step(high - low)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        return cls(first * step, last * step, tuple(index * step for index in range(first, last + 1)))

    @classmethod
    def logarithmic(cls, values: Sequence[float]) -> "Axis":
        """Powers of ten around the positive values, or around the largest of them when they are too far apart."""
        positive = [value for value in values if value > 0]
        if not positive:
            return cls.linear([], from_zero=True)
        last = math.ceil(math.log10(max(positive)))
        first = max(min(math.floor(math.log10(min(positive))), last - 1), last - MAX_DECADES)
        return cls(10.0**first, 10.0**last, tuple(10.0**power for power in range(first, last + 1)), is_logarithmic=True)

    @classmethod
    def between(cls, first: float, last: float, *, smallest_step: float = 0.0) -> "Axis":
        """From the first to the last exactly, with round numbers between."""
        if first == last:
            return cls(first - 0.5, last + 0.5, (first,))
        step = max(smallest_step, nice_step(last - first))
        return cls(first, last, tuple(index * step for index in range(math.ceil(first / step), math.floor(last / step) + 1)))


def nice_step(span: float) -> float:
    """1, 2 or 5 times a power of ten, so that `span` has at most MAX_TICKS of it."""
    power = 10.0 ** math.floor(math.log10(span / MAX_TICKS))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power * MAX_TICKS >= span * (1 - 1e-9))


@dataclasses.dataclass(frozen=True)
class Plot:
    """Metrics over learner steps, to be drawn in one frame."""

    title: str
    note: str
    lines: tuple[tuple[str, str], ...]  # label, metric
    text: Text = number
    from_zero: bool = True
    is_logarithmic: bool = False

    def draw(self, rows: Sequence[dict]) -> Node:
        """A figure. Null and missing values are gaps."""
        columns = [column(rows, name) for _, name in self.lines]
        kept = thin(columns, NUM_BINS)
        steps, columns = [rows[index]["step"] for index in kept], [[points[index] for index in kept] for points in columns]
        present = [value for points in columns for value in points if value is not None]
        across = Axis.between(steps[0], steps[-1], smallest_step=1)
        up = Axis.logarithmic(present) if self.is_logarithmic else Axis.linear(present, from_zero=self.from_zero)
        caption = node("figcaption", node("h3", self.title, " ", node("span", f"step {steps[-1]:,}", class_="at muted")),
                       node("p", self.note))
        drawing = node(
            "svg",
            node("path", d="".join(f"M0 {_y(up, tick)}H{WIDTH}" for tick in up.ticks), class_="grid"),
            *(_line(across, up, steps, points, index) for index, points in enumerate(columns)),
            viewBox=f"0 0 {WIDTH} {HEIGHT}", preserveAspectRatio="none", role="img", aria_label=self._description(steps, columns),
        )  # fmt: skip
        labels = up.labels(self.text)
        if present and min(present) < up.low:
            labels[0] = (0.0, f"≤ {labels[0][1]}")
        return node(
            "figure",
            caption,
            self._legend(steps, columns),
            node(
                "div",
                drawing,
                *(_label(label, bottom=share) for share, label in labels),
                *(_label(label, left=share) for share, label in across.labels(number)),
                node("span", class_="cursor"),
                class_="frame",
            ),
            data_steps=" ".join(map(str, steps)), data_low=f"{across.low}", data_high=f"{across.high}",
        )  # fmt: skip

    def _value(self, value: float | None) -> str:
        return "none" if value is None else self.text(value)

    def _legend(self, steps: list[int], columns: list[Points]) -> Node:
        items = [
            node("li", _swatch("M0 6H24", "line"), f"{label} ",
                 node("span", self._value(points[-1]), class_="value", data_values="|".join(map(self._value, points))),
                 class_=f"s{index}")
            for index, ((label, _), points) in enumerate(zip(self.lines, columns, strict=True))
        ]  # fmt: skip
        return node("ul", *items, class_="legend")

    def _description(self, steps: list[int], columns: list[Points]) -> str:
        sentences = [f"{self.title}, learner steps {steps[0]} to {steps[-1]}."]
        for (label, _), points in zip(self.lines, columns, strict=True):
            values = [value for value in points if value is not None]
            if values:
                first, last, low, high = map(self.text, (values[0], values[-1], min(values), max(values)))
                sentences.append(f"{label}: first {first}, last {last}, lowest {low}, highest {high}.")
            else:
                sentences.append(f"{label}: none.")
        return " ".join(sentences)


def _y(axis: Axis, value: float) -> int:
    return round(HEIGHT * (1 - axis.place(value)))


def _line(across: Axis, up: Axis, steps: list[int], points: Points, index: int) -> Node:
    """A line that breaks where there is no value; a value alone between two breaks is a dot."""
    runs, dots = "", ""
    paired = zip(steps, points, strict=True)
    for is_present, run in itertools.groupby(paired, lambda point: point[1] is not None):
        if is_present:
            places = [f"{round(WIDTH * across.place(step))} {_y(up, value)}" for step, value in run]
            if len(places) == 1:
                dots += f"M{places[0]}h0"
            else:
                runs += f"M{places[0]}L{' '.join(places[1:])}"
    return node("g", node("path", d=runs, class_="line"), node("path", d=dots, class_="dots"), class_=f"s{index}")


def _label(text: str, *, left: float | None = None, bottom: float | None = None, class_: str | None = None) -> Node:
    """A label of an axis, at a share of the frame's width or height. The description of the drawing says as much."""
    side, share, default = ("bottom", bottom, "y") if left is None else ("left", left, "x")
    return node("span", text, class_=class_ or default, style=f"{side}:{100 * share:.4g}%", aria_hidden="true")


def _swatch(path: str, class_: str) -> Node:
    """A piece of what a legend speaks of."""
    return node("svg", node("path", d=path, class_=class_), class_="swatch", viewBox="0 0 24 12", aria_hidden="true")


def timeline(title: str, note: str, spans: Sequence[dict], start: float, stop: float, *, mark_steps: bool) -> Node:
    """Two lanes over time. In each bin, a stage's share of the height is its share of the time.

    Args:
      title: of the figure.
      note: a line below it.
      spans: rows of `timeline.jsonl`.
      start: seconds of the run.
      stop: more than `start`.
      mark_steps: draw a line where the learner ends a step.
    """
    shares = occupancy(spans, start, stop, NUM_TIME_BINS)
    across = Axis.between(start, stop)
    bin_seconds = (stop - start) / NUM_TIME_BINS
    busy = {key: float(share.sum()) * bin_seconds for key, share in shares.items()}
    keys = [(lane, stage) for stage in STAGES for lane in LANES if (lane, stage) in shares]
    height = LANE_PITCH + LANE_HEIGHT
    paths = [
        node("path", d=_bars(below, share, LANES.index(lane) * LANE_PITCH + LANE_HEIGHT), class_=f"fill {_colour(stage)}")
        for lane in LANES for stage, below, share in _stacked(lane, shares)
    ]  # fmt: skip
    ends = {step: end for step, end in step_ends(spans).items() if start < end <= stop} if mark_steps else {}
    description = " ".join([
        f"{title}, from second {number(start)} to {number(stop)}.",
        *(f"{lane}, {_spoken(stage)}: {seconds(busy[lane, stage])}." for lane, stage in keys),
    ])  # fmt: skip
    drawing = node(
        "svg",
        *paths,
        node("path", d="".join(f"M{_bin(across, end)} 0V{height}" for end in ends.values()), class_="mark"),
        viewBox=f"0 0 {NUM_TIME_BINS} {height}", preserveAspectRatio="none", role="img", aria_label=description,
    )  # fmt: skip
    middles = zip(ends, itertools.pairwise([start, *ends.values()]), strict=True)
    return node(
        "figure",
        node("figcaption", node("h3", title), node("p", note)),
        node("ul", *(
            node("li", _swatch("M0 0H24V12H0Z", "fill"), f"{_spoken(key[1])} ", node("span", seconds(busy[key]), class_="value"),
                 class_=_colour(key[1]))
            for key in keys
        ), class_="legend"),
        node(
            "div",
            drawing,
            *(_label(lane, bottom=1 - (LANE_PITCH * index + LANE_HEIGHT / 2) / height) for index, lane in enumerate(LANES)),
            *(_label(label, left=share) for share, label in across.labels(seconds)),
            *(_label(f"step {step:,}", left=across.place((first + last) / 2), class_="top") for step, (first, last) in middles),
            class_="frame",
        ),
        class_="timeline",
    )  # fmt: skip


def _spoken(stage: str) -> str:
    return stage.replace("_", " ")


def _colour(stage: str) -> str:
    """That of the stage's line in a plot of all of them. Waiting is pale, as it is no work."""
    return "wait" if stage.endswith("_wait") else f"s{STAGES.index(stage)}"


def _bin(across: Axis, time: float) -> int:
    return round(NUM_TIME_BINS * across.place(time))


def _stacked(lane: str, shares: dict[tuple[str, str], np.ndarray]) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """The stages of a lane, each with what lies below it."""
    stacked, below = [], np.zeros(NUM_TIME_BINS)
    for stage in STAGES:
        if (lane, stage) in shares:
            stacked.append((stage, below, shares[lane, stage]))
            below = below + shares[lane, stage]
    return stacked


def _bars(below: np.ndarray, share: np.ndarray, floor: int) -> str:
    """A path of one rectangle for each run of equal bins."""
    low = np.rint(floor - LANE_HEIGHT * np.minimum(below, 1)).astype(int).tolist()
    high = np.rint(floor - LANE_HEIGHT * np.minimum(below + share, 1)).astype(int).tolist()
    path = ""
    for (bottom, top), run in itertools.groupby(range(len(low)), lambda index: (low[index], high[index])):
        indices = list(run)
        if bottom != top:
            path += f"M{indices[0]} {bottom}V{top}H{indices[-1] + 1}V{bottom}Z"
    return path
