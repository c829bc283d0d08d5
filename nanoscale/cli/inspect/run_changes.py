"""Changes of runs: tags, a stop, and the removal of runs and checkpoints."""

import difflib
import re
import shlex
from contextlib import ExitStack
from typing import Annotated

from nanoscale.checkpoint import store
from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import DONE, FAILED, answer
from nanoscale.cli.common.trust import can_ask, is_confirmed
from nanoscale.common import display
from nanoscale.common.errors import UserError, Violation, refuse_option
from nanoscale.common.units import byte_size
from nanoscale.runs import fence, status
from nanoscale.runs.directory import RunDirectory

_TAG = re.compile(r"[^\s,\-][^\s,]*")


def tag_run(
    run: opt.Run,
    tags: Annotated[list[str] | None, opt.argument("Add these tags", metavar="[TAG…]")] = None,
    remove: list[str] | None = opt.option("Remove this tag; may be repeated", metavar="TAG"),
    as_json: opt.AsJson = False,
) -> None:
    """Add tags to a run, remove some, or show them.

    They replace run.tags: `runs ls --where tags=TAG` finds the run, and trackers get them at the next attempt.
    """
    from nanoscale.runs.changes import read_tags, write_tags

    directory = RunDirectory.open(run)
    present = read_tags(directory)
    for tag in tags or ():
        if not _TAG.fullmatch(tag):
            message = "must not contain spaces or commas, and must not start with `-`"
            refuse_option("TAG", tag, message)
    for tag in remove or ():
        if tag not in present:
            near = difflib.get_close_matches(tag, present, n=3)
            message = f"the run has no such tag; its tags: {', '.join(present) or 'none'}"
            refuse_option("--remove", tag, message, *(f"--remove {one}" for one in near))
    kept = [tag for tag in present if tag not in (remove or ())]
    final = list(dict.fromkeys([*kept, *(tags or ())]))
    if final != present:
        write_tags(directory, final)
    document = {"run": str(directory.path), "tags": final}
    answer(as_json, document, display.show, ", ".join(final) or "no tags")


_MARGIN_S = 30.0


def stop_run(
    run: opt.Run,
    timeout: float | None = opt.option(
        "Wait this number of seconds for its end", shown="launcher.stop_grace_s + 30"
    ),
) -> int:
    """Save and stop a run, and wait for its end; cancel its waiting batch job."""
    from nanoscale.config.composing.frozen import load
    from nanoscale.launch.batch.jobs import job_of, require_known, way_on
    from nanoscale.launch.lifecycle.stopping import active, ask_to_stop, leave_queue, wait_for_end
    from nanoscale.runs import lock

    directory = RunDirectory.open(run)
    owner, job = lock.owner(directory), job_of(directory)
    if owner is None and job is not None and job.waits:
        begun = leave_queue(directory, job)
        if begun is None:
            display.show(f"{job} was removed from the queue; to continue: {way_on(directory)}")
            return DONE
        job = begun
    if owner is None:
        require_known(directory, job)
    target = active(owner, job)
    if target is None:
        display.show(f"{directory.name} is not running")
        return DONE
    ask_to_stop(directory, target)
    display.note(f"asked {target} to stop")
    if timeout is None:
        timeout = load(directory.config).launcher.stop_grace_s + _MARGIN_S
    if not wait_for_end(directory, owner, job, timeout):
        display.note(f"{directory.name} is still running after {timeout:g} s")
        return FAILED
    state = status.require(directory).state
    way = "" if state == "completed" else f"; to continue: {way_on(directory)}"
    display.show(f"{directory.name} is {state}{way}")
    return DONE


_KEEP = "checkpoint.keep_"


def remove_runs(runs: opt.Runs, yes: opt.Yes = False, as_json: opt.AsJson = False) -> int:
    """Delete runs with all their files, after a question. An active run is refused."""
    from nanoscale.launch.batch.jobs import require_inactive
    from nanoscale.runs.changes import remove, size_of
    from nanoscale.runs.lock import RunLock

    opened = [RunDirectory.open(name) for name in runs]
    unique = {run.path.resolve(): run for run in opened}
    for run in unique.values():
        require_inactive(run)
    sizes = {run: size_of(path) for path, run in unique.items()}
    names = {run: run.reference for run in sizes}
    for path, run in unique.items():
        if run.path.is_symlink():
            names[run] += f", a link to {path}"
            if yes:
                command = shlex.join(["nanoscale", "runs", "rm", str(path), "--yes"])
                what = f"is a link to {path}, which nobody is asked about"
                violation = Violation("RUN", run.reference, "command line", what, (command,))
                raise UserError("usage", f"{run.reference} {what}", [violation])
    if not _is_agreed("RUN", {names[run]: sizes[run] for run in sizes}, yes=yes):
        return DONE
    with ExitStack() as locks:
        for run in sizes:
            locks.enter_context(RunLock(run))
        for run in sizes:
            remove(run)
    _show_freed({str(path): sizes[run] for path, run in unique.items()}, as_json)
    return DONE


