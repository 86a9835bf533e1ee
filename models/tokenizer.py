"""Bytes as tokens: every text has exactly one encoding, and every id below 256 is one byte."""

import numpy as np

NUM_BYTES = 256


class ByteTokenizer:
    """UTF-8 bytes 0-255, then the special ids `bos`, `eos` and `pad`."""

    bos = NUM_BYTES
    eos = NUM_BYTES + 1
    pad = NUM_BYTES + 2
    vocab_size = NUM_BYTES + 3

    def encode(self, text: str) -> np.ndarray:
        """Text to ids, int32 [T]. Adds no special ids."""
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        """Ids to text. Special ids and bytes that are no UTF-8 become U+FFFD, so that sampled nonsense is still a text."""
        # 0xFF never occurs in UTF-8, so it decodes to the replacement character.
        return bytes(min(token, 0xFF) for token in tokens).decode("utf-8", errors="replace")
