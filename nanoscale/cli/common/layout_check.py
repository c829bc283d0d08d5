"""The comparison of a job's layout with one process: for `nanoscale conform`, and before `train`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanoscale.cli.common.output import saying
from nanoscale.common import display
from nanoscale.view.conformity_text import sentences

if TYPE_CHECKING:
    from nanoscale.config.resolved import ResolvedConfig


def compared(config: ResolvedConfig, *, compiled: bool = False) -> dict[str, Any] | None:
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
