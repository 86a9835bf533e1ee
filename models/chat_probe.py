"""What a chat template does to a conversation, found out by rendering a few.

A context of reinforcement learning only grows. Many templates do not write a growing text: they take the thoughts out of earlier
turns, trim what they are given, move the system message to the last turn, or put in words of their own. Each such habit that
matters is found here and gets a line for people; a template that no growing context can follow is refused.
"""

import dataclasses
import os
from collections.abc import Iterator

import numpy as np

from models.chat_template import TODAY, ChatTemplate, Message, TemplateError
from models.text_files import TextFiles
from models.tokenizer import SubwordTokenizer

SYSTEM, USER, TURN = "qorvexsystem", "qorvexuser", "qorvexturn"
"""Placeholders: words that no template writes, and that nothing trims."""
_NEXT_USER, _NEXT_TURN, _LAST_USER = "qorvexnextuser", "qorvexnextturn", "qorvexlastuser"
_SPACE = " \n "
_THOUGHT = f"<think>\nqorvexthought\n</think>\n\n{TURN}"
_MAX_SHOWN = 120


@dataclasses.dataclass(frozen=True)
class ChatReport:
    """What was found."""

    has_system_role: bool  # else a system text goes in front of the first message
    closing_token: int | None  # with which the template closes a turn of the assistant; None: it uses ordinary text
    stop_tokens: tuple[int, ...]  # those of the files, and the closing one
    notes: tuple[str, ...]


def reply_text(template: ChatTemplate, content: str) -> str:
    """What follows the assistant's turn when the user answers `content`: the turn's end, the message, the next turn's beginning.

    Raises:
      TemplateError: the template did not render it.
    """
    # The first of them is the turn, whatever the message holds: a probed template shows it.
    return template.render(_messages(USER, TURN, content)).partition(TURN)[2]


def probe(files: TextFiles, *, has_system_text: bool) -> ChatReport:
    """Renders a few conversations and compares them.

    Args:
      files: of the model.
      has_system_text: whether there will be one, which leaves a template no place for words of its own.

    Raises:
      ValueError: the template cannot be used for a context that only grows, or nothing would end a turn.
    """
    template, tokenizer = files.template, files.tokenizer
    opening = template.render(_messages(USER))
    _split_at(USER, opening)
    _, reply = _split_at(TURN, template.render(_messages(USER, TURN, _NEXT_USER)))
    closing, _ = _split_at(_NEXT_USER, reply)
    _, later = _split_at(_NEXT_TURN, template.render(_messages(USER, TURN, _NEXT_USER, _NEXT_TURN, _LAST_USER)))
    if later != reply.replace(_NEXT_USER, _LAST_USER):
        raise TemplateError(f"the chat template writes {_shown(reply)} after one turn and {_shown(later)} after two, wanted "
                            "the same but for the message; take one whose turns do not depend on how many came before")
    closing_token = _closing_token(closing, files)
    stop_tokens = tuple(dict.fromkeys([*files.stop_tokens, *([] if closing_token is None else [closing_token])]))
    if not stop_tokens:
        raise TemplateError("nothing ends a turn: the model's files name no end-of-turn id, and the chat template closes a turn "
                            f"with {_shown(closing)}; set eos_token_id in generation_config.json")
    has_system_role = _has_system_role(template)
    notes = [*_notes_on_stopping(closing, closing_token, files), *_notes_on_history(template, tokenizer, has_system_role),
             *_notes_on_contents(template, tokenizer, closing, has_system_role, has_system_text)]
    return ChatReport(has_system_role, closing_token, stop_tokens, tuple(f"the chat template {note}" for note in notes))


def _closing_token(closing: str, files: TextFiles) -> int | None:
    """The first special token behind a turn; an id that the files call the end of a turn goes before others."""
    special = [token for token in files.tokenizer.encode(closing).tolist() if token in files.tokenizer.special_names]
    return next((token for token in special if token in files.stop_tokens), special[0] if special else None)


