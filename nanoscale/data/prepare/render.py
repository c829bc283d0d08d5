"""Rendering chats by a model's own template, in a process with bounded memory and time.

A template is a program that comes with a model. Jinja's sandbox keeps it from files and from the interpreter,
but not from `{{ 'a' * 10**10 }}` or from nested loops. So `renderer` runs this file as a process of its own,
which imports the standard library and Jinja alone, and the kernel bounds its memory and its processor time.

The protocol: the template as a line of JSON, then batches of records as they are in the source; for each
record one answer, a line of JSON and the text.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

SECONDS, SECONDS_A_MIB = 10.0, 10.0
"""Processor time of one record in seconds, and the addition for each MiB of it."""
MEMORY_MIB, MEMORY_A_BYTE = 256, 40
"""Memory of the process, and the addition for each byte of a batch of records."""
LONGEST, LONGEST_A_BYTE = 1 << 16, 32
"""The most characters of a text, and the addition for each byte of its record."""
OUT_OF_MEMORY = 3
"""The exit code."""
_ERROR_CHARACTERS = 500
_INITIAL_BYTES = 0
"""Bytes of address space of the process before its first batch."""

_ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT = {"human": "user", "gpt": "assistant"}
ALPACA = ("instruction", "output")
INPUT = "input"
"""The field of an Alpaca record that follows its instruction, after an empty line; may be empty."""
PAIRS = (("prompt", "completion"), ALPACA)
"""The fields of a question and its answer: texts, or for the first pair lists of messages."""


_BEGIN, _END = "answer_begin_mark", "answer_end_mark"
"""The variables of a template that hold the marks of its answers."""
Message = dict[str, Any]


class RecordError(Exception):
    """A record that cannot become a text."""


@dataclass(frozen=True)
class Chat:
    """A conversation as a text."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """The begin and end of each answer in the text."""
    label: int | None = None
    """The class of the text, if it has one."""


@dataclass(frozen=True)
class Template:
    """A chat template and the tokens that it may use."""

    source: str
    """Jinja."""
    named: tuple[tuple[str, str], ...]
    """`eos_token` and other names that the template may use, with their tokens."""
    special: tuple[str, ...]
    """The special tokens."""

    def chat(self, messages: Sequence[Message]) -> Chat:
        """Render a conversation.

        Raises RecordError if the template refuses the messages, or does not render their answers.
        """
        self._refuse_special(messages)
        whole = self._render(messages)
        if "endgeneration" in self.source:
            return Chat(whole, self._blocks(whole, messages))
        numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        return Chat(whole, tuple(self._answer(whole, messages, number) for number in numbers))

    def question(self, messages: Sequence[Message]) -> Chat:
        """Render a conversation up to the answer that follows it. Raises RecordError."""
        self._refuse_special(messages)
        return Chat(self._render(messages, asks=True), ())

    def _refuse_special(self, messages: Sequence[Message]) -> None:
        forged = {token for text in _texts(messages) for token in self.special if token in text}
        if forged:
            raise RecordError(f"has the special token {min(forged)} in a message's text")

    def _blocks(self, whole: str, messages: Sequence[Message]) -> tuple[tuple[int, int], ...]:
        """Return the begin and end of each `{% generation %}` block, which the template has for its answers."""
        begin, end = _marks(whole)
        marked = self._render(messages, False, **{_BEGIN: begin, _END: end})
        head, *blocks = marked.split(begin)
        answers, position = [], len(head)
        for answer, _, rest in (block.partition(end) for block in blocks):
            answers.append((position, position + len(answer)))
            position += len(answer + rest)
        if marked.replace(begin, "").replace(end, "") != whole:
            raise RecordError("has no certain answers: the chat template reads its own text")
        return tuple(answers)

    def _answer(self, whole: str, messages: Sequence[Message], number: int) -> tuple[int, int]:
        begin = self._end_of(messages[:number], whole, messages, asks=True)
        end = self._end_of(messages[: number + 1], whole, messages)
        if end is None and begin is not None:
            end = self._end_from(begin, whole, messages, number)
        if begin is None or end is None or begin > end:
            raise RecordError(
                f"has no certain position of the answer in message {number + 1}: the chat template writes the"
                " messages before it differently with and without it (--chat-template FILE for another)"
            )
        answer = whole[begin:end].rstrip()
        has_end_token = answer.endswith(self.special)
        return begin, begin + len(answer) if has_end_token else end

    def _end_of(
        self, first: Sequence[Message], whole: str, messages: Sequence[Message], asks: bool = False
    ) -> int | None:
        """Return where the first messages end in the text of all messages; None if that is not certain.

        A template may write earlier messages differently as soon as others follow, for example without their
        thoughts. Then the text must agree from the end of the last message's content on, which gets a mark.
        """
        text = self._render(first, asks)
        if whole.startswith(text):
            return len(text)
        mark, _ = _marks(whole + text)
        last = max((i for i, message in enumerate(first) if message["content"].strip()), default=0)
        content = messages[last]["content"].rstrip()
        marked = {"content": content + mark + messages[last]["content"][len(content) :]}
        all_marked = [*messages[:last], messages[last] | marked, *messages[last + 1 :]]
        begin, is_in_all, rest = self._render(all_marked).partition(mark)
        alone = self._render(all_marked[: len(first)], asks)
        begin_alone, is_in_first, rest_alone = alone.partition(mark)
        is_certain = begin + rest == whole and begin_alone + rest_alone == text
        if is_in_all and is_in_first and is_certain and rest.startswith(rest_alone):
            return len(begin + rest_alone)
        return None

    def _end_from(
        self, begin: int, whole: str, messages: Sequence[Message], number: int
    ) -> int | None:
        """Return the end of an answer that the template writes with thoughts only while no message follows.

        The longest text that ends the answer then and begins it now is the answer, if a special token ends it.
        """
        before = self._render(messages[:number], asks=True)
        answer = self._render(messages[: number + 1]).removeprefix(before)
        ends = (answer[at:] for at in range(len(answer)) if whole.startswith(answer[at:], begin))
        longest = next(ends, "")
        return begin + len(longest) if longest.rstrip().endswith(self.special) else None

    def _render(self, messages: Sequence[Message], asks: bool = False, **more: str) -> str:
        try:
            text: str = compiled(self.source).render(
                messages=messages, add_generation_prompt=asks, **dict(self.named), **more
            )
        except MemoryError:
            raise
        except Exception as error:
            raise RecordError(
                f"cannot be rendered by the chat template: {_error_text(error)}"
            ) from error
        return text


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a JSON value, which may be nested deeply; names of fields are texts too."""
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            values += [*value, *value.values()]
        elif isinstance(value, list):
            values += value


