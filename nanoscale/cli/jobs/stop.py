"""`nanoscale runs stop`: ask a run to save and stop, wherever its launcher is."""

from __future__ import annotations

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import DONE, FAILED
from nanoscale.common import display

_MARGIN_S = 30.0


def stop_run(
    run: opt.Run,
    timeout: float | None = opt.option(
        "Wait this number of seconds for its end", shown="launcher.stop_grace_s + 30"
    ),
) -> int:
    """Save and stop a run, and wait for its end; cancel its waiting SLURM job."""
    from nanoscale.config.composing.frozen import load
    from nanoscale.launch.lifecycle.stopping import active, ask_to_stop, leave_queue, wait_for_end
    from nanoscale.launch.slurm.jobs import job_of, require_known
    from nanoscale.runs import lock, status
    from nanoscale.runs.directory import RunDirectory

    directory = RunDirectory.open(run)
    owner, job = lock.owner(directory), job_of(directory)
    if owner is None and job is not None and job.waits:
        begun = leave_queue(directory, job)
        if begun is None:
            display.show(f"{job} was removed from the queue")
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
    display.show(f"{directory.name} is {status.require(directory).state}")
    return DONE
