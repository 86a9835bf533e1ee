"""What a Hugging Face configuration means, in every spelling, and what is refused."""

import dataclasses
import json
import math

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.config import ModelConfig, Precision, RopeScaling
from models.families import WeightsError, check_config, model_config, places
from models.transformer import Model
from tests.golden_models import FOLDERS

LLAMA, QWEN2, QWEN3, SCALED, SLIDING = (json.loads((FOLDERS[name] / "config.json").read_text()) for name in (
    "llama_gqa_untied", "qwen2_bias_tied", "qwen3_headdim32_untied", "llama3_rope_scaled", "qwen2_sliding"))
STRETCH = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def changed(raw: dict, **changes) -> dict:
    """With other values; those of `...` are left out."""
    return {key: value for key, value in {**raw, **changes}.items() if value is not ...}


def test_every_field_is_read():
    assert model_config(QWEN3) == ModelConfig(
        vocab_size=128, num_layers=2, d_model=64, d_ff=128, num_heads=4, num_kv_heads=2, head_dim=32, max_length=128,
        rope_theta=1e6, norm_epsilon=1e-6, qk_norm=True, tied_embeddings=False)
    qwen2 = model_config(QWEN2)
    assert (qwen2.qkv_bias, qwen2.qk_norm, qwen2.tied_embeddings, qwen2.head_dim) == (True, False, True, 16)
    llama = model_config(changed(LLAMA, rms_norm_eps=1e-5, num_key_value_heads=4))
    assert (llama.qkv_bias, llama.qk_norm, llama.norm_epsilon, llama.num_kv_heads) == (False, False, 1e-5, 4)


def test_what_older_files_leave_unsaid():
    """By the defaults of transformers: only Qwen3 has a head size of its own."""
    unsaid = dict.fromkeys(("head_dim", "num_key_value_heads", "tie_word_embeddings", "rope_parameters", "rms_norm_eps"), ...)
    llama, qwen3 = (model_config(changed(raw, **unsaid)) for raw in (LLAMA, QWEN3))
    assert (llama.head_dim, llama.num_kv_heads, llama.tied_embeddings, llama.rope_theta) == (16, 4, False, 10_000.0)
    assert qwen3.head_dim == 128
    assert model_config(changed(LLAMA, head_dim=None, num_key_value_heads=None, architectures=None)).head_dim == 16


# --- rotary positions ---


@pytest.mark.parametrize("spelling", [
    {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **STRETCH}},
    {"rope_theta": 500_000, "rope_scaling": {"rope_type": "llama3", **STRETCH}},
    {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **STRETCH}},
    {"rope_theta": 1.0, "rope_scaling": {"type": "llama3", "rope_theta": 5e5, **STRETCH}},
    {"rope_theta": 5e5, "rope_parameters": {"rope_type": "llama3", **STRETCH}},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **STRETCH}, "rope_parameters": {"rope_type": "default"}},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **STRETCH, "original_max_position_embeddings": 99},
     "original_max_position_embeddings": 32},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **changed(STRETCH, original_max_position_embeddings=...)},
     "max_position_embeddings": 32},
])
def test_a_scaling_in_every_spelling(spelling):
    config = model_config(changed(LLAMA, **{"rope_parameters": ..., **spelling}))
    assert (config.rope_theta, config.rope_scaling) == (5e5, RopeScaling(8.0, 1.0, 4.0, 32))


