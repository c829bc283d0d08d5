"""What this host has to compute with, found without torch."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Devices:
    """What this host has to train on."""

    kind: Literal["cpu", "cuda"]
    count: int
    """GPUs, or CPU cores where there is no GPU"""
    names: tuple[str, ...] = ()
    cores: int = 1
    """CPU cores that the ranks may use together"""


def detect() -> Devices:
    """The GPUs that CUDA would show a program here; the CPU's cores where there is none."""
    gpus = visible(_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if gpus:
        return Devices("cuda", len(gpus), tuple(name for name, _ in gpus), cores())
    return Devices("cpu", cores(), cores=cores())


def cores() -> int:
    """CPU cores that this process may use: its affinity, and its container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, int(min(count or 1, _quota())))


Gpu = tuple[str, str]
"""name and UUID"""


def visible(gpus: list[Gpu], setting: str | None) -> list[Gpu]:
    """What is left of the host's GPUs under a CUDA_VISIBLE_DEVICES, in CUDA's reading of it.

    Entries are indices or beginnings of UUIDs; the first one that names no GPU, or one a second
    time, ends the list. An instance of a partitioned GPU (MIG) counts as a device.
    """
    if setting is None:
        return gpus
    chosen: list[Gpu] = []
    for entry in (word.strip() for word in setting.split(",")):
        gpu = _named(gpus, entry)
        if gpu is None or gpu in chosen:
            break
        chosen.append(gpu)
    return chosen


def _named(gpus: list[Gpu], entry: str) -> Gpu | None:
    if entry.isdecimal():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    if entry.startswith("MIG-"):
        return (gpus[0][0] + " MIG", entry) if gpus else None
    return next((gpu for gpu in gpus if len(entry) > 4 and gpu[1].startswith(entry)), None)


def _gpus() -> list[Gpu]:
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [(pynvml.nvmlDeviceGetName(h), pynvml.nvmlDeviceGetUUID(h)) for h in handles]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def driver() -> str | None:
    """Version of the GPUs' driver; None where there is none."""
    return _ask_driver(lambda nvml: str(nvml.nvmlSystemGetDriverVersion()))


def driver_cuda() -> tuple[int, int] | None:
    """Return the newest version of CUDA that the ranks' driver library supports; None if it is unknown.

    NVML asks the libcuda that programs load here, so that a forward-compatibility package counts.
    """
    number = _ask_driver(lambda nvml: int(nvml.nvmlSystemGetCudaDriverVersion_v2()))
    return None if number is None else (number // 1000, number % 1000 // 10)


def gpu_memory() -> list[tuple[float, float]]:
    """Free and whole memory of each GPU that CUDA would show a program here, GiB."""
    found = _ask_gpus(lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu))
    return [(memory.free / 2**30, memory.total / 2**30) for memory in found]


def gpu_capabilities() -> list[tuple[int, int]]:
    """Return the compute capability of each GPU that CUDA would show a program here; empty if unknown."""
    return _ask_gpus(lambda nvml, gpu: tuple(nvml.nvmlDeviceGetCudaComputeCapability(gpu)))


def gpu_cores(highest: int) -> list[set[int]]:
    """Return the CPU cores near each GPU that CUDA would show a program here; empty if unknown.

    Args:
        highest: number of the highest core that is asked for.
    """
    words = highest // 64 + 1
    masks = _ask_gpus(lambda nvml, gpu: list(nvml.nvmlDeviceGetCpuAffinity(gpu, words)))
    return [
        {64 * word + bit for word, bits in enumerate(mask) for bit in range(64) if bits >> bit & 1}
        for mask in masks
    ]


def _ask_driver(ask: Callable[[Any], T]) -> T | None:
    """Return what NVML answers; None if there is no driver, or it does not know."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # of NVML or of its module, which may be missing
        return None
    try:
        return ask(pynvml)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _ask_gpus(ask: Callable[[Any, Any], T]) -> list[T]:
    """Return what NVML answers for each GPU that CUDA would show a program here; empty if it does not."""
    gpus = visible(_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))

    def ask_each(nvml: Any) -> list[T]:
        return [ask(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)) for _, uuid in gpus]

    return _ask_driver(ask_each) or []


def gpu_problem() -> str | None:
    """Why GPUs cannot be asked for, where there is a driver that should answer."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return None
    except pynvml.NVMLError as error:
        absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return None if error.value in absent else str(error)
    pynvml.nvmlShutdown()
    return None


def _quota() -> float:
    """Cores that the control group grants; infinity where it does not say."""
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("ascii", "replace").split()
        if quota != "max":
            return math.ceil(int(quota) / int(period))
    return math.inf
