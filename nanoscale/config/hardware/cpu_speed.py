"""The speed of this machine's CPU over the assumed one, as `nanoscale doctor` measured it."""

from __future__ import annotations

import json
import platform
from pathlib import Path

from nanoscale.common.cache_folder import cache_path


def cpu_name() -> str:
    """Return the name of this machine's CPU, or its architecture where the kernel tells no name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def known_speed() -> float | None:
    """Return the speed in the cache; None if none was measured, or another CPU's."""
    try:
        content = json.loads(_path().read_text(encoding="utf-8"))
        speed, measured_on = float(content["speed"]), content["cpu"]
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):
        return None
    return speed if measured_on == cpu_name() and 0 < speed < 1000 else None


def keep_speed(speed: float) -> None:
    """Write the measured speed, as a factor on the assumed one, into the cache.

    Raises:
        OSError: the folder cannot be written.
        RuntimeError: the user has no home.
    """
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"cpu": cpu_name(), "speed": speed}) + "\n", encoding="utf-8")


def _path() -> Path:
    return cache_path(None) / "cpu-speed.json"
