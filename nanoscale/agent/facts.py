"""Facts about this host that are available at once, without torch."""

import ast
import getpass
import mmap
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from nanoscale.common import devices
from nanoscale.common.cache_folder import cache_path, user_cache
from nanoscale.common.json_text import Json
from nanoscale.common.units import byte_size
from nanoscale.common.versions import optional_packages, versions
from nanoscale.processes.messages import Message
from nanoscale.processes.network import addresses, interface_towards, resolve
from nanoscale.processes.proc import available_gib, kernel_id
from nanoscale.runs.directory import write_problem

_STALE_S = 3600.0
"""Seconds; no compilation of an operation takes longer."""
_PORTS = "sys/class/infiniband/*/ports/*"
_CAP_IPC_LOCK = 14
"""The capability to lock any amount of memory: capabilities(7)."""
_LEAST_LOCKED_BYTES = 1 << 30
"""Less memory than this may be too little for what NCCL registers with InfiniBand."""
_NCCL_OFF = {"NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_NET_GDR_LEVEL": "LOC"}
"""Settings with which NCCL does not use InfiniBand, or not GPUDirect RDMA."""
_SOCKETS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def facts(order: Message, port: int | None) -> Json:
    """Return the facts by which the launcher or `doctor` judges this host; JSON. `port` is reserved here."""
    local_devices, root = devices.detect(), Path(order["root"])
    # Path.exists() raises if a parent folder is not readable.
    visible = os.access(root / order["probe"], os.F_OK)
    return {
        "hostname": socket.gethostname(),
        # Equal for two names of one machine, and for nothing else.
        "machine": kernel_id("net") or f"{socket.gethostname()} {os.getpid()}",
        "pid": os.getpid(),
        "executable": sys.executable,
        "versions": versions(),
        "optional_packages": optional_packages(),
        "devices": asdict(local_devices),
        "gpu_memory_gib": devices.gpu_memory(),
        "gpu_problem": devices.gpu_problem(),
        # By these the launcher decides if the ranks can use the GPUs.
        "gpu_software": {
            "driver_cuda": devices.driver_cuda(),
            "capabilities": devices.gpu_capabilities(),
            "links": devices.gpu_links(),
            "fabric": fabric(Path("/")),
            "infiniband": infiniband(Path("/"), os.environ),
            "torch": torch_build(),
            "compiler": compiler(os.environ),
        }
        if local_devices.kind == "cuda"
        else None,
        "memory_gib": available_gib(),
        "shared_memory_gib": _free_gib(Path("/dev/shm")),
        # the folder of runs, by the file that the launcher has written there
        "root": {
            "path": str(root),
            "visible": visible,
            "problem": write_problem(root) if visible or os.access(root, os.F_OK) else None,
            "free_gib": _free_gib(root),
        },
        "cache": _inspect_cache(order["cache_dir"]),
        "compile_cache": _inspect(_compile_cache()),
        "network": {
            "addresses": addresses(),
            "asked_for": order["master_addr"],
            "found": resolve(order["master_addr"]),
            "interface": interface_towards(order["master_addr"]),
            "chosen": {name: os.environ[name] for name in _SOCKETS if os.environ.get(name)},
        },
        "stale_locks": _stale_locks(),
        "port": port,
        "asked_at": order["time"],
        "time": time.time(),
    }


def _inspect_cache(configured: str | None) -> Json:
    """Inspect the folder of prepared corpora, or its nearest existing parent."""
    try:
        folder = cache_path(configured)
    except RuntimeError:
        return {"path": "~/.cache", "problem": "the user has no home", "free_gib": None}
    return _inspect(folder)


