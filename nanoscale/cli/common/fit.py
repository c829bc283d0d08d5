"""The plan before `train` and `submit`: jobs that do not fit are not launched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanoscale.cli.common.refusals import Refusals
from nanoscale.common import display

if TYPE_CHECKING:
    from nanoscale.launch.request import Request
    from nanoscale.plan.saving import SavingPlan


def planned(request: Request, refusals: Refusals, *, force: bool) -> Request:
    """Return the request with its plan, if it may be launched; without one if its devices are not known here.

    Raises:
        UserError: of kind `plan`, it does not fit, and `force` is not set; or `cluster` names unknown
            hardware.
    """
    from dataclasses import replace

    from nanoscale.config.hardware.data_sheets import UnknownHardwareError
    from nanoscale.plan.predict import predict
    from nanoscale.view.plan.prediction_json import document
    from nanoscale.view.plan.verdict import require_fit

    try:
        plan = predict(request.config)
    except UnknownHardwareError as error:
        display.note(f"not planned: {error}")
        return request
    if not force:
        with refusals.gather():
            require_fit(request.composed, plan, request.devices)
    return replace(request, plan=document(plan))


def require_disk(request: Request, refusals: Refusals, *, force: bool) -> None:
    """Require that the disk has room for the job's checkpoints.

    Raises:
        UserError: of kind `plan`, there is no room for a single one, and `force` is not set.
    """
    if not force:
        with refusals.gather():
            saving_of(request).require_disk()


def saving_of(request: Request) -> SavingPlan:
    """Return the plan of the job's checkpoints and their disk space."""
    from nanoscale.plan.saving import plan_saving

    step_s = request.plan["step_time_s"] if request.plan else None
    return plan_saving(request.config, step_s, len(request.run.checkpoint_steps()))


def saving_lines(request: Request) -> list[str]:
    """Return the plan of checkpoints as lines to show, warnings included."""
    saving = saving_of(request)
    lines = [f"checkpoints: {sentence}" for sentence in saving.sentences()]
    return [*lines, *(f"warning: {warning}" for warning in saving.warnings())]
