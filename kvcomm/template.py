"""Chat templates: messages in, the text of a prompt out.

Owns: checking messages, finding a folder's templates, and rendering them as the reference
library does (jinja2's immutable sandbox, trimmed blocks, the helpers templates may call). It
knows nothing of tokens; what text may become a control token is decided in tokenizer.py.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import date, datetime, time
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from kvcomm.errors import FormatError
from kvcomm.fields import read_json, shown

_MESSAGE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)


class _Refusal(jinja2.TemplateError):
    """Raised by a template itself, through raise_exception."""


class _Generation(jinja2.ext.Extension):
    """The block tag that marks the assistant's text for training: its content is kept as is."""

    tags: ClassVar = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(text: Any) -> None:
    raise _Refusal(str(text))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes markup, which a prompt must not have.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


#: The day that templates are told, where it is not today's.
_DAY: ContextVar[date | None] = ContextVar("day", default=None)


def today() -> date:
    """The day that templates are told."""
    return _DAY.get() or date.today()


@contextmanager
def on_day(day: date | None) -> Iterator[None]:
    """Tell templates that it is this day (None: today), so that prompts are the same tomorrow."""
    token = _DAY.set(day)
    try:
        yield
    finally:
        _DAY.reset(token)


def asks_day(source: str) -> bool:
    """Whether what a template gives may depend on the day."""
    return "strftime_now" in source


def _strftime_now(form: str) -> str:
    now = datetime.now() if _DAY.get() is None else datetime.combine(today(), time())
    return now.strftime(form)


@lru_cache(maxsize=64)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise FormatError(f"chat template: line {error.lineno}: {error.message}") from None


def plain(value: Any, change: Callable[[str], str], where: str) -> Any:
    """Copy `value` into plain JSON types, every string in it (not the keys) passed to `change`.

    A template comes from a stranger: it must not see objects that have methods.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return change(str(value))
    if isinstance(value, Mapping):
        return {str(k): plain(v, change, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, change, f"{where}[{i}]") for i, item in enumerate(value)]
    raise TypeError(
        f"{where}: expected text, numbers, lists or dicts, found {type(value).__name__}"
    )


def check_messages(messages: Any) -> None:
    """Refuse what no template can mean: no messages, no role, no content."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TypeError(f"messages: expected a list of dicts, found {type(messages).__name__}")
    if not messages:
        raise ValueError("messages: the list is empty")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(f"message {i}: expected a dict, found {type(message).__name__}")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"message {i}: role is missing or no text")
        if message.get("content") is None and not message.get("tool_calls"):
            raise ValueError(f"message {i}: content is missing or null")


def render(source: str, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
    """Render a template.

    Parameters
    ----------
    source
        The template's text.
    messages
        Checked messages in plain types.
    variables
        What else the template sees: the flag for the generation prompt, special tokens, options.

    Returns
    -------
    str
        The prompt, exactly as the template gives it.

    Raises
    ------
    FormatError
        The template is broken or calls a helper that does not exist.
    ValueError
        The template refuses the messages; the text names the first message it refuses.
    """
    template = _compile(source)
    # A key whose value is null would be printed as "None" by many templates; they handle a
    # missing key.
    messages = [{k: v for k, v in m.items() if v is not None} for m in messages]
    variables = {"tools": None, "documents": None, **variables}
    try:
        text = template.render({**variables, "messages": messages})
    except (jinja2.UndefinedError, SecurityError) as error:
        raise FormatError(f"chat template: {error}") from None
    except _MESSAGE_ERRORS as error:
        first = _first_refused(template, messages, variables)
        raise ValueError(f"message {first}: chat template: {error}") from None
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list) and str(content) in text:
            raise ValueError(
                f"message {i}: content is a list of parts, and the chat template takes only text"
            )
    return text


def _first_refused(
    template: jinja2.Template, messages: list[dict[str, Any]], variables: Mapping[str, Any]
) -> int:
    """The last message of the shortest beginning of `messages` that cannot be rendered."""
    for n in range(1, len(messages)):
        try:
            template.render({**variables, "messages": messages[:n]})
        except _MESSAGE_ERRORS:
            return n - 1
    return len(messages) - 1


def find(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a model's folder by name; the usual one is called "default".

    chat_template.jinja goes before chat_template.json, and that before the key in
    tokenizer_config.json. Files in additional_chat_templates/ have the name of the file.
    """
    found: dict[str, str] = {}
    stated = config.get("chat_template")
    if isinstance(stated, str):
        found["default"] = stated
    elif isinstance(stated, list):
        found.update({entry["name"]: entry["template"] for entry in stated})
    if (path := folder / "chat_template.json").is_file():
        source = read_json(path).get("chat_template")
        if not isinstance(source, str):
            raise FormatError(f"{shown(path)}: chat_template is missing or no text")
        found["default"] = source
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        found[path.stem] = path.read_text("utf-8")
    if (path := folder / "chat_template.jinja").is_file():
        found["default"] = path.read_text("utf-8")
    return found
