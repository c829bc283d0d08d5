"""Reasons not to launch a job: raised at once, or with --dry-run shown after everything else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nanoscale.cli.common.output import DONE, error_document, exit_code, show_error
from nanoscale.common.errors import UserError


class Refusals:
    """The errors of a request that is complete enough to be shown nevertheless.

    Args:
        postponed: keep the errors for `show` (a dry run) instead of raising them.
    """

    def __init__(self, *, postponed: bool = False) -> None:
        self.postponed = postponed
        self._errors: list[UserError] = []

    @contextmanager
    def gather(self) -> Iterator[None]:
        """Keep a UserError of the block if errors are postponed."""
        try:
            yield
        except UserError as error:
            if not self.postponed:
                raise
            self._errors.append(error)

    def document(self) -> dict[str, Any]:
        """Return the error of the launch for `--json`; empty if it would begin."""
        return {"error": error_document(self._errors[0])} if self._errors else {}

    def show(self) -> int:
        """Write the errors to standard error; return the exit code that the launch would have."""
        for error in self._errors:
            show_error(error, as_json=False)
        return exit_code(self._errors[0]) if self._errors else DONE
