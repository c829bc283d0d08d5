"""The comparison of a job's layout with one process: two one-shot jobs on the CPUs of this machine."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nanoscale.common.errors import UserError
from nanoscale.common.json_text import Json
from nanoscale.config.composing.frozen import dump
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.translation.miniature import SAVED, STEPS, in_fp32, in_one_process, miniature
from nanoscale.launch.fleet.signals import unwinding
from nanoscale.launch.lifecycle.job_execution import (
    OneShotJobError,
    one_shot_jobs,
    run_one_shot_job,
)
from nanoscale.launch.preflight.by_library import hf_question
from nanoscale.processes.messages import ALONE, CONFORMITY, MODEL_CARD
from nanoscale.runs.directory import read_json


def conform(config: ResolvedConfig, say: Callable[[str], None], *, compiled: bool = False) -> Json:
    """Train the small job in its layout and in one process; return the document of `conform --json`.

    Args:
        compiled: compare the layout with compiled blocks and the layout without, in fp32.

    Raises:
        UserError: the job cannot be made small, or a rank found an error in the request.
        OneShotJobError: a rank failed.
    """
    with unwinding(), TemporaryDirectory(prefix="nanoscale-conform-") as name:
        small, lacks = miniature(config, Path(name))
        first, second = small, in_one_process(small)
        if compiled:
            first, second = (in_fp32(small, compiled=it) for it in (False, True))
            lacks = [key for key in lacks if key != "backend.compile"]
        task = {"folder": name, "compares": False}
        findings = run_one_shot_job(CONFORMITY, first, (), task, say)["findings"]
        task = {"folder": name, "compares": True}
        result = run_one_shot_job(CONFORMITY, second, (), task, say)
        findings += result.pop("findings", [])
    return _document(small, result, findings) | {"compiled": compiled, "left_out": lacks}


def _document(small: ResolvedConfig, result: Json, findings: list[str]) -> Json:
    layout = small.parallel
    again = {how: result.pop(how, None) for how in ("restored", "resumed")}
    compared = [result, *filter(None, again.values())]
    return {
        "equal": not findings and all(it["first_difference"] is None for it in compared),
        **result,
        **again,
        "findings": findings,
        "layout": {
            axis: getattr(layout, axis)
            for axis in ("dp", "dp_replicate", "tp", "pp", "cp", "ep")
            if getattr(layout, axis) > 1
        },
        "zero_stage": small.zero.stage,
        "world_size": small.world_size,
        "micro_batches": small.accumulation,
        "steps": STEPS,
        "saved_step": SAVED,
        "compiled": False,
        "left_out": [],
    }


# --- the card of a model --------------------------------------------------------------------------


def card(rows: dict[str, ResolvedConfig], say: Callable[[str], None]) -> dict[str, Json]:
    """Return the result of each row of a model's card, from the configurations of their small jobs."""
    divided = {row: it for row, it in rows.items() if row not in ALONE}
    with (
        unwinding(),
        TemporaryDirectory(prefix="nanoscale-card-") as name,
        one_shot_jobs(MODEL_CARD, next(iter(rows.values()))) as run,
    ):
        layouts = _run_rows(run, Path(name), divided, say)
        kept = [row for row in rows if "findings" in layouts.get(row, ("findings",))]
        single = {row: in_one_process(rows[row]) for row in kept}
        results = layouts | _run_rows(run, Path(name), single, say)
    for row, result in results.items():
        if "first_difference" in result:
            findings = layouts.get(row, {}).get("findings", []) + result.pop("findings", [])
            results[row] = _document(rows[row], result, findings)
    return results


def _run_rows(
    run: Callable[..., Any],
    folder: Path,
    rows: dict[str, ResolvedConfig],
    say: Callable[[str], None],
) -> dict[str, Json]:
    """Return the results of rows; a job that fails leaves the rows after its own to the next job."""
    results: dict[str, Json] = {}
    while left := [row for row in rows if row not in results]:
        first, failure = rows[left[0]], "the ranks ended without a result"
        names = [row for row in left if rows[row].world_size == first.world_size]
        files = {row: folder / row / f"of {first.world_size}.yaml" for row in names}
        for row, file in files.items():
            file.parent.mkdir(exist_ok=True)
            file.write_text(dump(rows[row]), "utf-8")
        asked = {row: hf_question(rows[row], rows[row].model.init_from) for row in names}
        try:
            run(first, {"files": {row: str(files[row]) for row in names}, "asked": asked}, say)
        except (UserError, OneShotJobError) as error:
            failure = str(error)
        done = [row for row in names if files[row].with_suffix(".json").exists()]
        results |= {row: read_json(files[row].with_suffix(".json")) for row in done}
        if len(done) < len(names):
            results[names[len(done)]] = {"failed": failure}
    return results
