"""Run by a batch script whose job was stopped by its time limit: submit the script again."""

import sys
from dataclasses import replace
from pathlib import Path

from nanoscale.common import display
from nanoscale.common.errors import UserError
from nanoscale.common.units import counted
from nanoscale.config.composing.frozen import load
from nanoscale.launch.batch.system import BatchError
from nanoscale.launch.batch.systems import SYSTEMS
from nanoscale.runs import submission
from nanoscale.runs.directory import RunDirectory


def requeue(run: RunDirectory) -> str:
    """Submit the script of a run again, at most `max_requeues` times; return a sentence about it."""
    job, most = submission.find(run), load(run.config).launcher.batch.max_requeues
    count = 0 if job is None else job.requeues
    if job is None or count >= most:
        return f"the job was queued again {counted(count, 'time')} already; it is not queued again"
    try:
        submitted = SYSTEMS[job.system].submit(Path(job.script or run.script))
    except (UserError, BatchError) as error:
        return f"the job cannot be queued again: {error}"
    submission.write(run, replace(submitted, requeues=count + 1))
    return f"the job is queued again as job {submitted} and will resume the run"


if __name__ == "__main__":
    display.show(requeue(RunDirectory.open(sys.argv[1])))
