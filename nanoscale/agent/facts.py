"""Facts about this host that are available at once, without torch."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nanoscale.agent.gpu_software import gpu_software
from nanoscale.agent.network import addresses, interface_towards, resolve
from nanoscale.common.cache_folder import cache_path, user_cache
from nanoscale.common.devices import detect, gpu_memory, gpu_problem
from nanoscale.common.versions import optional_packages, versions
from nanoscale.processes.messages import Message
from nanoscale.processes.proc import available_gib
from nanoscale.runs.directory import write_problem

_STALE_S = 3600.0
"""Seconds; no compilation of an operation takes longer."""
_SOCKETS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def facts(order: Message, port: int | None) -> dict[str, Any]:
    """Return the facts by which the launcher or `doctor` judges this host; JSON. `port` is reserved here."""
    devices = detect()
    return {
        "hostname": socket.gethostname(),
        "machine": _machine(),
        "pid": os.getpid(),
        "executable": sys.executable,
        "versions": versions(),
        "optional_packages": optional_packages(),
        "devices": asdict(devices),
        "gpu_memory_gib": gpu_memory(),
        "gpu_problem": gpu_problem(),
        "gpu_software": gpu_software() if devices.kind == "cuda" else None,
        "memory_gib": available_gib(),
        "shared_memory_gib": _free_gib(Path("/dev/shm")),
        "root": _inspect_folder(Path(order["root"]), order["probe"]),
        "cache": _inspect_cache(order["cache_dir"]),
        "network": _network(order["master_addr"]),
        "stale_locks": _stale_locks(),
        "port": port,
        "asked_at": order["time"],
        "time": time.time(),
    }


def _machine() -> str:
    """Return an id that is equal for two names of one machine, and for nothing else."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii", "replace").strip()
        return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"  # containers share the kernel
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"


def _inspect_folder(root: Path, probe: str) -> dict[str, Any]:
    """Inspect the folder of runs, by the file that the launcher has written there."""
    # Path.exists() raises if a parent folder is not readable.
    visible = os.access(root / probe, os.F_OK)
    return {
        "path": str(root),
        "visible": visible,
        "problem": write_problem(root) if visible or os.access(root, os.F_OK) else None,
        "free_gib": _free_gib(root),
    }


def _inspect_cache(configured: str | None) -> dict[str, Any]:
    """Inspect the folder of prepared corpora, or its nearest existing parent."""
    try:
        folder = cache_path(configured)
    except RuntimeError:
        return {"path": "~/.cache", "problem": "the user has no home", "free_gib": None}
    existing = next(path for path in (folder, *folder.parents) if os.access(path, os.F_OK))
    return {
        "path": str(folder),
        "problem": write_problem(existing),
        "free_gib": _free_gib(existing),
    }


def _network(master_addr: str) -> dict[str, Any]:
    return {
        "addresses": addresses(),
        "asked_for": master_addr,
        "found": resolve(master_addr),
        "interface": interface_towards(master_addr),
        "chosen": {name: os.environ[name] for name in _SOCKETS if os.environ.get(name)},
    }


def _stale_locks() -> list[str]:
    """List locks that compilations of PyTorch extensions have left; the next one waits for them forever.

    DeepSpeed compiles its operations in this way. A lock is a file that the compiling process removes in the
    end.
    """
    configured = os.environ.get("TORCH_EXTENSIONS_DIR")
    try:
        locks = Path(configured).glob("*/lock") if configured else _extensions().glob("*/*/lock")
        return [str(path) for path in sorted(locks) if _age_s(path) > _STALE_S]
    except (OSError, RuntimeError):
        return []


def _extensions() -> Path:
    return user_cache() / "torch_extensions"


def _age_s(path: Path) -> float:
    with suppress(OSError):
        return time.time() - path.stat().st_mtime
    return 0.0


def _free_gib(folder: Path) -> float | None:
    with suppress(OSError):
        return shutil.disk_usage(folder).free / 2**30
    return None
