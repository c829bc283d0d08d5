"""The output of `nanoscale submit`."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nanoscale.common import display
from nanoscale.common.units import counted
from nanoscale.config.composing.variants import Variant
from nanoscale.launch.submission.batch_job import BatchJob
from nanoscale.runs.submission import Submission
from nanoscale.view.run.launch_text import derived_values, rehearsal_lines, saving_lines, settings


def script_document(batch: BatchJob, variants: Sequence[Variant]) -> dict[str, Any]:
    """Return the document of `submit --dry-run --json`."""
    first = batch.requests[0]
    return {
        "world_size": first.config.world_size,
        "nodes": first.config.launcher.nodes or 1,
        "devices": first.config.launcher.devices,
        "settings": settings(first.config),
        "derived": derived_values(first.config),
        "text": batch.script,
        "checkpoints": first.saving.document(),
        **_runs_document(batch, variants),
    }


def submission_document(
    batch: BatchJob, variants: Sequence[Variant], job: Submission
) -> dict[str, Any]:
    """Return the document of `submit --json`."""
    return {"job": job.job, "cluster": job.cluster, **_runs_document(batch, variants, job)}


def print_script(batch: BatchJob, variants: Sequence[Variant]) -> None:
    """Print `submit --dry-run`."""
    display.content(batch.script)
    worlds = {one.config.world_size for one in batch.requests}
    ranks = " or ".join(map(str, sorted(worlds)))
    display.note(f"{ranks} ranks on {counted(len(batch.requests[0].hosts), 'node')}")
    if batch.is_array:
        _print_runs(batch, variants)
    if shutil.which("sbatch") is None:
        display.note("sbatch is not installed here: submit from a login node")
    for line in (*rehearsal_lines(batch.requests[0]), *saving_lines(batch.requests[0])):
        display.note(line)
    display.note(f"this would be written to {batch.path}; nothing was written or submitted")


def print_submission(batch: BatchJob, variants: Sequence[Variant], job: Submission) -> None:
    """Print the job that SLURM has accepted, and what to type next."""
    runs = [request.run for request in batch.requests]
    what = f"{len(runs)} runs are" if batch.is_array else f"{runs[0].name} is"
    display.show(f"{what} queued as job {job}")
    if batch.is_array:
        _print_runs(batch, variants)
    else:
        display.show(f"  run     {runs[0].path}")
    display.show(f"  script  {batch.path}")
    for line in (*rehearsal_lines(batch.requests[0]), *saving_lines(batch.requests[0])):
        display.show(f"  {line}")
    display.show(f"  follow  nanoscale runs watch {shlex.quote(runs[0].reference)}")
    display.show(f"  stop    nanoscale runs stop {shlex.quote(runs[0].reference)}")


def _runs_document(
    batch: BatchJob, variants: Sequence[Variant], job: Submission | None = None
) -> dict[str, Any]:
    runs: list[dict[str, Any]] = []
    for number, (request, variant) in enumerate(zip(batch.requests, variants, strict=True)):
        entry = {
            "name": request.run.name,
            "run_dir": str(request.run.path),
            "values": variant.chosen,
        }
        if job is not None:
            entry["job"] = str(replace(job, task=number) if batch.is_array else job)
        runs.append(entry)
    return {"script": str(batch.path), "runs": runs}


def _print_runs(batch: BatchJob, variants: Sequence[Variant]) -> None:
    """Print the values of each run."""
    from rich.table import Table

    table = Table("run", *variants[0].chosen, box=None)
    for request, variant in zip(batch.requests, variants, strict=True):
        table.add_row(request.run.name, *variant.chosen.values())
    display.print_table(display.console(sys.stderr), table)
