"""What tests of the commands share: a small run to look at, whose copy is taken to be changed, and a signal at a given step."""

import pathlib
import signal

import pytest

from launch import train
from launch.display import Display
from tests.tiny import TINY_OPTIONS


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("runs") / "tiny"
    assert train.main(["quickstart", *TINY_OPTIONS, "--checkpoint-every", "3", "--run-dir", str(directory)]) == 0
    return directory


@pytest.fixture
def stop_after(monkeypatch):
    """Sends this process a signal when a learner step is done."""

    def stop_after(step: int, number: signal.Signals) -> None:
        show = Display.step

        def stopping(self, metrics):
            show(self, metrics)
            if metrics["step"] == step:
                signal.raise_signal(number)

        monkeypatch.setattr(Display, "step", stopping)

    return stop_after
