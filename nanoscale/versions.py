"""The versions of what a job runs with, found without importing any of it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from contextlib import suppress
from functools import cache
from pathlib import Path

import nanoscale
from nanoscale.devices import driver

_PACKAGES = ("torch", "deepspeed")


def versions() -> dict[str, str | None]:
    """By name, nanoscale's own first; None: it is not installed here."""
    found: dict[str, str | None] = {
        "nanoscale": nanoscale_version(),
        "python": platform.python_version(),
    }
    for name in _PACKAGES:
        found[name] = None
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found | {"driver": driver()}


def nanoscale_version() -> str:
    """With a sum of its source, since two copies of one version may differ."""
    return f"{nanoscale.__version__} ({_source_sum()})"


@cache
def _source_sum() -> str:
    folder = Path(nanoscale.__file__).parent
    total = hashlib.blake2b(digest_size=4)
    for path in sorted(folder.rglob("*.py")):
        total.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return total.hexdigest()
