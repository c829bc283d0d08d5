"""The process that prepares the rest of a training's texts, beside the launcher."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from nanoscale.common.devices import cores
from nanoscale.config.schema import Data
from nanoscale.config.token_files import ALL_PARTS, REFUSED
from nanoscale.config.token_formats import is_parts

_SHARE = 4
"""One core of so many prepares texts, unless `data.prepare_cores` says how many."""
_MOST_KILLS = 3
"""The number of kills of the process upon which the training ends."""


@dataclass
class RestOfTexts:
    """The preparation of the texts that a training's folder of parts lacks; prepared parts stay."""

    folder: Path
    workers: int
    report: Callable[[str], None]
    """A function that gets sentences for people, from a thread."""
    problem: str = ""
    """Why the rest cannot be prepared; "" while it can."""
    is_request: bool = False
    """True if the problem is a wrong request."""

    def __post_init__(self) -> None:
        self._has_ended = threading.Event()
        self._process = self._start()

    def follow(self) -> None:
        """Report what the process prints until it has prepared all texts; start it again if it is killed."""
        for kills in range(1, _MOST_KILLS + 1):
            assert self._process.stdout is not None
            last = ""
            with self._process.stdout:
                for line in self._process.stdout:
                    last = line.rstrip("\n")
                    self.report(last)
            code = self._process.wait()
            if code == 0 or self._has_ended.is_set():
                return
            who = "the process that prepares the texts"
            killed = f"{who} was killed by signal {-code}" if code < 0 else ""
            if not killed or kills == _MOST_KILLS:
                break
            self.report(f"{killed}; it is started again")
            self._process = self._start()
            if self._has_ended.is_set():
                self._kill()
        self.is_request, self.problem = code == REFUSED, killed or last

    def end(self) -> None:
        self._has_ended.set()
        self._kill()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):  # a part that is unfinished is prepared again
            os.killpg(self._process.pid, signal.SIGKILL)

    def _start(self) -> subprocess.Popen[str]:
        module = "nanoscale.data.prepare.by_parts"
        arguments = [str(self.folder), str(self.workers), str(os.getpid())]
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            start_new_session=True,
        )


@contextmanager
def preparing_rest(data: Data, report: Callable[[str], None]) -> Iterator[RestOfTexts | None]:
    """Prepare the rest of a training's texts while the body runs; None if there is no rest."""
    folder = Path(data.path or "")
    if not is_parts(folder) or (folder / ALL_PARTS).is_file():
        yield None
        return
    rest = RestOfTexts(folder, data.prepare_cores or max(1, cores() // _SHARE), report)
    follower = threading.Thread(target=rest.follow, daemon=True)
    follower.start()
    try:
        yield rest
    finally:
        rest.end()
        follower.join()
