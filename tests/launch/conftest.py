"""One small run of `launch.train` that all tests of the commands look at; who changes it takes a copy."""

import pathlib

import pytest

from launch import train
from tests.tiny import TINY_OPTIONS


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("runs") / "tiny"
    assert train.main(["quickstart", *TINY_OPTIONS, "--checkpoint-every", "3", "--run-dir", str(directory)]) == 0
    return directory
