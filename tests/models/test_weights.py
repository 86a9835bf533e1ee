"""Hugging Face folders in and out: bit by bit, onto any mesh, and nothing half-loaded from a bad one."""

import dataclasses
import json
import pathlib
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh

from models import filling, sharding
from models.config import Precision
from models.families import WeightsError, model_config
from models.transformer import Model
from models.weights import INDEX, SINGLE, export_folder, import_folder, read_config
from tests.golden_models import FOLDERS, assert_same, golden_model

TIED, UNTIED = "qwen2_bias_tied", "llama_gqa_untied"
UP = "model.layers.1.mlp.up_proj.weight"
FLOAT32 = Precision.FLOAT32


def load(folder: pathlib.Path, precision: Precision = FLOAT32, **options):
    return import_folder(folder, model_config(read_config(folder)), precision=precision, **options)


def export(name: str, folder: pathlib.Path, **options) -> pathlib.Path:
    config, params, _ = golden_model(name)
    export_folder(folder, params, config, read_config(FOLDERS[name]), **options)
    return folder


def tensors_of(folder: pathlib.Path) -> dict[str, np.ndarray]:
    files = [safetensors.numpy.load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for tensors in files for name, tensor in tensors.items()}


def rewritten(folder: pathlib.Path, tensors: dict[str, np.ndarray], source: str = TIED, **changes) -> pathlib.Path:
    """A folder of one file with these tensors, and a configuration with these changes."""
    folder.mkdir(exist_ok=True)
    safetensors.numpy.save_file(tensors, folder / SINGLE)
    (folder / "config.json").write_text(json.dumps({**read_config(FOLDERS[source]), **changes}))
    return folder


def make_mesh(data: int, fsdp: int, tensor: int) -> Mesh:
    return Mesh(np.asarray(jax.devices()[:data * fsdp * tensor]).reshape(data, fsdp, tensor), sharding.MESH_AXES)


# --- round trips ---


@pytest.mark.parametrize("name", FOLDERS)
def test_an_exported_folder_holds_what_the_original_holds(name, tmp_path):
    """Export of an import is the original, tensor by tensor; so import of an export is too."""
    folder = export(name, tmp_path / "out")
    original, exported = tensors_of(FOLDERS[name]), tensors_of(folder)
    assert_same(exported, original)
    assert read_config(folder) == read_config(FOLDERS[name])
    assert_same(load(folder), golden_model(name)[1])
    with safetensors.safe_open(folder / SINGLE, "numpy") as file:
        assert file.metadata() == {"format": "pt"}
    assert (folder / SINGLE).stat().st_mode == (folder / "config.json").stat().st_mode


