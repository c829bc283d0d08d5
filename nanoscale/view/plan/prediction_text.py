"""A prediction for people: the verdict, the parts of memory and time, and the duration of the training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoscale.common.units import byte_size, duration, share, three_digits
from nanoscale.config.hardware.cpu_speed import known_speed
from nanoscale.config.hardware.data_sheets import CPU, kind
from nanoscale.config.hardware.usual_mfu import usual_mfu, usual_mfu_text
from nanoscale.config.model_math import active_parameters, parameters
from nanoscale.config.schema import Parallel
from nanoscale.plan.hardware.software import NANOSCALE
from nanoscale.plan.predict import Prediction, tokens_per_s_in_bf16
from nanoscale.plan.saving import plan_saving
from nanoscale.view.plan.explain import how
from nanoscale.view.plan.memory_text import bars
from nanoscale.view.plan.prediction_json import bf16_advice

if TYPE_CHECKING:
    from rich.console import Console

MEANINGS = {
    "matmul": "matrix products",
    "attention": "attention",
    "elementwise": "norms, activations, residuals, loss",
    "recomputed": "recomputed",
    "launch": "starting kernels",
    "tp": "tensor parallel, exposed",
    "cp": "context parallel, exposed",
    "ep": "tokens to their experts",
    "pp": "between stages, exposed",
    "dp": "gathers and reductions, exposed",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "offload": "to and from host memory",
    "data": "data",
    "jitter": "the slowest host",
}
"""The names of the parts of a step."""


def print_prediction(console: Console, plan: Prediction, *, explain: bool = False) -> None:
    """Print the prediction; with `explain` the arithmetic behind every number."""
    console.print("\n".join(head(plan)), markup=False)
    console.print()
    console.print(verdict(plan), style="green" if plan.fits else "bold red", markup=False)
    console.print(bars(plan.memory, plan.capacity, min(console.width, 120)))
    _print_memory(console, plan, explain)
    _print_time(console, plan, explain)
    if plan.timeline is not None:
        from nanoscale.view.plan.timeline_text import timeline_rich

        console.print(timeline_rich(plan.timeline, min(console.width, 160)))
    console.print("\n".join(outcome(plan)), markup=False)


def head(plan: Prediction) -> list[str]:
    """Describe the planned job in three lines."""
    config, hardware = plan.config, plan.hardware
    layout, train, model = config.parallel, config.train, config.model
    hosts = -(-config.world_size // hardware.devices_per_host)
    count = f"{config.world_size} × {hardware.device}"
    on = f"on {hosts} hosts" if hosts > 1 else "on one host"
    degrees = [f"dp {layout.dp}", f"tp {layout.tp}", f"pp {layout.pp}", f"cp {layout.cp}"]
    if model.experts:
        degrees.append(f"ep {layout.ep}")
    if layout.dp_replicate > 1:
        degrees.insert(1, f"in {layout.dp_replicate} replicas")
    if layout.pp > 1:
        degrees.append(layout.schedule)
        if layout.virtual_stages != 1:
            degrees[-1] += f", {layout.virtual_stages} stages a rank"
    recomputed = recomputation(layout)
    degrees += [f"ZeRO {config.zero.stage}"] + (
        [f"recompute {recomputed}"] if recomputed != "none" else []
    )
    size = f"{parameters(model) / 1e9:.4g} B parameters"
    if model.experts:
        size += f", {active_parameters(model) / 1e9:.4g} B active"
    own = plan.software is NANOSCALE
    engine = config.backend.name if own else f"as {plan.software.name}"
    return [
        f"{model.name}, {size}, {kind(config.precision)}, {engine}, {count} {on}",
        " · ".join(degrees),
        f"global batch {train.global_batch} = micro batch {train.micro_batch} · dp {layout.dp} · accumulation "
        f"{config.accumulation}, {train.seq_len:,} tokens each",
    ]


def recomputation(layout: Parallel) -> str:
    """Return the mode of recomputation, with the products that it keeps if they are not the usual ones."""
    mode, keep = layout.activation_checkpointing, layout.selective_keep
    usual = mode != "selective" or keep == Parallel().selective_keep
    return mode if usual else f"{mode} ({keep})"


def verdict(plan: Prediction) -> str:
    """Return the verdict in one line."""
    worst, rehearsed = plan.worst, plan.decisive
    if rehearsed is not None:
        needs = share(rehearsed.total, plan.capacity)
        where = f"rehearsed: rank {rehearsed.rank}, {rehearsed.phase}"
    else:
        needs = share(worst.total, plan.capacity)
        where = f"pipeline rank {worst.rank}, " if len(plan.memory) > 1 else ""
        where += worst.peak
        if plan.rehearsed is not None:
            most = byte_size(plan.rehearsed.total)
            where += f"; a rehearsal with eager blocks, an upper bound, counted {most}"
    word = "fits" if plan.fits else "does not fit"
    return f"{word}: {needs} ({where}); probability that it fits {plan.fits_probability:.0%}"


def outcome(plan: Prediction) -> list[str]:
    """Return the speed, the duration and cost of the training, and the times of checkpoints."""
    time, run = plan.time, plan.training
    advice = bf16_advice(time.tokens_per_s_per_gpu, tokens_per_s_in_bf16(plan))
    speed = (
        f"{time.tokens_per_s_per_gpu:,.0f} tokens/s per device, {time.tokens_per_s:,.0f} in total"
    )
    shares = f"MFU {time.mfu:.1%}, causal {time.mfu_causal:.1%}, HFU {time.hfu:.1%}"
    cost = f", {run.cost:,.0f} at {plan.hardware.price:g} an hour" if run.cost is not None else ""
    device_hours = f"{three_digits(run.device_hours)} device hours"
    length = f"{run.steps:,} steps in {duration(3600 * run.hours)}, {device_hours}{cost}"
    saving = plan_saving(plan.config, time.seconds)
    on_cpu = plan.hardware.device == CPU
    rough = on_cpu and known_speed() is None
    usual = None if on_cpu else usual_mfu_text(usual_mfu(plan.config))
    return [
        speed,
        *(["rough: this CPU's speed is assumed; `nanoscale doctor` measures it"] if rough else []),
        shares,
        *([usual] if usual else []),
        *([advice] if advice else []),
        length,
        *(f"checkpoints: {sentence}" for sentence in saving.sentences()),
        *(f"warning: {warning}" for warning in saving.warnings()),
    ]


def _print_memory(console: Console, plan: Prediction, explain: bool) -> None:
    from rich.table import Table

    worst = plan.worst
    title = (
        f"memory of pipeline rank {worst.rank} at its peak" if len(plan.memory) > 1 else "memory"
    )
    table = Table("part", "size", title=title, title_justify="left", box=None, pad_edge=False)
    table.columns[1].justify = "right"
    if explain:
        table.add_column("how", overflow="fold")
    for part in worst.parts:
        if part.bytes:
            table.add_row(part.name, byte_size(part.bytes), *([part.how] if explain else []))
    totals = {"allocated": worst.allocated, "reserved": worst.reserved, "in use": worst.total}
    for name, size in totals.items():
        table.add_row(name, byte_size(size), style="bold")
    for part in worst.host:
        table.add_row(f"{part.name}, in host memory", byte_size(part.bytes), style="dim")
    console.print(table)
    console.print()


def _print_time(console: Console, plan: Prediction, explain: bool) -> None:
    from rich.table import Table

    time = plan.time
    table = Table(
        "part", "time", "share", title="a step", title_justify="left", box=None, pad_edge=False
    )
    for column in table.columns[1:]:
        column.justify = "right"
    reasons = how(plan.config, plan.hardware, time, plan.software) if explain else {}
    if explain:
        table.add_column("how", overflow="fold")
    for name, meaning in MEANINGS.items():
        seconds = getattr(time.parts, name)
        if seconds >= 0.0005 * time.seconds:
            row = (meaning, duration(seconds), f"{seconds / time.seconds:.1%}")
            table.add_row(*row, *([reasons.get(name, "")] if explain else []))
    table.add_row("step", duration(time.seconds), "", style="bold")
    console.print(table)
    console.print()
