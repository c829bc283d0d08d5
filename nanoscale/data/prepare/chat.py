"""Tokenizing chats by a model's own template, with marks for the tokens of answers.

An answer is the text that the template adds when its message is appended to the conversation and its request
for an answer: the message and the token that ends the turn, without white space after that token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nanoscale.common.errors import UserError, Violation
from nanoscale.config.data.token_sources import TEMPLATE
from nanoscale.data.prepare.render import Chat, Template
from nanoscale.data.prepare.renderer import Renderer, TemplateProblem
from nanoscale.data.tokens.tokenizer import CONFIG, END, bytes_native

PLAIN = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""The template for tokenizers that have none: `User: …`, then `Assistant: …` and the end-of-document token."""

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


def find_template(tokenizer: Path | None, chosen: Path | None, eos: str = END) -> Template:
    """Return the template in the file `chosen`, else the tokenizer's own, else PLAIN.

    `tokenizer` is its tokenizer.json; None for bytes. Raises UserError for an invalid template.
    """
    config = _document(tokenizer.with_name(CONFIG)) if tokenizer else {}
    source = _read_template(chosen) or _tokenizer_template(tokenizer, config) or PLAIN
    special_tokens = {name: _content(config.get(name)) for name in _NAMED}
    special_tokens["eos_token"] = eos
    native = _native(tokenizer)
    added_tokens = native.get_added_tokens_decoder().values()
    special = tuple(sorted(token.content for token in added_tokens if token.special))
    template = Template(
        source,
        tuple((name_of, v) for name_of, v in special_tokens.items() if v is not None),
        special,
    )
    _check(template, chosen)
    return template


class ChatTokenizer:
    """A tokenizer of rendered chats, in which special tokens keep their meaning."""

    def __init__(self, path: Path | None, renderer: Renderer) -> None:
        """Load the tokenizer of `path`, a tokenizer.json, or that of bytes for None."""
        self._native = _native(path)
        self.renderer = renderer
        """The renderer that turns chats into texts."""

    def encode(self, chats: Sequence[Chat]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield, for each chat, its ids and the marks of its answers (uint8), both `[tokens]`."""
        for start in range(0, len(chats), _BATCH):
            batch = chats[start : start + _BATCH]
            texts = [chat.text for chat in batch]
            for chat, encoding in zip(
                batch, self._native.encode_batch(texts, add_special_tokens=False), strict=True
            ):
                starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
                answers = np.zeros(len(starts), dtype=np.uint8)
                for begin, end in chat.answers:
                    answers[(starts < end) & (ends > begin)] = 1
                yield np.array(encoding.ids, dtype=np.int64), answers


def _native(tokenizer: Path | None) -> Any:
    from tokenizers import Tokenizer as Native

    if tokenizer is None:
        return bytes_native()
    native = Native.from_file(str(tokenizer))
    native.no_truncation()
    native.no_padding()
    return native


def _read_template(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _template_error(path, f"cannot be read: {error}") from error


def _tokenizer_template(tokenizer: Path | None, config: dict[str, Any]) -> str | None:
    if tokenizer is None:
        return None
    file = tokenizer.with_name(TEMPLATE)
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several templates, by name
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _check(template: Template, chosen: Path | None) -> None:
    renderer = Renderer(template, "")
    try:
        renderer.check()
    except TemplateProblem as problem:
        raise _template_error(chosen or Path("the tokenizer's own"), str(problem)) from problem
    finally:
        renderer.close()


def _template_error(path: Path, what: str) -> UserError:
    violation = Violation("--chat-template", str(path), "", what)
    return UserError("data", f"--chat-template: {path}: {what}", [violation])


def _document(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _content(token: Any) -> str | None:
    """Return the text of a special token, which a configuration writes as a text or as an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None
