"""`nanoscale runs rm` and `nanoscale checkpoints prune`: show what would be freed, ask, and delete."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import DONE, FAILED, print_json
from nanoscale.common import display
from nanoscale.common.units import byte_size

if TYPE_CHECKING:
    from nanoscale.checkpoint.store import StoredCheckpoint

_KEEP = "checkpoint.keep_"


def remove_runs(runs: opt.Runs, yes: opt.Yes = False, as_json: opt.AsJson = False) -> int:
    """Delete runs with all their files, after a question. An active run is refused."""
    from nanoscale.launch.slurm.jobs import require_inactive
    from nanoscale.runs.directory import RunDirectory
    from nanoscale.runs.lock import RunLock
    from nanoscale.runs.removal import remove, size_of

    opened = [RunDirectory.open(name) for name in runs]
    unique = {run.path.resolve(): run for run in opened}
    for run in unique.values():
        require_inactive(run)
    sizes = {run: size_of(path) for path, run in unique.items()}
    if not _is_agreed("RUN", {run.reference: sizes[run] for run in sizes}, yes=yes):
        return DONE
    with ExitStack() as locks:
        for run in sizes:
            locks.enter_context(RunLock(run))
        for run in sizes:
            remove(run)
    _show_freed({str(run.path): size for run, size in sizes.items()}, as_json)
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
    """Delete checkpoints of a run that are none of those to keep, after a question.

    Without --keep-last and checkpoint.keep_last every checkpoint is kept. Damaged checkpoints are left as they
    are, and do not count. An active run is refused.
    """
    from nanoscale.checkpoint import store
    from nanoscale.config.composing.frozen import load
    from nanoscale.launch.slurm.jobs import require_inactive
    from nanoscale.runs import fence, status
    from nanoscale.runs.directory import RunDirectory
    from nanoscale.runs.lock import RunLock
    from nanoscale.runs.removal import size_of

    directory = RunDirectory.open(run)
    saving = load(directory.config).checkpoint
    require_inactive(directory)
    last = saving.keep_last if keep_last is None else keep_last
    every = saving.keep_every if keep_every is None else keep_every
    best = saving.keep_best if keep_best is None else keep_best

    def obsolete() -> list[StoredCheckpoint]:
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
    from nanoscale.cli.common.trust import can_ask, is_confirmed
    from nanoscale.common.errors import UserError, Violation

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
    if as_json:
        rows = [{"path": path, "bytes": size} for path, size in sizes.items()]
        print_json({"deleted": rows, "bytes": total})
        return
    for path in sizes:
        display.show(f"deleted  {path}")
    display.show(f"{byte_size(total)} freed" if sizes else "nothing to delete")
