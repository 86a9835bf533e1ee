"""Conversations: what an environment says, as the tokens that are appended to a context.

A policy's context only grows. What it sampled stays as it is, special ids and broken bytes included; what the environment says is
encoded once and put behind. A chat template is not made for that: it writes a whole conversation, and may write earlier turns
otherwise than they were (without their thoughts, trimmed). So a reply is cut out of a rendering in which the policy's turn is a
placeholder, and is whatever follows it: what closes the turn, the environment's message, and what opens the next turn. How the
template differs from such a context is found out beforehand (`models.chat_probe`) and said in `notes`.
"""

import abc
import pathlib
import re

import numpy as np

from models.chat_probe import probe, reply_text
from models.chat_template import TemplateError
from models.text_files import TextFiles, read_text_files
from models.tokenizer import ByteTokenizer, Tokenizer

_THOUGHT = re.compile(r".*</think>\n*|<think>.*", re.DOTALL)
"""What a turn holds beside its words: thoughts up to the last end of one, and one that was cut."""
_MARKS = range(0xF0000, 0x110000)  # characters without a meaning, one of which a text lacks


class Conversation(abc.ABC):
    """Texts to the tokens of a context, and a policy's tokens to the text an environment reads.

    Attributes:
      tokenizer: for what is shown to people.
      stop_tokens: ids that end a turn of the policy.
      notes: what is particular about the chat template, a line each, for the run to say.
    """

    tokenizer: Tokenizer
    stop_tokens: tuple[int, ...]
    notes: tuple[str, ...]

    @abc.abstractmethod
    def first(self, observation: str) -> np.ndarray:
        """The prompt, int32 [T]: everything before the policy's first token.

        Raises:
          TemplateError: the chat template did not render it.
        """

    @abc.abstractmethod
    def reply(self, observation: str, *, last_token: int) -> np.ndarray:
        """What follows a turn of the policy that ended in `last_token`, up to its next turn: int32 [T].

        Raises:
          TemplateError: the chat template did not render it.
        """

    @abc.abstractmethod
    def answer(self, turn: np.ndarray) -> str:
        """What the environment reads of one turn of the policy, whose tokens are int32 [T]: not a chat model's thoughts."""

    @abc.abstractmethod
    def turn(self, answer: str) -> np.ndarray:
        """A turn that the environment reads as `answer`, as a policy would write it that imitates an expert: int32 [T]."""


class ByteConversation(Conversation):
    """Bytes one after the other behind a start token: nothing tells the turns apart but what the environment writes.

    Args:
      stop: the text of the one token that ends a turn, or None where only the number of tokens ends it.
      system: what stands before the first observation.
    """

    notes = ()

    def __init__(self, stop: str | None, system: str | None = None):
        self.tokenizer = ByteTokenizer()
        self.stop_tokens = () if stop is None else tuple(self.tokenizer.encode(stop).tolist())
        self._opening = np.append(np.int32(self.tokenizer.bos), self.tokenizer.encode(system or ""))

    def first(self, observation: str) -> np.ndarray:
        return np.concatenate([self._opening, self.tokenizer.encode(observation)])

    def reply(self, observation: str, *, last_token: int) -> np.ndarray:
        return self.tokenizer.encode(observation)

    def answer(self, turn: np.ndarray) -> str:
        return self.tokenizer.decode(turn)

    def turn(self, answer: str) -> np.ndarray:
        return self.tokenizer.encode(answer)


class ChatConversation(Conversation):
    """A conversation in a model's own chat template.

    Names of special tokens in what an environment says are encoded as ordinary text: no observation can end a turn, or forge one.

    Args:
      files: the model's tokenizer, template and ids that end a turn. The id by which the template closes a turn joins them.
      stop: what an environment waits for at the end of a turn; it reads it where the policy closed its turn, or None.
      system: the system message; in front of the first message where the template has no such role.

    Raises:
      ValueError: the template cannot be used for a context that only grows, or nothing would end a turn.
    """

    def __init__(self, files: TextFiles, stop: str | None, system: str | None = None):
        self.tokenizer = files.tokenizer
        self._template, self._stop, self._system = files.template, stop, system
        self._special_names = re.compile("|".join(map(re.escape, self.tokenizer.special_names.values())) or "(?!)")
        report = probe(files, has_system_text=system is not None)
        self._has_system_role = report.has_system_role
        self._closing_token = report.closing_token
        self.stop_tokens = report.stop_tokens
        self.notes = report.notes

    def first(self, observation: str) -> np.ndarray:
        contents, system = {"user": observation}, self._system
        if system is not None:
            contents = {"system": system, **contents} if self._has_system_role else {"user": f"{system}\n\n{observation}"}
        mark = _unused_character("".join(contents.values()))
        messages = [{"role": role, "content": self._quoted(content, mark)} for role, content in contents.items()]
        return self._encode(self._template.render(messages), mark)

    def reply(self, observation: str, *, last_token: int) -> np.ndarray:
        mark = _unused_character(observation)
        tokens = self._encode(reply_text(self._template, self._quoted(observation, mark)), mark)
        if last_token != self._closing_token:
            return tokens  # the turn was cut, or ended by another stop token: it is closed as the template closes it
        return tokens[1 + np.flatnonzero(tokens == last_token)[0]:]

    def answer(self, turn: np.ndarray) -> str:
        has_ended = len(turn) and turn[-1] in self.stop_tokens
        said = self.tokenizer.decode(turn[:-1] if has_ended else turn)
        return _THOUGHT.sub("", said) + (self._stop or "" if has_ended else "")

    def turn(self, answer: str) -> np.ndarray:
        mark = _unused_character(answer)
        end = self.stop_tokens[0] if self._closing_token is None else self._closing_token
        return np.append(self._encode(self._quoted(answer.removesuffix(self._stop or ""), mark), mark), np.int32(end))

    def _quoted(self, text: str, mark: str) -> str:
        """A text with each special token's name cut in two by the mark, so that it is not found."""
        return self._special_names.sub(lambda name: name[0][0] + mark + name[0][1:], text)

    def _encode(self, text: str, mark: str) -> np.ndarray:
        return np.concatenate([self.tokenizer.encode(piece) for piece in text.split(mark)])


def read_conversation(path: pathlib.Path | None, *, vocab_size: int, stop: str | None, system: str | None = None) -> Conversation:
    """The conversation of a model's folder or GGUF file; of bytes, where there is none.

    Args:
      path: of the folder or the file.
      vocab_size: of the model.
      stop: of the environment.
      system: what the policy is told before anything else, or None.

    Raises:
      ValueError: the files are missing or broken, do not fit the model, or cannot be used.
    """
    if path is not None:
        try:
            return ChatConversation(read_text_files(path, vocab_size=vocab_size), stop, system)
        except TemplateError as error:
            raise TemplateError(f"{path}: {error}") from error
    if vocab_size < ByteTokenizer.vocab_size:
        raise ValueError(f"the model's vocabulary has {vocab_size} ids, wanted at least {ByteTokenizer.vocab_size} for bytes; "
                         "raise --model.vocab-size, or name a pretrained model by --model-path")
    return ByteConversation(stop, system)


def _unused_character(text: str) -> str:
    return next(character for character in map(chr, _MARKS) if character not in text)
