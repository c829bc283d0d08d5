"""`nanoscale runs compare`: several runs side by side."""

from __future__ import annotations

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.files import require_writable, write_file
from nanoscale.cli.common.output import console, print_json
from nanoscale.common import display

_MOST = 8
"""The colors of a chart."""


def compare_runs(
    runs: opt.Runs,
    html: opt.Html = None,
    overwrite: opt.Overwrite = False,
    as_json: opt.AsJson = False,
) -> None:
    """Compare runs: keys that differ, losses at equal steps, tokens and time, speed, memory."""
    from nanoscale.common.errors import UserError
    from nanoscale.runs.directory import RunDirectory
    from nanoscale.view.blocks import page, show
    from nanoscale.view.run.comparison import comparison_report, document

    opened = list(dict.fromkeys(RunDirectory.open(name) for name in runs))
    if not 2 <= len(opened) <= _MOST:
        raise UserError("usage", f"name 2 to {_MOST} different runs, not {len(opened)}")
    if html is not None:
        require_writable("--html", html, overwrite=overwrite)
    about = document(opened)
    if html is not None:
        write_file("--html", html, page(comparison_report(about)), overwrite=overwrite)
    if as_json:
        print_json(about)
        return
    show(console(), comparison_report(about))
    if html is not None:
        display.show(f"page  {html}")
