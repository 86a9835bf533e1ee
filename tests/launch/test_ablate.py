"""Ablations: every cell checked before one runs, cells that are runs like any other, going on, and what is shown of them."""

import dataclasses
import json
import pathlib
import signal

import pytest

from launch import ablate, run_directory
from launch.ablate import Ablation, Result, draw, grid, tables
from launch.config import ConfigError, load_config
from launch.styles import STYLES
from rl import training
from rl.old_logprobs import SourceName
from tests.tiny import TINY_OPTIONS, assert_same_run, rows_of


def ablation(run_dir, **changes):
    base = load_config("quickstart")
    return dataclasses.replace(Ablation(**vars(base)), run_dir=run_dir, **changes)


def test_the_grid_changes_nothing_but_its_axes(tmp_path):
    sources = (SourceName.SNAPSHOT, SourceName.INTERRUPT)
    cells = grid(ablation(tmp_path, sources=sources, staleness=(0, 4), seeds=(3, 5), steps=7))
    found = [(cell.seed, cell.staleness, cell.source) for cell in cells]
    assert found == [(seed, staleness, source) for seed in (3, 5) for staleness in (0, 4) for source in sources]
    assert len({cell.config.run_dir for cell in cells}) == 8
    base = dataclasses.replace(load_config("quickstart"), steps=7)
    for cell in cells:
        loop, snapshots = cell.config.loop, cell.config.snapshots
        assert (cell.config.seed, loop.max_staleness, snapshots.old_logprobs) == (cell.seed, cell.staleness, cell.source)
        back = dataclasses.replace(
            cell.config,
            seed=0,
            run_dir=None,
            loop=dataclasses.replace(loop, max_staleness=base.loop.max_staleness),
            snapshots=dataclasses.replace(snapshots, old_logprobs=base.snapshots.old_logprobs),
        )
        assert back == base