def prune_checkpoints(
    run: opt.Run,
    keep_last: int | None = opt.option(
        "Leave the newest N", metavar="N", shown=f"{_KEEP}last of the run", min=1
    ),
    keep_every: int | None = opt.option(
        "Leave steps that are a multiple of N", metavar="N", shown=f"{_KEEP}every of the run", min=1
    ),
    keep_best: int | None = opt.option(
        "Leave the N lowest evaluation losses", metavar="N", shown=f"{_KEEP}best of the run", min=0
    ),
    yes: opt.Yes = False,
    as_json: opt.AsJson = False,
) -> int:
    """Delete the checkpoints of a run that are not kept, after a question.

    Without --keep-last and checkpoint.keep_last every checkpoint is kept. Damaged checkpoints are left as they
    are, and do not count. An active run is refused.
    """
    from nanoscale.config.composing.frozen import load
    from nanoscale.launch.batch.jobs import require_inactive
    from nanoscale.runs.changes import size_of
    from nanoscale.runs.lock import RunLock

    directory = RunDirectory.open(run)
    saving = load(directory.config).checkpoint
    require_inactive(directory)
    last = saving.keep_last if keep_last is None else keep_last
    every = saving.keep_every if keep_every is None else keep_every
    best = saving.keep_best if keep_best is None else keep_best

    def obsolete() -> list[store.StoredCheckpoint]:
        stored = store.list_checkpoints(directory.checkpoints)
        whole = [it for it in stored if not store.find_damage(it.path, sums=False)]
        return store.obsolete(whole, last, every, store.lowest_losses(whole, best))

    sizes = {str(it.path): size_of(it.path) for it in obsolete()} if last is not None else {}
    if not sizes:
        _show_freed({}, as_json)
        return DONE
    if not _is_agreed("STEP", sizes, yes=yes):
        return DONE
    with RunLock(directory):
        attempt = max(directory.last_attempt(), status.read(directory).attempt) + 1
        fence.begin(directory, attempt)
        agreed = [it for it in obsolete() if str(it.path) in sizes]
        pruned = store.delete(directory.workspace(attempt), agreed)
        fence.end(directory)
    deleted = {str(directory.checkpoint(step)) for step in pruned.deleted}
    _show_freed({path: size for path, size in sizes.items() if path in deleted}, as_json)
    for step, why in pruned.failed.items():
        display.note(f"{directory.checkpoint(step)} cannot be deleted: {why}")
    return FAILED if pruned.failed else DONE


def _is_agreed(key: str, sizes: dict[str, int], *, yes: bool) -> bool:
    """Return True if the user wants to delete this, with its bytes.

    Raises:
        UserError: nobody can be asked.
    """
    if yes:
        return True
    total = f"{byte_size(sum(sizes.values()))} would be deleted for good"
    if not can_ask():
        found = [
            Violation(key, name, "command line", byte_size(size)) for name, size in sizes.items()
        ]
        question = Violation("--yes", None, "", "answers the question in scripts", ("--yes",))
        raise UserError("usage", f"{total}, and nobody can be asked", [*found, question])
    for name, size in sizes.items():
        display.note(f"{byte_size(size):>12}  {name}")
    if is_confirmed(f"{total}. Delete?"):
        return True
    display.note("nothing was deleted")
    return False


def _show_freed(sizes: dict[str, int], as_json: bool) -> None:
    total = sum(sizes.values())
    rows = [{"path": path, "bytes": size} for path, size in sizes.items()]
    lines = [f"deleted  {path}" for path in sizes]
    lines.append(f"{byte_size(total)} freed" if sizes else "nothing to delete")
    answer(as_json, {"deleted": rows, "bytes": total}, display.show, "\n".join(lines))
