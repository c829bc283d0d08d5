"""The comparison of a job's layout with one process: two one-shot jobs on the CPUs of this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.translation.miniature import SAVED, STEPS, in_fp32, in_one_process, miniature
from nanoscale.launch.fleet.signals import unwinding
from nanoscale.launch.lifecycle.job_execution import run_one_shot_job
from nanoscale.processes.messages import CONFORMITY


def conform(
    config: ResolvedConfig, say: Callable[[str], None], *, compiled: bool = False
) -> dict[str, Any]:
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
    layout = small.parallel
    again = {how: result.pop(how, None) for how in ("restored", "resumed")}
    compared = [result, *filter(None, again.values())]
    return {
        "equal": not findings and all(it["first_difference"] is None for it in compared),
        **result,
        **again,
        "findings": findings,
        "compiled": compiled,
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
        "left_out": lacks,
    }
