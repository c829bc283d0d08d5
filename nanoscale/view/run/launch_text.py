"""The description of a launch, for people and as a document."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, astuple
from typing import TYPE_CHECKING, Any, Literal

from nanoscale.common.units import GIB, counted, duration, share
from nanoscale.config.data.token_sources import times_seen
from nanoscale.config.hardware.data_sheets import wide_kind
from nanoscale.config.model_math import describe_adapters, parameters
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Precision, Zero
from nanoscale.config.stages import stage_layers
from nanoscale.launch.lifecycle.command import LaunchPlan
from nanoscale.launch.request import Request
from nanoscale.rehearse.tasks import why_unplayable
from nanoscale.runs.directory import RunDirectory
from nanoscale.view.plan.prediction_json import bf16_advice
from nanoscale.view.rehearsal_text import verdict

if TYPE_CHECKING:
    from rich.console import Console

_MOST_RANKS = 64
"""The most rows; more would push the rest off the screen."""


def document(request: Request, plan: LaunchPlan, run: RunDirectory) -> dict[str, Any]:
    """Return the document of `train --dry-run --json`."""
    config = request.config
    return {
        "world_size": plan.world_size,
        "hosts": [
            {
                "host": host.host,
                "slots": host.slots,
                "devices": list(host.used_devices),
                "ranks": list(host.ranks),
                "command": list(host.command),
            }
            for host in plan.hosts
        ],
        "master_addr": plan.master_addr,
        "master_port": plan.master_port,
        "environment": plan.environment,
        "mesh": asdict(plan.mesh),
        "settings": settings(config),
        "derived": derived_values(config),
        "run_dir": str(run.path),
        "epochs": times_seen(config),
        "plan": request.plan,
        "checkpoints": request.saving.document(),
        "rehearsed": request.program is not None,
    }


def derived_values(config: ResolvedConfig) -> dict[str, int]:
    """Return the numbers that follow from the configuration."""
    return {
        "dp": config.parallel.dp,
        "global_batch": config.train.global_batch,
        "micro_batch": config.train.micro_batch,
        "accumulation": config.accumulation,
        "tokens_per_step": config.tokens_per_step,
        "steps": config.train.steps,
        "parameters": parameters(config.model),
    }


def settings(config: ResolvedConfig) -> dict[str, str]:
    """Describe the most important settings in words, by topic."""
    layout, launcher = config.parallel, config.launcher
    words = {
        "backend": config.backend.name,
        "device": "cuda" if launcher.device == "cuda" else f"cpu, {_threads(launcher.threads)}",
        "data": _data(config),
        "precision": describe_precision(config.precision),
        "zero": _zero(config),
        "compile": config.backend.compile,
    }
    if config.backend.extra:
        words["DeepSpeed's own"] = json.dumps(config.backend.extra)
    if layout.pp > 1:
        stages = layout.pp * layout.virtual_stages
        blocks = stage_layers(config.model, stages, layout.layers_per_stage)
        words["pipeline"] = f"{layout.schedule}, {stages} stages of {_several(blocks)} blocks"
    if layout.dp_replicate > 1:
        shards = layout.dp // layout.dp_replicate * layout.cp
        words["copies"] = f"{layout.dp_replicate}, each sharded over {shards} ranks"
    if layout.cp > 1:
        words["context"] = layout.cp_method
    if config.model.experts:
        where = f", shared out over {layout.ep} ranks" if layout.ep > 1 else ""
        words["experts"] = (
            f"{config.model.experts}, {config.model.experts_per_token} a token{where}"
        )
    if config.lora.rank:
        words["trained"] = describe_adapters(config)
    if layout.activation_checkpointing != "none":
        words["recomputed"] = layout.activation_checkpointing
    return words


def forecast(predicted: dict[str, Any]) -> dict[str, str]:
    """Summarize plan.json; `nanoscale plan` shows all of it."""
    memory = predicted["memory"]
    word = "fits" if predicted["fits"] else "does not fit"
    rehearsed = predicted.get("rehearsed")
    in_use = memory["in_use_gib"]
    if rehearsed and rehearsed["decides"]:
        in_use, word = rehearsed["total_gib"], f"rehearsed: {word}"
    needed = share(int(GIB * in_use), int(GIB * memory["capacity_gib"]))
    advice = bf16_advice(
        predicted["tokens_per_s_per_gpu"], predicted.get("bf16_tokens_per_s_per_gpu")
    )
    return {
        "memory": f"{word}: {needed} on {predicted['hardware']['device']}, "
        f"with a probability of {predicted['fits_probability']:.0%}",
        "speed": f"{duration(predicted['step_time_s'])} a step, {predicted['tokens_per_s']:,.0f} tokens/s, "
        f"MFU {predicted['mfu']:.1%}",
        **({"in bf16": advice} if advice else {}),
    }


def _threads(threads: int | Literal["auto"]) -> str:
    if threads == "auto":
        return "the cores of each host divided among its ranks"
    return f"{counted(threads, 'thread')} a rank"


def _data(config: ResolvedConfig) -> str:
    data = config.data
    where = ", ".join(data.mixture) if data.mixture else data.path
    source = data.source if where is None else f"{data.source} {where}"
    seen = [seen_text(times)] if (times := times_seen(config)) is not None else []
    return ", ".join([source, f"tokens by {data.tokenizer}", *seen])


def seen_text(times: float) -> str:
    """Return how often the data is seen, in words."""
    return f"seen {times:.3g} times"


def describe_precision(precision: Precision) -> str:
    """Describe the dtypes in words."""
    words = [
        f"weights {precision.params}",
        f"products {wide_kind(precision)}",
        f"gradient sums {precision.reduce}",
    ]
    if precision.fp8:
        words.append(f"linear layers of the blocks fp8, scaled {precision.fp8_recipe}")
    if precision.compute == "fp16":
        words.append(f"loss scale {precision.loss_scale:g} at first")
    return ", ".join(words)


def _zero(config: ResolvedConfig) -> str:
    """Describe the backend's meaning of the ZeRO stage."""
    stage, pipeline = config.zero.stage, config.parallel.pp > 1
    kept = ("nothing is", "optimizer states are", "gradients too are", "parameters too are")[stage]
    if config.backend.name == "deepspeed":
        return f"stage {stage}: {kept} sharded (DeepSpeed){_offloaded(config.zero)}"
    how = "" if stage == 0 else " (FSDP2)"
    if stage == 2 and not pipeline:
        how = " (FSDP2, not resharded after forward)"
    if stage == 3 and not pipeline:
        how = " (FSDP2, resharded after forward)"
    if stage > 1 and pipeline:
        how = " (FSDP2; in a pipeline, gathered and reduced once a step)"
    return f"stage {stage}: {kept} sharded{how}"


