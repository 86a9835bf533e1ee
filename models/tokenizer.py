"""Tokenizers: text to ids and back. Bytes for demos, where every text has exactly one encoding; a model's own subwords otherwise.

Ids are what is kept: they are turned into text only to be read, by an environment or a person, and never back.
"""

import abc
import functools
import pathlib
from collections.abc import Iterable, Mapping

import numpy as np
import tokenizers

NUM_BYTES = 256
NO_TEXT = b"\xff"
"""The byte of an id that stands for no text. It never occurs in UTF-8, so it decodes to the replacement character."""


class Tokenizer(abc.ABC):
    """Text to ids and back.

    Attributes:
      vocab_size: one more than the largest id.
      bos: with which every context begins, or None where a template decides that.
      special_names: ids that stand for no text, such as the end of a turn, by name.
    """

    vocab_size: int
    bos: int | None
    special_names: Mapping[int, str]

    @abc.abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Text to ids, int32 [T]. Adds no special ids."""

    @abc.abstractmethod
    def to_bytes(self, tokens: Iterable[int]) -> bytes:
        """What the ids stand for; a piece of it may be no UTF-8. `NO_TEXT` for each special id, and for each id that is none."""

    def decode(self, tokens: Iterable[int]) -> str:
        """Ids to text. Special ids and bytes that are no UTF-8 become U+FFFD, so that sampled nonsense is still a text."""
        return self.to_bytes(tokens).decode("utf-8", errors="replace")


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes 0-255, then the special ids `bos`, `eos` and `pad`."""

    bos = NUM_BYTES
    eos = NUM_BYTES + 1
    pad = NUM_BYTES + 2
    vocab_size = NUM_BYTES + 3
    special_names = {bos: "<bos>", eos: "<eos>", pad: "<pad>"}

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def to_bytes(self, tokens: Iterable[int]) -> bytes:
        return bytes(min(token, NO_TEXT[0]) for token in tokens)


class SubwordTokenizer(Tokenizer):
    """A model's own tokenizer. The names of special tokens in a text become their ids: a template's text is made of them."""

    bos = None

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        # A tokenizer.json may ask for texts of one length, which would cut or pad a context without a word.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._is_byte_level = isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel)
        self.vocab_size = 1 + max(tokenizer.get_vocab().values())
        added = tokenizer.get_added_tokens_decoder()
        self.special_names = {token: name.content for token, name in added.items() if name.special}

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def to_bytes(self, tokens: Iterable[int]) -> bytes:
        if self._is_byte_level:
            return b"".join(map(self._piece, map(int, tokens)))
        # Other decoders join neighbours: a space between words, bytes to characters. Only what stands for no text parts them.
        whole, run = b"", []
        for token in map(int, tokens):
            if self._has_text(token):
                run.append(token)
                continue
            whole += self._join(run) + NO_TEXT
            run = []
        return whole + self._join(run)

    def save(self, path: pathlib.Path) -> None:
        """Writes a tokenizer.json."""
        self._tokenizer.save(str(path))

    def token_id(self, name: str) -> int | None:
        """The id of a token; None where there is no such token."""
        return self._tokenizer.token_to_id(name)

    def _has_text(self, token: int) -> bool:
        return token not in self.special_names and self._tokenizer.id_to_token(token) is not None

    def _join(self, run: list[int]) -> bytes:
        return self._tokenizer.decode(run, skip_special_tokens=False).encode()

    def _piece(self, token: int) -> bytes:
        if not self._has_text(token):
            return NO_TEXT
        piece = self._tokenizer.id_to_token(token)
        try:
            return bytes(_byte_of_character()[character] for character in piece)
        except KeyError:  # an added token is written as it is, not in the alphabet of bytes
            return piece.encode()


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: a printable character for each byte. Those that are printable in Latin-1 stand for themselves, the others
    for the characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, NUM_BYTES)]
    others = [byte for byte in range(NUM_BYTES) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(NUM_BYTES + index): byte for index, byte in enumerate(others)}
