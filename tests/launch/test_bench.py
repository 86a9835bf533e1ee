"""Benchmarks: found by name, refused in a sentence, their figures written as one flat object."""

import json

import pytest

from launch import bench


def test_names_and_help(capsys):
    assert bench.names() == ["threads"]
    assert bench.main([]) == 0
    printed = capsys.readouterr().out
    assert "usage" in printed and "threads" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["nosuch"], ["nosuch", "threads"]), (["threads", "--json", "no/such/place.json"], ["--json", "no/such"])],
)
def test_what_cannot_be_run_is_refused(capsys, arguments, words):
    assert bench.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and all(word in error for word in words)


@pytest.mark.slow
def test_threads_writes_its_figures(tmp_path, capsys):
    path = tmp_path / "figures.json"
    assert bench.main(["threads", "--seconds", "0.02", "--steps", "4", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert list(found) == ["share_of_ideal/0.02/0.02", "share_of_ideal/0.01/0.02", "share_of_ideal/0.02/0.01"]
    assert all(isinstance(value, float) and value > 0 for value in found.values())
    assert "share of ideal" in capsys.readouterr().out
