"""Plants the fault that PLANTED_FAULT names into one rank: `KIND PLACE RANK STEP`, as in `hang forward 2 3`.

dev/first_causes.py puts this folder into PYTHONPATH of a training.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from importlib.machinery import PathFinder
from typing import Any

KIND, PLACE, RANK, STEP = os.environ.get("PLANTED_FAULT", "none none -1 -1").split()


def strike() -> None:
    """Do what the fault does, in the rank that it is planted in."""
    print(f"PLANTED {time.time()}", file=sys.stderr, flush=True)
    if KIND == "hang":
        time.sleep(3600)
    elif KIND == "spin":
        while True:
            pass
    elif KIND == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif KIND == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif KIND == "raise":
        raise ValueError("a planted mistake")


def slow_down(owner: Any) -> None:
    """Let one rank need STEP percent more time for each call."""
    inner = owner.forward

    def outer(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = inner(*args, **kwargs)
        if os.environ.get("RANK") == RANK:
            end = (
                time.perf_counter() + 3 * (time.perf_counter() - start) * int(STEP) / 100
            )  # also backward
            while time.perf_counter() < end:
                pass
        return result

    owner.forward = outer


def is_due(step: int) -> bool:
    return os.environ.get("RANK") == RANK and step == int(STEP)


def plant(loop: Any) -> None:
    """Wrap what the training loop calls at the fault's place."""
    import torch

    from nanoscale.checkpoint.saver import Saver
    from nanoscale.models.transformer import Block
    from nanoscale.parallel import process_group

    now = {"step": 0, "done": False}

    def before(owner: Any, name: str, *, backward: bool = False) -> None:
        inner = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            due = is_due(now["step"]) and not now["done"]
            if due:
                now["done"] = True
            if due and not backward:
                strike()
            result = inner(*args, **kwargs)
            if due and backward:
                result.register_hook(lambda gradient: strike())
            return result

        setattr(owner, name, outer)

    advance = loop.Training.advance

    def counted(self: Any) -> Any:
        now["step"] = self.progress.step + 1
        if PLACE == "data" and is_due(now["step"]):
            samples = self.samples

            class Data:
                def micro_batches(self, *args: Any) -> Any:
                    strike()
                    return samples.micro_batches(*args)

            self.samples = Data()
        return advance(self)

    loop.Training.advance = counted
    if KIND == "slow":
        slow_down(Block)
    elif PLACE in ("forward", "backward"):
        before(Block, "forward", backward=PLACE == "backward")
    elif PLACE == "evaluation":
        before(loop.Evaluator, "evaluate")
    elif PLACE == "save":
        before(Saver, "write")
    elif PLACE == "disk":
        sync = os.fsync

        def hung(fd: Any) -> None:
            if is_due(now["step"]):  # every later call hangs too, as on a disk that does not answer
                strike()
            sync(fd)

        os.fsync = hung
    elif PLACE == "join":
        join = process_group.join

        def stuck(*args: Any, **options: Any) -> None:
            if os.environ.get("RANK") == RANK:
                strike()
            join(*args, **options)

        process_group.join = stuck  # type: ignore[assignment]
    elif PLACE == "collective":
        plain = process_group.gather_numbers

        def other(numbers: Any, *more: Any) -> Any:
            if not is_due(now["step"]) or now["done"]:
                return plain(numbers, *more)
            now["done"] = True
            print(f"PLANTED {time.time()}", file=sys.stderr, flush=True)
            if KIND == "skip":
                return torch.tensor(numbers, dtype=torch.float64)[None].repeat(
                    process_group.world_size(), 1
                )
            if KIND == "order":
                torch.distributed.barrier()
                return plain(numbers, *more)
            return plain([*numbers, *numbers])[:, : len(numbers)]

        process_group.gather_numbers = other  # type: ignore[assignment]


class Finder:
    """Plants once the training loop is imported, in the fork server of the ranks."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name != "nanoscale.train.loop":
            return None
        spec = PathFinder.find_spec(name, path)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            plant(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if KIND != "none":
    sys.meta_path.insert(0, Finder)
