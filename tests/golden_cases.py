"""Golden vectors, read: cases of one method and its options over all data sets at once, in one padded shape."""

import functools
import json
import pathlib
from collections.abc import Iterator

import numpy as np

GOLDEN = pathlib.Path(__file__).parent / "golden"
INPUTS = np.load(GOLDEN / "inputs.npz")
DATASETS = ("p0", "p1", "p2", "p3", "p4")
SHAPE = (8, 32)  # that of the largest data set


class Case:
    """One method with one set of options, on every data set."""

    def __init__(self, file: str, members: list[dict]):
        first = members[0]
        self.function, self.options = first["fn"], first["hyper"]
        self.arguments, self.aggregation = first.get("args", {}), first.get("agg")
        self.datasets = [member["dataset"] for member in members]
        self._members, self._file = members, file
        self.id = f"{self.function}-{first['id']}"

    def __repr__(self) -> str:
        return self.id

    def inputs(self, name: str, fill: float = np.nan) -> np.ndarray:
        """An input array [datasets, 8, 32]; what lies outside a data set must not matter, and neither must its values."""
        return np.stack([_pad(INPUTS[f"{dataset}/{name}"], fill) for dataset in self.datasets])

    @property
    def mask(self) -> np.ndarray:
        return self.inputs("mask", 0).astype(bool)

    @property
    def advantages(self) -> np.ndarray:
        """[datasets, 8, 32]: of tokens, or of rows where the case says so."""
        if self.arguments["adv"] == "tok":
            return self.inputs("adv_tok")
        return np.repeat(self.inputs("adv_seq")[:, :, None], SHAPE[1], axis=2)

    def private(self, name: str, fill: float = np.nan) -> np.ndarray:
        """An input of the case's own."""
        arrays = _arrays(self._file)
        return np.stack([_pad(arrays[f"{member['id']}/in/{name}"], fill) for member in self._members])

    def expected(self, name: str, precision: str) -> list[np.ndarray]:
        """An output, one array a data set, in its own shape."""
        arrays = _arrays(self._file)
        return [arrays[f"{member['id']}/{precision}/{name}"] for member in self._members]

    def has(self, name: str) -> bool:
        return all(name in outputs for member in self._members for outputs in member["outputs"].values())


def cases(file: str) -> list[Case]:
    """Those of a file below `golden/`, without its ending."""
    groups: dict[str, list[dict]] = {}
    for case in json.loads((GOLDEN / f"{file}.json").read_text())["cases"]:
        if case.get("dataset") is not None:
            options = json.dumps([case["fn"], case["hyper"], case.get("args"), case.get("agg")], sort_keys=True)
            groups.setdefault(options, []).append(case)
    return [Case(file, members) for members in groups.values()]


def cropped(arrays: np.ndarray, like: list[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs (ours, theirs), ours cut to the shape of theirs."""
    for mine, theirs in zip(np.asarray(arrays), like, strict=True):
        yield mine[tuple(map(slice, theirs.shape))], theirs


def assert_near(actual: np.ndarray, expected: np.ndarray, tolerance: float, message: str) -> None:
    """Relative to each value, or to a thousandth of the largest, whichever is more."""
    expected = np.asarray(expected, np.float64)
    scale = np.maximum(np.abs(expected), 1e-3 * np.max(np.abs(expected), initial=0))
    errors = np.abs(np.asarray(actual, np.float64) - expected) - tolerance * scale
    worst = np.unravel_index(np.argmax(np.nan_to_num(errors, nan=np.inf)), errors.shape)
    assert np.all(errors <= 0), f"{message}: {np.asarray(actual)[worst]} at {worst}, wanted {expected[worst]}"


@functools.cache
def _arrays(file: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / f"{file}.npz"))


def _pad(array: np.ndarray, fill: float) -> np.ndarray:
    return np.pad(array, [(0, size - length) for size, length in zip(SHAPE, array.shape, strict=False)], constant_values=fill)
