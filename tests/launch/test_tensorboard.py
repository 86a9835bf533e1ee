"""TensorBoard events: the numbers of metrics.jsonl, and nothing of a future that did not happen."""

import pathlib
import struct
import threading

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from launch.tensorboard import DIRECTORY, TensorBoard, tag


def read_events(run_dir: pathlib.Path) -> list[Event]:
    """All events, file by file: records of a length, its checksum, the event, its checksum."""
    events = []
    for path in sorted((run_dir / DIRECTORY).iterdir(), key=lambda path: path.name.partition(".after-")[2]):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            events.append(Event.FromString(content[12 : 12 + length]))
            content = content[12 + length + 4 :]
    return events


def scalars(events: list[Event]) -> dict[tuple[str, int], float]:
    return {(value.tag, event.step): value.simple_value for event in events for value in event.summary.value}


def test_each_step_s_numbers_are_written(tmp_path):
    threads = threading.enumerate()
    with TensorBoard(tmp_path, after_step=0) as board:
        board.step({"step": 1, "reward_mean": 0.25, "ring_versions": 3, "staleness_max": None, "source": "snapshot"})
        board.step({"step": 2, "reward_mean": 0.5, "ring_versions": 4, "staleness_max": 1.0, "source": "snapshot"})
    assert scalars(read_events(tmp_path)) == {
        ("learning/reward_mean", 1): 0.25, ("cost/ring_versions", 1): 3.0,
        ("learning/reward_mean", 2): 0.5, ("cost/ring_versions", 2): 4.0, ("asynchrony/staleness_max", 2): 1.0,
    }  # fmt: skip
    assert threading.enumerate() == threads


def test_a_resumed_run_hides_what_it_does_again(tmp_path):
    for after_step in (0, 2):
        with TensorBoard(tmp_path, after_step=after_step) as board:
            for step in range(after_step + 1, 5):
                board.step({"step": step, "loss": float(step + 10 * after_step)})
    events = read_events(tmp_path)
    starts = [event.step for event in events if event.session_log.status == SessionLog.START]
    assert starts == [1, 3]
    assert [value for _, value in sorted(scalars(events).items())] == [1, 2, 23, 24]


def test_a_killed_process_has_written_its_last_step(tmp_path):
    board = TensorBoard(tmp_path, after_step=0)
    board.step({"step": 1, "loss": 2.0})
    assert scalars(read_events(tmp_path)) == {("learning/loss", 1): 2.0}
    board.close()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("staleness_mean", "asynchrony/staleness_mean"),
        ("staleness_kl", "ratios/staleness_kl"),
        ("discrepancy_masked_fraction", "ratios/discrepancy_masked_fraction"),
        ("masked_stale_tokens", "asynchrony/masked_stale_tokens"),
        ("seconds_train", "cost/seconds_train"),
        ("novelty", "other/novelty"),
    ],
)
def test_metrics_are_grouped(name, expected):
    assert tag(name) == expected
