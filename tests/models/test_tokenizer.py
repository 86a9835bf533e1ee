"""Every text has one encoding and comes back from it; what the policy may invent is still a text."""

import hypothesis
import hypothesis.strategies as st
import numpy as np

from models.tokenizer import NUM_BYTES, ByteTokenizer

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
