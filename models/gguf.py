"""Weights from a GGUF file, llama.cpp's format, dequantised by its own package (`pip install gguf`).

A file's metadata is turned into the `config.json` that Hugging Face has for the model, and its tensors get the names they have
there: from then on it is like a folder, and can be exported as one.
"""

import pathlib
import re

import gguf
import numpy as np

from models.config import ModelConfig, Precision
from models.families import FAMILIES, WeightsError, check_config
from models.filling import fill
from models.parameters import Params

REQUIRED_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
OPTIONAL_KEYS = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
"""Metadata, without the architecture that their names begin with, to keys of `config.json`."""

UNKNOWN_KEYS = ("rope.scaling.type", "attention.sliding_window", "expert_count")
"""What a file must not ask for: it would have to be computed, and no such file has been tried."""

OUTSIDE_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
PERMUTED = ("llama",)
"""Architectures whose query and key rows llama.cpp stores in pairs: it rotates neighbours where Hugging Face rotates halves."""


class GgufFile:
    """One open file. A `models.filling.Source`.

    Attributes:
      raw: the `config.json` that goes with it.
      shapes: of the tensors, by Hugging Face's names.

    Raises:
      WeightsError: a file that is damaged or that the decoder cannot be.
    """

    def __init__(self, path: pathlib.Path):
        self.path = pathlib.Path(path)
        try:
            self._reader = gguf.GGUFReader(self.path)
        # The reader trusts what a file says of its own sizes.
        except (OSError, ValueError, LookupError, TypeError, OverflowError, MemoryError, AttributeError) as error:
            raise WeightsError(f"{path}: {_first_line(error)}; wanted a whole GGUF file") from error
        self._tensors = {_hugging_face_name(tensor.name): tensor for tensor in self._reader.tensors}
        self.shapes = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in self._tensors.items()}
        self.raw = self._config()
        for name, tensor in self._tensors.items():
            try:
                gguf.dequantize(tensor.data[:1], tensor.tensor_type)
            except NotImplementedError as error:
                raise WeightsError(f"{path}: tensor {name} is of type {tensor.tensor_type.name}, wanted one that gguf "
                                   "dequantizes") from error

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        tensor = self._tensors[name]
        rows = self._rows(name)
        stored = tensor.data[start:stop] if rows is None else tensor.data[rows[start:stop]]
        return gguf.dequantize(stored, tensor.tensor_type)

    def _rows(self, name: str) -> np.ndarray | None:
        """Where each row of a tensor is stored; None: in its place."""
        if self.raw["model_type"] not in PERMUTED or not name.endswith((".q_proj.weight", ".k_proj.weight")):
            return None
        heads = self.raw["num_attention_heads" if ".q_proj" in name else "num_key_value_heads"]
        return np.arange(self.shapes[name][0]).reshape(heads, -1, 2).swapaxes(1, 2).ravel()

    def _config(self) -> dict:
        architecture = self._field("general.architecture")
        if architecture not in FAMILIES:
            raise WeightsError(f"{self.path}: general.architecture is {architecture!r}, wanted one of: {', '.join(FAMILIES)}")
        for key in UNKNOWN_KEYS:
            value = self._field(f"{architecture}.{key}")
            if value not in (None, "none", 0):
                raise WeightsError(f"{self.path}: {architecture}.{key} is {value!r}, wanted none")
        config = {"architectures": [FAMILIES[architecture].architecture], "model_type": architecture, "hidden_act": "silu"}
        for key, name in {**REQUIRED_KEYS, **OPTIONAL_KEYS}.items():
            value = self._field(f"{architecture}.{key}")
            if value is not None:
                config[name] = value
            elif key in REQUIRED_KEYS:
                raise WeightsError(f"{self.path}: {architecture}.{key} is missing")
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        embedding = self.shapes.get("model.embed_tokens.weight", (0,))
        return {**config, "vocab_size": embedding[0], "tie_word_embeddings": "lm_head.weight" not in self.shapes,
                "dtype": "float32"}

    def _field(self, name: str):
        field = self._reader.get_field(name)
        value = None if field is None else field.contents()
        # Written with 32 bits: 1e-5 must not come back as 9.999999747e-06.
        is_short = value is not None and field.types == [gguf.GGUFValueType.FLOAT32]
        return float(str(np.float32(value))) if is_short else value


def import_gguf(file: GgufFile, config: ModelConfig, *, precision: Precision, shardings: Params | None = None) -> Params:
    """The parameters in a GGUF file, dequantised and placed; see `models.weights.import_folder`.

    Args:
      file: opened.
      config: `models.families.model_config(file.raw)`; its `FREE_FIELDS` may have been replaced.
      precision: type of the parameters.
      shardings: a tree like the parameters; None: all on the default device.

    Raises:
      WeightsError: a file that does not hold exactly this model.
    """
    check_config(config, file.raw, file.path)
    return fill(file, config, precision=precision, shardings=shardings)


def _hugging_face_name(name: str) -> str:
    """What is not known keeps its name, and is then one tensor too many."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer and layer[2] in LAYER_NAMES:
        return f"model.layers.{layer[1]}.{LAYER_NAMES[layer[2]]}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{OUTSIDE_NAMES[stem]}.{kind}" if stem in OUTSIDE_NAMES else name


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]
