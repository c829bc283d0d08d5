"""A prediction: the JSON document of `plan --json` and of a run's plan.json, and what people see of it."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

from nanoscale.common.json_text import Json
from nanoscale.common.units import GIB, byte_size, counted, duration, share, three_digits
from nanoscale.config.hardware.data_sheets import CPU, known_speed, usual_mfu, usual_mfu_text
from nanoscale.config.model_math import active_parameters, parameters
from nanoscale.config.training_phases import samples_after
from nanoscale.plan.memory.peak import RankMemory
from nanoscale.plan.predict import Prediction, gain_of_bf16_reductions, tokens_per_s_in_bf16
from nanoscale.plan.saving import SavingPlan, between_failures_s, memory_save_s, plan_saving
from nanoscale.plan.search.choice import LayoutChoice
from nanoscale.plan.time.step import Padding, paddings
from nanoscale.rehearse.rehearsals import why_unplayable
from nanoscale.view.blocks import Block, Chart, Column, Lines, Report, table
from nanoscale.view.job_text import job_lines, recomputation, shape, size
from nanoscale.view.plan import saving_text
from nanoscale.view.plan.choice_text import choice_line
from nanoscale.view.plan.explain import how
from nanoscale.view.plan.pictures import bars, timeline_text

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


def document(plan: Prediction, choice: LayoutChoice | None = None) -> Json:
    """Return the document, with the reason for a layout that the plan chose; sizes are in GiB, times in s."""
    time = plan.time
    return {
        "fits": plan.fits,
        "fits_probability": round(plan.fits_probability, 4),
        "memory": _memory(plan),
        "rehearsed": _rehearsed(plan),
        "step_time_s": time.seconds,
        "step_parts_s": asdict(time.parts),
        "tokens_per_s": time.tokens_per_s,
        "tokens_per_s_per_gpu": time.tokens_per_s_per_gpu,
        "bf16_tokens_per_s_per_gpu": tokens_per_s_in_bf16(plan),
        "mfu": time.mfu,
        "mfu_causal": time.mfu_causal,
        "hfu": time.hfu,
        "usual_mfu": usual_mfu(plan.config),
        "pipeline_utilization": plan.timeline.utilization if plan.timeline is not None else None,
        "training": asdict(plan.training),
        "checkpoints": saving_text.document(_saving(plan)),
        "paddings": [asdict(one) for one in paddings(plan.config, plan.hardware)],
        "parameters": parameters(plan.config.model),
        "active_parameters": active_parameters(plan.config.model),
        "layout": shape(plan.config)["layout"],
        "software": {
            "name": "nanoscale",
            "about": "this engine: its own operations, kernels and overlaps",
        },
        "hardware": {"device": plan.hardware.device, "memory_gib": plan.hardware.memory_gib},
        **({} if choice is None else {"choice": choice_line(choice)}),
    }


def _saving(plan: Prediction) -> SavingPlan:
    """Return the plan of checkpoints; the disk of a described machine is not known here."""
    save_s = memory_save_s(plan.config, plan.hardware)
    failures_s = between_failures_s(plan.config, plan.hardware)
    saving = plan_saving(plan.config, plan.time.seconds, save_s=save_s, failures_s=failures_s)
    return saving if plan.config.cluster.device is None else replace(saving, free=None)


def bought_training(amount: str, plan: Prediction, override: str) -> tuple[Json, str]:
    """Return the document and the line of a training that an amount is enough for."""
    run = plan.training
    tokens = samples_after(plan.config.train, run.steps) * plan.config.train.seq_len
    line = (
        f"{amount} buys {counted(run.steps, 'step')}, {size(tokens)} tokens, in "
        f"{duration(3600 * run.hours)} and {three_digits(run.device_hours)} device hours: type {override}"
    )
    return {"amount": amount, "tokens": tokens, **asdict(run), "override": override}, line


def bf16_advice(fp32: float, bf16: float | None) -> str | None:
    """Return the line about the speed in bf16; None if bf16 is not an option.

    Args:
        fp32: planned tokens/s of a device.
        bf16: the same in bf16, from `tokens_per_s_in_bf16`.
    """
    if bf16 is None:
        return None
    more = f"instead of {fp32:,.0f}, {bf16 / fp32:.1f} times as many"
    return f"precision=bf16 would give {bf16:,.0f} tokens/s per device {more}"


def _memory(plan: Prediction) -> Json:
    worst = plan.worst
    return {
        "worst_rank": worst.rank,
        "capacity_gib": plan.hardware.memory_gib,
        "host_in_use_gib": plan.host_bytes / GIB,
        "host_shared_gib": plan.shared_memory / GIB,
        "host_capacity_gib": plan.hardware.host_memory_gib,
        **_sizes(worst),
        "ranks": [{"rank": rank.rank, **_sizes(rank)} for rank in plan.memory],
    }


def _rehearsed(plan: Prediction) -> Json | None:
    rehearsed = plan.rehearsed
    if rehearsed is None:
        return None
    return {
        "fits": rehearsed.total <= plan.capacity,
        "decides": plan.decisive is not None,
        "rank": rehearsed.rank,
        "allocated_gib": rehearsed.allocated / GIB,
        "reserved_gib": rehearsed.reserved / GIB,
        "total_gib": rehearsed.total / GIB,
        "upper_bound": rehearsed.upper_bound,
    }


def _sizes(rank: RankMemory) -> Json:
    return {
        "allocated_gib": rank.allocated / GIB,
        "reserved_gib": rank.reserved / GIB,
        "in_use_gib": rank.total / GIB,
        "peak": rank.peak,
        "parts": {part.name: part.bytes / GIB for part in rank.parts},
        "host": {part.name: part.bytes / GIB for part in rank.host},
    }


# --- people ---------------------------------------------------------------------------------------


def prediction_report(plan: Prediction, *, explain: bool, about: Sequence[str] = ()) -> Report:
    """Return the verdict, memory, the step and the pipeline's timeline.

    Args:
        explain: True: with the arithmetic behind every number.
        about: sentences about the choice of the layout.
    """
    head = _head(plan)
    blocks = [*first_lines(plan), Lines([*head, *about]), *plan_blocks(plan, explain=explain)]
    return Report("", blocks, f"Plan of {head[0]}")


def first_lines(plan: Prediction) -> list[Block]:
    """Return three lines: the verdict, the speed, and the duration and cost of the training."""
    time, run = plan.time, plan.training
    question = undecided(plan)
    total = f"{time.tokens_per_s:,.0f} in total"
    speed = f"{time.tokens_per_s_per_gpu:,.0f} tokens/s per device, {total}"
    cost = f", {run.cost:,.0f} at {plan.hardware.price:g} an hour" if run.cost is not None else ""
    device_hours = f"{three_digits(run.device_hours)} device hours"
    length = f"{counted(run.steps, 'step')} in {duration(3600 * run.hours)}, {device_hours}{cost}"
    decides = [f"{question}: `nanoscale rehearse` with the same overrides decides"]
    style = "green" if plan.fits else "bold red"
    return [Lines([verdict(plan)], style), Lines([speed, length, *(decides if question else [])])]


def plan_blocks(plan: Prediction, *, explain: bool) -> Iterator[Block]:
    """Yield the memory, the step and the pipeline of a prediction, and what else is known of it."""
    yield Chart(lambda width: bars(plan.memory, plan.capacity, min(width, 120)))
    worst = plan.worst
    pipeline = len(plan.memory) > 1
    title = f"memory of pipeline rank {worst.rank} at its peak" if pipeline else "memory"
    of_host = (
        ("checkpoints in host memory, of all ranks of a host", plan.shared_memory),
        ("host memory, of all ranks of a host", plan.host_bytes),
    )
    sizes = [
        *((part.name, part.bytes, part.how) for part in worst.parts if part.bytes),
        ("allocated", worst.allocated, ""),
        ("reserved", worst.reserved, ""),
        ("in use", worst.total, ""),
        *((f"{part.name}, in host memory", part.bytes, "") for part in worst.host if part.bytes),
        *((name, size, "") for name, size in of_host if size),
    ]
    size = Column("size", lambda row: byte_size(row[1]))
    yield table([_PART, size, *([_HOW] if explain else [])], sizes, title)
    time = plan.time
    reasons = how(plan.config, plan.hardware, time) if explain else {}
    parts = {name: getattr(time.parts, name) for name in MEANINGS}
    times = [
        *(
            (MEANINGS[name], seconds, reasons.get(name, ""), f"{seconds / time.seconds:.1%}")
            for name, seconds in parts.items()
            if seconds >= 0.0005 * time.seconds
        ),
        ("step", time.seconds, "", ""),
    ]
    yield table([_PART, *_TIMES, *([_HOW] if explain else [])], times, "a step")
    timeline = plan.timeline
    if timeline is not None:
        yield Chart(lambda width: timeline_text(timeline, min(width, 160)), title="the pipeline")
    yield Lines(outcome(plan))


_PART = Column("part", lambda row: row[0])
_TIMES = (Column("time", lambda row: duration(row[1])), Column("share", lambda row: row[3]))
_HOW = Column("how", lambda row: row[2])


def _head(plan: Prediction) -> list[str]:
    """Describe the planned job in three lines."""
    config, hardware = plan.config, plan.hardware
    layout = config.parallel
    hosts = -(-config.world_size // hardware.devices_per_host)
    on = f"on {hosts} hosts" if hosts > 1 else "on one host"
    job = shape(config) | {"recompute": recomputation(layout)}
    if config.model.experts:
        job["active"] = active_parameters(config.model)
    if layout.pp > 1 and layout.virtual_stages != 1:
        job["schedule"] += f", {layout.virtual_stages} stages a rank"
    return job_lines(job, f"{config.world_size} × {hardware.device} {on}")


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
    if not plan.fits_host:
        ranks, sizes = plan.ranks_of_host, share(plan.host_bytes, plan.host_capacity)
        return f"does not fit the memory of a host: its {counted(ranks, 'rank')} keep {sizes} there"
    word = "fits" if plan.fits else "does not fit"
    return f"{word}: {needs} ({where}); probability that it fits {plan.fits_probability:.0%}"


def undecided(plan: Prediction) -> str:
    """Return that a rehearsal must decide whether the job fits; empty if the plan can, or none is possible."""
    if not plan.is_open or why_unplayable(plan.config):
        return ""
    return f"the plan cannot decide whether the job fits ({plan.fits_probability:.0%})"


_WORTH_A_HINT = 0.01
_REDUCTIONS = (
    "precision.reduce=bf16 would make a step {:.1%} shorter: it halves what reductions send, and rounds sums "
    "of gradients to bf16, which fewer than 128 ranks of data parallelism usually tolerate"
)


def _padding(one: Padding) -> str:
    longer = one.gain / (1 - one.gain)
    padded = f"{one.key}={one.padded}, with which rows are aligned and tiles are full"
    return f"{one.key}={one.size} makes a step {longer:.1%} longer than {padded}"


def outcome(plan: Prediction) -> list[str]:
    """Return the utilization, advice on the speed, and the times of checkpoints."""
    time = plan.time
    advice = bf16_advice(time.tokens_per_s_per_gpu, tokens_per_s_in_bf16(plan))
    shares = f"MFU {time.mfu:.1%}, causal {time.mfu_causal:.1%}, HFU {time.hfu:.1%}"
    on_cpu = plan.hardware.device == CPU
    rough = on_cpu and known_speed() is None
    reductions = gain_of_bf16_reductions(plan)
    usual = None if on_cpu else usual_mfu_text(usual_mfu(plan.config), time.mfu)
    return [
        *(["rough: this CPU's speed is assumed; `nanoscale doctor` measures it"] if rough else []),
        shares,
        *([usual] if usual else []),
        *([advice] if advice else []),
        *([_REDUCTIONS.format(reductions)] if reductions > _WORTH_A_HINT else []),
        *map(_padding, paddings(plan.config, plan.hardware)),
        *saving_text.saving_lines(_saving(plan)),
    ]
