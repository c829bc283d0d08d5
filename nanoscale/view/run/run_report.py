"""The report of a run, from its directory alone: a JSON document, and what people see of it, also as a page."""

import math
from collections.abc import Iterator
from dataclasses import asdict

from nanoscale.common.json_text import Json
from nanoscale.common.units import GIB, byte_size, clock, counted, duration, number
from nanoscale.config.composing.frozen import load
from nanoscale.config.hardware.data_sheets import usual_mfu, usual_mfu_text
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.launch.lifecycle.command import read_plan
from nanoscale.runs import events, failure, jsonlines, metrics, status
from nanoscale.runs.directory import RunDirectory, write_atomically
from nanoscale.runs.documents import damaged, read_document
from nanoscale.runs.goodput import NAMES, goodput
from nanoscale.runs.jsonlines import Object
from nanoscale.runs.metrics import Steady, known_metrics, steady
from nanoscale.view.blocks import Block, Chart, Column, Lines, Report, Table, page, table
from nanoscale.view.charts import Curve, curve_line, curves
from nanoscale.view.job_text import job_lines, seen_text, what
from nanoscale.view.run.live import figures

_BAR = 40
"""The characters of a bar for the whole time."""
MOST_POINTS = 600
"""The most points of a curve."""
_NOTICED = ("straggler", "spike", "zero gradient", "health")
"""Kinds of events that a reader of the report should know."""


def document(run: RunDirectory) -> Json:
    """Return the whole report; unknown values are null. Times are UNIX seconds, sizes GiB."""
    now, records, happened = status.require(run), metrics.read(run), events.read(run)
    seen = steady(run)
    cause, config, plan = failure.read(run), load(run.config), read_plan(run)
    return {
        "run": run.name,
        "path": str(run.path),
        "state": now.state,
        "exit_code": now.exit_code,
        "created": now.created,
        "started": now.started,
        "ended": now.ended,
        "what": what(config),
        "hosts": [{"host": it.host, "ranks": len(it.ranks)} for it in (plan.hosts if plan else ())],
        "attempts": _attempts(happened),
        "failure": asdict(cause) if cause else None,
        "step": metrics.reached(run, records[-1] if records else None),
        "steps": config.train.steps,
        "first": records[0] if records else None,
        "last": records[-1] if records else None,
        "against_plan": against_plan(run, config, seen),
        "planned_after": seen.after,
        "usual_mfu": usual_mfu(config) if config.launcher.device == "cuda" else None,
        "statistics": jsonlines.last(run.statistics, "modules"),
        "goodput": known.document() if (known := goodput(run)) else None,
        "noticed": [event for event in happened if event.get("kind") in _NOTICED],
        "checkpoints": _checkpoints(run, happened),
        "curves": {
            name: thinned(curve(records, name)) for name, it in known_metrics().items() if it.chart
        },
    }


def against_plan(run: RunDirectory, config: ResolvedConfig, seen: Steady) -> list[Json]:
    """Compare prediction and measurement of steady steps; empty if this layout was not planned."""
    plan = prediction(run)
    if plan is None:
        return []
    try:
        if any(getattr(config.parallel, name) != degree for name, degree in plan["layout"].items()):
            return []
        on_cpu = plan["hardware"]["device"] == "cpu"
        allocated, memory = plan["memory"]["allocated_gib"], None if on_cpu else seen.memory_gib
        seq_len = config.train.seq_len
        speed = seen.tokens_per_s
        rows = [
            ("step time", "s", plan["step_time_s"], seen.seconds),
            ("tokens/s", "", plan["tokens_per_s"], speed),
            ("samples/s", "", plan["tokens_per_s"] / seq_len, speed and speed / seq_len),
            ("MFU", "%", 100 * plan["mfu"], _utilization(run, "mfu")),
            ("HFU", "%", 100 * plan["hfu"], _utilization(run, "hfu")),
            ("memory allocated", "GiB", allocated, memory),
        ]
        if on_cpu:  # the measurement covers a process with its libraries, which is not predicted
            rows.append(("memory of a process", "GiB", None, seen.memory_gib))
    except (KeyError, TypeError, AttributeError) as error:
        raise damaged(run.plan, "is not a plan of nanoscale") from error
    return [
        {
            "what": name,
            "unit": unit,
            "predicted": predicted,
            "measured": measured,
            "error": measured / predicted - 1 if predicted and measured is not None else None,
        }
        for name, unit, predicted, measured in rows
    ]


def prediction(run: RunDirectory) -> Json | None:
    """Return the prediction of the run; None if there is none.

    Raises:
        UserError: plan.json is damaged.
    """
    try:
        return read_document(run.plan)
    except FileNotFoundError:
        return None


