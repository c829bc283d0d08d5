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
import re
import resource
import signal
import sys
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from difflib import get_close_matches
from functools import lru_cache
from itertools import chain, compress, islice
from pathlib import Path
from typing import Any, BinaryIO

from nanoscale.common.json_text import Json

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

_SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "observation": "tool",
    "function_call": "assistant",
}
_CALL = "function_call"
"""The role of ShareGPT's messages with a value that is the JSON text of a tool call."""
TOOLS, VARIABLES = "tools", "chat_template_kwargs"
"""The fields of a record that its template gets: the functions that the answers may call, and variables."""
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_THOUGHT_TAG = re.compile(r"</?[\w:]*think(ing)?>")
_OTHERS = {"image": "an image", "video": "a video", "audio": "audio"}
"""Names of the parts of a content that are not texts, by a word in their types, as in `image_url`."""
ATTACHED = ("images", "videos", "audios")
"""The fields of a record with what its texts refer to as `<image>`."""
_SWITCHES = ("weight", "train")
"""The fields of a message. If one of them is 0 or false, the model does not learn this answer."""
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_DATE = datetime(2024, 7, 26)
"""The date of templates that cannot be rendered without one."""
ALPACA = ("instruction", "output")
INPUT = "input"
"""The field of an Alpaca record that follows its instruction, after an empty line; may be empty."""
PAIRS = (("prompt", "completion"), ALPACA)
"""The fields of a question and its answer: texts, or for the first pair lists of messages."""

