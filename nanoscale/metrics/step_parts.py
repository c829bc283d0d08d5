"""The parts of a training step as a table; `metrics.trace.StepParts` defines each of them."""

from collections.abc import Iterator, Mapping
from typing import Any

from nanoscale.common.units import duration

PARTS = {
    "data": "data",
    "forward": "forward and loss",
    "backward": "backward",
    "gradients": "gradient norm, clipping",
    "optimizer": "optimizer",
    "other": "after the update",
    "communication": "communication, not hidden",
    "idle": "idle",
}
"""The parts of a step, by their names in `StepParts`."""


def table_lines(parts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a table; missing parts are left out."""
    for name, label in PARTS.items():
        seconds = parts[f"{name}_s"]
        if seconds > 0:
            yield f"  {label:26}{seconds / parts['step_s']:7.1%} {duration(seconds):>12}"
    if parts["communication_in_all_s"] > 0:
        yield f"  communication in total, hidden or not: {duration(parts['communication_in_all_s'])}"
    if parts["where"] == "device":
        yield f"  the host reads the batch in {duration(parts['data_on_host_s'])}"
        yield f"  the host waits for the device within all {parts['steps']} steps: {_counted(parts['waits'])}"
        yield f"  and between them, as to log a step: {_counted(parts['waits_between'])}"


def _counted(waits: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}×" for name, count in waits.items()) or "never"