@pytest.mark.parametrize("name", [TIED, UNTIED])
def test_a_folder_is_divided_by_size(name, tmp_path):
    folder, whole = export(name, tmp_path / "out", max_shard_bytes=100_000), tensors_of(FOLDERS[name])
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    count = len(files)
    assert count > 2 and files == [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    index = json.loads((folder / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert index["weight_map"] == {key: file for file in files for key in safetensors.numpy.load_file(folder / file)}
    assert all(sum(tensor.nbytes for tensor in safetensors.numpy.load_file(folder / file).values()) <= 100_000 for file in files)
    assert_same(load(folder), golden_model(name)[1])


def test_a_tensor_larger_than_a_file_may_be_has_one_of_its_own(tmp_path):
    folder = export(TIED, tmp_path / "out", max_shard_bytes=1)
    assert len(list(folder.glob("*.safetensors"))) == len(tensors_of(folder))
    assert_same(load(folder), golden_model(TIED)[1])


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_bfloat16_model_comes_back_bit_by_bit_and_says_so(key, tmp_path):
    raw = {name: value for name, value in read_config(FOLDERS[TIED]).items() if name != "dtype"} | {key: "float32"}
    params = load(FOLDERS[TIED], Precision.BFLOAT16)
    export_folder(tmp_path / "out", params, model_config(raw), raw)
    assert read_config(tmp_path / "out") == {**raw, key: "bfloat16"}
    assert_same(load(tmp_path / "out", Precision.BFLOAT16), params)
    assert_same(load(tmp_path / "out"), jax.tree.map(lambda leaf: leaf.astype(np.float32), params))


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("wanted", Precision)
def test_stored_types_are_rounded_once_to_the_wanted_one(stored, wanted, tmp_path):
    tensors = {name: tensor.astype(stored) for name, tensor in tensors_of(FOLDERS[TIED]).items()}
    up = load(rewritten(tmp_path / "in", tensors), wanted)["blocks"]["up"]["kernel"][1]
    np.testing.assert_array_equal(np.asarray(up), tensors[UP].T.astype(wanted.dtype))


def test_rows_that_pad_the_vocabulary_are_zero_and_never_leave(tmp_path):
    for name in (TIED, UNTIED):
        raw = read_config(FOLDERS[name])
        config = dataclasses.replace(model_config(raw), vocab_multiple=48)
        params = import_folder(FOLDERS[name], config, precision=FLOAT32)
        assert params["embedding"].shape == (144, 64) and not np.any(params["embedding"][128:])
        assert name == TIED or params["head"]["kernel"].shape == (64, 144) and not np.any(params["head"]["kernel"][:, 128:])
        export_folder(tmp_path / name, params, config, raw)
        assert_same(load(tmp_path / name), golden_model(name)[1])


# --- meshes ---


LAYERS_RULES = {"layers": "data", "embed": None, "heads": None, "kv_heads": None, "head": "fsdp", "mlp": "fsdp", "vocab": "fsdp"}
PLACEMENTS = {
    "fsdp 4, tensor 2": ((1, 4, 2), sharding.RULES),
    "data 2, fsdp 2, tensor 2": ((2, 2, 2), sharding.RULES),
    "copies for decoding": ((2, 2, 2), sharding.DECODE_RULES),
    "layers apart": ((2, 4, 1), LAYERS_RULES),
}


@pytest.mark.parametrize("name", [TIED, UNTIED])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_parameters_arrive_on_any_mesh_bit_by_bit(name, placement, monkeypatch):
    monkeypatch.setattr(filling, "PIECE_BYTES", 5000)  # so that even these tensors are read in pieces
    shape, rules = PLACEMENTS[placement]
    model = Model(golden_model(name)[0])
    shardings = sharding.parameter_shardings(model.axes, model.shapes, make_mesh(*shape), rules)
    params = load(FOLDERS[name], shardings=shardings)
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == shardings
    assert_same(params, golden_model(name)[1])


def test_a_sharded_model_is_exported_as_one(tmp_path):
    config, params, _ = golden_model(UNTIED)
    model = Model(config)
    shardings = sharding.parameter_shardings(model.axes, model.shapes, make_mesh(2, 2, 2))
    export_folder(tmp_path / "out", load(FOLDERS[UNTIED], shardings=shardings), config, read_config(FOLDERS[UNTIED]))
    assert_same(load(tmp_path / "out"), params)


def test_parameters_may_be_donated():
    """A CPU's arrays are the very memory that was filled, and copies of a part share it: jax must not write there."""
    model = Model(golden_model(TIED)[0])
    shardings = sharding.parameter_shardings(model.axes, model.shapes, make_mesh(8, 1, 1))
    params = load(FOLDERS[TIED], shardings=shardings)
    twice = jax.jit(lambda params: jax.tree.map(lambda leaf: 2 * leaf, params), donate_argnums=0)(params)
    for leaf, expected in zip(jax.tree.leaves(twice), jax.tree.leaves(golden_model(TIED)[1]), strict=True):
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, 2 * np.asarray(expected))


# --- bad folders ---


def refused(folder: pathlib.Path, message: str) -> None:
    with pytest.raises(WeightsError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.fixture
def shards(tmp_path) -> pathlib.Path:
    return export(TIED, tmp_path / "shards", max_shard_bytes=100_000)


def edit_index(folder: pathlib.Path, **changes) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"].update(changes)
    (folder / INDEX).write_text(json.dumps(index))


def test_missing_files_are_named(shards, tmp_path):
    first = sorted(shards.glob("*.safetensors"))[0]
    first.rename(tmp_path / "elsewhere")
    refused(shards, f"{first.name} is missing, wanted as {INDEX} names it")
    (shards / INDEX).unlink()
    refused(shards, f"no weights in it, wanted {SINGLE} or {INDEX}")
    (shards / "config.json").unlink()
    refused(shards, "config.json is missing")
    refused(tmp_path / "nowhere", "config.json is missing")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', "[" * 100_000, "\udcff"])
def test_files_that_are_no_json_object_are_named(text, shards):
    for name in (INDEX, "config.json"):
        (shards / name).write_text(text, encoding="utf-8", errors="surrogateescape")
        refused(shards, f"{name}: .*wanted a JSON object")


def test_an_index_that_is_wrong_is_refused(shards):
    names = json.loads((shards / INDEX).read_text())["weight_map"]
    edit_index(shards, **{UP: sorted(set(names.values()) - {names[UP]})[0]})
    refused(shards, f"holds tensor {UP}, which {INDEX} places in")
    edit_index(shards, **{UP: names[UP], "extra": names[UP]})
    refused(shards, "tensor extra is missing, wanted as")
    for value in (5, "../x.safetensors", "/etc/passwd", ""):
        edit_index(shards, extra=value)
        refused(shards, "no weight_map from names of tensors to names of files")
    (shards / INDEX).write_text('{"weight_map": []}')
    refused(shards, "no weight_map from names")


def test_files_beside_those_of_the_index_do_not_matter(shards):
    (shards / "consolidated.safetensors").write_bytes(b"something else")
    assert_same(load(shards), golden_model(TIED)[1])


def test_one_whole_file_wins_over_an_index(shards):
    shutil.copy(FOLDERS[TIED] / SINGLE, shards)
    (shards / INDEX).write_text("{}")
    assert_same(load(shards), golden_model(TIED)[1])


def test_tensors_that_do_not_fit_are_named_with_the_shape_they_should_have(tmp_path):
    tensors = tensors_of(FOLDERS[TIED])
    folder = rewritten(tmp_path / "in", {name: tensor for name, tensor in tensors.items() if name != UP})
    refused(folder, rf"tensor {UP} is missing, wanted shape \(128, 64\)")
    refused(rewritten(folder, {**tensors, UP: tensors[UP].T.copy()}), rf"{UP} has shape \(64, 128\), wanted shape \(128, 64\)")
    refused(rewritten(folder, {**tensors, "model.more": tensors[UP]}), r"model.more of shape \(128, 64\) is one too many")
    refused(rewritten(folder, tensors, vocab_size=130), r"embed_tokens.weight has shape \(128, 64\), wanted shape \(130, 64\)")
    refused(rewritten(folder, tensors, num_hidden_layers=10**9, layer_types=None), "layers.2.input_layernorm.weight is missing")
    refused(rewritten(folder, tensors, tie_word_embeddings=False), r"lm_head.weight is missing, wanted shape \(128, 64\)")


@pytest.mark.parametrize("dtype", [np.float64, np.int8, np.int32, ml_dtypes.float8_e4m3fn])
def test_other_types_are_named(dtype, tmp_path):
    tensors = tensors_of(FOLDERS[TIED])
    folder = rewritten(tmp_path / "in", {**tensors, UP: tensors[UP].astype(dtype)})
    refused(folder, f"{UP} is of type .*, wanted one of: BF16, F16, F32")


def test_a_tied_head_may_be_stored_twice_if_it_is_the_embedding(tmp_path):
    tensors = tensors_of(FOLDERS[TIED])
    head = tensors["model.embed_tokens.weight"].copy()
    derived = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    assert_same(load(rewritten(tmp_path / "in", {**tensors, **derived, "lm_head.weight": head})), golden_model(TIED)[1])
    head[-1, -1] += 1
    refused(rewritten(tmp_path / "in", {**tensors, "lm_head.weight": head}), "lm_head.weight of shape .* is one too many")


def test_another_config_than_the_folders_is_refused():
    config = model_config({**read_config(FOLDERS[TIED]), "rope_parameters": {"rope_theta": 5.0}})
    with pytest.raises(WeightsError, match=r"model: rope_theta is 5.0, wanted 1000000.0 as in .*config.json"):
        import_folder(FOLDERS[TIED], config, precision=FLOAT32)


@given(st.data())
def test_a_damaged_file_is_refused_or_loads_as_another_model(tmp_path_factory, data):
    """Cut anywhere, or with bytes changed in its header."""
    whole = (FOLDERS[TIED] / SINGLE).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    if data.draw(st.booleans()):
        damaged = whole[:data.draw(st.integers(0, len(whole) - 1))]
    else:
        at = data.draw(st.integers(0, header - 9))
        damaged = whole[:at] + data.draw(st.binary(min_size=1, max_size=8)) + whole[at + 8:]
    folder = tmp_path_factory.mktemp("damaged")
    shutil.copy(FOLDERS[TIED] / "config.json", folder)
    (folder / SINGLE).write_bytes(damaged)
    try:
        params = load(folder)
    except WeightsError as error:
        assert "\n" not in str(error)
    else:  # a change of what stands for nothing, or that swaps tensors of one shape
        assert len(damaged) == len(whole) and jax.tree.structure(params) == jax.tree.structure(golden_model(TIED)[1])


# --- bad exports ---


def test_an_export_never_overwrites_and_leaves_nothing_half_written(tmp_path, monkeypatch):
    config, params, _ = golden_model(TIED)
    raw = read_config(FOLDERS[TIED])
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(WeightsError, match="full exists, wanted a new or an empty folder"):
        export_folder(tmp_path / "full", params, config, raw)
    (tmp_path / "empty").mkdir()
    export(TIED, tmp_path / "empty")
    wrong = {**params, "embedding": params["embedding"][:-1]}
    with pytest.raises(WeightsError, match=r"parameter embedding has shape \(127, 64\), wanted \(128, 64\)"):
        export_folder(tmp_path / "out", wrong, config, raw)
    with pytest.raises(WeightsError, match="parameter head/kernel has shape None, wanted"):
        export_folder(tmp_path / "out", params, dataclasses.replace(config, tied_embeddings=False),
                      {**raw, "tie_word_embeddings": False})

    def fail(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr("models.weights.save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        export(TIED, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "full"]