_BEGIN, _END = "answer_begin_mark", "answer_end_mark"
"""The variables of a template that hold the marks of its answers."""
NO_FIELD = "has no field"
Message = dict[str, Any]
Messages = Sequence[Message]


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
    variables: tuple[tuple[str, Any], ...] = ()
    """The names of the record's tools and other variables, with their values."""

    def chat(self, messages: Messages) -> Chat:
        """Render a conversation.

        Raises RecordError if the template refuses the messages, or does not render their answers.
        """
        whole = self._render(messages)
        numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        learned = [is_learned(messages[number]) for number in numbers]
        if "endgeneration" not in self.source:
            chosen = compress(numbers, learned)
            answers = [self._answer(whole, messages, number) for number in chosen]
            if answers and answers[-1][1] == len(whole) and not whole.endswith(self.special):
                whole += self._next_opening(whole, messages)
                answers[-1] = answers[-1][0], len(whole)
            return Chat(whole, tuple(answers))
        blocks = self._blocks(whole, messages)
        if all(learned):
            return Chat(whole, blocks)
        if len(blocks) != len(numbers):
            raise RecordError("has answers that are not learned, and no block for each answer")
        return Chat(whole, tuple(compress(blocks, learned)))

    def question(self, messages: Messages) -> Chat:
        """Render a conversation up to the answer that follows it. Raises RecordError."""
        return Chat(self._render(messages, asks=True), ())

    def refuse_special(self, messages: Messages) -> None:
        """Raise RecordError if a message or a variable has a special token, or a message an unknown role.

        The tags around an answer's thought may be special tokens that the template itself looks for.
        """
        for number, message in enumerate(messages, 1):
            role = message["role"]
            if role not in _ROLES and not re.search(rf"['\"]{re.escape(role)}['\"]", self.source):
                near = get_close_matches(role, _ROLES, 1, 0.5)
                advice = f"; did you mean `{near[0]}`?" if near else ""
                raise RecordError(f"message {number} has the unknown role `{role:.40}`{advice}")
        tags = {it for it in self.special if _THOUGHT_TAG.fullmatch(it) and it in self.source}
        answers = [it for it in messages if it["role"] == "assistant"]
        others = [it for it in messages if it["role"] != "assistant"]
        texts = ((it, set(self.special) - tags) for it in _texts(answers))
        checked = chain(
            texts, ((it, self.special) for it in _texts([*others, dict(self.variables)]))
        )
        forged = {token for text, tokens in checked for token in tokens if token in text}
        if forged:
            raise RecordError(f"has the special token {min(forged)} in a message's text")

    def _blocks(self, whole: str, messages: Messages) -> tuple[tuple[int, int], ...]:
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

    def _answer(self, whole: str, messages: Messages, number: int) -> tuple[int, int]:
        begin = self._begin_of(messages[:number], whole, messages)
        end = None if begin is None else self._end_of(begin, whole, messages, number)
        if begin is None or end is None or begin > end:
            raise RecordError(
                f"has no certain position of the answer in message {number + 1}: the chat template writes the"
                " messages before it differently with and without it (--chat-template FILE for another)"
            )
        answer = whole[begin:end].rstrip()
        bare = answer
        for token in self.special:
            bare = bare.replace(token, "")
        if not bare.strip() and messages[number].get("content", "").strip():
            raise RecordError(
                f"has an answer in message {number + 1} that the chat template does not write: it may expect"
                " lists of texts and images"
            )
        if answer.endswith(self.special):
            return begin, begin + len(answer)
        # The token with which the next message begins ends the answer, as in GLM's templates.
        rest = whole[end:].lstrip()
        return begin, len(whole) - len(rest) + len(self._special_at(rest)) if rest else end

    def _special_at(self, text: str) -> str:
        """Return the special token with which a text begins; "" if there is none."""
        return max((token for token in self.special if text.startswith(token)), key=len, default="")

    def _next_opening(self, whole: str, messages: Messages) -> str:
        """Return the special token with which a question after the last answer would begin; "" for none."""
        with suppress(RecordError):
            longer = self._render([*messages, {"role": "user", "content": "…"}])
            if longer.startswith(whole):
                rest = longer[len(whole) :]
                token = self._special_at(rest.lstrip())
                return rest[: len(rest) - len(rest.lstrip())] + token if token else ""
        return ""

    def _begin_of(self, first: Messages, whole: str, messages: Messages) -> int | None:
        """Return the position at which the answer to the first messages begins; None if it is not certain.

        The answer follows the generation prompt. Some prompts end with a tag that opens a thought. If the
        conversation has the header of such a prompt without the tag, the answer follows the header.
        """
        common = []
        for at, text in self._common(first, whole, messages, asks=True):
            if whole.startswith(text, at):
                return at + len(text)
            common.append((at, text))
        prompt = len(common[0][1]) - len(self._render(first))
        for at, text in common:
            for length in range(len(text), len(text) - prompt - 1, -1):
                thought = text[length:]
                is_tag = thought.lstrip().startswith(("<", "["))
                has_header = not any(token in thought for token in self.special)
                if is_tag and has_header and whole.startswith(text[:length], at):
                    return at + length
        return None

    def _end_of(self, begin: int, whole: str, messages: Messages, number: int) -> int | None:
        """Return the end of an answer; None if that is not certain."""
        for at, text in self._common(messages[: number + 1], whole, messages):
            if whole.startswith(text, at):
                return at + len(text)
            # A template may end the last turn with other special tokens, after the content.
            rest = whole[at:].lstrip()
            token = self._special_at(rest)
            if at >= begin and text.lstrip().startswith(self.special) and token:
                return len(whole) - len(rest) + len(token)
        # A template may write an answer with thoughts only while no message follows. The longest text that
        # ends the answer then and begins it now is the answer, if a special token ends it.
        before = self._render(messages[:number], asks=True)
        answer = self._render(messages[: number + 1]).removeprefix(before)
        ends_in_both = (
            answer[at:] for at in range(len(answer)) if whole.startswith(answer[at:], begin)
        )
        longest = next(ends_in_both, "")
        return begin + len(longest) if longest.rstrip().endswith(self.special) else None

    def _common(
        self, first: Messages, whole: str, messages: Messages, asks: bool = False
    ) -> Iterator[tuple[int, str]]:
        """Yield positions in the text of all messages from which on it should begin with the given text, which
        ends the text of the first messages.

        A template may write earlier messages differently as soon as others follow, for example without their
        thoughts. Then the texts must agree from the end of the last message's content, or of the name of the
        function that it calls, on, which gets a mark.
        """
        text = self._render(first, asks)
        yield 0, text
        mark, _ = _marks(whole + text)
        contents = [it.get("tool_calls") or it.get("content", "").strip() for it in first]
        last = max((i for i, content in enumerate(contents) if content), default=0)
        all_marked = [*messages[:last], _marked(messages[last], mark), *messages[last + 1 :]]
        begin, is_in_all, rest = self._render(all_marked).partition(mark)
        alone = self._render(all_marked[: len(first)], asks)
        begin_alone, is_in_first, rest_alone = alone.partition(mark)
        rest, rest_alone = rest.replace(mark, ""), rest_alone.replace(mark, "")
        is_certain = begin + rest == whole and begin_alone + rest_alone == text
        if is_in_all and is_in_first and is_certain:
            yield len(begin), rest_alone

    def _render(self, messages: Messages, asks: bool = False, **more: str) -> str:
        try:
            text: str = compiled(self.source).render(
                messages=messages,
                add_generation_prompt=asks,
                **dict(self.named + self.variables),
                **more,
            )
        except MemoryError:
            raise
        except Exception as error:
            raise RecordError(
                f"cannot be rendered by the chat template: {_error_text(error)}"
            ) from error
        return text


