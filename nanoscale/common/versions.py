"""The versions of a job's packages, and the installation of missing ones; none of them is imported."""

import hashlib
import importlib.metadata
import platform
import re
import shlex
import shutil
import sys
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import nanoscale
from nanoscale.common.devices import driver

_PACKAGES = ("torch", "deepspeed")
OPTIONAL = {
    "datasets": "Hugging Face's datasets", "deepspeed": "DeepSpeed", "gcsfs": "gcsfs",
    "lm_eval": "lm-eval", "mlflow": "MLflow", "optuna": "Optuna", "s3fs": "s3fs",
    "sentencepiece": "sentencepiece", "tensorboard": "TensorBoard",
    "torchao": "torchao", "transformers": "transformers", "triton": "Triton", "wandb": "Weights & Biases",
}  # fmt: skip
"""Packages that only some configurations need, and their names in sentences; pyproject.toml says what for."""


def versions() -> dict[str, str | None]:
    """Return versions by name, nanoscale's own first; None: it is not installed here."""
    result: dict[str, str | None] = {
        "nanoscale": nanoscale_version(),
        "python": platform.python_version(),
    }
    for name in _PACKAGES:
        result[name] = None
        with suppress(importlib.metadata.PackageNotFoundError):
            result[name] = importlib.metadata.version(name)
    return result | {"driver": driver()}


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra of nanoscale, for the Python that runs this.

    It names the packages themselves: nanoscale is on no package index, so pip finds no `nanoscale[extra]`.
    """
    declared: list[str] = []
    with suppress(importlib.metadata.PackageNotFoundError):
        declared = importlib.metadata.requires("nanoscale") or []
    requirements = [
        requirement.strip()
        for requirement, _, condition in (line.partition(";") for line in declared)
        if re.search(rf"""extra == ['"]{re.escape(extra)}['"]""", condition)
    ]
    return f"{_pip()} install {' '.join(map(shlex.quote, requirements or [extra]))}"


def missing(package: str) -> str:
    """Return the name of an optional package and how to install it; empty if it is installed."""
    if find_spec(package) is not None:
        return ""
    return (
        f"{OPTIONAL[package]}, which is not installed: {install_command(package.replace('_', '-'))}"
    )


def _pip() -> str:
    """Return this Python's pip: the one on the PATH may belong to another environment."""
    on_path = shutil.which("pip")
    if on_path is not None and Path(on_path).parent == Path(sys.executable).parent:
        return "pip"
    return f"{shlex.quote(sys.executable)} -m pip"


def optional_packages() -> list[str]:
    """List the installed packages that only some configurations need."""
    return [name for name in OPTIONAL if find_spec(name) is not None]


def nanoscale_version() -> str:
    """Return the version with a sum of its source, since two copies of one version may differ."""
    return f"{nanoscale.__version__} ({_source_sum()})"


@cache
def _source_sum() -> str:
    folder = Path(nanoscale.__file__).parent
    digest = hashlib.blake2b(digest_size=4)
    files = [*folder.rglob("*.py"), *folder.rglob("*.yaml")]
    for name in sorted(path.relative_to(folder).as_posix() for path in files):
        if not name.startswith(("conf/", "recipes/")):  # a checkout has them elsewhere
            digest.update(name.encode() + (folder / name).read_bytes())
    return digest.hexdigest()
