"""Every text has one encoding and comes back from it; what the policy may invent is still a text."""

import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import tokenizers
from tokenizers import decoders, models

from models.tokenizer import NO_TEXT, NUM_BYTES, ByteTokenizer, SubwordTokenizer
from tests.chat import IM_END, PAD, SPECIAL_TOKENS, train_tokenizer

TOKENIZER = ByteTokenizer()


@hypothesis.given(st.text(max_size=20))
def test_a_text_comes_back_from_its_ids(text):
    ids = TOKENIZER.encode(text)
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert TOKENIZER.decode(ids) == text


@hypothesis.given(st.text(max_size=8), st.text(max_size=8))
def test_texts_encode_piece_by_piece(first, second):
    """So the ids of a context never depend on where its turns were cut."""
    joined = np.concatenate([TOKENIZER.encode(first), TOKENIZER.encode(second)])
    np.testing.assert_array_equal(TOKENIZER.encode(first + second), joined)


def test_ids_are_bytes():
    np.testing.assert_array_equal(TOKENIZER.encode("Aé"), [0x41, 0xC3, 0xA9])


def test_special_ids_lie_above_the_bytes_and_are_distinct():
    special = [TOKENIZER.bos, TOKENIZER.eos, TOKENIZER.pad]
    assert sorted(special) == list(range(NUM_BYTES, TOKENIZER.vocab_size))


@hypothesis.given(st.lists(st.integers(0, ByteTokenizer.vocab_size - 1), max_size=12))
def test_any_sampled_ids_decode(ids):
    assert isinstance(TOKENIZER.decode(np.asarray(ids, np.int32)), str)


def test_special_ids_and_broken_bytes_become_replacement_characters():
    assert TOKENIZER.decode(np.asarray([0x41, TOKENIZER.eos, 0x42, 0xC3, 0x43])) == "A\ufffdB\ufffdC"


LIBRARY = train_tokenizer()
SUBWORDS = SubwordTokenizer(train_tokenizer())


@hypothesis.given(st.text(max_size=20))
def test_subwords_give_every_text_back(text):
    hypothesis.assume(not any(name in text for name in SPECIAL_TOKENS))
    ids = SUBWORDS.encode(text)
    assert ids.dtype == np.int32 and ids.ndim == 1
    assert SUBWORDS.decode(ids) == text


@hypothesis.given(st.lists(st.integers(0, SUBWORDS.vocab_size + 9), max_size=12))
def test_any_sampled_subwords_decode_as_the_library_does_but_for_what_is_no_text(ids):
    expected = ""
    for is_text, run in itertools.groupby(ids, lambda token: len(SPECIAL_TOKENS) <= token < SUBWORDS.vocab_size):
        tokens = list(run)
        expected += LIBRARY.decode(tokens) if is_text else "\ufffd" * len(tokens)
    assert SUBWORDS.decode(np.asarray(ids, np.int32)) == expected


def test_a_character_that_is_cut_is_whole_again_when_its_pieces_are_read_together():
    ids = SUBWORDS.encode("漢")
    assert len(ids) == 3 and SUBWORDS.decode(ids[:1]) == "\ufffd"
    assert SUBWORDS.to_bytes(ids[:1]) + SUBWORDS.to_bytes(ids[1:]) == "漢".encode()


def test_special_tokens_of_a_text_are_found_and_named():
    assert SUBWORDS.encode("hello<|im_end|>").tolist()[-1] == IM_END
    assert SUBWORDS.special_names == dict(enumerate(SPECIAL_TOKENS))
    assert SUBWORDS.to_bytes([IM_END]) == NO_TEXT
    assert SUBWORDS.token_id("<|im_end|>") == IM_END and SUBWORDS.token_id("nonsense") is None


def test_an_added_token_that_is_not_special_is_text():
    tokenizer = train_tokenizer()
    tokenizer.add_tokens([tokenizers.AddedToken("<tool>", special=False), tokenizers.AddedToken("two words ▁", special=False)])
    subwords = SubwordTokenizer(tokenizer)
    assert subwords.vocab_size == SUBWORDS.vocab_size + 2
    assert subwords.encode("<tool>").tolist() == [SUBWORDS.vocab_size]
    assert subwords.decode([SUBWORDS.vocab_size, SUBWORDS.vocab_size + 1, IM_END]) == "<tool>two words ▁\ufffd"


def test_a_tokenizer_that_cuts_and_pads_does_neither_here():
    tokenizer = train_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16, pad_id=PAD)
    subwords = SubwordTokenizer(tokenizer)
    assert subwords.encode("a text of ten or more tokens").tolist() == SUBWORDS.encode("a text of ten or more tokens").tolist()
    assert len(subwords.encode("a")) == 1


def test_words_with_a_sign_for_space_are_joined_as_the_library_joins_them():
    """SentencePiece's way: bytes fall back, and the space at the start of a text is no space."""
    vocabulary = {"<s>": 0, "▁a": 1, "b": 2, "<0xC3>": 3, "<0xA9>": 4, "▁": 5, "a": 6}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [("▁", "a")], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<s>"])
    subwords = SubwordTokenizer(tokenizer)
    assert subwords.decode([1, 2, 1, 3, 4]) == "ab aé"
    assert subwords.decode([0, 1, 3, 99, 4]) == "\ufffda\ufffd\ufffd\ufffd"