def is_learned(message: Message) -> bool:
    """True for an assistant's message without `weight: 0` and `train: false`."""
    return message["role"] == "assistant" and all(map(message.get, _SWITCHES, (1, 1)))


class Arguments(dict[str, Any]):
    """The arguments of a tool call: an object, and its JSON text for a template that joins it to text."""

    def __init__(self, value: Json, text: str) -> None:
        super().__init__(value)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __radd__(self, other: str) -> str:
        return other + self._text


def _marked(message: Message, mark: str) -> Message:
    """Return a message with a mark after the last name of a function that it calls, or after its content."""
    if calls := message.get("tool_calls"):
        *others, call = calls
        function = call.get("function", call)
        function = function | {"name": function["name"] + mark}
        call = call | {"function": function} if "function" in call else function
        return message | {"tool_calls": [*others, call]}
    content = message.get("content", "")
    length = len(content.rstrip())
    return message | {"content": content[:length] + mark + content[length:]}


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in a JSON value, which may be nested deeply; names of fields are texts too."""
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            values += [*value, *value.values(), getattr(value, "_text", "")]  # of Arguments
        elif isinstance(value, list):
            values += value


def _marks(text: str) -> tuple[str, str]:
    """Return two characters of Unicode's private use area that a text does not have."""
    first, second = islice((chr(c) for c in range(0xF0000, 0xFFFFE) if chr(c) not in text), 2)
    return first, second


@lru_cache(8)
def compiled(source: str) -> Any:
    """Compile a template in a sandbox, with the functions of transformers' templates except the date.

    The date would give other tokens every day. Templates that test for `strftime_now` have a default date; the
    others get _DATE.
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
    if not re.search(r"strftime_now\s+is\s", source):
        environment.globals["strftime_now"] = _DATE.strftime
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
    for name in ATTACHED if isinstance(record, dict) else ():
        if _from_text(record.get(name)):
            raise RecordError(f"has {name} in its field {name!r}: only texts are trained")
    conversation = _from_text(_conversation(record, field) if isinstance(record, dict) else record)
    if not isinstance(conversation, list) or not conversation:
        raise RecordError("has no list of messages, or an empty one")
    messages = [_message(number, message) for number, message in enumerate(conversation, 1)]
    roles = [message["role"] for message in messages]
    if "assistant" not in roles and not asks:
        raise RecordError("has no answer: no message is an assistant's")
    if not asks and not any(map(is_learned, messages)):
        raise RecordError(
            "has no answer that is learned: `weight: 0` or `train: false` leaves all out"
        )
    if roles[0] == "assistant":
        raise RecordError("begins with an answer: its first message is an assistant's")
    return messages


def variables_of(record: Any) -> Json:
    """Return the variables of a record's template: its tools, and others. Raises RecordError."""
    fields = record if isinstance(record, dict) else {}
    tools = _from_text(fields.get(TOOLS)) or []
    tools = [_from_text(tool) for tool in tools] if isinstance(tools, list) else [None]
    variables = _from_text(fields.get(VARIABLES)) or {}
    if not all(isinstance(value, dict) for value in (*tools, variables)):
        raise RecordError(f"its {TOOLS!r} are not a list of objects, or {VARIABLES!r} no object")
    return {"documents": None, TOOLS: tools or None, **variables}


