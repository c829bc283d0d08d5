"""The description of a launch and of a job of a batch system, for people and as a document."""

import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, astuple, replace

from nanoscale.common import display
from nanoscale.common.json_text import Json
from nanoscale.common.units import GIB, counted, duration, share
from nanoscale.config.composing.variants import Variant
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.token_files import times_seen
from nanoscale.config.training_phases import samples_after
from nanoscale.launch.lifecycle.command import LaunchPlan
from nanoscale.launch.request import Request
from nanoscale.launch.submission.batch_job import BatchJob
from nanoscale.rehearse.rehearsals import why_unplayable
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.submission import Submission
from nanoscale.view import job_text
from nanoscale.view.blocks import Block, Lines, Report, Table, show_table
from nanoscale.view.plan import saving_text
from nanoscale.view.plan.prediction import bf16_advice
from nanoscale.view.rehearsal_text import verdict

_MOST_RANKS = 64
"""The most rows; more would push the rest off the screen."""


def document(request: Request, plan: LaunchPlan, run: RunDirectory) -> Json:
    """Return the document of `train --dry-run --json`."""
    config = request.config
    return {
        "world_size": plan.world_size,
        "hosts": [
            {"host": it.host, "slots": it.slots, "devices": list(it.used_devices)}
            | {"ranks": list(it.ranks), "command": list(it.command)}
            for it in plan.hosts
        ],
        "master_addr": plan.master_addr,
        "master_port": plan.master_port,
        "environment": plan.environment,
        "mesh": asdict(plan.mesh),
        "settings": job_text.settings(config),
        "derived": job_text.derived_values(config),
        "run_dir": str(run.path),
        "epochs": times_seen(config),
        "plan": request.plan,
        "checkpoints": saving_text.document(request.saving),
        "rehearsed": request.program is not None,
    }


def forecast(predicted: Json) -> dict[str, str]:
    """Summarize plan.json; `nanoscale plan` shows all of it."""
    memory = predicted["memory"]
    word = "fits" if predicted["fits"] else "does not fit"
    rehearsed = predicted.get("rehearsed")
    in_use = memory["in_use_gib"]
    if rehearsed and rehearsed["decides"]:
        in_use, word = rehearsed["total_gib"], f"rehearsed: {word}"
    needed = share(int(GIB * in_use), int(GIB * memory["capacity_gib"]))
    in_bf16 = predicted.get("bf16_tokens_per_s_per_gpu")
    advice = bf16_advice(predicted["tokens_per_s_per_gpu"], in_bf16)
    return {
        "memory": f"{word}: {needed} on {predicted['hardware']['device']}, "
        f"with a probability of {predicted['fits_probability']:.0%}",
        "speed": f"{duration(predicted['step_time_s'])} a step, {predicted['tokens_per_s']:,.0f} tokens/s, "
        f"MFU {predicted['mfu']:.1%}",
        **({"in bf16": advice} if advice else {}),
    }


def launch_report(request: Request, plan: LaunchPlan, run: RunDirectory) -> Report:
    """Return what `train --dry-run` shows."""
    environment = [f"  {name}={shlex.quote(value)}" for name, value in plan.environment.items()]
    commands = [f"  {entry.host}: {shlex.join(entry.command)}" for entry in plan.hosts]
    blocks: list[Block] = [
        _job_table(request, plan),
        _rank_table(request.config, plan),
        Lines(["environment, in addition to the inherited one", *environment]),
        Lines([f"rendezvous at {plan.master_addr}:{plan.master_port}"]),
        Lines(["commands", *commands]),
        Lines([*job_text.data_warning(request.config), *saving_text.warning_lines(request.saving)]),
        Lines(["nothing was written or started", *rehearsal_lines(request)]),
    ]
    return Report(f"run directory {run.path}", blocks)


def _job_table(request: Request, plan: LaunchPlan) -> Table:
    units = {
        "parameters": "",
        "global_batch": "samples",
        "micro_batch": "samples a rank",
        "accumulation": "forward and backward passes a step",
        "tokens_per_step": "tokens",
        "steps": "",
    }
    numbers, plan_json = job_text.derived_values(request.config), request.plan or {}
    rows = [
        *((name.replace("_", " "), f"{numbers[name]:,} {unit}") for name, unit in units.items()),
        ("mesh", str(plan.mesh)),
        *(job_text.settings(request.config) | {"precision": _precision(request)}).items(),
        *((("chosen by the plan", plan_json["choice"]),) if "choice" in plan_json else ()),
        *(forecast(plan_json).items() if plan_json else ()),
        *saving_text.sentences(request.saving).items(),
    ]
    return Table(("job", ""), rows, texts=("",))


def _rank_table(config: ResolvedConfig, plan: LaunchPlan) -> Table:
    names = ["rank", "host", "local rank", "pp", "dp", "cp", "tp"]
    rows = [list(map(str, astuple(place))) for place in plan.mesh.ranks[:_MOST_RANKS]]
    if config.launcher.device == "cuda":
        devices = {host.host: host.used_devices for host in plan.hosts}
        names.insert(3, "device")
        for row in rows:
            row.insert(3, str(devices[row[1]][int(row[2])]))
    left_out = len(plan.mesh.ranks) - _MOST_RANKS
    if left_out > 0:
        rows.append(["…", f"and {left_out} more; --json lists all"] + [""] * (len(names) - 2))
    return Table(names, rows, texts=names)


