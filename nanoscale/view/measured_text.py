"""The output of `nanoscale bench`, also of a scaling test, and of `nanoscale eval`."""

import math
from collections.abc import Iterator
from typing import Any

from nanoscale.common import display
from nanoscale.common.json_text import Json
from nanoscale.common.units import GIB, byte_size, counted, duration, number
from nanoscale.config.hardware.data_sheets import usual_mfu_text
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.metrics.step_parts import table_lines
from nanoscale.view.blocks import Block, Chart, Column, Lines, Report, Table, table
from nanoscale.view.charts import Curve, curves
from nanoscale.view.job_text import job_lines

_KERNELS, _NAME = 8, 66


def bench_report(told: Json) -> Report:
    """Return the figures, from the whole to its parts."""
    title, *head = job_lines(told, f"{counted(told['world_size'], 'rank')} on {told['device']}")
    texts = (head, _figures(told), _parts(told), _checkpoint(told))
    blocks: list[Block] = [Lines(list(lines)) for lines in texts]
    if "compared" in told:
        other = told["compared"]
        rows = [
            (name.replace("_", " "), f"{told[name]:,.4g}", f"{other[name]:,.4g}", f"{ratio:.3f}")
            for name, ratio in other["ratios"].items()
        ]
        blocks.append(Table(("", "this", other["name"], "ratio"), rows))
    return Report(title, blocks)


def _figures(told: Json) -> Iterator[str]:
    plan = told["predicted"] or {}

    def row(label: str, text: str, predicted: str | None = None) -> str:
        return f"{label:16}{text}{f'; planned {predicted}' if predicted else ''}"

    def planned(name: str, form: Any) -> str | None:
        return form(plan[name]) if plan.get(name) is not None else None

    spread = f"{duration(told['step_time_least_s'])} to {duration(told['step_time_most_s'])}"
    timed = f"the median of {told['steps']} after {told['warmup']} of warm-up, {spread}"
    yield row("step", f"{duration(told['step_time_s'])}, {timed}", planned("step_time_s", duration))
    yield row(
        "throughput",
        f"{told['tokens_per_s']:,.0f} tokens/s, {told['tokens_per_s_per_device']:,.0f} a device",
        planned("tokens_per_s", lambda value: f"{value:,.0f}"),
    )
    memory = planned("memory_gib", lambda value: byte_size(GIB * value))
    yield row("memory", f"{byte_size(GIB * told['memory_gib'])} at most", memory)
    if told["first_step_s"] is not None:
        yield row("first step", duration(told["first_step_s"]))
    yield from _use(told, row)


def _use(told: Json, row: Any) -> Iterator[str]:
    if told["model_tflops"] is None:
        yield row("MFU", "unknown: the number of experts of a token is not known")
        return
    yield row("computes", f"{_flops(told['model_tflops'])} of the model, per device")
    roofs = (
        ("peak", "the maker's peak", "peak_tflops", ""),
        ("products", "large matrix products here", "matmul_tflops", "_of_measured"),
    )
    for label, words, roof, of in roofs:
        if told[roof] is None:
            yield row(f"of {label}", f"unknown: no data sheet gives one for {told['device']}")
            continue
        mfu, hfu = told[f"mfu{of}"], told[f"hfu{of}"]
        if mfu > 1:
            yield row(
                f"of {label}",
                f"unknown: the model computes more than {_flops(told[roof])}, {words}",
            )
            continue
        further = f", HFU {hfu:.1%}" if hfu is not None else ""
        yield row(f"of {label}", f"MFU {mfu:.1%}{further} of {_flops(told[roof])}, {words}")
        usual = usual_mfu_text(told.get("usual_mfu"))
        if roof == "peak_tflops" and usual:
            yield row("", usual)


def _flops(tera: float) -> str:
    return f"{tera:.4g} TFLOP/s" if tera >= 1 else f"{1e3 * tera:.4g} GFLOP/s"


def _parts(told: Json) -> Iterator[str]:
    parts = told["parts"]
    if parts is None:
        return
    longer = parts["step_s"] / told["step_time_s"]
    yield (
        f"parts of a step, by the {parts['where']}'s time, of {parts['steps']} further steps that "
        f"were recorded and took {longer:.2f} times as long"
    )
    yield from table_lines(parts)
    if parts["kernels"]:
        yield "  the most expensive kernels"
    for name, spent in list(parts["kernels"].items())[:_KERNELS]:
        # The names of templates are many lines long.
        short = name if len(name) <= _NAME else f"{name[: _NAME - 1]}…"
        yield f"    {short:68}{spent / parts['step_s']:7.1%} {duration(spent):>12}"


def _checkpoint(told: Json) -> Iterator[str]:
    found = told["checkpoint"]
    if found is None:
        return
    if "problem" in found:
        yield f"checkpoint: not measured: {found['problem']}"
        return
    how = "asynchronous" if found["asynchronous"] else "synchronous"
    first = f", {duration(found['first_stall_s'])} for the first" if found["asynchronous"] else ""
    yield (
        f"checkpoint      the training waits for {duration(found['stall_s'])}{first}, "
        f"{found['share']:.2%} of the time with one every {found['every']} steps; {how}, "
        f"{byte_size(GIB * found['gib'])}, written after {duration(found['seconds'])}"
    )


# --- scaling --------------------------------------------------------------------------------------


