"""A series of measurements in limited time: each has a limit, and results are written at once."""

from __future__ import annotations

import ctypes
import json
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu.table import lines_of, render
from nanoscale.common.devices import gpu_memory

Figures = dict[str, Any]

GRACE_S = 5.0
"""Seconds for a command to end all of its processes, before they are killed."""
FREE_S = 30.0
"""The longest wait for the memory of the GPU to be free after that."""
CLOSING_S = 10.0
"""Seconds of a session that are reserved for ending the last command, and for writing."""
LOG_LINES = 40
_SUBREAPER, _DEATH_SIGNAL = 36, 1
"""The numbers of prctl(2)."""
_OUT_OF_MEMORY = re.compile(r"GPU ran out of memory|CUDA out of memory|OutOfMemoryError")


class NotMeasured(Exception):  # noqa: N818
    """The reason why there are no figures.

    Attributes:
        log: all output of the command.
    """

    def __init__(self, why: str, log: str = "") -> None:
        super().__init__(why)
        self.log = log


class TooSlow(NotMeasured):
    """A command was cut off at its limit, which proves no fault."""


class Failed(NotMeasured):
    """A command has failed by itself."""

    def __init__(self, log: str) -> None:
        super().__init__(f"failed: {cause(log)}", log)
        if self.out_of_memory:
            self.args = (f"does not fit: {cause(log)}",)

    @property
    def out_of_memory(self) -> bool:
        """True if the memory of the GPU did not suffice."""
        return bool(_OUT_OF_MEMORY.search(self.log))


def cause(log: str) -> str:
    """Return the line of a log that names the error: nanoscale's own, or the last one."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("error:")]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    named = ours[:1] or raised[-1:] or lines[-1:] or ["it printed nothing"]
    return named[0][:300]


def gpu_used_gib() -> float:
    """Return the memory in use on all GPUs, GiB, by any process; 0 without a GPU."""
    return sum(total - free for free, total in gpu_memory())


@dataclass
class Session:
    """A series of measurements.

    Attributes:
        ends: the time at which all measurements end, by time.monotonic().
        results: the path of the results, without .json and .txt.
        used_gib: the memory in use on the GPU.
        about: facts about all rows.
        predictions: figures by row, which are stored as `compiled` next to what was measured.
        began, until: the start of the present measurement, and its limit.
    """

    ends: float
    results: Path
    used_gib: Callable[[], float] = gpu_used_gib
    about: Figures = field(default_factory=dict)
    predictions: dict[str, Figures] = field(default_factory=dict)
    rows: list[Figures] = field(default_factory=list)
    began: float = 0.0
    until: float = 0.0

    def __post_init__(self) -> None:
        # Orphans of a command become children of this process, which can then end them.
        ctypes.CDLL(None).prctl(_SUBREAPER, 1)
        signal.signal(signal.SIGTERM, _leave)
        self._idle_gib = self.used_gib()

    def measure(
        self, what: str, act: Callable[[], Figures], *, limit_s: float, needed_s: float = 0.0
    ) -> Figures:
        """Write a row with the figures of `act`, or with the reason why there are none.

        Args:
            limit_s: its longest duration, seconds.
            needed_s: it is not started if less time is left, seconds.
        """
        self.began = time.monotonic()
        self.until = min(self.began + limit_s, self.ends)
        self.save(running=what)
        left = self.ends - self.began
        try:
            if left < max(needed_s, 1.0):
                raise NotMeasured(f"left out: {max(left, 0):.0f} s left, {needed_s:.0f} s needed")
            row = act()
        except NotMeasured as why:
            row = {"why": str(why), "log": why.log.splitlines()[-LOG_LINES:]}
        except Exception as error:  # an error of the benchmark itself leaves the other rows alone
            row = {"why": f"failed: {type(error).__name__}: {error}"}
        row = {"what": what, "seconds": round(time.monotonic() - self.began, 1), **row}
        if what in self.predictions:
            row["compiled"] = self.predictions[what]
        self.rows.append(row)
        self.save()
        print("\n".join(lines_of(row)), flush=True)
        return row

    def run(self, command: list[str]) -> str:
        """Return the standard output of a command that ends well and in time.

        Raises:
            TooSlow: it was cut off.
            Failed: it ended otherwise.
        """
        late = False
        text: dict[str, Any] = {"mode": "w+", "encoding": "utf-8", "errors": "replace"}
        with tempfile.TemporaryFile(**text) as out, tempfile.TemporaryFile(**text) as err:
            process = subprocess.Popen(command, stdout=out, stderr=err, preexec_fn=_die_with_this)
            try:
                process.wait(timeout=max(0.0, self.until - time.monotonic()))
            except subprocess.TimeoutExpired:
                late = True
            finally:
                end_all(process)
                self._wait_for_memory()
            out.seek(0)
            err.seek(0)
            printed, log = out.read(), err.read()
        if late:
            raise TooSlow(f"cut off after {self.until - self.began:.0f} s", printed + log)
        if process.returncode:
            raise Failed(printed + log)
        return printed

    def _wait_for_memory(self) -> None:
        """Return once the GPU's memory is as free as it was; a note says if it is not."""
        deadline = min(time.monotonic() + FREE_S, self.ends + GRACE_S)
        while (used := self.used_gib()) > self._idle_gib + 1:
            if time.monotonic() > deadline:
                note = f"{used - self._idle_gib:.1f} GiB of the GPU are still in use after this row"
                self.about.setdefault("notes", []).append(f"row {len(self.rows) + 1}: {note}")
                return
            time.sleep(0.1)

    def save(self, **now: str) -> None:
        """Write all results atomically."""
        document = {**self.about, **now, "rows": self.rows}
        write(self.results.with_suffix(".json"), json.dumps(document, indent=1) + "\n")
        write(self.results.with_suffix(".txt"), render([document]) + "\n")


def end_all(process: subprocess.Popen[Any]) -> None:
    """End a command and all that it has started: ask the command, and kill the rest after a grace."""
    process.terminate()  # nothing happens if it has ended
    psutil.wait_procs(psutil.Process().children(recursive=True), timeout=GRACE_S)
    for _ in range(5):  # killed processes may have started others just before
        rest = psutil.Process().children(recursive=True)
        for one in rest:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(rest, timeout=1)


def write(file: Path, text: str) -> None:
    beside = file.with_name(f".{file.name}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(file)


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def _die_with_this() -> None:
    """Let the kernel end a command whose session was killed."""
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM)
