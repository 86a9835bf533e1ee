"""Objectives on the command line, in a run's config, and in the README's table."""

import dataclasses
import json
import pathlib

import pytest

from launch import objectives, run_directory, train
from launch.config import Config, ConfigError, check, load_config, parse, parse_options
from rl.presets import PRESETS
from rl.surrogates import Clip

ROOT = pathlib.Path(__file__).resolve().parents[2]


def parsed(*arguments: str) -> Config:
    return parse(["quickstart", *arguments], program="launch.train")[1].config


@pytest.mark.parametrize("name", PRESETS)
def test_every_objective_can_be_named_and_its_run_read_back(name, tmp_path):
    """Bounds may be infinite, which JSON is not; and one of several dataclasses is to be told from the others."""
    config = dataclasses.replace(parsed("--objective", name), run_dir=tmp_path / "run")
    assert config.objective == PRESETS[name]()
    check(config)
    run_dir = run_directory.create(config, "quickstart")
    assert run_directory.read_config(run_dir) == config
    json.loads((run_dir / run_directory.CONFIG).read_text(), parse_constant=pytest.fail)


def test_options_come_on_top_of_the_objective_that_is_named():
    config = parsed("--clip-high", "0.5", "--objective=dapo", "--advantages", "mean_centered", "--seed", "3")
    assert config.objective.surrogate == Clip(0.2, 0.5) and config.objective.dynamic_sampling and config.seed == 3
    assert config.objective.advantage.advantages.value == "mean_centered"


def test_without_a_name_the_config_s_own_objective_stays():
    assert parsed().objective == load_config("quickstart").objective != PRESETS["ppo"]()
    assert parsed("--discrepancy", "both").objective.correction.discrepancy.value == "both"


def test_an_option_that_an_objective_does_not_have_is_refused(capsys):
    with pytest.raises(SystemExit):
        parsed("--objective", "vespo", "--clip-low", "0.1")
    assert "--clip-low" in capsys.readouterr().err


def test_an_objective_is_named_once():
    with pytest.raises(ConfigError, match="--objective is given 2 times, wanted once: ppo, dapo"):
        parsed("--objective", "ppo", "--seed", "1", "--objective", "dapo")


def test_a_run_is_gone_on_with_under_the_name_of_its_objective(tmp_path, capsys):
    """The command that began it, and --resume: the objective is compared, and another one is refused."""
    config = dataclasses.replace(parsed("--objective", "grpo"), run_dir=tmp_path / "run")
    run_directory.create(config, "quickstart")
    options = ["quickstart", "--run-dir", str(config.run_dir), "--resume", "--objective"]
    assert train.main([*options, "dapo"]) == 2
    assert "objective is" in capsys.readouterr().err
    assert parse_options(["--objective", "grpo"], config, program="launch.train").objective == config.objective


def test_a_name_that_nobody_has_is_refused_with_all_there_are():
    with pytest.raises(ConfigError, match="no objective 'ppp'; wanted one of: decoupled_ppo, ppo_ewma"):
        parsed("--objective", "ppp")


@pytest.mark.parametrize(("options", "message"), [
    (("--denominator", "constant"), "wants a constant above 0"),
    (("--denominator-constant", "8"), "'tokens' got constant 8.0; it takes none"),
    (("--clip-low", "1.5"), "clip_low is 1.5"),
    (("--ratio-level", "maximum"), "ratio_level is 'maximum'"),
    (("--rejection", "k3"), "give a statistic and an end, or neither"),
])  # fmt: skip
def test_what_has_no_meaning_is_refused_before_anything_runs(options, message):
    with pytest.raises(ValueError, match=message):
        check(parsed(*options))


def test_the_readme_has_the_table_of_the_code():
    assert objectives.markdown() in (ROOT / "README.md").read_text()
    assert objectives.main(["--all"]) == 2


def test_every_cell_of_the_table_says_something(capsys):
    assert objectives.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(PRESETS)
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        assert len(cells) == len(objectives.COLUMNS) and all(cells), line
