"""`nanoscale runs tag`: words by which runs are found again."""

from __future__ import annotations

import difflib
import re
from typing import Annotated

import typer

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import print_json
from nanoscale.common import display
from nanoscale.common.errors import UserError, Violation

_TAG = re.compile(r"[^\s,\-][^\s,]*")


def tag_run(
    run: opt.Run,
    tags: Annotated[
        list[str] | None,
        typer.Argument(metavar="[TAG…]", help="Add these tags", show_default=False),
    ] = None,
    remove: list[str] | None = opt.option("Remove this tag; may be repeated", metavar="TAG"),
    as_json: opt.AsJson = False,
) -> None:
    """Add tags to a run, remove some, or show them.

    They replace run.tags: `runs ls --where tags=TAG` finds the run, and trackers get them at the next attempt.
    """
    from nanoscale.runs import tags as stored
    from nanoscale.runs.directory import RunDirectory

    directory = RunDirectory.open(run)
    present = stored.read(directory)
    for tag in tags or ():
        if not _TAG.fullmatch(tag):
            message = "must not contain spaces or commas, and must not start with `-`"
            raise _refused("TAG", tag, message)
    for tag in remove or ():
        if tag not in present:
            near = difflib.get_close_matches(tag, present, n=3)
            message = f"the run has no such tag; its tags: {', '.join(present) or 'none'}"
            raise _refused("--remove", tag, message, *(f"--remove {one}" for one in near))
    kept = [tag for tag in present if tag not in (remove or ())]
    final = list(dict.fromkeys([*kept, *(tags or ())]))
    if final != present:
        stored.write(directory, final)
    if as_json:
        print_json({"run": str(directory.path), "tags": final})
    else:
        display.show(", ".join(final) or "no tags")


def _refused(option: str, tag: str, message: str, *advice: str) -> UserError:
    violation = Violation(option, tag, "command line", message, advice)
    return UserError("usage", f"{option} {tag}: {message}", [violation])