def _compile_cache() -> Path:
    """Return the folder in which Inductor keeps compiled code; its default is from
    torch._inductor.runtime.cache_dir_utils."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # in a container: the user has no name
        user = f"uid_{os.getuid()}"
    folder = "torchinductor_" + re.sub(r'[\\/:*?"<>|]', "_", user)
    return Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or Path(tempfile.gettempdir(), folder))


def _inspect(folder: Path) -> Json:
    existing = next(path for path in (folder, *folder.parents) if os.access(path, os.F_OK))
    return {
        "path": str(folder),
        "problem": write_problem(existing),
        "free_gib": _free_gib(existing),
    }


def _stale_locks() -> list[str]:
    """List locks that compilations of PyTorch extensions have left; the next one waits for them forever.

    DeepSpeed compiles its operations in this way. A lock is a file that the compiling process removes in the
    end.
    """
    configured = os.environ.get("TORCH_EXTENSIONS_DIR")
    try:
        default = user_cache() / "torch_extensions"
        locks = Path(configured).glob("*/lock") if configured else default.glob("*/*/lock")
        stale = []
        for path in sorted(locks):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _STALE_S:
                    stale.append(str(path))
        return stale
    except (OSError, RuntimeError):
        return []


def _free_gib(folder: Path) -> float | None:
    with suppress(OSError):
        return shutil.disk_usage(folder).free / 2**30
    return None


_ARCHITECTURES = re.compile(rb"\0((?:sm|compute)_\d+[af]?(?: (?:sm|compute)_\d+[af]?)*)\0")
_COMPILE_S = 20.0


def fabric(root: Path) -> list[str]:
    """Return the rate of each active port of InfiniBand or RoCE, and `GPUDirect RDMA` if NCCL can use it.

    NCCL needs the module nvidia_peermem for it, or the DMA-BUF of NVIDIA's open kernel modules.

    Args:
        root: the root folder of the system.
    """
    found = []
    for port in sorted(root.glob(_PORTS)):
        if "ACTIVE" in _read(port / "state"):
            found.append(_read(port / "rate").partition(" (")[0].strip())
    names = ("nvidia_peermem", "nv_peer_mem")
    direct = any((root / "sys" / "module" / name).exists() for name in names)
    direct |= "Open Kernel Module" in _read(root / "proc" / "driver" / "nvidia" / "version")
    return found + ["GPUDirect RDMA"] * direct


def infiniband(root: Path, environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return what keeps NCCL from using this host's InfiniBand, each with a remedy; [] without InfiniBand."""
    ports = [it for it in root.glob(_PORTS) if "InfiniBand" in _read(it / "link_layer")]
    active = any("ACTIVE" in _read(port / "state") for port in ports)
    devices = root.glob("dev/infiniband/uverbs*")
    usable = any(os.access(device, os.R_OK | os.W_OK) for device in devices)
    capabilities = re.search(r"CapEff:\s*(\w+)", _read(root / "proc" / "self" / "status"))
    may_lock = capabilities and int(capabilities[1], 16) >> _CAP_IPC_LOCK & 1
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limited = not may_lock and limit != resource.RLIM_INFINITY and limit < _LEAST_LOCKED_BYTES
    off = [f"{it}={value}" for it, value in _NCCL_OFF.items() if environment.get(it) == value]
    problems = {
        ("no port is active", "look at `ibstat`, and for a subnet manager (`sminfo`)"): not active,
        (
            "the user may not open its devices",
            "make /dev/infiniband/uverbs* readable and writable; in a container: --device=/dev/infiniband",
        ): not usable,
        (
            f"processes may lock only {byte_size(limit)} of memory",
            "`memlock unlimited` in /etc/security/limits.conf; in a container: --ulimit memlock=-1",
        ): limited,
        (
            "no GPUDirect RDMA: messages pass through host memory",
            "`modprobe nvidia-peermem`, or NVIDIA's open kernel modules",
        ): "GPUDirect RDMA" not in fabric(root),
        (f"{' and '.join(off)} turns it off", "unset it, unless NCCL should use sockets"): bool(
            off
        ),
    }
    return [problem for problem, is_present in problems.items() if ports and is_present]


def _read(file: Path) -> str:
    with suppress(OSError):
        return file.read_text("utf-8", errors="replace")
    return ""


def torch_build() -> Json | None:
    """Return the targets of the installed torch build; None if it is not installed or cannot be read.

    `cuda`: the version of CUDA, None for a build without it. `architectures`: the targets of its
    compiled kernels, as `torch.cuda.get_arch_list` returns them; empty if unknown.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    with suppress(OSError, SyntaxError, ValueError):
        values = constants((folder / "version.py").read_text("utf-8"))
        cuda = values.get("cuda")
        library = folder / "lib" / "libtorch_python.so"
        return {
            "version": values.get("__version__"),
            "cuda": cuda,
            "architectures": architectures(library) if cuda else [],
        }
    return None


def constants(source: str) -> Json:
    """Return the constants that a Python file assigns at module level, by name."""
    values: Json = {}
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant):
            values |= {name.id: value.value for name in targets if isinstance(name, ast.Name)}
    return values


def architectures(library: Path) -> list[str]:
    """Return the architectures that torch was compiled for, from the text in its library; empty if unknown."""
    with suppress(OSError, ValueError), library.open("rb") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            texts = _ARCHITECTURES.findall(content)
        return max(texts, key=len).decode("ascii").split() if texts else []
    return []


def compiler(environment: Mapping[str, str]) -> dict[str, str | None]:
    """Find the C compiler that Triton calls when a kernel runs first, and try it on Python's headers.

    Returns:
        `path`: the compiler, None if there is none; `problem`: why it cannot build for this Python, else "".
    """
    # Triton's own choice and order (triton/runtime/build.py).
    configured = environment.get("CC")
    candidates = ["gcc", "clang"] if configured is None else [configured]
    path = next(filter(None, map(shutil.which, candidates)), None)
    if path is None:
        problem = f"CC={configured} is not a program" if configured else "no gcc or clang"
        return {"path": None, "problem": problem}
    include = sysconfig.get_paths()["include"]
    command = [path, "-fsyntax-only", "-x", "c", f"-I{include}", "-"]
    source = "#include <stdio.h>\n#include <Python.h>\n"
    try:
        result = subprocess.run(
            command,
            input=source,
            capture_output=True,
            env={**os.environ, "LC_ALL": "C"},  # messages in English
            encoding="utf-8",
            errors="replace",
            timeout=_COMPILE_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"path": path, "problem": str(error)}
    errors = [line for line in result.stderr.splitlines() if "error" in line.lower()]
    problem = (errors or result.stderr.splitlines() or [f"exit code {result.returncode}"])[0]
    return {"path": path, "problem": problem.strip() if result.returncode else ""}