def _has_system_role(template: ChatTemplate) -> bool:
    try:
        text = template.render(_messages(USER, system=SYSTEM))
    except TemplateError:
        return False
    return text.count(SYSTEM) == 1


def _notes_on_stopping(closing: str, closing_token: int | None, files: TextFiles) -> Iterator[str]:
    if closing_token is None:
        yield f"closes a turn with {_shown(closing)}, no special token: only an end-of-turn id of the model's files ends one"
    elif closing_token not in files.stop_tokens:
        name = files.tokenizer.special_names[closing_token]
        yield f"closes a turn with {name}, which the model's files do not name as an end of turn; it ends one here"


def _notes_on_history(template: ChatTemplate, tokenizer: SubwordTokenizer, has_system_role: bool) -> Iterator[str]:
    """Where a rendering of a later context does not begin with the context before."""
    differing = _difference(template, TURN)
    if differing:
        yield f"writes an earlier turn otherwise than it was begun ({differing}); the context keeps it as it was begun"
    elif thought := _difference(template, _THOUGHT):
        yield f"rewrites the thoughts of earlier turns ({thought}); the context keeps them as they were sampled"
    if not differing and _difference(template, _SPACE + TURN + _SPACE):
        yield "trims earlier turns; the context keeps them as they were sampled"
    if has_system_role and SYSTEM not in template.render(_messages(USER, TURN, _NEXT_USER, system=SYSTEM)).partition(TURN)[0]:
        yield "moves the system message as turns come; the context keeps it where it was first"
    if not differing:
        opening, whole = template.render(_messages(USER)), template.render(_messages(USER, TURN, _NEXT_USER))
        parts = [tokenizer.encode(text) for text in (opening, TURN, reply_text(template, _NEXT_USER))]
        if not np.array_equal(np.concatenate(parts), tokenizer.encode(whole)):
            yield "has other ids for a whole conversation than for its parts; the context is made of the parts"


def _notes_on_contents(template: ChatTemplate, tokenizer: SubwordTokenizer, closing: str, has_system_role: bool,
                       has_system_text: bool) -> Iterator[str]:
    """What a message loses, and what is said that nobody has said."""
    spaced = _SPACE + USER + _SPACE
    if spaced not in template.render(_messages(spaced)):
        yield "trims messages: an observation is read without the white space around it"
    if not has_system_role:
        yield "has no system role: a system text goes in front of the first message"
    # What comes before a first message and not before a later one; only tokens of beginning may.
    beginning, _ = _split_at(USER, template.render(_messages(USER)))
    first, later = tokenizer.encode(beginning).tolist(), tokenizer.encode(closing).tolist()
    own = first[: len(first) - len(os.path.commonprefix([first[::-1], later[::-1]]))]
    if not (has_system_text and has_system_role) and any(token not in tokenizer.special_names for token in own):
        yield f"opens with words of its own where there is no system text: {_shown(beginning)}"
    if template.asked_for_date:
        yield f"asks for the day; it is told {TODAY.isoformat()}, always"


def _difference(template: ChatTemplate, turn: str) -> str:
    """Where a context of one turn and the rendering one message later part, if they do."""
    context = template.render(_messages(USER)) + turn
    later = template.render(_messages(USER, turn, _NEXT_USER))
    if later.startswith(context):
        return ""
    start = len(os.path.commonprefix([context, later]))
    return f"{_shown(context[start:])} becomes {_shown(later[start:start + len(context) - start])}"


def _messages(*contents: str, system: str | None = None) -> list[Message]:
    """The user begins, and they take turns."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    return messages + [{"role": ("user", "assistant")[index % 2], "content": content} for index, content in enumerate(contents)]


def _split_at(placeholder: str, text: str) -> tuple[str, str]:
    """What comes before and after it."""
    if (count := text.count(placeholder)) != 1:
        raise TemplateError(f"the chat template shows a message {count} times, wanted once: {_shown(text)}; take another one")
    before, _, after = text.partition(placeholder)
    return before, after


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")
