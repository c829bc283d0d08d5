"""A libnvidia-ml.so.1 that answers for GPUs that are not there, and files of a torch that is built for CUDA."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_name("fake_nvml.c")


def build_fake_nvml(folder: Path) -> Path:
    """Compile the library and return the folder to put into LD_LIBRARY_PATH; skip without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler: apt-get install gcc")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, _SOURCE], check=True)
    return folder


def fake_environment(folder: Path, **settings: object) -> dict[str, str]:
    """Return the variables that show a program such GPUs: gpus, name, capability, driver, cuda, cores."""
    chosen = {f"FAKE_NVML_{name.upper()}": str(value) for name, value in settings.items()}
    return {"LD_LIBRARY_PATH": str(folder), **chosen}


def write_torch_files(
    folder: Path, cuda: str | None, architectures: str = "", version: str = "2.11.0"
) -> Path:
    """Write the files of torch that tell what it was built for; return the folder to put into PYTHONPATH.

    The text of the library is as in the library of torch 2.11.0+cu130.
    """
    torch = folder / "torch"
    (torch / "lib").mkdir(parents=True)
    (torch / "__init__.py").write_text("raise ImportError('nothing may import it')\n")
    (torch / "version.py").write_text(
        f"from typing import Optional\n\n__version__ = {version!r}\ncuda: Optional[str] = {cuda!r}\n"
    )
    text = (
        f"\0invalid argument to setDevice\0sm_\0{architectures}\0\0\0invalid argument to exchange\0"
    )
    (torch / "lib" / "libtorch_python.so").write_bytes(text.encode())
    return folder
