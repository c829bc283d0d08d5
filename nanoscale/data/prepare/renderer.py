"""The client of the process that renders chats; see `render`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import IO, Any

from nanoscale.common.units import byte_size
from nanoscale.data.prepare import render
from nanoscale.data.prepare.render import Chat, RecordError, Template

_MOST_RECORDS, _MOST_BYTES = 64, 1 << 20
"""The limits of a batch; a single record may be larger."""

Outcome = Chat | RecordError


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
        if self._process is None:
            self._start()

    def render(self, records: Sequence[bytes]) -> Iterator[Outcome]:
        """Yield each record, a JSON document, as a text, or its error."""
        for batch in _batches(records):
            try:
                yield from self._request(batch)
            except _EndedError:
                yield from map(self._render_alone, batch)

    def close(self) -> None:
        """End the process."""
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
            return RecordError(
                f"cannot be rendered by the chat template: it {_describe_end(ended.code, [record])}"
            )

    def _request(self, batch: Sequence[bytes]) -> list[Outcome]:
        self.check()
        assert self._process is not None and self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(
                json.dumps([len(record) for record in batch]).encode() + b"\n"
            )
            self._process.stdin.writelines(batch)
            self._process.stdin.flush()
            return [_outcome(self._process.stdout) for _ in batch]
        except (OSError, EOFError) as error:
            raise _EndedError(self._end()) from error

    def _start(self) -> None:
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
    return Chat(
        text.decode(errors="surrogatepass"), tuple((begin, end) for begin, end in header["answers"])
    )


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
