"""Records of preferences: a chosen and a rejected answer to the same question, or a good or bad one."""

from __future__ import annotations

import json
from collections.abc import Container
from itertools import takewhile
from typing import Any

from nanoscale.data.prepare.render import TOOLS, VARIABLES, RecordError, messages_of, parsed

PAIR = ("chosen", "rejected")
"""The fields of the answers: texts, or lists of messages, with or without the question's messages."""
LABEL = "label"
"""The field of a text's class, or of whether an answer is good."""
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


def rated(raw: bytes, field: str) -> tuple[list[bytes], int]:
    """Return the conversation, as JSON, and 1 for a good answer or 0 for a bad one; only what follows the last
    question is learned.

    Raises RecordError.
    """
    record = parsed(raw.decode())
    label = record.get(LABEL) if isinstance(record, dict) else None
    texts = {"true": 1, "1": 1, "false": 0, "0": 0}  # of a .csv
    sign = texts.get(label.lower()) if isinstance(label, str) else label
    if sign not in (0, 1):
        raise RecordError(
            f"its {LABEL!r} is neither true for a good answer nor false: {label!r:.40}"
        )
    messages = messages_of(record, field)
    last = max((i for i, it in enumerate(messages) if it["role"] != "assistant"), default=-1)
    first = [message | {"train": False} for message in messages[: last + 1]]
    variables = {name: record[name] for name in (TOOLS, VARIABLES) if name in record}
    conversation = variables | {"conversations": first + messages[last + 1 :]}
    return [json.dumps(conversation).encode()], int(sign)


def _messages(value: Any, role: str, name: str) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise RecordError(f"its field {name!r} is neither a text nor a list of messages")
    return value
