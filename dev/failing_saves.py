"""Fail every write, fsync, rename and other act of a save once, and expect a whole checkpoint each time.

    python dev/failing_saves.py [ENOSPC|EIO|EROFS …]

A run has saved step 1. A process of its own saves step 2 and deletes step 1 with the code of a training
(`Saver`); one after the other, each of its acts on the file system fails with the error instead of being done.
Afterwards the newest checkpoint must be whole and hold step 1 or step 2 bit for bit, no other whole one may
have been lost for it, an error other than the injected one must not have been raised, and the next attempt
must be able to save. Needs nothing but nanoscale.
"""

from __future__ import annotations

import errno
import io
import os
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nanoscale.checkpoint import sharded, store
from nanoscale.checkpoint.saver import Saver
from nanoscale.config.schema import Checkpoint
from nanoscale.runs import fence
from nanoscale.runs.directory import RunDirectory
from tests.support.runs import create_run

ACTS = ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink", "symlink", "scandir")
SAVED, RAISED, OTHER = 0, 1, 2
"""The results of the process: the save returned, it raised the injected error, or another error."""


class Acts:
    """A counter of this process's file system operations, which fails one of them."""

    def __init__(self, failing: int, number: int) -> None:
        self.done: list[str] = []
        self._failing, self._number = failing, number

    def patch(self) -> None:
        """Let every operation of this process pass here first; permanently."""
        for name in ACTS:
            setattr(os, name, self._watched(name, getattr(os, name)))
        opened = io.open

        def watched_open(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if not set(mode) & set("wxa+"):
                return opened(file, mode, *args, **options)
            self.act("open")
            raw = _Raw(self, file, mode.replace("b", "").replace("t", ""))
            buffered = io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding="utf-8")

        io.open = watched_open  # type: ignore[assignment]

    def act(self, name: str) -> None:
        """Raise the error if this operation is the one that fails."""
        self.done.append(name)
        if len(self.done) - 1 == self._failing:
            raise OSError(self._number, os.strerror(self._number))

    def _watched(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **options: Any) -> Any:
            self.act(name)
            return act(*args, **options)

        return watched


class _Raw(io.FileIO):
    def __init__(self, acts: Acts, file: Any, mode: str) -> None:
        super().__init__(file, mode)
        self._acts = acts

    def write(self, data: Any) -> int:
        self._acts.act("write")
        return super().write(data) or 0


def state(step: int) -> dict[str, torch.Tensor]:
    """Return a tensor that is written at once, and some that share a buffer."""
    return {"large": torch.arange(1 << 15) * step, "small": torch.ones(5) * step}


def save(run: RunDirectory, attempt: int, step: int) -> None:
    """Save a step and delete the one before, as rank 0 of a training does."""
    settings = Checkpoint(keep_last=1, asynchronous=False)
    Saver(run.workspace(attempt), settings, rank=0).write(state(step), {"step": step})


def save_in_a_process(run: RunDirectory, failing: int, number: int) -> tuple[int, list[str]]:
    """Save step 2 while one operation fails; return how the process ended, and its operations."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        acts = Acts(failing, number)
        how = OTHER
        try:
            acts.patch()
            save(run, 1, 2)
            how = SAVED
        except OSError as error:
            how = RAISED if error.errno == number else OTHER
        except BaseException:
            traceback.print_exc()
        os.write(sender, " ".join(acts.done).encode())
        os._exit(how)
    os.close(sender)
    with open(receiver, "rb") as pipe:  # noqa: PTH123 - a descriptor, not a path
        done = pipe.read().decode().split()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), done


def problems(run: RunDirectory, how: int) -> list[str]:
    """List the violations after a process has ended; empty if there are none."""
    found = []
    stored = store.list_checkpoints(run.checkpoints)
    found += [
        f"{it.path.name}: {sentence}" for it in stored for sentence in store.find_damage(it.path)
    ]
    if how not in (SAVED, RAISED):
        found.append(f"the process ended otherwise ({how})")
    if not stored or (how == SAVED and stored[-1].step != 2):
        return [*found, f"steps {[it.step for it in stored]} are left"]
    loaded = state(0)
    fence.begin(run, 2)
    sharded.load_newest(run.workspace(2), loaded)
    expected = state(stored[-1].step)
    if not all(torch.equal(value, expected[name]) for name, value in loaded.items()):
        found.append(f"{stored[-1].path.name} holds other tensors")
    save(run, 2, 3)
    left = sorted(path.name for path in run.checkpoints.iterdir())
    if left != [".attempt-2", "latest", "step-00000003"]:
        found.append(f"the next attempt leaves {left}")
    return found


def fail_each_act(folder: Path, number: int) -> int:
    """Fail one operation after another with an error; return the number of operations after which something was
    wrong."""
    failing = wrong = 0
    outcomes: Counter[tuple[str, str]] = Counter()
    while True:
        run = create_run(folder, f"{errno.errorcode[number]}-{failing}")
        fence.begin(run, 1)
        save(run, 1, 1)
        how, done = save_in_a_process(run, failing, number)
        if len(done) <= failing:
            break  # the save has no further act
        kept = store.list_checkpoints(run.checkpoints)
        newest = kept[-1].step if kept else None
        outcomes[done[failing], f"step {newest} is the newest"] += 1
        for problem in problems(run, how):
            wrong += 1
            print(f"act {failing}, {done[failing]}: {problem}")
        failing += 1
    print(
        f"{errno.errorcode[number]}: {failing} acts of a save failed, one each time; wrong: {wrong}"
    )
    for (act, outcome), count in sorted(outcomes.items()):
        print(f"  {count:>3} {act:<8} {outcome}")
    return wrong


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    with tempfile.TemporaryDirectory() as folder:
        numbers = [getattr(errno, name) for name in names or ("ENOSPC", "EIO", "EROFS")]
        return int(sum(fail_each_act(Path(folder), number) for number in numbers) > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