def _marks(text: str) -> tuple[str, str]:
    """Return two characters of Unicode's private use area that a text does not have."""
    first, second = islice((chr(c) for c in range(0xF0000, 0xFFFFE) if chr(c) not in text), 2)
    return first, second


@lru_cache(8)
def compiled(source: str) -> Any:
    """Compile a template in a sandbox, with the functions of transformers' templates except the date.

    The date would give other tokens every day; templates with a default date use that.
    """
    from jinja2 import ext, nodes, parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """The block `{% generation %}` … `{% endgeneration %}` around an answer: its content, between the marks
        of a rendering that has any."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: parser.Parser) -> list[nodes.Node]:
            next(parser.stream)
            content = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (nodes.Output([nodes.Name(name, "load")]) for name in (_BEGIN, _END))
            return [begin, *content, end]

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


def _error_text(error: BaseException) -> str:
    """Return an exception's own text in one line, or its name."""
    return " ".join(str(error).split())[:_ERROR_CHARACTERS] or type(error).__name__


# --- records --------------------------------------------------------------------------------------


def parsed(text: str) -> Any:
    """Return the value of a JSON document. Raises RecordError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"is not JSON: {error}") from error


def messages_of(record: Any, field: str, asks: bool = False) -> list[Message]:
    """Return the messages of a record, `{field: […]}` or the list itself, with `role` and `content`.

    ShareGPT's `conversations` of `from` and `value`, and the questions and answers of PAIRS, are accepted too.
    With `asks`, its answer may be missing. Raises RecordError.
    """
    conversation = _conversation(record, field) if isinstance(record, dict) else record
    if not isinstance(conversation, list) or not conversation:
        raise RecordError("has no list of messages, or an empty one")
    messages = [_message(number, message) for number, message in enumerate(conversation, 1)]
    roles = [message["role"] for message in messages]
    if "assistant" not in roles and not asks:
        raise RecordError("has no answer: no message is an assistant's")
    if roles[0] == "assistant":
        raise RecordError("begins with an answer: its first message is an assistant's")
    return messages


def value_at(record: dict[str, Any], field: str) -> Any:
    """Return the value of a field: its own name comes before `a.b`, which is `b` in the object `a`.

    Raises RecordError.
    """
    if field in record:
        return record[field]
    value: Any = record
    for name in field.split("."):
        if not isinstance(value, dict) or name not in value:
            names = ", ".join(list(record)[:8]) or "none"
            raise RecordError(f"has no field {field!r} (--field); its fields: {names}")
        value = value[name]
    return value


def pair_in(names: Container[str]) -> tuple[str, str] | None:
    """Return the fields of the question and the answer; None if there is no such pair."""
    return next((pair for pair in PAIRS if pair[0] in names and pair[1] in names), None)


def _conversation(record: dict[str, Any], field: str) -> Any:
    try:
        return value_at(record, field)
    except RecordError:
        if "conversations" in record:
            return record["conversations"]
        pair = pair_in(record)
        if pair is None:
            raise
    question, answer = (record[name] for name in pair)
    if isinstance(question, list) and isinstance(answer, list):
        return question + answer
    input_text = record.get(INPUT) if pair == ALPACA else None
    if not isinstance(input_text, str | None):
        raise RecordError(f"its field {INPUT!r} is not text")
    if input_text and isinstance(question, str):
        question = f"{question}\n\n{input_text}"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _message(number: int, record: Any) -> Message:
    if not isinstance(record, dict):
        raise RecordError(f"message {number} is not an object with a role and a content")
    role = record.get("role", record.get("from"))
    content = record.get("content", record.get("value"))
    role = _SHAREGPT.get(role, role) if isinstance(role, str) else role
    if role not in _ROLES:
        raise RecordError(f"message {number} has the role {role!r}, not {', '.join(_ROLES)}")
    if not isinstance(content, str):
        raise RecordError(f"message {number} has a content that is not text")
    return {**record, "role": role, "content": content}


# --- the process ----------------------------------------------------------------------------------


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until the input ends: first whether the template compiles, then records."""
    first = json.loads(requests.readline())
    named = tuple((name, token) for name, token in first["named"])
    template = Template(first["source"], named, tuple(first["special"]))
    _limit_memory(len(template.source))
    _limit_time(len(template.source))
    try:
        compiled(template.source)
        problem = None
    except MemoryError:
        raise
    except Exception as error:
        line = getattr(error, "lineno", None)
        problem = f"line {line}: {_error_text(error)}" if line else _error_text(error)
    _write(answers, {"problem": problem})
    while header := requests.readline():
        sizes = json.loads(header)
        _limit_memory(sum(sizes))
        for record in [requests.read(size) for size in sizes]:
            _limit_time(len(record))
            _answer(answers, template, record, first["field"], first["asks"])
        answers.flush()


