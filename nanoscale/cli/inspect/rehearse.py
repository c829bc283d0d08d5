"""`nanoscale rehearse`: the real code of every kind of rank, on devices that are not there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nanoscale.cli.common import options as opt
from nanoscale.cli.common import output
from nanoscale.cli.common.described_machines import on_described_hosts, planned_hosts
from nanoscale.cli.common.rehearsal import rehearsed
from nanoscale.cli.common.request import HOSTS, CommandLine, request_job, requesting
from nanoscale.common.errors import UserError, refuse_option

if TYPE_CHECKING:
    from nanoscale.config.resolved import ResolvedConfig
    from nanoscale.launch.request import Request


@requesting("config", "config_dir", *HOSTS, "trust")
def rehearse(
    line: CommandLine,
    ranks: str = opt.option(
        "Play one rank of each kind, all ranks, or these",
        default="distinct",
        metavar="distinct|all|0,8",
    ),
    steps: int = opt.option("Play this many steps", default=2),
    micro_batches: Literal["distinct", "all"] = opt.option(
        "Play the micro batches of a step that differ, or all", default="distinct"
    ),
    html: opt.Html = None,
    snapshots: Path | None = opt.option(
        "Write each rank's memory for pytorch.org/memory_viz", metavar="FOLDER"
    ),
    trace: Path | None = opt.option(
        "Write the step's timeline for ui.perfetto.dev", metavar="FILE"
    ),
    against: Path | None = opt.option(
        "Compare with the result in this file, of --json or a run's program.json", metavar="FILE"
    ),
    overwrite: opt.Overwrite = False,
    as_json: opt.AsJson = False,
) -> int:
    """Run every kind of rank's real code without devices.

    The hardware is what `cluster` describes, or this machine.
    """
    from nanoscale.plan.hardware.planned_devices import planned_devices
    from nanoscale.plan.rehearsed import step_time
    from nanoscale.rehearse.against import changes as changes_against
    from nanoscale.rehearse.against import read_former
    from nanoscale.rehearse.document import failed
    from nanoscale.runs.directory import write_atomically
    from nanoscale.view.rehearsal_text import rehearsal_report

    opt.require_at_least(1, {"--steps": steps})
    output.require_writable("--html", html, overwrite=overwrite)
    output.require_writable("--trace", trace, overwrite=overwrite)
    former = read_former(against) if against is not None else None
    line = on_described_hosts(line)
    request = request_job(line, starts=False, devices=planned_devices, hosts=planned_hosts)
    if snapshots is not None:
        _require_snapshots(request.config, snapshots, overwrite=overwrite)
    result = rehearsed(request.config, ranks, steps, snapshots, every_batch=micro_batches == "all")
    times = step_time.times_of(request.config, result, traced=trace is not None)
    result |= {"time": step_time.document(request.config, times)}
    result["compiled"]["order"] = step_time.block_order(result)
    if trace is not None:
        write_atomically(trace, json.dumps(step_time.trace(times, result["compiled"]["kernels"])))
    fits, changes = (True, []) if result["fits"] else _planned(request, result)
    if against is not None and former is not None:
        before = step_time.times_of(request.config, former)
        former |= {"time": step_time.document(request.config, before)}
        result |= {"against": changes_against(result, former, against)}
    report = rehearsal_report(result, changes)
    output.write_page(html, report, overwrite=overwrite)
    shown = {name: value for name, value in result.items() if name != "program"}
    output.answer(as_json, shown | {"changes": changes}, output.show_report, report)
    if failed(result):
        return output.FAILED
    if not fits:
        return output.DOES_NOT_FIT
    return output.CHANGED if result.get("against") else output.DONE


def _planned(request: Request, result: dict[str, Any]) -> tuple[bool, list[dict[str, str]]]:
    """Return whether a rehearsed job fits, and overrides with which the job fits according to the plan."""
    from nanoscale.config.hardware.data_sheets import UnknownHardwareError
    from nanoscale.plan.predict import predict
    from nanoscale.view.plan.verdict import proposals

    fits = result["fits"] is None
    if result["capacity"] is None:
        return fits, []
    try:
        plan = predict(request.config)
    except UnknownHardwareError:  # without speeds no layout is better than another
        return fits, []
    if fits and plan.fits:
        return True, []
    most = max(rank["total"] for rank in result["ranks"])
    margin = 1.0 if result["eager"] else most / plan.worst.total
    proposed = proposals(request.composed, plan, request.devices, max(1.0, margin))
    return False, [{"overrides": one.suggestions[0], "expected": one.message} for one in proposed]


def _require_snapshots(config: ResolvedConfig, folder: Path, *, overwrite: bool) -> None:
    """Refuse snapshots of a job on CPUs, and a folder that cannot take them."""
    if config.launcher.device == "cpu":
        what = f"--snapshots {folder}: shows the memory of GPUs, and this job runs on CPUs"
        raise UserError("usage", what)
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        refuse_option("--snapshots", str(folder), "the folder is not empty", "--overwrite")
    if folder.exists() and not folder.is_dir():
        raise UserError("usage", f"--snapshots {folder}: is a file")
    if not folder.parent.is_dir() or not os.access(folder.parent, os.W_OK):
        raise UserError("usage", f"--snapshots {folder}: cannot be written")
