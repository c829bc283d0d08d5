"""The process that plays ranks: `python -m nanoscale.rehearse FOLDER`.

The process loads torch once and forks for every rank, as many at a time as cores and free memory allow. The
folder holds the task of `rehearsals.rehearse`, and receives the record of each rank. The process and its
copies are a process group, which ends with the process that started it.
"""

import gc
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import psutil

from nanoscale.common.versions import missing
from nanoscale.config.composing.frozen import load
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.processes.lifeline import die_with, end_group
from nanoscale.rehearse.life import play, told
from nanoscale.rehearse.played import compiled
from nanoscale.rehearse.played.cuda import Gpu
from nanoscale.rehearse.played.record import RankRecord
from nanoscale.rehearse.rehearsals import Task, record_file, snapshot_file
from nanoscale.runs.directory import write_json

_LOADED = (
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.testing._internal.distributed.fake_pg",
    "torch._dynamo",
    "nanoscale.backends.native",
)
"""Modules that every copy needs, which are loaded before the first fork."""
_CHECK_S = 0.05
_FIRST_COPY = 1 << 30
"""Bytes of memory that a copy is assumed to need until one has ended."""


@dataclass
class _Copy:
    """A copy of this process that plays a rank."""

    rank: int
    process: psutil.Process
    most: int = 0
    """Its peak of resident bytes."""


class Ranks:
    """The copies of this process, and the memory that they may use."""

    def __init__(self, folder: Path, task: Task, config: ResolvedConfig) -> None:
        self._folder, self._task, self._config = folder, task, config
        self._waiting = list(task.ranks)
        self._copies: dict[int, _Copy] = {}
        self._largest = _FIRST_COPY
        self._parent = os.getppid()

    def run(self) -> None:
        """Play all ranks, and print a line of JSON when a rank ends."""
        while self._waiting or self._copies:
            while self._waiting and self._may_start():
                self._start(self._waiting.pop(0))
            self._check_copies()
            if os.getppid() != self._parent:
                end_group(os.getpgid(0))
                sys.exit(1)
            time.sleep(_CHECK_S)

    def _may_start(self) -> bool:
        if not self._copies:
            return True
        if len(self._copies) >= self._task.processes:
            return False
        expected = sum(max(0, self._largest - copy.most) for copy in self._copies.values())
        return psutil.virtual_memory().available - expected > 1.2 * self._largest

    def _start(self, rank: int) -> None:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _play(rank, self._folder, self._task, self._config)
        self._copies[pid] = _Copy(rank, psutil.Process(pid))

    def _check_copies(self) -> None:
        for pid, copy in list(self._copies.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._copies[pid]
                self._report(copy, os.waitstatus_to_exitcode(status))
                continue
            copy.most = max(copy.most, copy.process.memory_info().rss)
            if copy.most > self._task.memory:
                os.kill(pid, signal.SIGKILL)

    def _report(self, copy: _Copy, code: int) -> None:
        self._largest = max(copy.most, self._largest if self._largest != _FIRST_COPY else 0)
        file = record_file(self._folder, copy.rank)
        if not file.is_file():
            reason = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            why = f"the process that played it ended with {reason}"
            if copy.most > self._task.memory:
                why = f"playing it needs more than {self._task.memory} bytes of host memory"
            write_json(file, RankRecord(copy.rank, error=why).as_json())
        print(json.dumps({"rank": copy.rank, "left": len(self._waiting)}), flush=True)


def _play(rank: int, folder: Path, task: Task, config: ResolvedConfig) -> None:
    """Play a rank in a copy of the process, write its record, also after an error, and exit."""
    record = RankRecord(rank)
    try:
        die_with(os.getppid(), group=os.getpgid(0))
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        gpu = Gpu(**task.gpu) if task.gpu is not None else None
        snapshot = snapshot_file(folder, rank) if task.snapshots else None
        record = play(config, rank, task.steps, gpu, snapshot, every_batch=task.every_batch)
    except BaseException as error:
        record.error = record.error or told(error)
    try:
        write_json(record_file(folder, rank), record.as_json())
    except BaseException:  # a copy never returns into the code of the process
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main(folder: Path) -> None:
    import torch

    task = Task.read(folder)
    for name in (*_LOADED, *(() if missing("triton") else compiled.LOADED)):
        import_module(name)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # so that copies share these pages
    Ranks(folder, task, load(folder / "config.yaml")).run()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
