"""Checks of a job before its launch: rehearsals, and the comparison of its layout with one process."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from nanoscale.cli.common.output import saying
from nanoscale.common import display
from nanoscale.common.errors import UserError, refuse_option
from nanoscale.common.json_text import Json
from nanoscale.common.units import duration
from nanoscale.config.violations import refuse
from nanoscale.view.conformity_text import sentences

PATIENCE_S = 180.0
"""The longest rehearsal, in seconds, that a launch makes without being asked."""

if TYPE_CHECKING:
    from pathlib import Path

    from nanoscale.config.resolved import ResolvedConfig
    from nanoscale.plan.predict import Prediction


def with_memory(plan: Prediction, result: Json | None) -> Prediction:
    """Return the prediction with the memory that a rehearsal counted; None: without."""
    from nanoscale.plan.predict import RehearsedMemory

    if result is None:
        return plan
    worst = next(rank for rank in result["ranks"] if rank["rank"] == result["worst_rank"])
    figures = {name: worst[name] for name in ("rank", "allocated", "reserved", "total")}
    memory = RehearsedMemory(**figures, phase=worst["peak_phase"], upper_bound=result["eager"])
    return replace(plan, rehearsed=memory)


def must_decide(plan: Prediction) -> bool:
    """Return whether a rehearsal must decide if the job fits, since the plan cannot; tell the user."""
    from nanoscale.rehearse.rehearsals import estimated_seconds
    from nanoscale.view.plan.prediction import undecided

    if not (question := undecided(plan)):
        return False
    seconds = estimated_seconds(plan.config)
    if seconds > PATIENCE_S:
        display.note(f"{question}: --rehearse would decide, in about {duration(seconds)}")
        return False
    display.note(f"{question}: a rehearsal decides (--force skips it)")
    return True


def rehearsal_of_launch(config: ResolvedConfig, *, asked: bool) -> Json | None:
    """Return the result of a rehearsal before a launch; None if it cannot be played here.

    Args:
        asked: True if the user asked for it.

    Raises:
        UserError: of kind `rehearsal`, the code of a rank fails or ranks disagree.
    """
    from nanoscale.rehearse import rehearsals
    from nanoscale.rehearse.document import failed
    from nanoscale.view.rehearsal_text import mistakes

    try:
        result = rehearsed(config, "distinct", rehearsals.STEPS)
    except UserError as error:
        if asked:
            raise
        display.note(f"not rehearsed, so the plan decides: {error}")
        return None
    if failed(result):
        raise UserError("rehearsal", "the rehearsal failed\n" + "\n".join(mistakes(result)))
    return result


def rehearsed(
    config: ResolvedConfig,
    ranks: str,
    steps: int,
    snapshots: Path | None = None,
    *,
    every_batch: bool = False,
) -> Json:
    """Return the result of a rehearsal, from the cache if the same code has played it before.

    Args:
        config: resolved.
        ranks: `distinct`, `all`, or numbers.
        snapshots: the folder for the history of each rank's memory, which the cache does not hold.
        every_batch: play all micro batches of a step.

    Raises:
        UserError: the request is wrong.
    """
    from nanoscale.rehearse import rehearsals
    from nanoscale.rehearse.document import document, failed
    from nanoscale.rehearse.rehearsals import device_of, why_unplayable

    if (unplayable := why_unplayable(config)) is not None:
        refuse([unplayable])
    played = _played_ranks(config, ranks)
    gpu, context = device_of(config)
    name = rehearsals.digest(config, gpu, sorted(played), steps, every_batch)
    result = rehearsals.known(name)
    if result is None or snapshots is not None:
        with saying() as say:
            records = rehearsals.rehearse(
                config, gpu, list(played), steps, say, snapshots, every_batch=every_batch
            )
        result = document(config, records, played, steps, gpu, context)
        if not failed(result):
            rehearsals.keep(name, result)
    return result


def _played_ranks(config: ResolvedConfig, asked: str) -> dict[int, int]:
    """Return the ranks to play, and how many each stands for."""
    from nanoscale.rehearse.kinds import played_ranks

    world = config.world_size
    if asked == "distinct":
        return played_ranks(config)
    if asked == "all":
        return dict.fromkeys(range(world), 1)
    if not re.fullmatch(r"\d+(,\d+)*", asked):
        what = "is neither distinct nor all nor numbers such as 0,8"
        refuse_option("--ranks", asked, what, "--ranks distinct", "--ranks 0")
    numbers = sorted({int(number) for number in asked.split(",")})
    if numbers[-1] >= world:
        what = f"the job has the ranks 0 to {world - 1}"
        refuse_option("--ranks", asked, what, "--ranks distinct")
    return dict.fromkeys(numbers, 1)


# --- the comparison with one process --------------------------------------------------------------


def compared(config: ResolvedConfig, *, compiled: bool = False) -> Json | None:
    """Return the document of `conform --json`; None if a rank failed, which is reported.

    Raises:
        UserError: the request is wrong.
    """
    from nanoscale.launch.lifecycle.job_execution import OneShotJobError
    from nanoscale.launch.lifecycle.small_job import conform

    with saying() as say:
        try:
            return conform(config, say, compiled=compiled)
        except OneShotJobError as error:
            display.note(f"error: in the small job, {error}")
            return None


def conforms(config: ResolvedConfig) -> bool:
    """Return True if the layout trains what one process trains; tell the user on standard error."""
    result = compared(config)
    for sentence in sentences(result) if result is not None else ():
        display.note(sentence)
    return result is not None and result["equal"]
