"""Families of decoders: what a Hugging Face configuration says in our words, and where each stored tensor belongs.

One decoder serves them all, so a family is a few lines here: what its configurations leave unsaid, which options its layers have,
and no layers of its own. Names and shapes of tensors follow from `ModelConfig` alone. A configuration that asks for anything the
decoder does not compute (another activation, another rotary scaling, experts, soft caps) is refused: weights that load but mean
something else are worse than none. The rules are those of transformers 5.12, `configuration_*.py` and `modeling_rope_utils.py`.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping

from models.config import ModelConfig, RopeScaling
from models.parameters import by_path
from models.transformer import Model


class WeightsError(ValueError):
    """Weights or a configuration that cannot be used; the message says what, got and wanted in one line."""


@dataclasses.dataclass(frozen=True)
class Family:
    """What sets a family's configurations and layers apart."""

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    has_windows: bool = True  # whether its layers may slide
    default_head_dim: int | None = None  # None: the hidden size, divided by the query heads


FAMILIES = {
    "llama": Family("LlamaForCausalLM", has_windows=False),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, default_head_dim=128),
}
"""By `model_type`. SmolLM2 and Llama 3 are of the first, Qwen2.5 is of the second."""

FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,  # where it may be set, it would give the output projection a bias as well
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
"""Keys of a configuration that the decoder knows one value of; null is that value too."""

FREE_FIELDS = ("max_length", "vocab_multiple", "compute_dtype")
"""Of a `ModelConfig`: what a run chooses, whatever the configuration says."""


