"""The output of `nanoscale bench`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from nanoscale.common import display
from nanoscale.common.units import GIB, byte_size, counted, duration
from nanoscale.config.hardware.usual_mfu import usual_mfu_text
from nanoscale.metrics.step_parts import table_lines

if TYPE_CHECKING:
    from rich.console import Console

_KERNELS, _NAME = 8, 66


def print_bench(screen: Console, told: dict[str, Any]) -> None:
    """Print the figures, from the whole to its parts."""
    for line in [*_head(told), "", *_figures(told), *_parts(told), *_checkpoint(told)]:
        screen.print(line, markup=False, soft_wrap=True)
    if "compared" in told:
        _print_compared(screen, told)


def _head(told: dict[str, Any]) -> Iterator[str]:
    ranks = counted(told["world_size"], "rank")
    layout = " · ".join(f"{axis} {told['layout'][axis]}" for axis in ("dp", "tp", "pp", "cp"))
    yield (
        f"{told['model']}, {told['parameters'] / 1e6:,.1f} M parameters, {told['precision']}, "
        f"{told['backend']}, {ranks} on {told['device']}"
    )
    yield (
        f"{layout} · ZeRO {told['zero_stage']}; global batch {told['global_batch']} = micro batch "
        f"{told['micro_batch']} · dp {told['layout']['dp']} · accumulation {told['accumulation']}, "
        f"{told['seq_len']:,} tokens each"
    )


def _figures(told: dict[str, Any]) -> Iterator[str]:
    plan = told["predicted"] or {}

    def row(label: str, text: str, predicted: str | None = None) -> str:
        return f"{label:16}{text}" + (f"; planned {predicted}" if predicted else "")

    def planned(name: str, form: Any) -> str | None:
        return form(plan[name]) if plan.get(name) is not None else None

    spread = f"{duration(told['step_time_least_s'])} to {duration(told['step_time_most_s'])}"
    timed = f"the median of {told['steps']} after {told['warmup']} of warm-up, {spread}"
    yield row(
        "step",
        f"{duration(told['step_time_s'])}, {timed}",
        planned("step_time_s", duration),
    )
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


def _use(told: dict[str, Any], row: Any) -> Iterator[str]:
    if told["model_tflops"] is None:
        yield row("MFU", "unknown: the number of experts of a token is not known")
        return
    yield row("computes", f"{_flops(told['model_tflops'])} of the model, per device")
    roofs = (
        ("peak", "the maker's peak", "peak_tflops", "mfu", "hfu"),
        (
            "products",
            "large matrix products here",
            "matmul_tflops",
            "mfu_of_measured",
            "hfu_of_measured",
        ),
    )
    for label, words, roof, mfu, hfu in roofs:
        if told[roof] is None:
            yield row(f"of {label}", f"unknown: no data sheet gives one for {told['device']}")
            continue
        again = f", HFU {told[hfu]:.1%}" if told[hfu] is not None else ""
        yield row(f"of {label}", f"MFU {told[mfu]:.1%}{again} of {_flops(told[roof])}, {words}")
        usual = usual_mfu_text(told.get("usual_mfu"))
        if roof == "peak_tflops" and usual:
            yield row("", usual)


def _flops(tera: float) -> str:
    return f"{tera:.4g} TFLOP/s" if tera >= 1 else f"{1e3 * tera:.4g} GFLOP/s"


def _parts(told: dict[str, Any]) -> Iterator[str]:
    parts = told["parts"]
    if parts is None:
        return
    yield ""
    longer = parts["step_s"] / told["step_time_s"]
    yield (
        f"parts of a step, by the {parts['where']}'s time, of {parts['steps']} further steps that "
        f"were recorded and took {longer:.2f} times as long"
    )
    yield from table_lines(parts)
    if parts["kernels"]:
        yield "  the most expensive kernels"
    for name, spent in list(parts["kernels"].items())[:_KERNELS]:
        yield f"    {_shortened(name):68}{spent / parts['step_s']:7.1%} {duration(spent):>12}"


def _shortened(name: str) -> str:
    """Shorten the names of templates, which are many lines long."""
    return name if len(name) <= _NAME else f"{name[: _NAME - 1]}…"


def _checkpoint(told: dict[str, Any]) -> Iterator[str]:
    found = told["checkpoint"]
    if found is None:
        return
    yield ""
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


def _print_compared(screen: Console, told: dict[str, Any]) -> None:
    from rich.table import Table

    other = told["compared"]
    table = Table("", "this", other["name"], "ratio", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, ratio in other["ratios"].items():
        label = name.replace("_", " ")
        table.add_row(label, f"{told[name]:,.4g}", f"{other[name]:,.4g}", f"{ratio:.3f}")
    screen.print()
    display.print_table(screen, table)