def test_only_the_dedicated_cells_set_devices_aside(tmp_path):
    sources = (SourceName.SNAPSHOT, SourceName.DEDICATED)
    snapshots = dataclasses.replace(load_config("quickstart").snapshots, scorer_devices=1)
    cells = grid(ablation(tmp_path, sources=sources, snapshots=snapshots))
    assert [cell.config.snapshots.scorer_devices for cell in cells] == [0, 1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run_dir": None}, "--run-dir"),
        ({"seed": 4}, "--seeds"),
        ({"seeds": (1, 1)}, "--seeds"),
        ({"sources": ()}, "--sources"),
        ({"run_dir": pathlib.Path(__file__)}, "--run-dir .* is a file"),
        ({"staleness": (2, -1)}, "staleness -1.*--max-staleness is -1"),
        ({"staleness": (2, 40)}, "staleness 40.*--ring-capacity 41"),
        ({"sources": (SourceName.SNAPSHOT, SourceName.DEDICATED)}, "dedicated.*--scorer-devices"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_does(tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        grid(ablation(**{"run_dir": tmp_path, **changes}))
    assert list(tmp_path.iterdir()) == []


def test_another_experiment_s_directory_is_refused(tmp_path):
    cells = grid(ablation(tmp_path))
    run_directory.create(cells[0].config, "quickstart")
    assert grid(ablation(tmp_path)) == cells
    with pytest.raises(ConfigError, match=r"other options \(optimizer, steps\)"):
        grid(ablation(tmp_path, steps=3, optimizer=dataclasses.replace(cells[0].config.optimizer, learning_rate=1.0)))


def test_a_directory_that_holds_no_run_is_refused(tmp_path):
    left = grid(ablation(tmp_path))[0].config.run_dir
    left.mkdir()
    grid(ablation(tmp_path))
    (left / "config.tmp").write_text("{")  # a process was killed just then
    with pytest.raises(ConfigError, match="is not empty and holds no config.json"):
        grid(ablation(tmp_path))


def test_cells_that_would_learn_on_other_devices_are_refused(tmp_path, monkeypatch):
    config = load_config("quickstart")
    mesh, snapshots = (
        dataclasses.replace(config.mesh, data=-1),
        dataclasses.replace(config.snapshots, scorer_devices=4, score_rows=1),
    )
    monkeypatch.setenv("NPROC", "64")
    with pytest.raises(ConfigError, match="dedicated.*the learner has 4 devices, and 8 in snapshot.*--data"):
        grid(ablation(tmp_path, mesh=mesh, snapshots=snapshots, sources=(SourceName.SNAPSHOT, SourceName.DEDICATED)))


def test_a_wrong_command_ends_with_one_line(tmp_path, capsys):
    assert ablate.main(["quickstart", "--run-dir", str(tmp_path), "--sources", "dedicated"]) == 2
    assert capsys.readouterr().err.startswith("error: dedicated, staleness 4, seed 0: --old-logprobs dedicated wants devices")


def result(source, staleness, seed, error, success, diverged=None):
    figures = dict.fromkeys(("clip_fraction", "discrepancy_masked_fraction", "active_fraction", "seconds_step"), 0.25)
    figures |= {"staleness_mean": staleness / 2, "approximation_error_mean": error, "approximation_error_max": error}
    if not diverged:
        figures |= {"success_after": success, "sampled_success_after": success, "seconds": 1.0}
    return Result(source, staleness, seed, "somewhere", diverged, [0.0, 0.5, None, success], figures)


RESULTS = [
    result("snapshot", 4, 0, 0.0, 0.5), result("snapshot", 1, 0, 0.0, 0.75), result("snapshot", 4, 1, 0.0, 0.7),
    result("recompute", 4, 0, 0.125, 0.25), result("recompute", 4, 1, 0.375, 0.0, diverged="learner step 9: loss nan"),
]  # fmt: skip


def test_tables_are_means_over_seeds():
    (_, success), (_, anchors) = tables(RESULTS)
    assert success[1:] == [
        ("snapshot", "1", "75.0%", "75.0%", "1", "0"),
        ("snapshot", "4", "60.0% ±14.1%", "60.0% ±14.1%", "2", "0"),
        ("recompute", "4", "25.0%", "25.0%", "2", "1"),
    ]
    assert anchors[2:] == [
        ("snapshot", "4", "2.00", "0", "25.0%", "25.0%", "0.25"),
        ("recompute", "4", "2.00", "2.5e-01", "25.0%", "25.0%", "0.25"),
    ]


def test_the_figure_has_the_errors_and_a_panel_for_each_staleness(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is missing; pip install -e '.[notebooks]'")
    errors, first, second = draw(RESULTS).axes
    assert [line.get_label() for line in errors.lines] == ["snapshot", "recompute"]
    assert errors.lines[0].get_xydata().tolist() == [[0.5, 0.0], [2.0, 0.0]]
    assert errors.lines[1].get_xydata().tolist() == [[2.0, 0.25]]
    assert [first.get_title()[-1], second.get_title()[-1]] == ["4", "1"]
    assert len(first.lines) == 2 and len(second.lines) == 1
    assert first.lines[0].get_ydata() == pytest.approx([0, 0.25, 0.5 / 3, (0.5 + 0.6) / 4])
    alone = draw(RESULTS[:1]).axes[0]
    assert alone.get_xlim() == errors.get_xlim() == pytest.approx((-0.1, 4.1))  # one point alone is no reason to zoom in


def test_every_source_has_a_look_of_its_own():
    assert STYLES.keys() == {source.value for source in SourceName}
    for property in ("color", "marker"):
        assert len({style[property] for style in STYLES.values()}) == len(SourceName)


@pytest.mark.slow
def test_cells_are_runs_of_train_and_the_same_command_goes_on(tiny_run, tmp_path, stop_after, capsys, monkeypatch):
    directory = tmp_path / "grid"
    options = [*TINY_OPTIONS, "--checkpoint-every", "3", "--staleness", "4", "--run-dir", str(directory)]
    command = ["quickstart", *options, "--sources", "recompute", "snapshot"]
    with monkeypatch.context():
        stop_after(5, signal.SIGTERM)  # in the first cell
        assert ablate.main(command) == 0
        assert "stopped after 0 of 2 cells" in capsys.readouterr().out
    monkeypatch.undo()
    first, second = (directory / f"{source}-staleness-4-seed-0" for source in ("recompute", "snapshot"))
    assert len(rows_of(first)) == 5 and not second.exists() and not (directory / ablate.FIGURES).exists()

    assert ablate.main(command) == 0
    assert "going on after learner step 5" in capsys.readouterr().out
    assert_same_run(tiny_run, second)
    written = json.loads((directory / ablate.FIGURES).read_text())["cells"]
    assert [cell["source"] for cell in written] == ["recompute", "snapshot"]
    assert written[0]["figures"]["approximation_error_mean"] > 0 == written[1]["figures"]["approximation_error_mean"]
    assert all(len(cell["rewards"]) == 8 and 1 < cell["figures"]["staleness_mean"] < 4 for cell in written)
    assert (directory / ablate.PICTURE).stat().st_size > 1000

    finished = (first / "summary.json").stat().st_mtime_ns
    assert ablate.main(command) == 0
    assert (first / "summary.json").stat().st_mtime_ns == finished
    assert "training" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_cell_that_diverges_is_a_result_and_the_others_go_on(tmp_path, monkeypatch):
    update = training.Training.update

    def diverging(self, batch, step, version):
        if self._rooms.source.name is SourceName.RECOMPUTE and step == 3:
            raise training.NonFiniteLoss("learner step 3: loss nan")
        return update(self, batch, step, version)

    monkeypatch.setattr(training.Training, "update", diverging)
    options = [*TINY_OPTIONS, "--run-dir", str(tmp_path), "--sources", "recompute", "snapshot", "--staleness", "4"]
    assert ablate.main(["quickstart", *options]) == 0
    diverged, other = json.loads((tmp_path / ablate.FIGURES).read_text())["cells"]
    assert diverged["diverged"] == "learner step 3: loss nan" and len(diverged["rewards"]) == 2
    assert other["diverged"] is None and len(other["rewards"]) == 8
