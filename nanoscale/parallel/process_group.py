"""The process group of all ranks, and the few collectives on Python objects outside of steps."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

T = TypeVar("T")


def join(
    world_size: int, device: torch.device, timeout_s: float, *, even_alone: bool = False
) -> None:
    """Join the other ranks; a single rank does nothing. Tensors in host memory always use gloo.

    Args:
        even_alone: a single rank has a group too: it shards over itself, to offload.
        timeout_s: how long ranks wait for each other in any group, seconds.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if world_size == 1:
        if even_alone:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    # A new group does not inherit its parent's timeout: it uses these.
    timeout = timedelta(seconds=timeout_s)
    distributed_c10d.default_pg_timeout = timeout
    distributed_c10d.default_pg_nccl_timeout = timeout
    if device.type == "cpu":
        # Otherwise PyTorch records every collective with its Python stack, which nobody reads; in 2.11 threads
        # do so without a lock, and one of them writes a checkpoint.
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
        _use_batch_scheduling()
    dist.init_process_group(backend, device_id=device if device.type == "cuda" else None)


def _use_batch_scheduling() -> None:
    """Let this thread, and threads that it starts from now on, wait for their turn when they wake up.

    A thread of gloo polls its sockets as long as another holds their lock. If it got that thread's core on
    waking up, both would stall until its time slice ends: with 4 ranks on 2 cores a small all_reduce took 6.0
    ms, and takes 1.3 without that.
    """
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:  # nobody changed it
        with suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def local_device(device_type: str) -> torch.device:
    """Return this rank's device, by its number on the host."""
    if device_type == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's value, in the order of ranks, on every rank. `group`: another one of all ranks."""
    if not dist.is_initialized():
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value, group)
    return values


def broadcast(read: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Return on every rank what `read` returns on rank 0; the others do not call it.

    `group`: another one of all ranks.
    """
    if not dist.is_initialized():
        return read()
    values: list[Any] = [read() if rank() == 0 else None]
    dist.broadcast_object_list(values, src=0, group=group)
    return values[0]


def gather_numbers(numbers: Sequence[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return every rank's numbers, `[ranks, numbers]` in host memory, the same on every rank."""
    local = torch.tensor(numbers, dtype=dtype)
    if not dist.is_initialized():
        return local[None]
    all_numbers = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(all_numbers, local)
    return torch.stack(all_numbers)
