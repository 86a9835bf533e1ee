"""Chat templates: the jinja program of a model's files that writes messages as one text.

A template comes with weights from anywhere, so it runs in jinja's sandbox, which keeps it from the interpreter, and with less
than jinja gives: the numbers of its iterations and characters are bounded, and nothing in it depends on the day or on chance,
because a run is a function of its config and seed. What templates rely on is there as in Hugging Face's `apply_chat_template`.
"""

import datetime
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import jinja2.visitor
from jinja2 import nodes
from jinja2.exceptions import SecurityError

MAX_ITERATIONS = 200_000
"""Of all loops of one rendering together."""
MAX_CHARACTERS = 4_000_000
"""Of a rendering, and of any text on the way to it."""
TODAY = datetime.date(2024, 7, 26)
"""The day that a template is told: always the same, and one that the models which ask for it have seen."""

Message = dict[str, str]
"""`role` (system, user or assistant) and `content`."""

_REMOVED_FILTERS = ("random", "center", "format", "indent", "wordwrap", "filesizeformat", "pprint", "xmlattr", "urlize")
_REMOVED_GLOBALS = ("lipsum", "cycler", "joiner")
# A width in an argument would make a text of any size out of nothing.
_UNSAFE_METHODS = {"format", "format_map", "ljust", "rjust", "center", "zfill", "expandtabs", "translate"}
_COUNTER = "counter of iterations"  # no name that a template could write
MAX_REASON_CHARACTERS = 300


class TemplateError(ValueError):
    """A chat template that cannot be read, or did not render."""


class ChatTemplate:
    """A template and the names of the special tokens it may write, such as `bos_token`.

    Raises:
      TemplateError: it is no template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        self._asked_for_date = False
        self.source, self.special_tokens = source, special_tokens
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock])
        for name in _REMOVED_FILTERS:
            del environment.filters[name]
        for name in _REMOVED_GLOBALS:
            del environment.globals[name]
        environment.filters |= {"tojson": _to_json, "counted": _counted, "joined": _joined}
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": self._strftime_now}
        try:
            program = environment.compile(_Bounder().visit(environment.parse(source)))
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(f"the chat template is no jinja template: {_line(error)}; repair it") from error
        self._template = jinja2.Template.from_code(environment, program, environment.make_globals(None))

    @property
    def asked_for_date(self) -> bool:
        """Whether a rendering has asked for the day."""
        return self._asked_for_date

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The messages as one text, by default up to where the assistant is to speak.

        Raises:
          TemplateError: the template refuses them, or fails, or grows beyond all bounds.
        """
        values = {"messages": [dict(message) for message in messages], "add_generation_prompt": add_generation_prompt,
                  "tools": None, "documents": None, **self.special_tokens, _COUNTER: itertools.count(1)}
        pieces, length = [], 0
        try:
            for piece in self._template.generate(values):
                pieces.append(piece)
                length += len(piece)
                _raise_if_too_long(length)
        except Exception as error:  # a template is a program: it can fail in every way a program can
            raise TemplateError(f"the chat template did not render {len(messages)} messages "
                                f"({', '.join(message['role'] for message in messages)}): {_line(error)}") from error
        return "".join(pieces)

    def _strftime_now(self, form: str) -> str:
        self._asked_for_date = True
        return TODAY.strftime(form)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which makes no text or number of any size out of small ones, and counts calls."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        is_text = isinstance(left, str | list)
        if operator == "+" and is_text and isinstance(right, str | list):
            _raise_if_too_long(len(left) + len(right))
        elif operator == "*" and is_text and isinstance(right, int):
            _raise_if_too_long(len(left) * right)
        elif operator != "+" and not (_is_small(left) and _is_small(right)):
            raise SecurityError(f"`{operator}` of {type(left).__name__} and {type(right).__name__}, wanted small numbers")
        elif operator == "**" and right > 64:
            raise SecurityError(f"a power of {right}, wanted 64 at most")
        return super().call_binop(context, operator, left, right)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and not (isinstance(obj, str) and attr in _UNSAFE_METHODS)

    def wrap_str_format(self, value: Any) -> None:
        """Jinja's safe `str.format` still obeys any width; without it `is_safe_attribute` refuses the method."""
        return None

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _count(context)  # macros may call themselves
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(result, str):
            _raise_if_too_long(len(result))
        return result


class _Bounder(jinja2.visitor.NodeTransformer):
    """Sends what loops run over, and what `~` joins, through a filter: the sandbox has no hook for them."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        pieces = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(pieces, "joined", [], [], None, None, lineno=node.lineno)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}`: training frameworks find the assistant's text by it. Here it is no more than what it holds."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _is_small(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= MAX_CHARACTERS


def _count(context: jinja2.runtime.Context) -> None:
    # `parent` holds what a rendering was given; a template cannot set it.
    if next(context.parent[_COUNTER]) > MAX_ITERATIONS:
        raise SecurityError(f"more than {MAX_ITERATIONS} iterations and calls")


@jinja2.pass_context
def _counted(context: jinja2.runtime.Context, iterable: Iterable) -> Iterator:
    for item in iterable:
        _count(context)
        yield item


def _joined(pieces: list) -> str:
    texts = [str(piece) for piece in pieces]
    _raise_if_too_long(sum(map(len, texts)))
    return "".join(texts)


def _raise_if_too_long(length: int) -> None:
    if length > MAX_CHARACTERS:
        raise SecurityError(f"more than {MAX_CHARACTERS} characters")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
             sort_keys: bool = False) -> str:
    """JSON without jinja's escapes for HTML. An indent is a number of spaces, 16 at most."""
    if indent is not None and not 0 <= int(indent) <= 16:
        raise SecurityError(f"tojson with an indent of {indent}, wanted 0 to 16")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _line(error: Exception) -> str:
    """A reason on one line; a template writes some of them itself."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_REASON_CHARACTERS]
