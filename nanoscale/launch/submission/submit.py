"""Runs that are prepared here and launched by a SLURM job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nanoscale.launch.lifecycle.prepare import new_run
from nanoscale.launch.request import Request
from nanoscale.launch.slurm import slurm
from nanoscale.launch.submission.batch_script import array_script, batch_script, runs_list
from nanoscale.runs import submission
from nanoscale.runs.directory import ARRAY, RunDirectory, taken_back, write_atomically
from nanoscale.runs.submission import Submission


@dataclass(frozen=True)
class BatchJob:
    """One job for one run, or an array of jobs for several with the same request to SLURM."""

    name: str
    requests: Sequence[Request]
    at_once: int | None = None
    """For an array, the number of runs at the same time."""

    @property
    def is_array(self) -> bool:
        return len(self.requests) > 1

    @property
    def root(self) -> Path:
        return self.requests[0].run.path.parent

    @property
    def path(self) -> Path:
        """The path of the script, which may not exist yet."""
        if self.is_array:
            return RunDirectory(self.root / f"{self.name}{ARRAY}").script
        return self.requests[0].run.script

    @property
    def script(self) -> str:
        """The batch script.

        Raises:
            UserError: a path cannot be written into it.
        """
        return self._script(self.requests[0])

    def needs_the_same(self, one: Request) -> bool:
        """True if the same script serves another run."""
        return self._script(one) == self.script

    def _script(self, one: Request) -> str:
        if not self.is_array:
            return batch_script(one.config, one.run)
        count = len(self.requests)
        return array_script(one.config, self.path.parent, self.name, count, self.at_once)

    def submit(self) -> Submission:
        """Create the run directories and submit them; if SLURM refuses, they are removed.

        Raises:
            UserError: a run cannot be created, or there is no sbatch here.
            SlurmError: SLURM refused.
        """
        script = self.script
        with taken_back(self.root) as made:
            for request in self.requests:
                with new_run(request) as lock:
                    made.append(lock.run.path)
            if self.is_array:
                self.path.parent.mkdir()
                made.append(self.path.parent)
                runs = "".join(f"{request.run.path}\n" for request in self.requests)
                write_atomically(runs_list(self.path.parent), runs)
            write_atomically(self.path, script)
            job = slurm.submit(self.path)
        for number, request in enumerate(self.requests):
            task = number if self.is_array else None
            submission.write(request.run, replace(job, task=task))
        return job
