"""What a model's files say about text: its tokenizer, its chat template, and the ids that end a turn.

They come as a Hugging Face folder (tokenizer.json and its companions) or as the metadata of one GGUF file.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from models.chat_template import ChatTemplate
from models.gguf_metadata import read_metadata
from models.tokenizer import SubwordTokenizer

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"
CONFIG = "config.json"

_GGUF = "tokenizer.ggml."
_GGUF_SPECIAL_TOKENS = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "pad_token": "padding_token_id",
                        "unk_token": "unknown_token_id"}
_GGUF_CONTROL, _GGUF_USER_DEFINED = 3, 4  # kinds of token that are looked for in a text before it is cut into words

# How a text is cut into words before they are merged from bytes; a GGUF file names that and does not describe it. Only what has
# been compared with the model's own tokenizer is here: ids that are nearly right are a language that the model has never seen.
_PRE_TOKENIZERS = {
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                               pre_tokenizers.ByteLevel(add_prefix_space=False)]),
}


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """What a model's files say about text."""

    tokenizer: SubwordTokenizer
    template: ChatTemplate
    stop_tokens: tuple[int, ...]  # ids that end a turn, as the files name them; there may be none


def read_text_files(path: pathlib.Path, *, vocab_size: int) -> TextFiles:
    """Reads a Hugging Face folder or a GGUF file.

    Args:
      path: of the folder or the file.
      vocab_size: of the model, which must have a logit for every id. It may have more, where its vocabulary is padded.

    Raises:
      ValueError: there is no such thing, or what it says is missing, broken, or does not fit the model.
    """
    if path.is_dir():
        files = _read_folder(path)
    elif path.is_file():
        files = _read_gguf(path)
    else:
        raise ValueError(f"{path} is no folder and no file; name the folder of a model, or its GGUF file")
    if files.tokenizer.vocab_size > vocab_size:
        raise ValueError(f"the tokenizer of {path} has {files.tokenizer.vocab_size} ids, but the model only {vocab_size}; "
                         "take the tokenizer and the weights from the same model")
    return files


def write_text_files(folder: pathlib.Path, files: TextFiles) -> None:
    """Writes into a Hugging Face folder what `read_text_files` reads of it, and transformers too."""
    files.tokenizer.save(folder / TOKENIZER)
    (folder / TEMPLATE).write_text(files.template.source, encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **files.template.special_tokens}
    for name, value in {TOKENIZER_CONFIG: settings, GENERATION_CONFIG: {"eos_token_id": list(files.stop_tokens)}}.items():
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


# --- a Hugging Face folder ---


def _read_folder(folder: pathlib.Path) -> TextFiles:
    tokenizer = _read_tokenizer(folder)
    settings = _read_json(folder / TOKENIZER_CONFIG)
    special_tokens = _special_tokens(_read_json(folder / SPECIAL_TOKENS)) | _special_tokens(settings)
    template = ChatTemplate(_folder_template(folder, settings), special_tokens)
    for name in (GENERATION_CONFIG, CONFIG):
        if (stop_ids := _read_json(folder / name).get("eos_token_id")) is not None:
            return TextFiles(tokenizer, template, _stop_tokens(stop_ids, tokenizer, f"eos_token_id of {folder / name}"))
    eos = special_tokens.get("eos_token")
    stop_ids = [] if eos is None else tokenizer.token_id(eos)
    return TextFiles(tokenizer, template, _stop_tokens(stop_ids, tokenizer, f"the id of {eos!r} in {folder / TOKENIZER}"))


