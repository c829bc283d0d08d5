"""Tokenizing chats by a model's own template, with marks for the tokens of answers.

An answer is the text of the template's `{% generation %}` blocks. In a template without them, it is the text
that the template adds when its message is appended to the conversation and its request for an answer: the
message and the token that ends the turn, without white space after that token. `Renderer` is the client of the
process that renders chats; see `render`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from nanoscale.common.errors import UserError, Violation
from nanoscale.common.units import byte_size
from nanoscale.config.token_files import TEMPLATE
from nanoscale.data.prepare import render
from nanoscale.data.prepare.render import Chat, RecordError, Template
from nanoscale.data.tokens import tokenizer as tokenizers

PLAIN = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""The template for tokenizers that have none: `User: …`, then `Assistant: …` and the end-of-document token."""

_NAMED = [f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")]
_BATCH = 64
_MOST_RECORDS, _MOST_BYTES = 64, 1 << 20
"""The limits of a batch; a single record may be larger."""

Outcome = Chat | RecordError


def find_template(tokenizer: tokenizers.Tokenizer, chosen: Path | None) -> Template:
    """Return the template in the file `chosen`, else the tokenizer's own, else PLAIN.

    Raises UserError for an invalid template.
    """
    path, eos = None, tokenizers.END
    if isinstance(tokenizer, tokenizers.FileTokenizer):
        path, eos = tokenizer.path, tokenizer.name_of(tokenizer.eos)
    config = tokenizers.config_of(path) if path else {}
    source = _read_template(chosen) or _tokenizer_template(path, config) or PLAIN
    special_tokens = {name: tokenizers.special_token(config, name) for name in _NAMED}
    special_tokens["eos_token"] = eos
    added_tokens = _native(path).get_added_tokens_decoder().values()
    special = tuple(sorted(token.content for token in added_tokens if token.special))
    named = tuple((name, token) for name, token in special_tokens.items() if token is not None)
    template = Template(source, named, special)
    with closing(Renderer(template, "")) as renderer:
        try:
            renderer.check()
        except TemplateProblem as problem:
            raise _template_error(chosen or Path("the tokenizer's own"), str(problem)) from problem
    return template


class ChatTokenizer:
    """A tokenizer of rendered chats, in which special tokens keep their meaning."""

    def __init__(self, path: Path | None, renderer: Renderer) -> None:
        """Load the tokenizer of `path`, a tokenizer.json, or the byte tokenizer for None."""
        self._native = _native(path)
        self.renderer = renderer
        """The renderer that turns chats into texts."""

    def encode(self, chats: Sequence[Chat]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield, for each chat, its ids and the marks of its answers (uint8), both `[tokens]`."""
        for start in range(0, len(chats), _BATCH):
            batch = chats[start : start + _BATCH]
            texts = [chat.text for chat in batch]
            encodings = self._native.encode_batch(texts, add_special_tokens=False)
            for chat, encoding in zip(batch, encodings, strict=True):
                starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
                answers = np.zeros(len(starts), dtype=np.uint8)
                for begin, end in chat.answers:
                    if begin < end:
                        answers[(starts < end) & (ends > begin)] = 1
                yield np.array(encoding.ids, dtype=np.int64), answers


def _native(tokenizer: Path | None) -> Any:
    return tokenizers.bytes_native() if tokenizer is None else tokenizers.open_native(tokenizer)


def _read_template(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.expanduser().read_text("utf-8")
    except (OSError, ValueError) as error:
        raise _template_error(path, f"cannot be read: {error}") from error


def _tokenizer_template(tokenizer: Path | None, config: dict[str, Any]) -> str | None:
    if tokenizer is None:
        return None
    file = tokenizer.with_name(TEMPLATE)
    if file.is_file():
        return file.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several templates, by name
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _template_error(path: Path, what: str) -> UserError:
    violation = Violation("--chat-template", str(path), "", what)
    return UserError("data", f"--chat-template: {path}: {what}", [violation])


class TemplateProblem(Exception):  # noqa: N818
    """An error of the template itself, or of its compilation, which takes too much."""


class Renderer:
    """A renderer of chats in a process of its own, which is started on demand and restarted after its end."""

    def __init__(self, template: Template, field: str, *, asks: bool = False) -> None:
        """Render the messages in the field `field` of records; with `asks`, up to the answer that follows."""
        self._first = {
            "source": template.source,
            "named": template.named,
            "special": template.special,
            "field": field,
            "asks": asks,
        }
        self._process: subprocess.Popen[bytes] | None = None

    def check(self) -> None:
        """Raise a TemplateProblem if the template cannot be compiled."""
        if self._process is not None:
            return
        # The file and not the module, whose package would import much more. The parent handles Ctrl-C.
        command = [sys.executable, "-P", render.__file__]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, **pipes, start_new_session=True)
        assert self._process.stdin and self._process.stdout
        first = json.dumps(self._first).encode() + b"\n"
        try:
            self._process.stdin.write(first)
            self._process.stdin.flush()
            problem = json.loads(_line(self._process.stdout))["problem"]
        except (OSError, EOFError) as error:
            raise TemplateProblem(_describe_end(self._end(), [first])) from error
        if problem is not None:
            self.close()
            raise TemplateProblem(f"is not a Jinja template: {problem}")

    def render(self, records: Sequence[bytes]) -> Iterator[Outcome]:
        """Yield each record, a JSON document, as a text, or its error."""
        for batch in _batches(records):
            try:
                yield from self._request(batch)
            except _EndedError:
                yield from map(self._render_alone, batch)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._end()

    def _render_alone(self, record: bytes) -> Outcome:
        """Retry a failed record in a new process: the old one may still hold memory of other records."""
        try:
            if self._process is not None:
                return self._request([record])[0]
        except _EndedError:
            pass
        try:
            return self._request([record])[0]
        except _EndedError as ended:
            what = _describe_end(ended.code, [record])
            return RecordError(f"cannot be rendered by the chat template: it {what}")

    def _request(self, batch: Sequence[bytes]) -> list[Outcome]:
        self.check()
        assert self._process is not None and self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(list(map(len, batch))).encode() + b"\n")
            self._process.stdin.writelines(batch)
            self._process.stdin.flush()
            return [_outcome(self._process.stdout) for _ in batch]
        except (OSError, EOFError) as error:
            raise _EndedError(self._end()) from error

    def _end(self) -> int:
        """Wait for the end of the process and return its exit code."""
        assert self._process is not None and self._process.stdin and self._process.stdout
        process, self._process = self._process, None
        process.stdout.close()  # type: ignore[union-attr]
        with suppress(OSError):  # nobody reads the rest of the buffer
            process.stdin.close()  # type: ignore[union-attr]
        return process.wait()


class _EndedError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def _batches(records: Sequence[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for record in records:
        if batch and (len(batch) == _MOST_RECORDS or size + len(record) > _MOST_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(record)
        size += len(record)
    if batch:
        yield batch


def _outcome(answers: IO[bytes]) -> Outcome:
    header = json.loads(_line(answers))
    if "error" in header:
        return RecordError(header["error"])
    text = answers.read(header["bytes"])
    if len(text) < header["bytes"]:
        raise EOFError
    return Chat(text.decode(errors="surrogatepass"), tuple(map(tuple, header["answers"])))


def _line(answers: IO[bytes]) -> bytes:
    line = answers.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return line


def _describe_end(code: int, records: Sequence[bytes]) -> str:
    """Return why the process ended, as a phrase about the template."""
    size = sum(map(len, records))
    if code == render.OUT_OF_MEMORY:
        limit = (render.MEMORY_MIB << 20) + render.MEMORY_A_BYTE * size
        return f"needs more than {byte_size(limit)} of memory"
    if code == -signal.SIGPROF:
        limit_s = render.SECONDS + render.SECONDS_A_MIB * size / 2**20
        return f"takes more than {round(limit_s, 1):g} s of processor time"
    ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"ended its process ({ending})"
