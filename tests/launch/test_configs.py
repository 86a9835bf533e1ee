"""Every file of `launch/configs/` describes a run that can be had."""

import jax
import pytest

from launch.build import Foundation
from launch.config import ConfigError, check, config_names, load_config, parse
from launch.pretrained import locate
from rl.environments import EnvironmentName

SIZES = {"qwen3_0_6b": 0.596e9, "qwen3_4b": 4.02e9, "qwen3_8b": 8.19e9, "smollm2_135m": 134.5e6}


@pytest.mark.parametrize("name", config_names())
def test_it_can_be_run_once_its_files_are_there(name):
    config = load_config(name)
    if config.environment is EnvironmentName.REASONING_GYM:
        pytest.importorskip("reasoning_gym")
    if config.pretrained.model_path is not None:
        pytest.importorskip("gguf")
        try:
            locate(config.pretrained.model_path)
        except ValueError as error:
            pytest.skip(str(error))
    check(config)
    assert parse([name], program="test")[1].config == config
    Foundation.of(config).check_division()


@pytest.mark.parametrize(("name", "size"), SIZES.items())
def test_it_has_as_many_parameters_as_its_name_says(name, size):
    shapes = Foundation.of(load_config(name)).model.shapes
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == pytest.approx(size, rel=0.002)


def test_there_are_no_others():
    with pytest.raises(ConfigError, match="there is no config 'qwen4'"):
        load_config("qwen4")
