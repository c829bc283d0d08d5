"""Processes that tokenize chunks of text; results come back in the order of the chunks.

Processes and not the threads of the tokenizers library: parsing JSON and copying the tokens into Python then
run on all cores too, and no cache is shared between them.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections import defaultdict, deque
from collections.abc import Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from nanoscale.data.prepare.chat import ChatTokenizer
from nanoscale.data.prepare.chunks import Chunk
from nanoscale.data.prepare.encode import Encoded, Reading, encode
from nanoscale.data.prepare.renderer import Renderer
from nanoscale.data.tokenizer import ByteTokenizer, Tokenizer, load

_LOOK_S = 0.2
_THREADS = "TOKENIZERS_PARALLELISM"
_QUEUED = 2
"""Chunks that a worker has at a time: one at work, and the next."""
_AHEAD = 4
"""Chunks per worker that may be read before the first of them is written."""


@dataclass(frozen=True)
class Setup:
    """The settings that every worker gets once."""

    reading: Reading
    tokenizer: Path | None
    """A tokenizer.json; None for bytes."""
    dtype: np.dtype[Any]

    def load(self) -> Tokenizer | ChatTokenizer:
        if self.reading.template is not None:
            return ChatTokenizer(
                self.tokenizer, Renderer(self.reading.template, self.reading.field)
            )
        return load(self.tokenizer) if self.tokenizer else ByteTokenizer()


def encode_here(
    chunks: Iterator[Chunk], setup: Setup, stop: threading.Event
) -> Generator[tuple[Chunk, Encoded], None, None]:
    """Tokenize in this process alone, with the results of `Workers`."""
    tokenizer = setup.load()
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = "false"
    try:
        for chunk in chunks:
            if stop.is_set():
                raise KeyboardInterrupt
            yield chunk, encode(chunk, setup.reading, tokenizer, setup.dtype)
    finally:
        if before is None:
            del os.environ[_THREADS]
        else:
            os.environ[_THREADS] = before
        if isinstance(tokenizer, ChatTokenizer):
            tokenizer.renderer.close()


class LostWorkerError(Exception):
    """A worker was killed, for example by the system when memory ran out."""


@dataclass
class _Piece:
    chunk: Chunk
    result: Encoded | None = None


@dataclass
class Workers:
    """A pool of processes; they end with the context, and with this process however it ends."""

    count: int
    setup: Setup
    stop: threading.Event
    """Once it is set, `encoded` raises KeyboardInterrupt."""
    _free: deque[Connection] = field(default_factory=deque)
    """Workers that can take another chunk, listed once for each chunk that they can take."""
    _processes: list[Any] = field(default_factory=list)

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        with _uninterruptible():
            for _ in range(self.count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, self.setup), daemon=True)
                process.start()
                theirs.close()  # so that each side sees the end of the other
                self._free.append(ours)
                self._processes.append(process)
        self._free *= _QUEUED
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes:
            process.kill()  # they hold nothing that this process lacks
            process.join()

    def encoded(self, chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, Encoded]]:
        """Yield every chunk with its tokens, in order; at most a few chunks per worker are in memory."""
        pending: deque[_Piece] = deque()
        busy: dict[Connection, deque[_Piece]] = defaultdict(deque)
        following = next(chunks, None)
        while following or pending:
            while following and self._free and len(pending) < _AHEAD * self.count:
                piece, connection = _Piece(following), self._free.popleft()
                self._send(connection, following)
                busy[connection].append(piece)
                pending.append(piece)
                following = next(chunks, None)
            while pending and pending[0].result is not None:
                done = pending.popleft()
                yield done.chunk, done.result  # type: ignore[misc]
            if self.stop.is_set():
                raise KeyboardInterrupt
            if busy:
                self._receive(busy)

    def _send(self, connection: Connection, chunk: Chunk) -> None:
        try:
            connection.send(chunk)
        except OSError as error:
            raise self._lost() from error

    def _receive(self, busy: dict[Connection, deque[_Piece]]) -> None:
        for connection in wait(list(busy), _LOOK_S):
            assert isinstance(connection, Connection)
            try:
                answer = connection.recv()
            except (EOFError, OSError) as error:
                raise self._lost() from error
            if isinstance(answer, str):
                raise RuntimeError(f"a worker failed:\n{answer}")
            busy[connection].popleft().result = answer
            if not busy[connection]:
                del busy[connection]
            self._free.append(connection)

    def _lost(self) -> LostWorkerError:
        for process in self._processes:
            process.join(_LOOK_S)
        codes = [process.exitcode for process in self._processes if process.exitcode is not None]
        how = f"signal {-codes[0]}" if codes and codes[0] < 0 else f"exit code {codes or '?'}"
        return LostWorkerError(
            f"a worker ended by {how}; if memory ran out, use fewer: --workers N. What was"
            " prepared so far is kept: the same command continues from there"
        )


def _work(connection: Connection, setup: Setup) -> None:
    os.environ[_THREADS] = "false"
    chunks: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, chunks), daemon=True).start()
    try:
        tokenizer = setup.load()
        while True:
            connection.send(encode(chunks.get(), setup.reading, tokenizer, setup.dtype))
    except BaseException:
        with suppress(OSError):
            connection.send(traceback.format_exc())


def _receive(connection: Connection, chunks: queue.SimpleQueue[Chunk]) -> None:
    """Receive chunks as they come, so that the next one is present when one is done."""
    try:
        while True:
            chunks.put(connection.recv())
    except (EOFError, OSError):
        os._exit(1)  # the parent is dead


class _uninterruptible:  # noqa: N801
    """A context in which new processes ignore Ctrl-C from their start; the parent handles it."""

    def __enter__(self) -> None:
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal.signal(signal.SIGINT, signal.SIG_IGN)

    def __exit__(self, *_: object) -> None:
        if self._main:
            signal.signal(signal.SIGINT, self._before)