def _answer(answers: BinaryIO, template: Template, record: bytes, field: str, asks: bool) -> None:
    try:
        messages = messages_of(parsed(record.decode()), field, asks)
        chat = template.question(messages) if asks else template.chat(messages)
        limit = LONGEST + LONGEST_A_BYTE * len(record)
        if len(chat.text) > limit:
            raise RecordError(
                f"becomes {len(chat.text):,} characters by the chat template; at most {limit:,} are allowed"
            )
    except RecordError as error:
        _write(answers, {"error": str(error)})
        return
    text = chat.text.encode(errors="surrogatepass")
    answers.write(json.dumps({"bytes": len(text), "answers": chat.answers}).encode() + b"\n" + text)


def _write(answers: BinaryIO, document: dict[str, Any]) -> None:
    answers.write(json.dumps(document).encode() + b"\n")
    answers.flush()


def _limit_memory(record_bytes: int) -> None:
    """Limit the process to the memory that it had, and the need of `record_bytes` bytes of records."""
    limit = _INITIAL_BYTES + (MEMORY_MIB << 20) + MEMORY_A_BYTE * record_bytes
    with suppress(ValueError, OSError):  # not every system supports it
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _limit_time(record_bytes: int) -> None:
    """Let the kernel end this process after this much more processor time."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS + SECONDS_A_MIB * record_bytes / 2**20)


def _virtual_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


if __name__ == "__main__":
    _INITIAL_BYTES = _virtual_bytes()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
