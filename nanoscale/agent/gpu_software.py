"""Facts about the software between this host's GPUs and the ranks: torch's build, the driver, a C compiler.

None of it is imported: torch alone takes seconds.
"""

from __future__ import annotations

import ast
import mmap
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nanoscale.common.devices import driver_cuda, gpu_capabilities

_ARCHITECTURES = re.compile(rb"\0((?:sm|compute)_\d+[af]?(?: (?:sm|compute)_\d+[af]?)*)\0")
_COMPILE_S = 20.0


def gpu_software() -> dict[str, Any]:
    """Return the facts by which the launcher decides if the ranks can use the GPUs; JSON."""
    return {
        "driver_cuda": driver_cuda(),
        "capabilities": gpu_capabilities(),
        "torch": torch_build(),
        "compiler": compiler(os.environ),
    }


def torch_build() -> dict[str, Any] | None:
    """Return the targets of the installed torch build; None if it is not installed or cannot be read.

    `cuda`: the version of CUDA, None for a build without it. `architectures`: those that its kernels are
    compiled for, as `torch.cuda.get_arch_list` returns them; empty if unknown.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    with suppress(OSError, SyntaxError, ValueError):
        values = constants((folder / "version.py").read_text(encoding="utf-8"))
        cuda = values.get("cuda")
        library = folder / "lib" / "libtorch_python.so"
        return {
            "version": values.get("__version__"),
            "cuda": cuda,
            "architectures": architectures(library) if cuda else [],
        }
    return None


def constants(source: str) -> dict[str, Any]:
    """Return the constants that a Python file assigns at module level, by name."""
    values: dict[str, Any] = {}
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
    path = (
        shutil.which(configured)
        if configured is not None
        else shutil.which("gcc") or shutil.which("clang")
    )
    if path is None:
        return {
            "path": None,
            "problem": f"CC={configured} is not a program" if configured else "no gcc or clang",
        }
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