def request_lines(request: Request) -> list[str]:
    """Describe a launch in three lines, which are the job, its length and its folder, and list warnings."""
    config, plan = request.config, request.plan
    job, seen = job_text.shape(config), times_seen(config)
    chosen = " (chosen by the plan)" if request.choice else ""
    steps = config.train.steps
    tokens = job_text.size(samples_after(config.train, steps) * config.train.seq_len)
    length = f"{counted(steps, 'step')}, {tokens} tokens"
    length += f", {job_text.seen_text(seen)}" if seen is not None else ""
    advice = None
    if plan:
        advice = forecast(plan).get("in bf16")
        expected = duration(3600 * plan["training"]["hours"])
        length += f"; the plan expects {expected} at {plan['tokens_per_s']:,.0f} tokens/s"
        length += f"; {forecast(plan)['memory']}"
    return [
        f"{job_text.model_text(job)}, {job_text.layout_line(job)}{chosen}",
        length,
        f"run in {request.run.path}; {saving_text.summary(request.saving)}",
        *job_text.data_warning(config),
        *([f"warning: {advice}"] if advice else []),
        *saving_text.warning_lines(request.saving),
    ]


def _precision(request: Request) -> str:
    """Describe the dtypes, and who chose them if nobody has set them."""
    requested = request.composed.requested.precision.compute
    chosen = " (precision.compute=auto)" if requested == "auto" else ""
    return f"{job_text.describe_precision(request.config.precision)}{chosen}"


def _submission_lines(request: Request) -> list[str]:
    """Return lines on the data, the rehearsal and the checkpoints of a submitted job."""
    return [
        *job_text.data_warning(request.config),
        *rehearsal_lines(request),
        *saving_text.saving_lines(request.saving),
    ]


def rehearsal_lines(request: Request) -> list[str]:
    """Return whether a job of several ranks was rehearsed, in a line to show; nothing if it cannot be."""
    if request.config.world_size == 1 or why_unplayable(request.config) is not None:
        return []
    if request.program is None:
        return ["not rehearsed: --rehearse plays every kind of rank before the launch"]
    return [f"rehearsed: {verdict(request.program)}"]


# --- jobs of batch systems ---------------------------------------------------------------------------------


def script_document(batch: BatchJob, variants: Sequence[Variant]) -> Json:
    """Return the document of `submit --dry-run --json`."""
    first = batch.requests[0]
    return {
        "world_size": first.config.world_size,
        "nodes": first.config.launcher.nodes or 1,
        "devices": first.config.launcher.devices,
        "settings": job_text.settings(first.config),
        "derived": job_text.derived_values(first.config),
        "text": batch.script,
        "checkpoints": saving_text.document(first.saving),
        **_runs_document(batch, variants),
    }


def submission_document(batch: BatchJob, variants: Sequence[Variant], job: Submission) -> Json:
    """Return the document of `submit --json`."""
    return {"job": job.job, "cluster": job.cluster, **_runs_document(batch, variants, job)}


def print_script(batch: BatchJob, variants: Sequence[Variant]) -> None:
    """Print `submit --dry-run`."""
    display.content(batch.script)
    worlds = {one.config.world_size for one in batch.requests}
    ranks = " or ".join(map(str, sorted(worlds)))
    noun = "rank" if worlds == {1} else "ranks"
    display.note(f"{ranks} {noun} on {counted(len(batch.requests[0].hosts), 'node')}")
    if batch.is_array:
        _print_runs(batch, variants)
    if shutil.which(batch.system.program) is None:
        display.note(f"{batch.system.program} is not installed here: submit from a login node")
    for line in _submission_lines(batch.requests[0]):
        display.note(line)
    display.note(f"this would be written to {batch.path}; nothing was written or submitted")


def print_submission(batch: BatchJob, variants: Sequence[Variant], job: Submission) -> None:
    """Print the job that was accepted, and what to type next."""
    runs = [request.run for request in batch.requests]
    what = f"{len(runs)} runs are" if batch.is_array else f"{runs[0].name} is"
    display.show(f"{what} queued as job {job}")
    if batch.is_array:
        _print_runs(batch, variants)
    else:
        display.show(f"  run     {runs[0].path}")
    display.show(f"  script  {batch.path}")
    for line in _submission_lines(batch.requests[0]):
        display.show(f"  {line}")
    display.show(f"  follow  nanoscale runs watch {shlex.quote(runs[0].reference)}")
    display.show(f"  stop    nanoscale runs stop {shlex.quote(runs[0].reference)}")


def _runs_document(
    batch: BatchJob, variants: Sequence[Variant], job: Submission | None = None
) -> Json:
    runs: list[Json] = []
    for number, (request, variant) in enumerate(zip(batch.requests, variants, strict=True)):
        named = {"name": request.run.name, "run_dir": str(request.run.path)}
        entry = {**named, "values": variant.chosen}
        if job is not None:
            entry["job"] = str(replace(job, task=number) if batch.is_array else job)
        runs.append(entry)
    return {"script": str(batch.path), "runs": runs}


def _print_runs(batch: BatchJob, variants: Sequence[Variant]) -> None:
    """Print the values of each run."""
    rows = [
        (request.run.name, *variant.chosen.values())
        for request, variant in zip(batch.requests, variants, strict=True)
    ]
    header = ("run", *variants[0].chosen)
    show_table(display.console(sys.stderr), Table(header, rows, texts=header))