def model_config(raw: Mapping) -> ModelConfig:
    """The decoder that a Hugging Face `config.json` describes.

    It computes in float32 on contexts of the full length and pads no vocabulary; `dataclasses.replace` these `FREE_FIELDS`.

    Args:
      raw: the parsed file.

    Raises:
      WeightsError: no such family, or something that the decoder does not compute, or a value that makes no sense.
    """
    family = _family(raw)
    for key, wanted in FIXED.items():
        got = raw.get(key)
        if got is not None and got != wanted:
            raise WeightsError(f"config.json: {key} is {got!r}, wanted {wanted!r}")
    num_layers, num_heads = _integer(raw, "num_hidden_layers"), _integer(raw, "num_attention_heads")
    d_model = _integer(raw, "hidden_size")
    head_dim = _integer(raw, "head_dim", family.default_head_dim or d_model // num_heads)
    window, sliding_layers = _windows(raw, family, num_layers)
    theta, scaling = _rope(raw)
    try:
        return ModelConfig(
            vocab_size=_integer(raw, "vocab_size"),
            num_layers=num_layers,
            d_model=d_model,
            d_ff=_integer(raw, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=_integer(raw, "num_key_value_heads", num_heads),
            head_dim=head_dim,
            max_length=_integer(raw, "max_position_embeddings"),
            rope_theta=theta,
            rope_scaling=scaling,
            norm_epsilon=_number(raw, "rms_norm_eps", 1e-6),
            qk_norm=family.qk_norm,
            qkv_bias=family.qkv_bias,
            sliding_window=window,
            sliding_layers=sliding_layers,
            tied_embeddings=_flag(raw, "tie_word_embeddings", False),
        )
    except WeightsError:
        raise
    except ValueError as error:  # sizes that do not fit together
        raise WeightsError(f"config.json: {error}") from error


def check_config(config: ModelConfig, raw: Mapping, file: object) -> None:
    """Refuses a config that is not what `raw` describes, but for its `FREE_FIELDS`; `file` is where that stands.

    Raises:
      WeightsError: so it is.
    """
    stored = dataclasses.replace(model_config(raw), **{name: config.__dict__[name] for name in FREE_FIELDS})
    for name, wanted in stored.__dict__.items():
        if config.__dict__[name] != wanted:
            raise WeightsError(f"model: {name} is {config.__dict__[name]}, wanted {wanted} as in {file}")


def _family(raw: Mapping) -> Family:
    model_type, wanted = raw.get("model_type"), ", ".join(FAMILIES)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise WeightsError(f"config.json: model_type is {model_type!r}, wanted one of: {wanted}")
    family, architectures = FAMILIES[model_type], raw.get("architectures")
    if architectures is not None and architectures != [family.architecture]:
        raise WeightsError(f"config.json: architectures are {architectures!r}, wanted [{family.architecture!r}]")
    return family


def _windows(raw: Mapping, family: Family, num_layers: int) -> tuple[int | None, tuple[int, ...]]:
    """The window and the layers that have it: `layer_types` where they are named, else those from `max_window_layers` on."""
    full, sliding, types = "full_attention", "sliding_attention", raw.get("layer_types")
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else raw.get("sliding_window")
    if types is None:
        is_used = _flag(raw, "use_sliding_window", False) and window is not None
        layers = tuple(range(_integer(raw, "max_window_layers", 28, minimum=0), num_layers)) if is_used else ()
    else:
        if not isinstance(types, list) or len(types) != num_layers or any(kind not in (full, sliding) for kind in types):
            raise WeightsError(f"config.json: layer_types is {types!r}, wanted {num_layers} times {full!r} or {sliding!r}")
        layers = tuple(layer for layer, kind in enumerate(types) if kind == sliding)
    if not layers:
        return None, ()
    if not family.has_windows:
        raise WeightsError(f"config.json: layers {layers} slide, wanted none in a {family.architecture}")
    if window is None or not _flag(raw, "use_sliding_window", True):
        raise WeightsError(f"config.json: layers {layers} slide with sliding_window {window!r} and use_sliding_window "
                           f"{raw.get('use_sliding_window')!r}, wanted a window in use")
    return _integer({"sliding_window": window}, "sliding_window"), layers


def _rope(raw: Mapping) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary positions, in the spelling of either time.

    Up to transformers 4: `rope_theta` and `rope_scaling` {rope_type or type, ...}; since 5: `rope_parameters` with all of it.
    Where a file has both objects the older one wins, as it does there.
    """
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise WeightsError(f"config.json: rope_scaling or rope_parameters is {rope!r}, wanted an object")
    theta = _number(rope, "rope_theta", _number(raw, "rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if _number(rope, "partial_rotary_factor", 1.0) != 1:
        raise WeightsError(f"config.json: partial_rotary_factor is {rope['partial_rotary_factor']!r}, wanted 1")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise WeightsError(f"config.json: rotary parameters by kind of layer ({', '.join(rope)}), wanted one set for all layers")
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise WeightsError(f"config.json: the rotary scaling is {kind!r}, wanted 'default' or 'llama3'")
    key = "original_max_position_embeddings"
    original = _integer(raw if raw.get(key) is not None else rope, key, raw.get("max_position_embeddings"))
    try:
        return theta, RopeScaling(_number(rope, "factor"), _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor"),
                                  original)
    except WeightsError:
        raise
    except ValueError as error:
        raise WeightsError(f"config.json: {error}") from error


def _value(raw: Mapping, key: str, default):
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise WeightsError(f"config.json: {key} is missing")
    return value


def _integer(raw: Mapping, key: str, default: int | None = None, *, minimum: int = 1) -> int:
    value = _value(raw, key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise WeightsError(f"config.json: {key} is {value!r}, wanted an integer of at least {minimum}")
    return value


def _number(raw: Mapping, key: str, default: float | None = None) -> float:
    value = _value(raw, key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not (value > 0 and math.isfinite(value)):
        raise WeightsError(f"config.json: {key} is {value!r}, wanted a positive number")
    return float(value)


def _flag(raw: Mapping, key: str, default: bool) -> bool:
    value = _value(raw, key, default)
    if not isinstance(value, bool):
        raise WeightsError(f"config.json: {key} is {value!r}, wanted true or false")
    return value


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one stored tensor belongs in the tree of parameters.

    PyTorch stores a matrix as [outputs, inputs], and heads are no axis of their own; ours are [inputs, outputs]. Unfolded, a
    stored tensor has our axes in another order: `stored.reshape(unfolded).transpose(order)` is what belongs into our leaf.
    """

    path: str  # of the leaf, as in "blocks/query/kernel"
    layer: int | None  # on the leaf's leading axis; None: it has no axis of layers
    shape: tuple[int, ...]  # as stored
    unfolded: tuple[int, ...]
    order: tuple[int, ...]


_STORED = {
    "embedding": ("model.embed_tokens.weight", 0),
    "blocks/attention_norm/scale": ("model.layers.{}.input_layernorm.weight", 0),
    "blocks/query/kernel": ("model.layers.{}.self_attn.q_proj.weight", 1),
    "blocks/query/bias": ("model.layers.{}.self_attn.q_proj.bias", 0),
    "blocks/key/kernel": ("model.layers.{}.self_attn.k_proj.weight", 1),
    "blocks/key/bias": ("model.layers.{}.self_attn.k_proj.bias", 0),
    "blocks/value/kernel": ("model.layers.{}.self_attn.v_proj.weight", 1),
    "blocks/value/bias": ("model.layers.{}.self_attn.v_proj.bias", 0),
    "blocks/output/kernel": ("model.layers.{}.self_attn.o_proj.weight", 2),
    "blocks/query_norm/scale": ("model.layers.{}.self_attn.q_norm.weight", 0),
    "blocks/key_norm/scale": ("model.layers.{}.self_attn.k_norm.weight", 0),
    "blocks/mlp_norm/scale": ("model.layers.{}.post_attention_layernorm.weight", 0),
    "blocks/gate/kernel": ("model.layers.{}.mlp.gate_proj.weight", 1),
    "blocks/up/kernel": ("model.layers.{}.mlp.up_proj.weight", 1),
    "blocks/down/kernel": ("model.layers.{}.mlp.down_proj.weight", 1),
    "final_norm/scale": ("model.norm.weight", 0),
    "head/kernel": ("lm_head.weight", 1),
}
"""Of each leaf, the stored name, with a place for the layer, and how many leading axes are inputs: 0 where the order is ours."""


def places(config: ModelConfig) -> Iterator[tuple[str, Place]]:
    """Names every tensor that a folder of this model holds, leaf by leaf, and the place where it belongs."""
    model = Model(config)
    leaves = by_path(model.shapes)
    axes = by_path(model.axes, is_leaf=lambda node: isinstance(node, tuple))
    for path, (name, num_inputs) in _STORED.items():
        if path not in leaves:
            continue
        is_stacked = axes[path][0] == "layers"
        sizes = zip(axes[path], leaves[path].shape, strict=True)
        # Rows that pad the vocabulary are ours alone.
        ours = [config.vocab_size if axis == "vocab" else size for axis, size in sizes if axis != "layers"]
        num_outputs = len(ours) - num_inputs
        unfolded = (*ours[num_inputs:], *ours[:num_inputs])
        order = (*range(num_outputs, len(ours)), *range(num_outputs))
        shape = (math.prod(ours[num_inputs:]), math.prod(ours[:num_inputs])) if num_inputs else unfolded
        if path.endswith("bias"):
            shape = (math.prod(ours),)
        for layer in range(config.num_layers) if is_stacked else (None,):
            yield name.format(layer), Place(path, layer, shape, unfolded, order)
