"""What this host is like: everything that can be found out at once, without torch."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import nanoscale
from nanoscale.agent.host import available_gib
from nanoscale.agent.network import addresses, interface_towards, resolve
from nanoscale.channel import Message
from nanoscale.devices import detect, driver

_PACKAGES = ("torch", "deepspeed")


def facts(order: Message, port: int | None) -> dict[str, Any]:
    """What the launcher, or `doctor`, judges this host by; JSON. `port`: the one that is reserved here."""
    return {
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "executable": sys.executable,
        "versions": _versions(),
        "devices": asdict(detect()),
        "memory_gib": available_gib(),
        "shared_memory_gib": _free_gib(Path("/dev/shm")),
        "root": _look_at(Path(order["root"]), order["probe"]),
        "network": _network(order["master_addr"]),
        "port": port,
        "asked_at": order["time"],
        "time": time.time(),
    }


def source_sum() -> str:
    """A sum of this nanoscale's own source: two copies of one version may differ."""
    folder = Path(nanoscale.__file__).parent
    total = hashlib.blake2b(digest_size=4)
    for path in sorted(folder.rglob("*.py")):
        total.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return total.hexdigest()


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "nanoscale": f"{nanoscale.__version__} ({source_sum()})",
    }
    for name in _PACKAGES:
        versions[name] = None
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions | {"driver": driver()}


def _look_at(root: Path, probe: str) -> dict[str, Any]:
    """The folder of runs, by the file that the launcher has put there."""
    return {
        "visible": (root / probe).is_file(),
        "writable": os.access(root, os.W_OK | os.X_OK),
        "free_gib": _free_gib(root),
    }


def _network(master_addr: str) -> dict[str, Any]:
    own = addresses()
    found = resolve(master_addr)
    return {
        "addresses": own,
        "master": found,
        "is_master": any(address in own for address in found),
        "interface": interface_towards(master_addr),
    }


def _free_gib(folder: Path) -> float | None:
    with suppress(OSError):
        return shutil.disk_usage(folder).free / 2**30
    return None
