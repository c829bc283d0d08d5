"""The table of measurements."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from nanoscale.metrics.step_parts import PARTS

_KERNELS, _NAME = 4, 40
_COMPARED = {
    "tokens_per_s": "{:,.0f} tokens/s",
    "memory_gib": "{:.1f} GiB",
    "bf16_tflops": "{:,.0f} TFLOP/s in bf16",
    "fp8_tflops": "{:,.0f} TFLOP/s in fp8",
    "copy_gbs": "{:,.0f} GB/s",
}
"""Figures that are compared with a prediction."""
_LAYOUT = ("train.micro_batch", "parallel.activation_checkpointing")
_COLUMNS = {
    "tokens_per_s": "{:,.0f} tokens/s",
    "step_time_s": "{:.3f} s a step",
    "mfu": "{:.1%} MFU",
    "memory_gib": "{:.1f} GiB",
    "first_step_s": "{:.1f} s the first step",
    "stall_s": "{:.3f} s a checkpoint stalls",
}


def render(documents: Sequence[dict[str, Any]]) -> str:
    """Return the rows of some sessions, their machines, and ratios between rows of any of them."""
    lines = []
    for document in documents:
        about = {**document, **document.get("versions", {})}.items()
        named = [f"{name} {it}" for name, it in about if not isinstance(it, list | dict)]
        lines += [" · ".join(named)]
        lines += document.get("notes", [])
        lines += [line for row in document["rows"] for line in lines_of(row)]
    rows = [row for document in documents for row in document["rows"]]
    return "\n".join([*lines, *(f"{name:52}{ratio:6.3f}" for name, ratio in ratios(rows))])


def lines_of(row: dict[str, Any]) -> Iterator[str]:
    """Yield a row's figures, and below them the parts of the step time."""
    if "why" in row:
        yield f"{row['what']:40}{row['why']}"
        yield from _compared(row)
        return
    if items := row.get("items"):
        wrong = sum(str(it["verdict"]).startswith("WRONG") for it in items)
        yield f"{row['what']:40}{len(items)} measured, {wrong} WRONG{row.get('ended', '')}"
        for it in items:
            numbers = [
                f"{it[name]:.1e}" for name in ("error", "bound") if isinstance(it.get(name), float)
            ]
            speeds = row.get("compiled", {}).get("tflops", {}).get(it["item"], ())
            planned = (
                f" (plan {' and '.join(f'{speed:,.0f}' for speed in speeds)})" if speeds else ""
            )
            yield f"    {it['item']:44}{' of '.join(numbers):22}{it['verdict']}{planned}"
        return
    cells = [_cell(row, name, form) for name, form in _COLUMNS.items() if row.get(name)]
    cells = cells or [
        f"{name} {value:,.4g}" for name, value in row.items() if isinstance(value, float)
    ]
    cells += [f"micro batch {micro}" for micro in _values(row, "train.micro_batch")]
    yield f"{row['what']:40} {'  '.join(cells)}"
    yield from _code(row)
    yield from _compared(row)
    if parts := row.get("parts"):
        shares = {name: parts[f"{name}_s"] / parts["step_s"] for name in PARTS}
        named = [f"{name} {share:.1%}" for name, share in shares.items() if share > 0]
        yield f"    {' · '.join(named)} · the host waited {sum(parts['waits'].values())} times"
        kernels = list(parts["kernels"].items())[:_KERNELS]
        if kernels:
            named = [f"{name[:_NAME]} {time / parts['step_s']:.1%}" for name, time in kernels]
            yield f"    {' · '.join(named)}"


def _code(row: dict[str, Any]) -> Iterator[str]:
    """Yield what the compiled code of a prediction shows."""
    if "operations" not in row:
        return
    code, findings = row["kernels"], list(row["compiler"])
    findings += [f"{name} spills registers" for name in code["spilling"]]
    yield (
        f"    {code['count']} kernels of Inductor, {code['launches']:,} of {row['launches']:,} launches, "
        f"{code['gb']:,.0f} GB, {code['share']:.1%} of the step · not compiled {row['eager_gb']:,.0f} GB · "
        f"{len(code['reading_twice'])} read rows twice · {row['waits']} waits"
    )
    yield from (f"    {it}" for it in findings)
    for it in row["operations"][:_KERNELS]:
        yield f"    {it['share']:6.1%} {it['what']}"


def _compared(row: dict[str, Any]) -> Iterator[str]:
    """Yield the figures of the compiled code, and the measured ones over them."""
    if not (compiled := row.get("compiled")):
        return
    if "why" in compiled:
        yield f"    compiled code: {compiled['why']}"
        return
    cells = []
    for name in (it for it in _COMPARED if compiled.get(it)):
        ratio = f", measured {row[name] / compiled[name]:.3f} of it" if row.get(name) else ""
        cells.append(_COMPARED[name].format(compiled[name]) + ratio)
    if cells:
        yield f"    compiled code: {' · '.join(cells)}"
    layouts = [[it for key in _LAYOUT for it in _values(side, key)] for side in (row, compiled)]
    if layouts[0] and layouts[0] != layouts[1]:
        yield f"    compiled code: of another layout, {' '.join(layouts[1])}"
    seconds = {it["what"]: it["seconds"] for it in compiled.get("operations", ())}
    for name, measured in ((row.get("parts") or {}).get("kernels") or {}).items():
        if name in seconds:
            yield f"    {name}: {1e3 * measured:.1f} ms, compiled code {1e3 * seconds[name]:.1f} ms"


def _values(row: dict[str, Any], key: str) -> list[str]:
    pairs = [override.split("=", 1) for override in row.get("overrides", ())]
    return [value for name, value in pairs if name == key]


def _cell(row: dict[str, Any], name: str, form: str) -> str:
    planned = (row.get("predicted") or {}).get(name)
    return form.format(row[name]) + (f" (plan {form.format(planned)})" if planned else "")


def ratios(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield the speed of nanoscale over the peer's in the same job, and the speed of fp8 over bf16."""
    speeds = {row["what"]: row["tokens_per_s"] for row in rows if row.get("tokens_per_s")}
    for what, speed in speeds.items():
        peer, _, job = what.partition(" ")
        ours = speeds.get(f"nanoscale {job}")
        if peer != "nanoscale" and ours:
            yield f"nanoscale over {what}", ours / speed
        bf16 = speeds.get(re.sub(" fp8.*", " bf16", what))
        if " fp8" in what and bf16:
            yield f"{what} over bf16", speed / bf16
