"""A small model's text files: a byte-level BPE trained on a few lines, and chat templates with the habits of well-known ones."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

LINES = ["the lake is frozen and the ice is thin", "what is the sum of two and two", "you are a helpful player of games",
         "hello there, hello again", "    indented\n\n\nlines"]
SPECIAL_TOKENS = ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<|header|>", "<|eot|>", "<pad>"]
BEGIN, END, IM_START, IM_END, HEADER, EOT, PAD = range(len(SPECIAL_TOKENS))

CHATML = """\
{% for message in messages %}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# A system message of its own, as of SmolLM2 and Qwen 2.5.
CHATML_DEFAULT_SYSTEM = """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{% endif %}""" + CHATML

# As Llama 3: a token of beginning, and messages without the white space around them.
LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|header|>' + message['role'] + '\n\n' + message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant\n\n' }}{%- endif %}"""

# As Llama 3.1: a system message in any case, and the day in it.
LLAMA31 = """\
{{- bos_token }}
{%- set system = '' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|header|>system\n\nToday: ' + strftime_now('%d %b %Y') + '\n\n' + system + '<|eot|>' }}
{%- for message in messages %}
    {{- '<|header|>' + message.role + '\n\n' + message.content + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant\n\n' }}{%- endif %}"""

# As Qwen 3: thoughts are taken out of the turns before the last question.
QWEN3 = """\
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'assistant' and '</think>' in content and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# As models that are made to think: the generation prompt opens a thought that earlier turns do not show.
OPENS_THOUGHT = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")

# As Gemma: no system message, and the turns must alternate.
NO_SYSTEM = """\
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

# As Mistral: the system message goes to the last question, and a space before the end of a turn.
MOVES_SYSTEM = """\
{%- set system = none %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system + '\n\n' if loop.last and system is not none else '') + message.content + ' [/INST]' }}
    {%- else %}{{ ' ' + message.content + ' ' + eos_token }}{% endif %}
{%- endfor %}"""

# Turns told apart by ordinary text alone.
PLAIN = """\
{%- for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""

NUMBERED = """\
{%- for message in messages %}{{ '<|im_start|>' ~ loop.index ~ message.content ~ '<|im_end|>' }}{% endfor %}"""


def train_tokenizer() -> tokenizers.Tokenizer:
    """A byte-level BPE of a few merges behind all bytes and the special tokens; any text can be written in it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=350, special_tokens=SPECIAL_TOKENS, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def write_folder(folder: pathlib.Path, template: str | None, *, stop_tokens: int | Sequence[int] | None = IM_END,
                 **files: dict[str, Any]) -> pathlib.Path:
    """A Hugging Face folder without weights; `files` are more JSON files, by stem."""
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>", "special": True}, "pad_token": None}
    if template is not None:
        settings["chat_template"] = template
    files = {"tokenizer_config": settings, **files}
    if stop_tokens is not None:
        files["generation_config"] = {"eos_token_id": stop_tokens}
    for stem, value in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(value))
    return folder
