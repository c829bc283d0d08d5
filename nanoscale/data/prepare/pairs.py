"""Records of preferences: a chosen and a rejected answer to the same question."""

from __future__ import annotations

import json
from collections.abc import Container
from itertools import takewhile
from typing import Any

from nanoscale.data.prepare.render import TOOLS, VARIABLES, RecordError, parsed

PAIR = ("chosen", "rejected")
"""The fields of the answers: texts, or lists of messages, with or without the question's messages."""
QUESTION = "prompt"
"""The field of the question: a text or a list of messages; it may be missing before whole conversations."""


def holds_pair(names: Container[str]) -> bool:
    """True if these are the fields of a record of preferences."""
    return all(name in names for name in PAIR)


def conversations(raw: bytes) -> list[bytes]:
    """Return the chosen and the rejected conversation, as JSON; answers that both share are not learned.

    Raises RecordError.
    """
    record = parsed(raw.decode())
    if not isinstance(record, dict) or not holds_pair(record):
        names = ", ".join(list(record)[:8]) if isinstance(record, dict) else "none"
        raise RecordError(f"has no fields 'chosen' and 'rejected'; its fields: {names}")
    question = _messages(record.get(QUESTION) or [], "user", QUESTION)
    chosen, rejected = (_messages(record[name], "assistant", name) for name in PAIR)
    if chosen == rejected:
        raise RecordError("has the same chosen and rejected answer")
    if isinstance(record[PAIR[0]], str) and not question:
        raise RecordError(
            f"has answers without a question; questions are in the field {QUESTION!r}"
        )
    both = zip(chosen, rejected, strict=False)
    shared = list(takewhile(lambda pair: pair[0] == pair[1], both))
    if len(shared) in (len(chosen), len(rejected)):
        raise RecordError("has no answer after the messages that both share")
    first = [
        message | {"train": False} if isinstance(message, dict) else message
        for message in question + chosen[: len(shared)]
    ]
    variables = {name: record[name] for name in (TOOLS, VARIABLES) if name in record}
    return [
        json.dumps(variables | {"conversations": first + answer[len(shared) :]}).encode()
        for answer in (chosen, rejected)
    ]


def _messages(value: Any, role: str, name: str) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise RecordError(f"its field {name!r} is neither a text nor a list of messages")
    return value
