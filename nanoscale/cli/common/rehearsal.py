"""Rehearsals of a configuration: for `nanoscale rehearse`, and before `train` and `submit`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from nanoscale.cli.common.output import saying
from nanoscale.common.errors import UserError, Violation
from nanoscale.config.violations import refuse

if TYPE_CHECKING:
    from pathlib import Path

    from nanoscale.config.resolved import ResolvedConfig
    from nanoscale.launch.request import Request
    from nanoscale.plan.predict import Prediction


def with_program(request: Request, *, rehearse: bool, force: bool) -> Request:
    """Return the request with its rehearsal, if there is one.

    Args:
        rehearse: play it now if it was not played before.
        force: launch a job that does not fit.

    Raises:
        UserError: of kind `rehearsal`, the code of a rank fails or ranks disagree; of kind `plan`, it does not
            fit.
    """
    from dataclasses import replace

    from nanoscale.rehearse import rehearsals
    from nanoscale.rehearse.document import failed
    from nanoscale.view.rehearsal_text import mistakes, verdict

    config = request.config
    if not rehearse:
        return replace(request, program=rehearsals.known_of(config))
    result = rehearsed(config, "distinct", rehearsals.STEPS)
    if failed(result):
        raise UserError("rehearsal", "the rehearsal failed\n" + "\n".join(mistakes(result)))
    if result["fits"] is False and not force:
        raise UserError("plan", f"the rehearsal {verdict(result)}")
    return replace(request, program=result)


def with_rehearsal(plan: Prediction) -> Prediction:
    """Return the prediction with the memory that a rehearsal by the same code counted, if there is one."""
    from dataclasses import replace

    from nanoscale.plan.predict import RehearsedMemory
    from nanoscale.rehearse.rehearsals import known_of

    result = known_of(plan.config)
    if result is None:
        return plan
    worst = next(rank for rank in result["ranks"] if rank["rank"] == result["worst_rank"])
    memory = RehearsedMemory(
        rank=worst["rank"],
        phase=worst["peak_phase"],
        allocated=worst["allocated"],
        reserved=worst["reserved"],
        total=worst["total"],
        upper_bound=result["eager"],
    )
    return replace(plan, rehearsed=memory)


def rehearsed(
    config: ResolvedConfig, ranks: str, steps: int, snapshots: Path | None = None
) -> dict[str, Any]:
    """Return the result of a rehearsal, from the cache if the same code has played it before.

    Args:
        config: resolved.
        ranks: `distinct`, `all`, or numbers.
        snapshots: the folder for the history of each rank's memory, which the cache does not hold.

    Raises:
        UserError: the request is wrong.
    """
    from nanoscale.rehearse import rehearsals
    from nanoscale.rehearse.document import document, failed
    from nanoscale.rehearse.tasks import device_of, why_unplayable

    if (unplayable := why_unplayable(config)) is not None:
        refuse([unplayable])
    played = _played_ranks(config, ranks)
    gpu, context = device_of(config)
    name = rehearsals.digest(config, gpu, sorted(played), steps)
    result = rehearsals.known(name)
    if result is None or snapshots is not None:
        with saying() as say:
            records = rehearsals.rehearse(config, gpu, list(played), steps, say, snapshots)
        result = document(config, records, played, steps, gpu, context)
        if not failed(result):
            rehearsals.keep(name, result)
    return result


def _played_ranks(config: ResolvedConfig, asked: str) -> dict[int, int]:
    """Return the ranks to play, and how many each stands for.

    Raises:
        UserError: there are no such ranks.
    """
    from nanoscale.rehearse.kinds import distinct_ranks

    world = config.world_size
    if asked == "distinct":
        return distinct_ranks(config)
    if asked == "all":
        return dict.fromkeys(range(world), 1)
    if not re.fullmatch(r"\d+(,\d+)*", asked):
        what = f"--ranks {asked}: is neither distinct nor all nor numbers such as 0,8"
        found = Violation("--ranks", asked, "command line", what, ("--ranks distinct", "--ranks 0"))
        raise UserError("usage", what, [found])
    numbers = sorted({int(number) for number in asked.split(",")})
    if numbers[-1] >= world:
        what = f"--ranks {asked}: the job has the ranks 0 to {world - 1}"
        found = Violation("--ranks", asked, "command line", what, ("--ranks distinct",))
        raise UserError("usage", what, [found])
    return dict.fromkeys(numbers, 1)