def value_at(record: Json, field: str) -> Any:
    """Return the value of a field: its own name comes before `a.b`, which is `b` in the object `a`.

    Raises RecordError.
    """
    if field in record:
        return record[field]
    value: Any = record
    for name in field.split("."):
        if not isinstance(value, dict) or name not in value:
            names = ", ".join(list(record)[:8]) or "none"
            raise RecordError(f"{NO_FIELD} {field!r} (--field); its fields: {names}")
        value = value[name]
    return value


def pair_in(names: Container[str]) -> tuple[str, str] | None:
    """Return the fields of the question and the answer; None if there is no such pair."""
    return next((pair for pair in PAIRS if pair[0] in names and pair[1] in names), None)


def _conversation(record: Json, field: str) -> Any:
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
    message = {name: value for name, value in record.items() if value is not None}
    role = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    if not isinstance(role, str) or not role:
        raise RecordError(f"message {number} has no role")
    message["role"] = _SHAREGPT.get(role, role)
    if role == _CALL:
        functions, content = _from_text(content), None
        functions = functions if isinstance(functions, list) else [functions]
        message["tool_calls"] = [{"type": "function", "function": one} for one in functions]
    if "tool_calls" in message:
        message["tool_calls"] = _calls(number, _from_text(message["tool_calls"]) or [])
    if content is not None or not message.get("tool_calls"):
        if not isinstance(content, str):
            for part in content if isinstance(content, list) else ():
                kind = str(part.get("type")) if isinstance(part, dict) else ""
                if other := next((name for name in _OTHERS if name in kind), None):
                    what = f"has {_OTHERS[other]} in message {number}: only texts are trained"
                    raise RecordError(what)
            raise RecordError(f"message {number} has a content that is not text")
        message["content"] = content
    for name in _SWITCHES:
        if message.get(name, 1) not in (0, 1):
            raise RecordError(f"message {number} has the {name} {message[name]!r:.40}, not 0 or 1")
    for name in _THOUGHTS:  # transformers gives a thought both names
        if name in message:
            message.setdefault("thinking", message[name])
            message.setdefault("reasoning_content", message[name])
    return message


def _calls(number: int, calls: Any) -> list[Any]:
    """Return the tool calls of a message, with their arguments as objects where they are JSON text of one."""
    result = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else {}
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RecordError(f"message {number} has a tool call without a function's name")
        text = function.get("arguments")
        if isinstance(value := _from_text(text), dict):
            text = text if isinstance(text, str) else json.dumps(value, ensure_ascii=False)
            function = function | {"arguments": Arguments(value, text)}
        result.append(call | {"function": function} if "function" in call else function)
    return result


def _from_text(value: Any) -> Any:
    """Return the value of a JSON text, which datasets store in place of lists and objects; else `value`."""
    with suppress(ValueError, RecursionError):
        return json.loads(value) if isinstance(value, str) else value
    return value


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
        value = parsed(record.decode())
        messages = messages_of(value, field, asks)
        template = replace(template, variables=tuple(variables_of(value).items()))
        template.refuse_special(messages)
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


def _write(answers: BinaryIO, document: Json) -> None:
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
