"""`nanoscale bench`: what a recipe's steps take on this machine or the hosts of a job, and how they scale."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from nanoscale.cli.common import options as opt
from nanoscale.cli.common import output
from nanoscale.cli.common.request import LAUNCH, CommandLine, request_new_run, requesting
from nanoscale.common import display
from nanoscale.common.errors import UserError
from nanoscale.common.json_text import Json

if TYPE_CHECKING:
    from nanoscale.config.values.provenance import Composed
    from nanoscale.launch.request import Request

_BATCH = "train.global_batch"
_RECORDED = 3
"""Steps after the timed ones; the first is ignored."""


@requesting("config", "config_dir", *LAUNCH)
def bench(
    line: CommandLine,
    steps: int = opt.option("Time this number of steps", default=10),
    warmup: int = opt.option("Run this number of steps before the timed ones", default=3),
    compare: str | None = opt.option(
        "Compare with a run, or with the --json output of an earlier bench", metavar="RUN|FILE"
    ),
    devices: str | None = opt.option(
        "Measure with each number of devices of a host, to see how it scales", metavar="N,N,…"
    ),
    weak: bool = opt.flag("Grow the global batch with the devices", "--weak"),
    html: opt.Html = None,
    overwrite: opt.Overwrite = False,
    force: opt.Force = False,
    as_json: opt.AsJson = False,
) -> int:
    """Measure a job's step time, its parts, MFU and memory.

    The job's ranks train for some steps; no run is created, and nothing is kept. With checkpoint.every, a
    checkpoint is written next to the runs, measured and removed; checkpoint.every=0 leaves that out. With
    --devices 1,2,4 or --num-nodes 1,2, it measures each and shows speed-up and efficiency compared with the
    plan's.
    """
    from nanoscale.launch.lifecycle.bench import compare_figures, read_other
    from nanoscale.view.measured_text import bench_report, scaling_report

    opt.require_at_least(1, {"--steps": steps})
    opt.require_at_least(0, {"--warmup": warmup})
    scale = _scale(devices, line)
    need = "is for a scaling test: add --devices 1,2 or --num-nodes 1,2"
    single = "is for one measurement, not for a scaling test"
    opt.refuse_unused(
        (scale is None, need, {"--weak": weak, "--html": html}),
        (scale is not None, single, {"--compare": compare}),
    )
    output.require_writable("--html", html, overwrite=overwrite)
    other = read_other(compare) if compare is not None else None
    if scale is not None:
        about = _test_scaling(line, *scale, weak, warmup, steps, force)
        report = scaling_report(about)
        output.write_page(html, report, overwrite=overwrite)
        output.answer(as_json, about, output.show_report, report, html)
        return output.DONE if len(about["points"]) == len(scale[1]) else output.FAILED
    told = _measure(_request(line, force), warmup, steps)
    if told is None:
        return output.FAILED
    if other is not None:
        told["compared"] = compare_figures(told, other)
    output.answer(as_json, told, output.show_report, bench_report(told))
    return output.DONE


def _request(line: CommandLine, force: bool) -> Request:
    return request_new_run(line, force=force, fetch=False, saves=False, verify=_refuse_profile)


def _measure(request: Request, warmup: int, steps: int, label: str = "") -> Json | None:
    """Return the measurements of a job; None if it has failed, which is reported."""
    from nanoscale.launch.lifecycle.bench import checkpoint_folder, document
    from nanoscale.launch.lifecycle.job_execution import OneShotJobError, run_one_shot_job
    from nanoscale.processes.messages import BENCH

    config = request.config
    assert config.train.steps is not None
    # Random weights take as long, and the schedule fits all steps.
    longest = max(config.train.steps, warmup + steps + _RECORDED)
    train = replace(config.train, steps=longest, sample_tokens=0)
    measured = replace(config, train=train, model=replace(config.model, init_from=None))
    with output.saying() as say, checkpoint_folder(config) as folder:
        task = {"warmup": warmup, "steps": steps, "folder": folder and str(folder)}
        say(f"{label}starting the ranks …")
        try:
            figures = run_one_shot_job(BENCH, measured, request.hosts, task, say)
        except OneShotJobError as error:
            display.note(f"error: {label}{error}")
            return None
    return {**document(config, figures, request.plan), "warmup": warmup}


# --- scaling --------------------------------------------------------------------------------------


def _scale(devices: str | None, line: CommandLine) -> tuple[str, list[int]] | None:
    """Return the option of a scaling test, and its numbers of devices or hosts; None if none is requested.

    Raises:
        UserError: the numbers are not ascending ones from 1, or both lists are given.
    """
    given = {key: setting.value for key, setting in line.options.items()}
    num_nodes = given.get("launcher.nodes")
    by_nodes = isinstance(num_nodes, str) and "," in num_nodes
    if devices is None and not by_nodes:
        return None
    other = "--num-nodes" if by_nodes else "--num-gpus"
    opt.refuse_several({"--devices": devices, other: by_nodes or given.get("launcher.devices")})
    option, text = ("--devices", devices) if devices is not None else ("--num-nodes", num_nodes)
    words = str(text).split(",")
    numbers = [int(word) for word in words if word.strip().isdecimal()]
    if len(numbers) < max(2, len(words)) or numbers != sorted({*numbers} - {0}):
        what = f"must be ascending numbers, as in {option} 1,2,4"
        raise UserError("usage", f"{option} {text}: {what}")
    return option, numbers


def _test_scaling(
    line: CommandLine,
    option: str,
    counts: list[int],
    weak: bool,
    warmup: int,
    steps: int,
    force: bool,
) -> Json:
    """Measure with every number, after all of them are checked and planned; a failure ends the test.

    Raises:
        UserError: one of the requests is wrong.
        typer.Exit: the first job failed.
    """
    from nanoscale.config.composing.compose import Setting
    from nanoscale.config.values.provenance import COMMAND_LINE
    from nanoscale.launch.lifecycle.bench import scaling_document

    axis, key = ("devices",) * 2 if option == "--devices" else ("hosts", "nodes")
    requests: list[Request] = []
    for count in counts:
        source = f"{COMMAND_LINE}: {option} {count}"
        scaled = {f"launcher.{key}": Setting(count, source), "parallel.dp": Setting("auto", source)}
        counted = replace(line, options={**line.options, **scaled})
        if weak and requests:
            batch = requests[0].config.train.global_batch * count // counts[0]
            kept = [word for word in line.overrides or () if not word.startswith(f"{_BATCH}=")]
            counted = replace(counted, overrides=[*kept, f"{_BATCH}={batch}"])
        requests.append(_request(counted, force))
    measured: list[Json] = []
    for count, request in zip(counts, requests, strict=True):
        label = f"{axis} {count}: "
        told = _measure(request, warmup, steps, label)
        if told is None:
            break
        display.note(f"{label}{told['tokens_per_s']:,.0f} tokens/s")
        measured.append(told)
    if not measured:
        raise typer.Exit(output.FAILED)
    return scaling_document(axis, counts[: len(measured)], measured, weak=weak)


# --- the job --------------------------------------------------------------------------------------


def _refuse_profile(composed: Composed) -> None:
    steps = composed.config.profile.steps
    if steps is not None:
        what = "writes into a run, and a bench creates none: leave it out, or type nanoscale train"
        raise UserError("usage", f"profile.steps={steps} {what}")
