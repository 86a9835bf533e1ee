"""A pretrained model is checked and read alike, whether it is a folder or a file."""

import pytest

from models import pretrained
from models.config import Precision
from models.families import WeightsError
from models.pretrained import check_params, import_params, read_shape
from tests.golden_models import FOLDERS, assert_same, golden_model

NAME = "qwen3_qknorm_tied"


def test_a_folder_is_read_as_its_parts_read_it():
    config, params, _ = golden_model(NAME)
    path = FOLDERS[NAME]
    assert read_shape(path) == config
    check_params(path, config)
    assert_same(import_params(path, config, precision=Precision.FLOAT32), params)


def test_a_missing_package_of_the_reader_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "models.gguf", None)  # as if importing it failed
    pretrained._opened_gguf.cache_clear()
    (tmp_path / "model.gguf").touch()
    with pytest.raises(WeightsError, match=r"pip install 'exactor\[gguf\]'"):
        read_shape(tmp_path / "model.gguf")


def test_another_shape_is_refused_before_anything_is_read():
    config, _, _ = golden_model("llama_gqa_untied")
    with pytest.raises(WeightsError, match="wanted .* as in"):
        check_params(FOLDERS[NAME], config)
