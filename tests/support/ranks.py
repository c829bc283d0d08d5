"""Real ranks for tests: processes from a fork server that has torch loaded, one thread each, over gloo."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

import torch.distributed as dist

LIMIT_S = 120
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.preload"])


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Call `function(rank, *args)` in `world_size` processes that can meet; what each returned.

    The function must be importable by name. The first exception of a rank is raised here with its traceback.
    """
    # The store listens on a port of the system's choice, so no other process can use it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = _context.Pipe()
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        process = _context.Process(target=_rank, args=(sender, environment, function, rank, args))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        return _collect(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(pipes: list[Any]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready: list[Any] = wait(waiting, timeout=LIMIT_S)
        if not ready:
            raise TimeoutError(f"only ranks {sorted(results)} ended within {LIMIT_S} s")
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                good, value = pipe.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} died") from None
            if not good:
                raise RuntimeError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank(
    sender: Any, environment: dict[str, str], function: Callable[..., Any], rank: int, args: Any
) -> None:
    import torch

    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        sender.send((True, function(rank, *args)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
    # Another rank may still be connecting to this one: stay until the test has all results, or is itself gone.
    with suppress(EOFError, OSError):
        sender.recv()
