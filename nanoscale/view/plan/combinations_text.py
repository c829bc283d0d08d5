"""The plans of several combinations of values, for people and as documents."""

from collections.abc import Sequence

from nanoscale.common.json_text import Json
from nanoscale.common.units import counted, duration, three_digits
from nanoscale.plan.predict import Prediction
from nanoscale.plan.search.choice import LayoutChoice
from nanoscale.view.blocks import Lines, Report, Table
from nanoscale.view.job_text import layout_line, shape
from nanoscale.view.plan.prediction import document

_MACHINES = {"cluster": "devices", "cluster.hosts": "hosts"}
"""The first columns, by the key whose value they show for a combination without a plan."""
_PLAN = ("layout", "memory", "fits", "step", "tokens/s per device", "tokens/s", "MFU")
_OPTIONAL = {"MFU": 1, "step": 2, "layout": 3}


def combination(plan: Prediction, choice: LayoutChoice | None) -> Json:
    """Return the document of one combination: the job, its hosts, the plan, and why its layout was chosen."""
    hosts = -(-plan.config.world_size // plan.hardware.devices_per_host)
    return {"hosts": hosts, **shape(plan.config), **document(plan, choice)}


def combinations_report(rows: Sequence[Json]) -> Report:
    """Return the table of all combinations, and below it why some of them have no plan."""
    keys = [key for key in rows[0]["values"] if key not in _MACHINES]
    header = [*_MACHINES.values(), *keys, *_PLAN]
    cells = [_cells(row, keys) for row in rows]
    fitting = sum(row.get("fits", False) for row in rows)
    title = f"{counted(len(rows), 'combination')}, {fitting} of them {'fits' if fitting == 1 else 'fit'}"
    reasons = [_reason(row) for row in rows if "error" in row]
    return Report(title, [Table(header, cells, "", [*keys, "layout"], _OPTIONAL), Lines(reasons)])


def _cells(row: Json, keys: Sequence[str]) -> list[str]:
    values = row["values"]
    varied = [values[key] for key in keys]
    if "error" in row:
        first = [values.get(key, "") for key in _MACHINES]
        return [*first, *varied, *("error" if name == "fits" else "" for name in _PLAN)]
    fits = f"{'yes' if row['fits'] else 'no'}, {row['fits_probability']:.0%}"
    speeds = (f"{row[key]:,.0f}" for key in ("tokens_per_s_per_gpu", "tokens_per_s"))
    return [
        *(f"{row['world_size']} × {row['hardware']['device']}", str(row["hosts"]), *varied),
        f"{layout_line(row)} · micro batch {row['micro_batch']}",
        *(f"{three_digits(row['memory']['in_use_gib'])} GiB", fits, duration(row["step_time_s"])),
        *(*speeds, f"{row['mfu']:.1%}"),
    ]


def _reason(row: Json) -> str:
    words = " ".join(f"{key}={value}" for key, value in row["values"].items())
    violations, message = row["error"]["violations"], row["error"]["message"]
    reasons = [f"{it['key']}: {it['message']}" for it in violations] or [message]
    advice = [f"type {it['suggestions'][0]}" for it in violations if it["suggestions"]]
    return f"{words}: {'; '.join([*reasons, *advice])}"
