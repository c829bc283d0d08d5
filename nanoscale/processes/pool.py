"""A pool of processes for independent work; results come back in the order of the work.

The processes ignore Ctrl-C, which the parent handles. They end with the context, and with the parent however
it ends.
"""

import multiprocessing
import os
import queue
import signal
import threading
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, Protocol, Self, TypeVar

from nanoscale.common.errors import UserError

_LOOK_S = 0.2
_AHEAD = 4
"""Results per process that may wait for the first of them."""

Work = TypeVar("Work")
Result = TypeVar("Result")
_Work = TypeVar("_Work", contravariant=True)
_Result = TypeVar("_Result", covariant=True)


class ProcessSetup(Protocol[_Work, _Result]):
    """The settings that a process gets once; they are pickled."""

    def load(self) -> Callable[[_Work], _Result]:
        """Return the function that does the work; called in the process."""


class LostProcessError(Exception):
    """A process was killed, for example by the system when memory ran out; the text says how."""


@dataclass
class Pool(Generic[Work, Result]):
    """A pool with a process for each setup."""

    setups: Sequence[ProcessSetup[Work, Result]]
    stop: threading.Event = field(default_factory=threading.Event)
    """Once it is set, `map` raises KeyboardInterrupt."""
    queued: int = 1
    """The work that a process has at a time: one in progress, and the next ones."""
    _free: deque[Connection] = field(default_factory=deque)
    """Processes that can take more work, listed once for each."""
    _processes: list[Any] = field(default_factory=list)

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        is_main = threading.current_thread() is threading.main_thread()
        # new processes ignore Ctrl-C from their start
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main else None
        try:
            for setup in self.setups:
                local, remote = context.Pipe()
                process = context.Process(target=_serve, args=(remote, setup), daemon=True)
                process.start()
                remote.close()  # so that each side sees the end of the other
                self._free.append(local)
                self._processes.append(process)
        finally:
            if is_main:
                signal.signal(signal.SIGINT, before)
        self._free *= self.queued
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()  # they hold nothing that this process lacks
            process.join()

    def map(self, work: Iterable[Work]) -> Iterator[tuple[Work, Result]]:
        """Yield all work with its results, in order; only some of it is in memory at a time.

        Raises:
            UserError: a process raised it.
            LostProcessError: a process was killed.
        """
        remaining = iter(work)
        pending: deque[tuple[Work, list[Result]]] = deque()  # work, and its result once it is known
        busy: dict[Connection, deque[list[Result]]] = defaultdict(deque)
        more = True
        while more or pending:
            while more and self._free and len(pending) < _AHEAD * len(self.setups):
                following = next(remaining, self)
                if following is self:
                    more = False
                    break
                connection = self._free.popleft()
                try:
                    connection.send(following)
                except OSError as error:
                    raise self._lost() from error
                results: list[Result] = []
                busy[connection].append(results)
                pending.append((following, results))  # type: ignore[arg-type]
            while pending and pending[0][1]:
                done, results = pending.popleft()
                yield done, results[0]
            if self.stop.is_set():
                raise KeyboardInterrupt
            if busy:
                self._receive(busy)

    def _receive(self, busy: dict[Connection, deque[list[Result]]]) -> None:
        for connection in wait(list(busy), _LOOK_S):
            assert isinstance(connection, Connection)
            try:
                result, error = connection.recv()
            except (EOFError, OSError) as broken:
                raise self._lost() from broken
            if isinstance(error, UserError):
                raise error
            if error is not None:
                raise RuntimeError(f"a process of the pool failed:\n{error}")
            busy[connection].popleft().append(result)
            if not busy[connection]:
                del busy[connection]
            self._free.append(connection)

    def _lost(self) -> LostProcessError:
        for process in self._processes:
            process.join(_LOOK_S)
        codes = [process.exitcode for process in self._processes if process.exitcode is not None]
        return LostProcessError(
            f"signal {-codes[0]}" if codes and codes[0] < 0 else f"exit code {codes or '?'}"
        )


def _serve(connection: Connection, setup: ProcessSetup[Any, Any]) -> None:
    """Do the work that arrives, until the parent ends."""
    received: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, received), daemon=True).start()
    with suppress(OSError):
        try:
            do = setup.load()
            while True:
                connection.send((do(received.get()), None))
        except UserError as error:
            connection.send((None, error))
        except Exception:
            connection.send((None, traceback.format_exc()))


def _receive(connection: Connection, received: queue.SimpleQueue[Any]) -> None:
    """Receive work as it comes, so that the next one is present when one is done."""
    try:
        while True:
            received.put(connection.recv())
    except (EOFError, OSError):
        os._exit(1)  # the parent is dead