def _utilization(run: RunDirectory, name: str) -> float | None:
    """Return the MFU or HFU in percent, of the steady steps; it is proportional to the speed."""
    last, seen = metrics.last(run), steady(run)
    if last is None or not last.get(name) or not last.get("step_time_s") or not seen.seconds:
        return None
    return 100.0 * float(last[name]) * float(last["step_time_s"]) / seen.seconds


def _attempts(happened: list[Object]) -> list[Json]:
    """Return the attempts: the step before the first, which is None if it trained none, the ranks, and the
    end as the ranks report it."""
    attempts: list[Json] = []
    for event in happened:
        kind = event.get("kind")
        if kind == "attempt":
            known = {name: event.get(name) for name in ("attempt", "time", "world_size")}
            attempts.append({**known, "after_step": None, "end": None})
        elif attempts and kind == "resumed":
            attempts[-1]["after_step"] = int(event.get("step", 0))
        elif attempts and kind == "running":
            attempts[-1]["after_step"] = attempts[-1]["after_step"] or 0
        elif attempts and kind in ("end", "failure", "restart"):
            attempts[-1]["end"] = str(event.get("message", ""))
    return attempts


def _checkpoints(run: RunDirectory, happened: list[Object]) -> list[Json]:
    """List the existing checkpoints, with the time and duration of their saving if an event has them."""
    saved = {event.get("step"): event for event in happened if event.get("kind") == "checkpoint"}
    return [
        {"step": step, "path": str(run.checkpoint(step))}
        | {name: saved.get(step, {}).get(name) for name in ("time", "seconds")}
        for step in run.checkpoint_steps()
    ]


def curve(records: list[Object], name: str) -> Curve:
    """Return a metric over the steps that have it."""
    return [(int(record["step"]), record[name]) for record in records if name in record]


