"""`nanoscale runs report RUN`: a run summed up, on the terminal and as a page."""

from __future__ import annotations

from pathlib import Path

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.files import require_writable, write_file
from nanoscale.cli.common.output import console, print_json
from nanoscale.common import display


def report_run(
    run: opt.Run,
    html: Path | None = opt.option(
        "Write the page to this file", metavar="FILE", shown="RUN/report.html"
    ),
    overwrite: opt.Overwrite = False,
    as_json: opt.AsJson = False,
) -> None:
    """Report a run's course and its figures compared with the plan, also as a page."""
    from nanoscale.runs.directory import RunDirectory, write_atomically
    from nanoscale.view.blocks import page, show
    from nanoscale.view.run.run_report import document, run_report

    directory = RunDirectory.open(run)
    if html is not None:
        require_writable("--html", html, overwrite=overwrite)
    about = document(directory)
    file = html or directory.report
    if html is not None:
        write_file("--html", html, page(run_report(about)), overwrite=overwrite)
    else:
        try:
            write_atomically(file, page(run_report(about)))
        except OSError as error:
            display.note(
                f"{file} cannot be written: {error.strerror}; choose another file with --html FILE"
            )
    if as_json:
        print_json(about)
    else:
        show(console(), run_report(about))
        display.show(f"page  {file}")
