"""`train` and `submit` plan first: what does not fit is not launched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from nanoscale import display
from nanoscale.cli.refusals import Refusals

if TYPE_CHECKING:
    from nanoscale.launch.prepare import Request

Force = Annotated[
    bool, typer.Option("--force", help="Launch it even if the plan says that it does not fit.")
]


def planned(request: Request, refusals: Refusals, *, force: bool) -> Request:
    """The same with its plan, if it may be launched; without one where its devices are not known from here.

    Raises:
        UserError: of kind `plan`, it does not fit, and nobody insists; or `cluster` names what is unknown.
    """
    from dataclasses import replace

    from nanoscale.plan.document import document
    from nanoscale.plan.hardware import UnknownHardwareError
    from nanoscale.plan.predict import predict
    from nanoscale.plan.verdict import require_fit

    try:
        plan = predict(request.config)
    except UnknownHardwareError as error:
        display.note(f"not planned: {error}")
        return request
    if not force:
        with refusals.gather():
            require_fit(request.composed, plan, request.devices)
    return replace(request, plan=document(plan))