def thinned(points: Curve) -> Curve:
    """Return at most `MOST_POINTS` points: the lowest and the highest of each segment, so no spike is lost."""
    stretch = -(-len(points) // (MOST_POINTS // 2))
    if len(points) <= MOST_POINTS:
        return points
    kept: set[int] = {0, len(points) - 1}
    for start in range(0, len(points), stretch):
        places = range(start, min(start + stretch, len(points)))
        sizes = {i: math.inf if (it := points[i][1]) is None else it for i in places}
        kept |= {least(sizes, key=sizes.__getitem__) for least in (min, max)}
    return [points[i] for i in sorted(kept)]


# --- people ---------------------------------------------------------------------------------------


def write_report(run: RunDirectory) -> None:
    """Write the page into the run directory.

    Raises:
        OSError: it cannot be written.
    """
    write_atomically(run.report, page(run_report(document(run))))


def run_report(about: Json) -> Report:
    """Return the configuration, the outcome, the curves, and prediction and measurement."""
    return Report(about["run"], list(_blocks(about)), f"Report of the run {about['run']}")


def _blocks(about: Json) -> Iterator[Block]:
    yield Lines(_head(about))
    style = {"completed": "green", "failed": "bold red"}.get(about["state"], "bold")
    yield Lines([_outcome(about)], style)
    cause = about["failure"]
    if cause is not None and about["state"] != "completed":
        yield Lines([failure.Failure(**cause).sentence], "red")
        details = [f"remedy: {cause['remedy']}"] if cause.get("remedy") else []
        yield Lines([*details, *(cause.get("traceback") or "").rstrip().splitlines()])
    if any(about["curves"].values()):
        yield Chart(lambda width: _curve_lines(about, width), list(_charts(about)))
    yield table(_COMPARED, about["against_plan"], "prediction and measurement")
    if not about["against_plan"]:
        yield Lines(["There is no plan of this layout."])
    if (parts := about["goodput"]) is not None:
        shares = [(name, it, it / parts["wall_s"]) for name, it in parts["seconds"].items() if it]
        yield table(_GOODPUT, shares, "goodput")
        yield Lines([parts["sentence"]])
    yield Lines([usual] if (usual := usual_mfu_text(about["usual_mfu"])) else [])
    if (layers := about["statistics"]) is not None:
        rows = [
            [name, *("" if values[key] is None else f"{values[key]:.3g}" for key in _LAYERS)]
            for name, values in layers["modules"].items()
        ]
        optional = {"largest": 1, "attention score": 1}
        header = ["", *_LAYERS.values()]
        yield Table(header, rows, f"layers at step {layers['step']}", optional=optional)
    if about["noticed"]:
        texts = [str(event.get("message", "")) for event in about["noticed"]]
        yield Lines([f"noticed: {text}" for text in dict.fromkeys(texts)], "yellow")
    if state := figures(about["last"] or {}).get("GPU"):
        yield Lines([f"GPUs at the last logged step: {state}"])
    if about["attempts"]:
        yield table(_ATTEMPTS, about["attempts"], "attempts")
    if about["checkpoints"]:
        yield table(_CHECKPOINTS, about["checkpoints"], "checkpoints")
    yield Lines([about["path"]])


def _head(about: Json) -> list[str]:
    """Describe the configuration in a few lines."""
    what = about["what"]
    if what is None:
        return ["its config.yaml cannot be read"]
    names = [host["host"] for host in about["hosts"]]
    on = f" on {', '.join(names[:4])}" if names else ""
    on += f" and {counted(len(names) - 4, 'more host')}" if len(names) > 4 else ""
    seen = f", {seen_text(what['epochs'])}" if what["epochs"] is not None else ""
    ranks = f"{counted(what['world_size'], 'rank')} ({what['device']}){on}"
    return job_lines(what, ranks, f", {what['optimizer']}, data {what['data']}{seen}")


def _outcome(about: Json) -> str:
    of = f" of {about['steps']:,}" if about["steps"] is not None else ""
    words = [f"{about['state']} after step {about['step']:,}{of}"]
    if about["started"] is not None and about["ended"] is not None:
        words.append(f"the last attempt took {duration(about['ended'] - about['started'])}")
    last = about["last"]
    if last is not None:
        words.append(f"loss {number(last.get('loss'), '.4f')}")
        if last.get("eval_loss") is not None:
            words.append(f"eval loss {last['eval_loss']:.4f}")
        words.append(f"{last.get('tokens', 0):,} tokens")
    return ", ".join(words)


def figure(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if unit == "s":
        return duration(value)
    if unit == "GiB":
        return byte_size(GIB * value)
    return f"{value:.1f}%" if unit == "%" else f"{value:,.0f}"


def _charts(about: Json) -> Iterator[str]:
    if not about["curves"]["loss"]:
        return
    starts = [attempt["after_step"] for attempt in about["attempts"] if attempt["after_step"]]
    planned = next((row for row in about["against_plan"] if row["what"] == "tokens/s"), None)
    level = ("predicted", planned["predicted"], about["planned_after"]) if planned else None
    for title in dict.fromkeys(known_metrics()[name].chart for name in about["curves"]):
        names = [name for name in about["curves"] if known_metrics()[name].chart == title]
        known = {name: points for name in names if (points := about["curves"][name])}
        series = [
            ("evaluation" if it.startswith("eval_") else "training", known[it]) for it in known
        ]
        scale = known_metrics()[names[0]].scale
        yield curves(
            title,
            series if len(series) > 1 else [("", points) for _, points in series],
            logarithmic=scale == "logarithmic",
            from_zero=scale == "from zero",
            level=level if "tokens_per_s" in names else None,
            starts=starts,
        )


def _curve_lines(about: Json, width: int) -> str:
    columns = max(20, min(width, 100) - 40)
    lines = [
        curve_line(known_metrics()[name].label, points, columns)
        for name, points in about["curves"].items()
        if points
    ]
    return "".join(f"{line}\n" for line in lines)


_COMPARED = (
    Column("", "what"),
    Column("predicted", lambda row: figure(row["predicted"], row["unit"])),
    Column("measured", lambda row: figure(row["measured"], row["unit"]) or "not known"),
    Column("difference", lambda row: "" if row["error"] is None else f"{row['error']:+.1%}"),
)
_GOODPUT = (
    Column("", lambda row: NAMES[row[0]]),
    Column("time", lambda row: duration(row[1])),
    Column("share", lambda row: f"{row[2]:.1%}"),
    Column("bar", lambda row: "█" * round(_BAR * row[2]), is_text=True, optional=1),
)
_LAYERS = {
    "weight_norm": "weights", "grad_norm": "gradients", "rms": "result, rms", "largest": "largest",
    "score": "attention score",
}  # fmt: skip
"""The statistics of a layer and their headers."""
_ATTEMPTS = (
    Column("began", lambda attempt: clock(attempt["time"])),
    Column("attempt", "attempt", optional=1),
    Column("ranks", "world_size", optional=1),
    Column("from step", lambda it: "" if it["after_step"] is None else f"{it['after_step'] + 1:,}"),
    Column("end", lambda attempt: attempt["end"] or "", is_text=True),
)
_CHECKPOINTS = (
    Column("saved", lambda saved: clock(saved["time"])),
    Column("step", lambda saved: f"{saved['step']:,}"),
    Column("took", lambda it: "" if it["seconds"] is None else duration(it["seconds"])),
)
