"""The page `report.html`: a run on one self-contained page."""

from __future__ import annotations

import time
from collections.abc import Iterator
from html import escape

from nanoscale.common.units import GIB, byte_size, duration
from nanoscale.runs.directory import RunDirectory, write_atomically
from nanoscale.view.page import page, table
from nanoscale.view.run.curve_svg import curve_svg
from nanoscale.view.run.run_report import Document, document

_GOOD, _BAD = ("completed",), ("failed",)


def write_report(run: RunDirectory) -> None:
    """Write the page into the run directory.

    Raises:
        OSError: it cannot be written.
    """
    write_atomically(run.report, report_page(document(run)))


def report_page(about: Document) -> str:
    """Return the page: the configuration, the outcome, and prediction and measurement."""
    state = about["state"]
    colour = "yes" if state in _GOOD else "no" if state in _BAD else ""
    parts = [
        f"<h1>{escape(about['run'])}</h1>",
        *(f"<p>{escape(line)}</p>" for line in head(about)),
        f'<p class="verdict {colour}">{escape(outcome(about))}</p>',
        *_failure(about),
        *_curves(about),
        "<h2>Prediction and measurement</h2>",
        *_against_plan(about),
        *_attempts(about),
        *_checkpoints(about),
        f"<p>{escape(about['path'])}</p>",
    ]
    return page(f"{about['run']}: {state}", parts)


def head(about: Document) -> list[str]:
    """Describe the configuration in a few lines."""
    what = about["what"]
    if what is None:
        return ["its config.yaml cannot be read"]
    layout = what["layout"]
    degrees = [f"{name} {layout[name]}" for name in ("dp", "tp", "pp", "cp")]
    if layout["ep"] > 1:
        degrees.append(f"ep {layout['ep']}")
    if layout["dp_replicate"] > 1:
        degrees.insert(1, f"in {layout['dp_replicate']} replicas")
    if what["schedule"]:
        degrees.append(what["schedule"])
    degrees.append(f"ZeRO {what['zero_stage']}")
    if what["recompute"] != "none":
        degrees.append(f"recompute {what['recompute']}")
    names = [host["host"] for host in about["hosts"]]
    on = f" on {', '.join(names[:4])}" if names else ""
    on += f" and {len(names) - 4} more hosts" if len(names) > 4 else ""
    ranks = "1 rank" if what["world_size"] == 1 else f"{what['world_size']} ranks"
    return [
        f"{what['model']}, {size(what['parameters'])} parameters, {what['precision']}, {what['backend']}, "
        f"{what['optimizer']}, data {what['data']}; {ranks} ({what['device']}){on}",
        " · ".join(degrees),
        f"global batch {what['global_batch']} = micro batch {what['micro_batch']} · dp {layout['dp']} · "
        f"accumulation {what['accumulation']}, {what['seq_len']:,} tokens each",
    ]


def outcome(about: Document) -> str:
    """Describe the outcome in one line."""
    of = f" of {about['steps']:,}" if about["steps"] is not None else ""
    words = [f"{about['state']} after step {about['step']:,}{of}"]
    if about["started"] is not None and about["ended"] is not None:
        words.append(f"the last attempt took {duration(about['ended'] - about['started'])}")
    last = about["last"]
    if last is not None:
        loss = "not finite" if last.get("loss") is None else f"{last['loss']:.4f}"
        words.append(f"loss {loss}")
        if last.get("eval_loss") is not None:
            words.append(f"eval loss {last['eval_loss']:.4f}")
        words.append(f"{last.get('tokens', 0):,} tokens")
    return ", ".join(words)


def size(count: float) -> str:
    """Format a number of parameters."""
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f}"


def compared(row: Document) -> tuple[str, str, str, str]:
    """Return the quantity, prediction, measurement, and the relative error of the prediction."""
    predicted, measured = (figure(row[name], row["unit"]) for name in ("predicted", "measured"))
    error = "" if row["error"] is None else f"{row['error']:+.1%}"
    return row["what"], predicted, measured or "not known", error


def figure(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    if unit == "s":
        return duration(value)
    if unit == "GiB":
        return byte_size(GIB * value)
    if unit == "%":
        return f"{value:.1f} %"
    return f"{value:,.0f}"


def clock(value: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value)) if value else "?"


def _failure(about: Document) -> Iterator[str]:
    cause = about["failure"]
    if cause is None or about["state"] == "completed":
        return
    yield f"<p>rank {cause['rank']} on {escape(str(cause['host']))}: {escape(cause['diagnosis'])}</p>"
    if cause.get("remedy"):
        yield f"<p>remedy: {escape(cause['remedy'])}</p>"
    if cause.get("traceback"):
        yield f"<pre>{escape(cause['traceback'].rstrip())}</pre>"


def _curves(about: Document) -> Iterator[str]:
    curves = about["curves"]
    starts = [attempt["after_step"] for attempt in about["attempts"] if attempt["after_step"]]
    planned = next((row for row in about["against_plan"] if row["what"] == "tokens/s"), None)
    level = ("predicted", planned["predicted"]) if planned else None
    losses = [("", curves["loss"])]
    if curves["eval_loss"]:
        losses = [("training", curves["loss"]), ("evaluation", curves["eval_loss"])]
    if not curves["loss"]:
        return
    yield '<div class="pictures">'
    yield curve_svg("loss", losses, starts=starts)
    yield curve_svg("gradient norm", [("", curves["grad_norm"])], logarithmic=True, starts=starts)
    yield curve_svg("learning rate", [("", curves["lr"])], from_zero=True, starts=starts)
    yield curve_svg(
        "tokens/s", [("", curves["tokens_per_s"])], from_zero=True, level=level, starts=starts
    )
    yield "</div>"


def _against_plan(about: Document) -> Iterator[str]:
    if not about["against_plan"]:
        yield "<p>There is no plan of this layout.</p>"
        return
    rows = [compared(row) for row in about["against_plan"]]
    yield table(("", "predicted", "measured", "difference"), rows)
    yield "<p>Measured is the median of the steps without the first of each start.</p>"


def _attempts(about: Document) -> Iterator[str]:
    if not about["attempts"]:
        return
    yield "<h2>Attempts</h2>"
    rows = [
        (
            clock(attempt["time"]),
            str(attempt["attempt"]),
            str(attempt["world_size"]),
            f"{attempt['after_step'] + 1:,}",
            attempt["end"] or "",
        )
        for attempt in about["attempts"]
    ]
    yield table(("began", "attempt", "ranks", "from step", "how"), rows)


def _checkpoints(about: Document) -> Iterator[str]:
    yield "<h2>Checkpoints</h2>"
    if not about["checkpoints"]:
        yield "<p>none</p>"
        return
    rows = [
        (
            clock(checkpoint["time"]),
            f"{checkpoint['step']:,}",
            "" if checkpoint["seconds"] is None else duration(checkpoint["seconds"]),
        )
        for checkpoint in about["checkpoints"]
    ]
    yield table(("saved", "step", "took"), rows)
