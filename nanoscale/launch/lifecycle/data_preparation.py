"""The process that prepares the rest of a training's texts, beside the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nanoscale.common.devices import cores
from nanoscale.config.schema import Data
from nanoscale.config.token_files import ALL_PARTS, FAILED_PARTS
from nanoscale.config.token_formats import is_parts
from nanoscale.runs.directory import write_json

_SHARE = 4
"""One core of so many prepares texts, unless `data.prepare_cores` says how many."""


@contextmanager
def preparing_rest(data: Data, report: Callable[[str], None]) -> Iterator[None]:
    """Prepare the texts that a training's folder of parts lacks while the body runs; prepared parts stay.

    `report` gets sentences for people, from a thread.
    """
    folder = Path(data.path or "")
    if not is_parts(folder) or (folder / ALL_PARTS).is_file():
        yield
        return
    (folder / FAILED_PARTS).unlink(missing_ok=True)
    workers = data.prepare_cores or max(1, cores() // _SHARE)
    command = [
        sys.executable,
        "-P",
        "-m",
        "nanoscale.data.prepare.by_parts",
        str(folder),
        str(workers),
        str(os.getpid()),
    ]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        start_new_session=True,
    )
    ended = threading.Event()

    def follow() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                report(line.rstrip("\n"))
        code = process.wait()
        if code and not ended.is_set() and not (folder / FAILED_PARTS).exists():
            message = f"the process that prepares the texts ended with {code}"
            report(message)
            write_json(folder / FAILED_PARTS, {"message": message})

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield
    finally:
        ended.set()
        with suppress(ProcessLookupError):  # a part that is unfinished is prepared again
            os.killpg(process.pid, signal.SIGKILL)
        follower.join()
