"""The compute devices of this host, found without torch."""

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
    """The devices of this host for training."""

    kind: Literal["cpu", "cuda"]
    count: int
    """GPUs, or CPU cores if there is no GPU."""
    names: tuple[str, ...] = ()
    cores: int = 1
    """CPU cores that the ranks may use together."""


def detect() -> Devices:
    """Return the GPUs that CUDA would show a program here; the CPU's cores if there is none."""
    gpus = visible(_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if gpus:
        return Devices("cuda", len(gpus), tuple(name for name, _ in gpus), cores())
    return Devices("cpu", cores(), cores=cores())


def cores() -> int:
    """Count the CPU cores that this process may use: its affinity, and its container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, int(min(count or 1, _quota())))


Gpu = tuple[str, str]
"""Name and UUID."""


def visible(gpus: list[Gpu], setting: str | None) -> list[Gpu]:
    """Return the host's GPUs that a CUDA_VISIBLE_DEVICES leaves, by CUDA's rules.

    Entries are indices or beginnings of UUIDs; the first one that names no GPU, or one a second time, ends the
    list. An instance of a partitioned GPU (MIG) counts as a device.
    """
    if setting is None:
        return gpus
    chosen: list[Gpu] = []
    for entry in (item.strip() for item in setting.split(",")):
        gpu = _gpu_of_entry(gpus, entry)
        if gpu is None or gpu in chosen:
            break
        chosen.append(gpu)
    return chosen


def _gpu_of_entry(gpus: list[Gpu], entry: str) -> Gpu | None:
    if entry.isdecimal():
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    if entry.startswith("MIG-"):
        return (f"{gpus[0][0]} MIG", entry) if gpus else None
    return next((gpu for gpu in gpus if len(entry) > 4 and gpu[1].startswith(entry)), None)


def gpu_uuids() -> list[str]:
    """Return the UUID of each GPU that CUDA would show a program here."""
    return [uuid for _, uuid in visible(_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))]


def _gpus() -> list[Gpu]:
    def list_all(nvml: Any) -> list[Gpu]:
        count = nvml.nvmlDeviceGetCount()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        return [(nvml.nvmlDeviceGetName(gpu), nvml.nvmlDeviceGetUUID(gpu)) for gpu in handles]

    return _ask_driver(list_all) or []


def driver() -> str | None:
    """Return the version of the GPUs' driver; None if there is none."""
    return _ask_driver(lambda nvml: str(nvml.nvmlSystemGetDriverVersion()))


def driver_cuda() -> tuple[int, int] | None:
    """Return the newest version of CUDA that the ranks' driver library supports; None if unknown.

    NVML asks the libcuda that programs load here, so that a forward-compatibility package counts.
    """
    number = _ask_driver(lambda nvml: int(nvml.nvmlSystemGetCudaDriverVersion_v2()))
    return None if number is None else (number // 1000, number % 1000 // 10)


def gpu_memory() -> list[tuple[float, float]]:
    """Return free and whole memory of each GPU that CUDA would show a program here, GiB."""
    memory_of_gpus = _ask_gpus(lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu))
    return [(memory.free / 2**30, memory.total / 2**30) for memory in memory_of_gpus]


def gpu_capabilities() -> list[tuple[int, int]]:
    """Return the compute capability of each GPU that CUDA would show a program here; empty if unknown."""
    return _ask_gpus(lambda nvml, gpu: tuple(nvml.nvmlDeviceGetCudaComputeCapability(gpu)))


def gpu_links() -> list[tuple[int, int, int, int]]:
    """Return for each GPU that CUDA would show the number of active NVLinks, the lanes of PCIe in use, the most
    lanes, and the generation of PCIe; empty if unknown."""

    def links(nvml: Any, gpu: Any) -> tuple[int, int, int, int]:
        active = 0
        with suppress(nvml.NVMLError):  # a GPU without NVLink
            for link in range(nvml.NVML_NVLINK_MAX_LINKS):
                active += nvml.nvmlDeviceGetNvLinkState(gpu, link)
        lanes = nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu), nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu)
        return active, *lanes, nvml.nvmlDeviceGetMaxPcieLinkGeneration(gpu)

    return _ask_gpus(links)


def gpu_cores(highest: int) -> list[set[int]]:
    """Return the CPU cores near each GPU that CUDA would show a program here; empty if unknown.

    Args:
        highest: number of the highest core to consider.
    """
    word_count = highest // 64 + 1
    masks = _ask_gpus(lambda nvml, gpu: list(nvml.nvmlDeviceGetCpuAffinity(gpu, word_count)))
    return [
        {64 * word + bit for word, bits in enumerate(mask) for bit in range(64) if bits >> bit & 1}
        for mask in masks
    ]


def _ask_driver(query: Callable[[Any], T]) -> T | None:
    """Return NVML's answer; None if there is no driver, or no answer."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # errors of NVML or of its module, which may be missing
        return None
    try:
        return query(pynvml)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _ask_gpus(query: Callable[[Any, Any], T]) -> list[T]:
    """Return NVML's answer for each GPU that CUDA would show a program here; empty if there is none."""
    uuids = gpu_uuids()

    def ask_each(nvml: Any) -> list[T]:
        return [query(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid)) for uuid in uuids]

    return _ask_driver(ask_each) or []


def gpu_problem() -> str | None:
    """Return why a driver does not list its GPUs, if it should."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return None
    except pynvml.NVMLError as error:
        no_driver = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return None if error.value in no_driver else str(error)
    pynvml.nvmlShutdown()
    return None


def _quota() -> float:
    """Return the cores that the control group grants; infinity if it does not limit them."""
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("ascii", "replace").split()
        if quota != "max":
            return math.ceil(int(quota) / int(period))
    return math.inf
