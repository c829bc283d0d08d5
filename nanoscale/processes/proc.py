"""Processes and memory as Linux shows them in /proc, and settings of a process: cores, memory, open files."""

import ctypes
import os
import re
import resource
import time
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import suppress
from pathlib import Path

from nanoscale.common.devices import gpu_cores

_TRACKER = b"multiprocessing.resource_tracker"
_EXEC_S = 1.0
_START, _MEMORY, _ENVIRONMENT_START, _ENVIRONMENT_END = 19, 20, 47, 48
"""Places of starttime, vsize, env_start and env_end in /proc/PID/stat, counted from the state: proc(5)."""
_PR_SET_PDEATHSIG = 1


def all_pids() -> Iterator[int]:
    """Yield the processes of this machine."""
    return (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))


def is_alive(pid: int) -> bool:
    """True if a process has not ended; an unreaped one has."""
    return _stat(pid)[:1] not in ([], ["Z"], ["X"])


def is_stopped(pid: int) -> bool:
    """True if a process was stopped by a signal, and not by a debugger."""
    return _stat(pid)[:1] == ["T"]


def environment(pid: int) -> list[bytes]:
    """Read the variables of a process, each as NAME=VALUE.

    While a process begins a new program, the kernel has its memory but not yet its environment, and shows none;
    that moment is waited for, but not in a process that has ended, or has an environment of length zero, or in
    a thread of the kernel.

    Raises:
        OSError: the process has ended, or belongs to another user.
    """
    path, end = Path(f"/proc/{pid}/environ"), time.monotonic() + _EXEC_S
    while not (content := path.read_bytes()) and time.monotonic() < end:
        fields = _stat(pid)
        if len(fields) <= _ENVIRONMENT_END or fields[_MEMORY] == "0":
            break
        if fields[_ENVIRONMENT_START] == fields[_ENVIRONMENT_END] != "0":
            break
        time.sleep(0.001)
    return content.split(b"\0")


def start_ticks(pid: int) -> int | None:
    """Return the start of a process in the kernel's ticks; None if it does not exist, or is a zombie."""
    fields = _stat(pid)
    return int(fields[_START]) if fields and fields[0] not in ("Z", "X") else None


def kernel_id(namespace: str) -> str:
    """Return an id of boot and namespace (`pid`, `net`), since containers share a kernel; "" if unknown."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii", "replace").strip()
        return f"{boot} {Path(f'/proc/self/ns/{namespace}').stat().st_ino}"
    return ""


def _stat(pid: int) -> list[str]:
    """Return the fields of a process from its state on; empty if it does not exist."""
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text("ascii", "replace")
        return stat.rpartition(")")[2].split()
    return []


def is_tracker(pid: int) -> bool:
    """True if a process is Python's resource tracker, which exits by itself when it is not needed."""
    with suppress(OSError):
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def oom_kills() -> int:
    """Count the processes that the kernel's out-of-memory killer has ended since the machine started."""
    return _number("/proc/vmstat", r"^oom_kill (\d+)$") or 0


def available_gib() -> float | None:
    """Return the host memory available to programs, GiB; None if the kernel does not report it."""
    kib = _number("/proc/meminfo", r"^MemAvailable: +(\d+) kB$")
    return None if kib is None else kib / 2**20


def _number(path: str, pattern: str) -> int | None:
    with suppress(OSError):
        match = re.search(pattern, Path(path).read_text("ascii", "replace"), re.MULTILINE)
        return int(match[1]) if match else None
    return None


# --- settings ---------------------------------------------------------------------------------------


def bind_to_gpu(local_rank: int, ranks: int) -> None:
    """Bind this process, and the threads and processes that it starts, to the cores near its GPU.

    Memory that it pins is then on the GPU's side too. A binding by SLURM, a cpuset or taskset is only
    narrowed.
    """
    allowed = os.sched_getaffinity(0)
    cores = near_cores(local_rank, ranks, gpu_cores(max(allowed)), allowed)
    if cores is not None:
        os.sched_setaffinity(0, cores)


def near_cores(
    local_rank: int, ranks: int, gpus: Sequence[Set[int]], allowed: Set[int]
) -> Set[int] | None:
    """Return the cores to bind a rank to; None if it stays unbound.

    It stays unbound if its GPU's cores are unknown, if none of them or only they are allowed, or if the ranks
    near them would have fewer cores than an even share of all.

    Args:
        ranks: ranks on this host.
        gpus: the cores near each GPU.
        allowed: cores that this process may run on.
    """
    if ranks > len(gpus):
        return None
    near = gpus[local_rank] & allowed
    neighbors = sum(gpus[rank] & allowed == near for rank in range(ranks))
    if not near or near == allowed or neighbors * (len(allowed) // ranks) > len(near):
        return None
    return near


def ranges(numbers: Iterable[int]) -> str:
    """Return `0-3,8` for 0, 1, 2, 3 and 8."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{first}-{last}" if first != last else str(first) for first, last in spans)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""The numbers of mallopt(3)'s M_TRIM_THRESHOLD and M_MMAP_THRESHOLD."""
_KEPT_BYTES = 2**28
_LARGE_BYTES = 2**30


def end_with_parent(number: int) -> None:
    """Receive this signal when the process that has started this one dies (Linux: prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def keep_freed_memory() -> None:
    """Let this process keep freed memory for its next allocations; does nothing without glibc.

    A training step frees its activations and gradients, and the next one needs as much again. glibc returns
    free memory at the end of the heap, and every tensor above 32 MiB, to the system, so each step begins with
    pages that the system has to allocate and to clear: 1 to 5 % of a step's time on two cores. With this, up
    to 256 MiB stay at the end of the heap, and tensors of up to 1 GiB are allocated in it, which took up to 3
    % more memory. The user's own settings are kept.
    """
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
    mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)


MANY_FILES = 1 << 16
"""More than a rank of 10,000 opens: a connection to every other rank in several groups."""


def allow_open_files(count: int = MANY_FILES) -> None:
    """Raise this process's limit of open files to `count`, or to the hard limit; children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