def _offloaded(zero: Zero) -> str:
    waiting = {"optimizer states": zero.offload_optimizer, "parameters": zero.offload_param}
    places = {"cpu": "host memory", "nvme": str(zero.nvme_path)}
    return "".join(
        f", {what} wait in {places[where]}" for what, where in waiting.items() if where != "none"
    )


def _several(numbers: list[int]) -> str:
    """Format equal numbers as one, `2`, others as a list."""
    return str(numbers[0]) if len(set(numbers)) == 1 else ", ".join(map(str, numbers))


def print_plan(console: Console, request: Request, plan: LaunchPlan, run: RunDirectory) -> None:
    """Print `train --dry-run`."""
    from rich.table import Table

    config, saving = request.config, request.saving
    values = Table("", "", title="job", title_justify="left", show_header=False)
    units = {
        "parameters": "",
        "global_batch": "samples",
        "micro_batch": "samples a rank",
        "accumulation": "forward and backward passes a step",
        "tokens_per_step": "tokens",
        "steps": "",
    }
    numbers = derived_values(config)
    for name, unit in units.items():
        values.add_row(name.replace("_", " "), f"{numbers[name]:,} {unit}".rstrip())
    values.add_row("mesh", str(plan.mesh))
    for name, text in settings(config).items():
        values.add_row(name, text)
    for name, text in forecast(request.plan).items() if request.plan else ():
        values.add_row(name, text)
    values.add_row("checkpoints", "\n".join(saving.sentences()))
    console.print(f"run directory {run.path}\n", markup=False, soft_wrap=True)
    console.print(values)

    on_gpus = config.launcher.device == "cuda"
    ranks = Table("rank", "host", "local rank", *(["device"] * on_gpus), "pp", "dp", "cp", "tp")
    ranks.title, ranks.title_justify = "ranks", "left"
    devices = {host.host: host.used_devices for host in plan.hosts}
    places = plan.mesh.ranks
    for place in places[:_MOST_RANKS]:
        rank, host, local_rank, *coordinates = astuple(place)
        device = [devices[host][local_rank]] * on_gpus
        ranks.add_row(*map(str, (rank, host, local_rank, *device, *coordinates)))
    console.print(ranks)
    if len(places) > _MOST_RANKS:
        console.print(f"… and {len(places) - _MOST_RANKS} more ranks; --json lists all of them")

    console.print("\nenvironment, in addition to the inherited one")
    for name, value in plan.environment.items():
        console.print(f"  {name}={shlex.quote(value)}", markup=False, soft_wrap=True)
    console.print(f"\nrendezvous at {plan.master_addr}:{plan.master_port}")
    console.print("\ncommands")
    for entry in plan.hosts:
        line = f"  {entry.host}: {shlex.join(entry.command)}"
        console.print(line, markup=False, soft_wrap=True)
    for warning in saving.warnings():
        console.print(f"\nwarning: {warning}", markup=False, soft_wrap=True)
    console.print("\nnothing was written or started")
    for line in rehearsal_lines(request):
        console.print(line, markup=False, soft_wrap=True)


def request_lines(request: Request) -> list[str]:
    """Describe what a launch begins with: dtypes, data, rehearsal and checkpoints."""
    return [
        *precision_lines(request),
        *_data_lines(request),
        *rehearsal_lines(request),
        *saving_lines(request),
    ]


def precision_lines(request: Request) -> list[str]:
    """Describe the dtypes, and the speed in bf16 if fp32 was chosen on GPUs."""
    chosen = " (precision.compute=auto)" if request.asked.precision.compute == "auto" else ""
    lines = [f"precision: {describe_precision(request.config.precision)}{chosen}"]
    advice = forecast(request.plan).get("in bf16") if request.plan else None
    return [*lines, advice] if advice else lines


def _data_lines(request: Request) -> list[str]:
    """Describe how often the data is seen; nothing if its size is not known before the launch."""
    times = times_seen(request.config)
    return [] if times is None else [f"data: {seen_text(times)}"]


def rehearsal_lines(request: Request) -> list[str]:
    """Return whether a job of several ranks was rehearsed, in a line to show; nothing if it cannot be."""
    if request.config.world_size == 1 or why_unplayable(request.config) is not None:
        return []
    if request.program is None:
        return ["not rehearsed: --rehearse plays every kind of rank before the launch"]
    return [f"rehearsed: {verdict(request.program)}"]


def saving_lines(request: Request) -> list[str]:
    """Return the plan of checkpoints as lines to show, warnings included."""
    saving = request.saving
    lines = [f"checkpoints: {sentence}" for sentence in saving.sentences()]
    return [*lines, *(f"warning: {warning}" for warning in saving.warnings())]