def _read_tokenizer(folder: pathlib.Path) -> SubwordTokenizer:
    path = folder / TOKENIZER
    if not path.is_file():
        raise ValueError(f"there is no {path}; fetch it with the model, or write it with AutoTokenizer.from_pretrained(...)"
                         ".save_pretrained(...) of the transformers library")
    try:
        return SubwordTokenizer(tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # what the library raises is no class of its own
        raise ValueError(f"{path} is no tokenizer: {_line(error)}; fetch the file again") from error


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a file; nothing where there is no file."""
    if not path.is_file():
        return {}
    text = _read_text(path)
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}; fetch the file again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}, wanted an object; fetch the file again")
    return value


def _read_text(path: pathlib.Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8: {error}; fetch the file again") from error


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Names of special tokens by role, such as `bos_token`. A token is its name, or an object that holds it."""
    contents = {role: token.get("content") if isinstance(token, dict) else token for role, token in settings.items()}
    return {role: name for role, name in contents.items() if role.endswith("_token") and isinstance(name, str)}


def _folder_template(folder: pathlib.Path, settings: Mapping[str, Any]) -> str:
    if (folder / TEMPLATE).is_file():
        return _read_text(folder / TEMPLATE)
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return _require_template(template, f"{folder} has no {TEMPLATE}, and its {TOKENIZER_CONFIG} no chat_template")


# --- a GGUF file ---


def _read_gguf(path: pathlib.Path) -> TextFiles:
    metadata = read_metadata(path)
    try:
        tokenizer = _gguf_tokenizer(metadata)
        tokens = {role: metadata.get(_GGUF + key) for role, key in _GGUF_SPECIAL_TOKENS.items()}
        special_tokens = {role: metadata[_GGUF + "tokens"][token] for role, token in tokens.items() if token is not None}
    except Exception as error:  # keys that are missing, ids that are none; what the library raises is no class of its own
        raise ValueError(f"{path} has no tokenizer that can be used ({type(error).__name__}: {_line(error)}); take the model's "
                         f"Hugging Face folder, whose {TOKENIZER} says all") from error
    template = _require_template(metadata.get("tokenizer.chat_template"), f"{path} has no tokenizer.chat_template")
    stop_ids = [] if tokens["eos_token"] is None else tokens["eos_token"]
    return TextFiles(tokenizer, ChatTemplate(template, special_tokens),
                     _stop_tokens(stop_ids, tokenizer, f"{_GGUF}eos_token_id of {path}"))


def _gguf_tokenizer(metadata: Mapping[str, Any]) -> SubwordTokenizer:
    kind, words = metadata[_GGUF + "model"], metadata[_GGUF + "pre"]
    if kind != "gpt2" or words not in _PRE_TOKENIZERS:
        raise ValueError(f"its kind is {kind!r} with words cut as {words!r}, wanted 'gpt2' with one of {sorted(_PRE_TOKENIZERS)}")
    names, kinds = metadata[_GGUF + "tokens"], metadata[_GGUF + "token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata[_GGUF + "merges"]]
    tokenizer = tokenizers.Tokenizer(models.BPE({name: token for token, name in enumerate(names)}, merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[words]()
    tokenizer.decoder = decoders.ByteLevel()
    for wanted, is_special in ((_GGUF_CONTROL, True), (_GGUF_USER_DEFINED, False)):
        tokenizer.add_tokens([tokenizers.AddedToken(name, normalized=False, special=is_special)
                              for name, kind in zip(names, kinds, strict=True) if kind == wanted])
    return SubwordTokenizer(tokenizer)


# --- both ---


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _require_template(template: Any, absence: str) -> str:
    if not isinstance(template, str):
        raise ValueError(f"{absence}: a base model has none; take one that was tuned to follow instructions, or add {TEMPLATE}")
    return template


def _stop_tokens(stop_ids: Any, tokenizer: SubwordTokenizer, place: str) -> tuple[int, ...]:
    """One id or several, as configs have them."""
    stop_ids = stop_ids if isinstance(stop_ids, list) else [stop_ids]
    if not all(type(token) is int and 0 <= token < tokenizer.vocab_size for token in stop_ids):
        raise ValueError(f"{place} is {stop_ids}, wanted ids of 0 to {tokenizer.vocab_size - 1}; repair the file")
    return tuple(dict.fromkeys(stop_ids))
