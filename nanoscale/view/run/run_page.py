"""The page `report.html`: a run on one self-contained page."""

from __future__ import annotations

from collections.abc import Iterator

from nanoscale.common.units import GIB, byte_size, clock, counted, duration
from nanoscale.config.hardware.usual_mfu import usual_mfu_text
from nanoscale.runs.directory import RunDirectory, write_atomically
from nanoscale.view.charts import curves
from nanoscale.view.page import render
from nanoscale.view.run.launch_text import seen_text
from nanoscale.view.run.run_report import Document, document


def write_report(run: RunDirectory) -> None:
    """Write the page into the run directory.

    Raises:
        OSError: it cannot be written.
    """
    write_atomically(run.report, report_page(document(run)))


def report_page(about: Document) -> str:
    """Return the page: the configuration, the outcome, and prediction and measurement."""
    return render(
        "run.html",
        title=f"{about['run']}: {about['state']}",
        run=about["run"],
        head=head(about),
        state=about["state"],
        outcome=outcome(about),
        failure=None if about["state"] == "completed" else about["failure"],
        charts=list(_charts(about)),
        against_plan=[compared(row) for row in about["against_plan"]],
        usual_mfu=usual_mfu_text(about["usual_mfu"]),
        attempts=list(map(_attempt, about["attempts"])),
        checkpoints=list(map(_checkpoint, about["checkpoints"])),
        path=about["path"],
    )


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
    ranks = counted(what["world_size"], "rank")
    seen = f", {seen_text(what['epochs'])}" if what["epochs"] is not None else ""
    return [
        f"{what['model']}, {size(what['parameters'])} parameters, {what['precision']}, {what['backend']}, "
        f"{what['optimizer']}, data {what['data']}{seen}; {ranks} ({what['device']}){on}",
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


def _charts(about: Document) -> Iterator[str]:
    metrics = about["curves"]
    if not metrics["loss"]:
        return
    starts = [attempt["after_step"] for attempt in about["attempts"] if attempt["after_step"]]
    planned = next((row for row in about["against_plan"] if row["what"] == "tokens/s"), None)
    level = ("predicted", planned["predicted"]) if planned else None
    losses = [("", metrics["loss"])]
    if metrics["eval_loss"]:
        losses = [("training", metrics["loss"]), ("evaluation", metrics["eval_loss"])]
    speed = [("", metrics["tokens_per_s"])]
    yield curves("loss", losses, starts=starts)
    yield curves("gradient norm", [("", metrics["grad_norm"])], logarithmic=True, starts=starts)
    yield curves("learning rate", [("", metrics["lr"])], from_zero=True, starts=starts)
    yield curves("tokens/s", speed, from_zero=True, level=level, starts=starts)


def _attempt(attempt: Document) -> tuple[str, ...]:
    return (
        clock(attempt["time"]),
        str(attempt["attempt"]),
        str(attempt["world_size"]),
        f"{attempt['after_step'] + 1:,}",
        attempt["end"] or "",
    )


def _checkpoint(checkpoint: Document) -> tuple[str, ...]:
    seconds = checkpoint["seconds"]
    return (
        clock(checkpoint["time"]),
        f"{checkpoint['step']:,}",
        "" if seconds is None else duration(seconds),
    )
