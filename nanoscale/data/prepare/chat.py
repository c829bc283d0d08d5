"""Chats to tokens by a model's own template, and which of the tokens are answers.

An answer is what the template adds to the conversation before it, with the header that asks for an answer, when
its message is appended: the message and the token that ends the turn, without white space after that token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from nanoscale.config.prepared import TEMPLATE
from nanoscale.data.tokenizer import CONFIG, END
from nanoscale.data.vocabulary import bytes_native
from nanoscale.errors import UserError, Violation

PLAIN = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""for tokenizers that have none: `User: …`, then `Assistant: …` and the token that ends a document"""

_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {"human": "user", "gpt": "assistant"}
_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
_BATCH = 64


class ChatError(Exception):
    """A record that is no chat, or none that the template can render."""


@dataclass(frozen=True)
class Chat:
    """A conversation as a text."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """where in the text each answer begins and ends"""


@dataclass(frozen=True)
class Template:
    """How a conversation becomes a text."""

    source: str
    """Jinja"""
    named: tuple[tuple[str, str], ...]
    """`eos_token` and other names that the template may use, with their tokens"""
    special: tuple[str, ...]
    """the special tokens"""

    def chat(self, messages: Sequence[dict[str, Any]]) -> Chat:
        """Raises ChatError where the template refuses the messages, or has no place for their answers."""
        forged = {token for m in messages for token in self.special if token in m["content"]}
        if forged:
            raise ChatError(f"has the special token {min(forged)} in a message's text")
        whole = self._render(messages)
        numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        return Chat(whole, tuple(self._answer(whole, messages, number) for number in numbers))

    def _answer(
        self, whole: str, messages: Sequence[dict[str, Any]], number: int
    ) -> tuple[int, int]:
        before = self._render(messages[:number], asks=True)
        after = self._render(messages[: number + 1])
        if not (after.startswith(before) and whole.startswith(after)):
            raise ChatError(
                f"has its answers in message {number + 1} at no certain place: the chat template writes the"
                " messages before it differently with and without it (--chat-template FILE for another)"
            )
        kept = after[len(before) :].rstrip()
        ended = kept.endswith(self.special)
        return len(before), len(before) + len(kept) if ended else len(after)

    def _render(self, messages: Sequence[dict[str, Any]], asks: bool = False) -> str:
        from jinja2 import TemplateError

        try:
            text: str = compiled(self.source).render(
                messages=messages, add_generation_prompt=asks, **dict(self.named)
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise ChatError(f"cannot be rendered by the chat template: {error}") from error
        return text


def find_template(tokenizer: Path | None, chosen: Path | None, eos: str = END) -> Template:
    """The template in the file `chosen`, else the tokenizer's own, else PLAIN.

    `tokenizer`: its tokenizer.json; None for bytes. Raises UserError where the template is none.
    """
    config = _document(tokenizer.with_name(CONFIG)) if tokenizer else {}
    source = _chosen(chosen) or _own(tokenizer, config) or PLAIN
    named = {name: _content(config.get(name)) for name in _NAMED}
    named["eos_token"] = eos
    native = _native(tokenizer)
    added = native.get_added_tokens_decoder().values()
    special = tuple(sorted(token.content for token in added if token.special))
    template = Template(source, tuple((k, v) for k, v in named.items() if v is not None), special)
    _check(template, chosen)
    return template


class ChatTokenizer:
    """Rendered chats to tokens, in which special tokens are what they say."""

    def __init__(self, path: Path | None) -> None:
        """`path`: a tokenizer.json; None for bytes."""
        self._native = _native(path)

    def encode(self, chats: Sequence[Chat]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Of each chat the ids and, uint8, which of them are of an answer, both `[tokens]`."""
        for start in range(0, len(chats), _BATCH):
            batch = chats[start : start + _BATCH]
            texts = [chat.text for chat in batch]
            for chat, found in zip(
                batch, self._native.encode_batch(texts, add_special_tokens=False), strict=True
            ):
                begins, ends = np.array(found.offsets, dtype=np.int64).reshape(-1, 2).T
                answers = np.zeros(len(begins), dtype=np.uint8)
                for begin, end in chat.answers:
                    answers[(begins < end) & (ends > begin)] = 1
                yield np.array(found.ids, dtype=np.int64), answers


def messages_of(record: Any, field: str) -> list[dict[str, Any]]:
    """The messages of a record, `{field: […]}` or the list itself, with `role` and `content`.

    ShareGPT's `conversations` of `from` and `value` are taken too. Raises ChatError.
    """
    found = record
    if isinstance(record, dict):
        name = next((name for name in (field, "conversations") if name in record), None)
        if name is None:
            names = ", ".join(list(record)[:8]) or "none"
            raise ChatError(f"has no field {field!r} (--field); its fields: {names}")
        found = record[name]
    if not isinstance(found, list) or not found:
        raise ChatError("has no list of messages, or an empty one")
    messages = [_message(number, one) for number, one in enumerate(found, 1)]
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise ChatError("has no answer: no message is an assistant's")
    if roles[0] == "assistant":
        raise ChatError("begins with an answer: its first message is an assistant's")
    return messages


def _message(number: int, one: Any) -> dict[str, Any]:
    if not isinstance(one, dict):
        raise ChatError(f"message {number} is no object with a role and a content")
    role, content = one.get("role", one.get("from")), one.get("content", one.get("value"))
    role = _SHAREGPT.get(role, role) if isinstance(role, str) else role
    if role not in _ROLES:
        raise ChatError(f"message {number} has the role {role!r}, not {', '.join(_ROLES)}")
    if not isinstance(content, str):
        raise ChatError(f"message {number} has a content that is not text")
    return {**one, "role": role, "content": content}


@lru_cache(8)
def compiled(source: str) -> Any:
    """A template in a sandbox, with what transformers' templates may use, but the date.

    The date would make other tokens every day; templates that know a date to fall back on take that.
    """
    from jinja2 import ext, nodes, parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """`{% generation %}` … `{% endgeneration %}`, which are around an answer: only what is within."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: parser.Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(source)


def _json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False} | options)


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _native(tokenizer: Path | None) -> Any:
    from tokenizers import Tokenizer as Native

    if tokenizer is None:
        return bytes_native()
    native = Native.from_file(str(tokenizer))
    native.no_truncation()
    native.no_padding()
    return native


def _chosen(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _wrong(path, f"cannot be read: {error}") from error


def _own(tokenizer: Path | None, config: dict[str, Any]) -> str | None:
    if tokenizer is None:
        return None
    beside = tokenizer.with_name(TEMPLATE)
    if beside.is_file():
        return beside.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = {one.get("name"): one.get("template") for one in found}.get("default")
    return found if isinstance(found, str) else None


def _check(template: Template, chosen: Path | None) -> None:
    from jinja2 import TemplateSyntaxError

    try:
        compiled(template.source)
    except TemplateSyntaxError as error:
        where = chosen or Path("the tokenizer's own")
        raise _wrong(
            where, f"is no Jinja template: line {error.lineno}: {error.message}"
        ) from error


def _wrong(path: Path, what: str) -> UserError:
    found = Violation("--chat-template", str(path), "", what)
    return UserError("data", f"--chat-template: {path}: {what}", [found])


def _document(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _content(token: Any) -> str | None:
    """A special token, which a configuration writes as a text or as an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