@pytest.mark.parametrize("spelling", [
    {"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": None}, {"rope_theta": 500_000, "rope_parameters": None},
    {"rope_theta": 5e5, "rope_scaling": {"type": "default"}}, {"rope_parameters": {"rope_theta": 5e5}},
    {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_theta": 7.0}, {"rope_theta": 5e5, "rope_scaling": {}},
])
def test_no_scaling_in_every_spelling(spelling):
    config = model_config(changed(LLAMA, **{"rope_parameters": ..., **spelling}))
    assert (config.rope_theta, config.rope_scaling) == (5e5, None)


# --- windows ---


@pytest.mark.parametrize(("changes", "window", "layers"), [
    ({}, 5, (1, 2)),
    ({"layer_types": ...}, 5, (1, 2)),
    ({"layer_types": ..., "max_window_layers": 0}, 5, (0, 1, 2)),
    ({"layer_types": ..., "max_window_layers": 3}, None, ()),
    ({"layer_types": ..., "max_window_layers": ...}, None, ()),
    ({"layer_types": ..., "use_sliding_window": False}, None, ()),
    ({"layer_types": ..., "use_sliding_window": ...}, None, ()),
    ({"layer_types": ..., "sliding_window": None}, None, ()),
    ({"layer_types": ..., "sliding_window": ...}, 4096, (1, 2)),
    ({"layer_types": ["sliding_attention", "full_attention", "full_attention"], "use_sliding_window": ...}, 5, (0,)),
    ({"layer_types": ["full_attention"] * 3}, None, ()),
])
def test_windows_where_a_configuration_asks_for_them(changes, window, layers):
    config = model_config(changed(SLIDING, **changes))
    assert (config.sliding_window, config.sliding_layers) == (window, layers)
    assert config.windows == tuple(window if layer in layers else None for layer in range(3))


# --- refusals ---


@pytest.mark.parametrize(("raw", "changes", "message"), [
    (LLAMA, {"model_type": "gemma2"}, "model_type is 'gemma2', wanted one of: llama, qwen2, qwen3"),
    (LLAMA, {"model_type": "qwen3_moe"}, "model_type is 'qwen3_moe', wanted one of"),
    (LLAMA, {"model_type": ...}, "model_type is None, wanted one of"),
    (LLAMA, {"model_type": ["llama"]}, r"model_type is \['llama'\], wanted one of"),
    (LLAMA, {"architectures": ["LlamaForSequenceClassification"]}, r"wanted \['LlamaForCausalLM'\]"),
    (LLAMA, {"hidden_act": "gelu"}, "hidden_act is 'gelu', wanted 'silu'"),
    (LLAMA, {"attention_bias": True}, "attention_bias is True, wanted False"),
    (LLAMA, {"mlp_bias": True}, "mlp_bias is True, wanted False"),
    (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}, wanted None"),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, wanted 1"),
    (LLAMA, {"vocab_size": ...}, "vocab_size is missing"),
    (LLAMA, {"vocab_size": "128"}, "vocab_size is '128', wanted an integer"),
    (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers is 0, wanted an integer of at least 1"),
    (LLAMA, {"num_attention_heads": True}, "num_attention_heads is True, wanted an integer"),
    (LLAMA, {"num_key_value_heads": 3}, "4 query heads do not divide over 3 kv heads"),
    (LLAMA, {"head_dim": 15}, "head_dim is 15, wanted an even number"),
    (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, wanted a positive number"),
    (LLAMA, {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', wanted true or false"),
    (LLAMA, {"rope_scaling": "llama3"}, "is 'llama3', wanted an object"),
    (LLAMA, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "the rotary scaling is 'yarn', wanted 'default' or 'llama3'"),
    (LLAMA, {"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
    (LLAMA, {"rope_scaling": {"type": "llama3", **STRETCH, "high_freq_factor": 0.5}}, "low_frequency_factor below"),
    (LLAMA, {"rope_parameters": {"rope_theta": 0}}, "rope_theta is 0, wanted a positive number"),
    (LLAMA, {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "by kind of layer"),
    (LLAMA, {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5, wanted 1"),
    (LLAMA, {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}, "wanted none in a LlamaForCausalLM"),
    (SLIDING, {"layer_types": ["full_attention"]}, "wanted 3 times 'full_attention' or 'sliding_attention'"),
    (SLIDING, {"layer_types": ["linear_attention"] * 3}, "wanted 3 times 'full_attention' or 'sliding_attention'"),
    (SLIDING, {"sliding_window": None}, "slide with sliding_window None"),
    (SLIDING, {"sliding_window": 0}, "sliding_window is 0, wanted an integer of at least 1"),
    (SLIDING, {"use_sliding_window": False}, "use_sliding_window False, wanted a window in use"),
])
def test_what_the_decoder_does_not_compute_is_refused(raw, changes, message):
    with pytest.raises(WeightsError, match=message) as caught:
        model_config(changed(raw, **changes))
    assert "\n" not in str(caught.value) and str(caught.value).startswith("config.json: ")


NONSENSE = st.recursive(st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=8),
                        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3))


@given(st.sampled_from([LLAMA, SCALED, SLIDING]), st.data())
def test_nonsense_is_a_config_or_a_refusal(raw, data):
    """Any value for any key, one level down as well."""
    key = data.draw(st.sampled_from(sorted(raw)))
    value = data.draw(NONSENSE)
    if isinstance(raw[key], dict) and data.draw(st.booleans()):
        value = {**raw[key], data.draw(st.sampled_from(sorted(raw[key]))): value}
    try:
        config = model_config({**raw, key: value})
    except WeightsError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(config, ModelConfig)


def test_a_run_may_choose_only_what_a_file_does_not_say():
    config = model_config(LLAMA)
    check_config(dataclasses.replace(config, max_length=7, vocab_multiple=8, compute_dtype=Precision.BFLOAT16), LLAMA, "x")
    with pytest.raises(WeightsError, match="model: rope_theta is 1.0, wanted 10000.0 as in x"):
        check_config(dataclasses.replace(config, rope_theta=1.0), LLAMA, "x")


# --- places ---


@pytest.mark.parametrize("raw", [LLAMA, QWEN2, QWEN3])
def test_every_number_of_the_model_is_stored_once(raw):
    config = model_config(raw)
    named = list(places(config))
    assert len({name for name, _ in named}) == len(named)
    sizes = {}
    for _, place in named:
        sizes[place.path] = sizes.get(place.path, 0) + math.prod(place.shape)
    leaves = jax.tree.leaves_with_path(Model(config).shapes)
    assert sizes == {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.size for path, leaf in leaves}
