"""Packages for a machine without a network: downloaded here, installed there.

Usage: python3 -m benchmarks.gpu.wheels [--python 3.12]

Downloads wheels into build/wheels/, in the versions of requirements.lock. `python3 -m benchmarks.gpu` installs
the missing ones into build/site/, which it puts on the path of all that it starts.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
WHEELS, SITE = ROOT / "build" / "wheels", ROOT / "build" / "site"
BINARY = (
    *("hydra-core", "omegaconf", "torchao", "pyyaml", "psutil", "nvidia-ml-py", "xxhash"),
    *(
        "typer",
        "click",
        "shellingham",
        "annotated-doc",
        "rich",
        "markdown-it-py",
        "mdurl",
        "pygments",
    ),
    *("jinja2", "markupsafe", "safetensors", "tokenizers"),
)
SOURCE = ("antlr4-python3-runtime",)
"""Has no wheel."""
PRESENT = ("torch", "numpy", "pyarrow", "huggingface-hub")
"""Requirements that the machine must have: large, or a part of transformers."""
GLIBC = (28, 27, 24, 17, 12, 5)
"""Minor versions that wheels name; pip takes these alone."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default="3.12", help="of the machine (3.12)")
    platforms = (f"manylinux_2_{minor}_x86_64" for minor in GLIBC)
    target = ["--only-binary=:all:", "--implementation=cp"]
    target += [f"--python-version={parser.parse_args().python}"]
    target += [f"--platform={name}" for name in (*platforms, "manylinux2014_x86_64")]
    WHEELS.mkdir(parents=True, exist_ok=True)
    pip("download", "--no-deps", "--dest", str(WHEELS), *target, *map(locked, BINARY))
    pip("wheel", "--no-deps", "--wheel-dir", str(WHEELS), *map(locked, SOURCE))
    size = sum(wheel.stat().st_size for wheel in WHEELS.glob("*.whl"))
    print(f"{size / 2**20:.1f} MiB of wheels in {WHEELS}")


def locked(name: str) -> str:
    """Return a package's line in requirements.lock."""
    (line,) = re.findall(
        rf"^{re.escape(name)}==.*$", (ROOT / "requirements.lock").read_text(), re.MULTILINE
    )
    return str(line)


def install_missing() -> None:
    """Install the wheels of packages that are not here, for this process and all that it starts."""
    sys.path.append(str(SITE))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT), str(SITE), os.environ.get("PYTHONPATH")))
    )
    missing = [str(wheel) for wheel in sorted(WHEELS.glob("*.whl")) if not is_installed(wheel)]
    if missing:
        options = ("--no-index", "--no-deps", "--no-compile", "--no-cache-dir")
        pip("install", *options, "--upgrade", "--target", str(SITE), *missing)


def is_installed(wheel: Path) -> bool:
    try:
        version(wheel.name.partition("-")[0])
    except PackageNotFoundError:
        return False
    return True


def pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *words]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