def scaling_report(about: Json) -> Report:
    """Return the table of a scaling test and its charts."""
    axis, first = about["axis"], about["points"][0]
    columns = (Column(axis, lambda point: str(point[axis])), *_SCALING)
    ideal = [point["world_size"] / first["world_size"] for point in about["points"]]
    charts = [
        _chart(about, "speed-up", "speed_up", ideal),
        _chart(about, "efficiency", "efficiency", [1.0] * len(ideal)),
    ]
    blocks: list[Block] = [table(columns, about["points"]), Chart(pictures=charts)]
    batch = "grows with them" if about["weak"] else f"is {first['global_batch']} samples"
    counts = ", ".join(str(point[axis]) for point in about["points"])
    what = f"{about['model']}, {about['precision']}, {about['backend']} on {about['device']}"
    return Report(f"{what}: {counts} {axis}; the global batch {batch}", blocks)


def _planned(point: Json, name: str, form: str) -> str:
    plan = point["predicted"]
    return "" if plan is None else format(plan[name], form)


_SCALING = (
    Column("step", lambda point: duration(point["step_time_s"])),
    Column("tokens/s", lambda point: f"{point['tokens_per_s']:,.0f}"),
    Column("a device", lambda point: f"{point['tokens_per_s_per_device']:,.0f}"),
    Column("speed-up", lambda point: f"{point['speed_up']:.2f}"),
    Column("planned", lambda point: _planned(point, "speed_up", ".2f")),
    Column("efficiency", lambda point: f"{point['efficiency']:.1%}"),
    Column("planned", lambda point: _planned(point, "efficiency", ".1%")),
    Column("memory", lambda point: byte_size(GIB * point["memory_gib"])),
)


def _chart(about: Json, name: str, key: str, ideal: list[float]) -> str:
    points = about["points"]
    counts = [point[about["axis"]] for point in points]
    series: list[tuple[str, Curve]] = [
        ("measured", [(count, point[key]) for count, point in zip(counts, points, strict=True)])
    ]
    planned = [(point["predicted"] or {}).get(key) for point in points]
    if None not in planned:
        series.append(("planned", list(zip(counts, planned, strict=True))))
    series.append(("ideal", list(zip(counts, ideal, strict=True))))
    return curves(name, series, axis=about["axis"], from_zero=True, width=960, height=320)


# --- eval -----------------------------------------------------------------------------------------


def evaluation_document(config: ResolvedConfig, task: Json, figures: Json) -> Json:
    """Return the document of `eval --json`. Values that are not finite are null."""
    of_texts = not config.train.has_whole_documents
    measured = figures["parts"]
    parts, shares = [_source(part, of_texts) for part in measured], [it["share"] for it in measured]
    loss = sum(share * part["loss"] for share, part in zip(shares, parts, strict=True))
    alone = parts[0] if len(parts) == 1 else None
    return {
        "checkpoint": task["checkpoint"] or config.model.init_from,
        "step": task["step"],
        "loss": _finite(loss),
        "perplexity": _perplexity(loss) if of_texts else None,
        **{
            name: sum(share * part[name] for share, part in zip(shares, measured, strict=True))
            for name in ("preferred", "margin", "accuracy")  # of pairs, and of labels
            if name in measured[0]
        },
        "bits_per_byte": alone and alone["bits_per_byte"],
        **{name: sum(part[name] for part in parts) for name in ("samples", "tokens", "seconds")},
        "bytes": alone and alone["bytes"],
        "sources": [] if alone else [part | {"loss": _finite(part["loss"])} for part in parts],
        "world_size": config.world_size,
        "data": figures["data"],
    }


def print_loss(document: Json) -> None:
    """Print the loss and what follows from it."""
    display.show(document["checkpoint"])
    display.show(f"  loss           {number(document['loss'], '.4f')}")
    if "preferred" in document:
        display.show(
            f"  preferred      {document['preferred']:.1%} of {document['tokens']:,} pairs"
        )
        display.show(f"  margin         {document['margin']:.4f}")
    elif "accuracy" in document:
        display.show(f"  accuracy       {document['accuracy']:.1%} of {document['tokens']:,} texts")
    else:
        display.show(f"  perplexity     {number(document['perplexity'], ',.3f')}")
    if document["bits_per_byte"] is not None:
        display.show(f"  bits per byte  {number(document['bits_per_byte'], '.4f')}")
    for part in document["sources"]:
        words = number(part["loss"], ".4f")
        if document["perplexity"] is not None:
            words += f", perplexity {number(part['perplexity'], ',.3f')}"
        display.show(f"    {part['name']}: loss {words}, {part['samples']:,} samples")
    speed = document["tokens"] / document["seconds"]
    ranks = counted(document["world_size"], "rank")
    counted_in = "pairs" if "preferred" in document else "tokens"
    display.show(f"  samples        {document['samples']:,}, {document['tokens']:,} {counted_in}")
    display.show(f"  speed          {speed:,.0f} {counted_in}/s, {ranks}")
    display.show(f"  data           {document['data']}")


def plain_numbers(value: Any) -> Any:
    """Convert numpy's numbers to Python's; numbers that are not finite become null."""
    if isinstance(value, dict):
        return {str(key): plain_numbers(item) for key, item in value.items()}
    if isinstance(value, bool | str | int | None):
        return value
    try:
        return _finite(float(value))
    except (TypeError, ValueError):
        return str(value)


def _source(figures: Json, of_texts: bool) -> Json:
    """Return the same for one source."""
    loss, text_bytes = figures["loss_sum"] / figures["tokens"], figures["bytes"]
    bits = figures["loss_sum"] / math.log(2) / text_bytes if text_bytes and of_texts else None
    named = {name: figures[name] for name in ("name", "samples", "tokens", "seconds", "bytes")}
    perplexity = _perplexity(loss) if of_texts else None
    return {**named, "loss": loss, "perplexity": perplexity, "bits_per_byte": _finite(bits)}


def _perplexity(loss: float) -> float | None:
    return _finite(math.exp(loss)) if loss < 700 else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
