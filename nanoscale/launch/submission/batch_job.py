"""Runs that are prepared here and launched by a job of a batch system."""

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nanoscale.common.errors import UserError, Violation
from nanoscale.config.resolved import ResolvedConfig, differences
from nanoscale.config.values.provenance import Composed
from nanoscale.config.violations import override, refuse, shown
from nanoscale.launch.batch.jobs import require_inactive
from nanoscale.launch.batch.slurm import SlurmSystem
from nanoscale.launch.batch.system import SHELL, BatchError, BatchSystem
from nanoscale.launch.batch.systems import SYSTEMS
from nanoscale.launch.lifecycle import prepare
from nanoscale.launch.request import Request
from nanoscale.launch.transport.transport import source_path
from nanoscale.runs import submission
from nanoscale.runs.directory import ARRAY, RunDirectory, removed_on_error, write_atomically
from nanoscale.runs.submission import Submission

_PARTITIONS, _ASSOCIATIONS = "sinfo --summarize", "sacctmgr show associations user=$USER"
_NODES = "sinfo --Node --Format=NodeHost,CPUs,Memory,Gres,Features"
_BLAMED = (
    (r"time limit", "launcher.slurm.time", _PARTITIONS),
    (r"qos", "launcher.slurm.qos", _ASSOCIATIONS),
    (r"account", "launcher.slurm.account", _ASSOCIATIONS),
    (r"partition", "launcher.slurm.partition", _PARTITIONS),
    (r"feature", "launcher.slurm.constraint", _NODES),
    (r"gres|generic resource", "launcher.slurm.gpus", _NODES),
    (r"node (count|configuration)", "launcher.nodes", _NODES),
    (r"unrecognized option|ambiguous", "launcher.slurm.directives", "sbatch --help"),
)
"""sbatch's complaint, the key that it may be about, and a command that shows more."""

_ALIKE = ("launcher.", "cluster.python", "run.root")
"""Keys that the script of an array depends on."""


@dataclass(frozen=True)
class BatchJob:
    """One job for one run, or an array of jobs for several with the same request to the batch system."""

    name: str
    requests: Sequence[Request]
    at_once: int | None = None
    """For an array, the number of runs at the same time."""
    changes: Sequence[str] | None = None
    """The overrides of a run that exists and is resumed; None: the runs are new."""

    @property
    def system(self) -> BatchSystem:
        return SYSTEMS[self.requests[0].config.launcher.name]

    @property
    def is_array(self) -> bool:
        return len(self.requests) > 1

    @property
    def path(self) -> Path:
        """The path of the script, which may not exist yet."""
        folder = self.requests[0].run.path
        if self.is_array:
            return RunDirectory(folder.parent / f"{self.name}{ARRAY}").script
        return folder / f"submit.{self.system.program}"

    @property
    def script(self) -> str:
        """The batch script.

        Raises:
            UserError: a path cannot be written into it.
        """
        return self._script(self.requests[0])

    def check(self) -> None:
        """Check that the runs can be created. Writes nothing.

        Raises:
            UserError: a name is used or invalid, no run can be created under run.root, or the run
                to resume is active.
        """
        if self.is_array:
            prepare.check_new_runs(self.requests, self.name)
        elif self.changes is not None:
            require_inactive(self.requests[0].run)
        else:
            prepare.check_new_run(self.requests[0].config)

    def require_one_script(self) -> None:
        """Raise a UserError unless the same script serves all runs."""
        for other in self.requests[1:]:
            if self._script(other) != self.script:
                _refuse_unlike(self.requests[0], other)

    def _script(self, one: Request) -> str:
        if not self.is_array:
            return batch_script(one.config, one.run, self.changes or ())
        count = len(self.requests)
        return array_script(one.config, self.path.parent, self.name, count, self.at_once)

    def submit(self) -> Submission:
        """Create the run directories of new runs and submit the job. If it is refused, nothing is changed.

        Raises:
            UserError: a run cannot be created, or the batch system is not installed here or refused.
        """
        script = self.script
        with removed_on_error(self.requests[0].run.path.parent) as made:
            for request in self.requests if self.changes is None else ():
                with prepare.new_run(request) as lock:
                    made.append(lock.run.path)
            if self.is_array:
                self.path.parent.mkdir()
                made.append(self.path.parent)
                runs = "".join(f"{request.run.path}\n" for request in self.requests)
                write_atomically(runs_list(self.path.parent), runs)
            previous = self.path.read_bytes() if self.path.exists() else None
            write_atomically(self.path, script)
            try:
                job = self.system.submit(self.path)
            except (BatchError, UserError) as error:
                self.path.unlink()
                if previous is not None:
                    write_atomically(self.path, previous)
                raise refused(error, self.system, self.requests[0].composed) from error
        for number, request in enumerate(self.requests):
            task = number if self.is_array else None
            submission.write(request.run, replace(job, task=task))
        return job


def batch_job(requests: Sequence[Request], at_once: int | None) -> BatchJob:
    """Return the job of one run or of an array, with their names."""
    if len(requests) > 1:
        if (name := requests[0].config.launcher.name) != "slurm":
            message = f"several values make an array of SLURM; submit one run at a time with launcher={name}"
            raise UserError("usage", message)
        return BatchJob(*prepare.name_runs(requests), at_once)
    if at_once is not None:
        raise UserError("usage", "--at-once needs an array of runs, as in train.seed=1,2,3")
    (one,) = requests
    config = prepare.name_run(one.composed, one.config, repeats=one.repeats is not None)
    return BatchJob(str(config.run.name), [replace(one, config=config)])


def _refuse_unlike(one: Request, other: Request) -> None:
    violations = []
    for key, values in differences(one.config, other.config).items():
        if key.startswith(_ALIKE):
            them, source = " and ".join(map(shown, values)), other.composed.source(key)
            rule = f"differs between the runs ({them}), and one script asks for what they all need"
            violations.append(Violation(key, None, source, rule, (override(key, values[1]),)))
    refuse(violations)


def refused(error: Exception, system: BatchSystem, composed: Composed | None = None) -> UserError:
    """Return a batch system's message as an error, with the key of a configuration that it may be about."""
    if isinstance(error, UserError):  # the system is not installed here
        return error
    message = str(error).replace("Batch job submission failed: ", "")
    if composed is not None and system.name == "slurm":
        for pattern, key, command in _BLAMED:
            if re.search(pattern, message, re.IGNORECASE):
                cause = composed.violation(key, message, command)
                return UserError("slurm", "SLURM rejected the job", [cause])
    return UserError(system.name, f"{system.title} rejected the job: {message}")


FOLLOW = (SHELL / "follow.sh").read_text("utf-8")

_CHOOSE = """\
mapfile -t runs < {runs}
run=${{runs[$SLURM_ARRAY_TASK_ID]}}
"""


def batch_script(config: ResolvedConfig, run: RunDirectory, changes: Sequence[str] = ()) -> str:
    """Return the script of one run.

    Args:
        config: checked, with the number of ranks on a node in `launcher.devices`.
        changes: overrides of a run that is resumed.

    Raises:
        UserError: a path cannot be written into it.
    """
    system = SYSTEMS[config.launcher.name]
    options = system.options(config, run.name, run.logs)
    path = shlex.quote(str(run.path))
    return _script(config, system, options, run.logs, path, changes=changes)


def array_script(
    config: ResolvedConfig, folder: Path, name: str, count: int, at_once: int | None = None
) -> str:
    """Return one script for several runs with the same request to SLURM; `folder` holds it and the list of
    runs.

    Args:
        config: the configuration of any of the runs.
        at_once: how many of them may run at the same time.
    """
    limit = "" if at_once is None else f"%{at_once}"
    options = SlurmSystem().options(config, name, folder, f"0-{count - 1}{limit}")
    choose = _CHOOSE.format(runs=shlex.quote(str(runs_list(folder))))
    return _script(config, SlurmSystem(), options, folder, '"$run"', choose)


def runs_list(folder: Path) -> Path:
    """Return the file in the folder of an array that lists one run directory per line."""
    return folder / "runs"


def _script(
    config: ResolvedConfig, system: BatchSystem, options: list[str], logs: Path, run: str,
    choose: str = "", changes: Sequence[str] = (),
) -> str:  # fmt: skip
    settings = config.launcher.slurm if system.name == "slurm" else config.launcher.batch
    # Anybody who can change the run's config.yaml can change this script as well.
    python = shlex.join([config.cluster.python or sys.executable, "-P"])
    # `run` is quoted, or a variable of the script.
    launch = " ".join(
        [python, "-m nanoscale resume --trust", run, *map(shlex.quote, changes), "&\n"]
    )
    exports, path = "", source_path({})
    if config.cluster.python is None and path is not None:
        exports = f"export PYTHONPATH={shlex.quote(path)}${{PYTHONPATH:+:$PYTHONPATH}}\n"
    command = system.commands[0].partition(" -")[0]  # without options: `flux batch`
    remark = f"Submitted again with {command}, it continues where the run stopped."
    sections = [
        "#!/bin/bash\n" + "".join(f"{system.directive}{option}\n" for option in options),
        f"# Written by `nanoscale submit`. {remark}\n",
        system.listening(config, logs),
        "".join(f"{line}\n" for line in settings.setup),
        choose,
        exports,
        launch + FOLLOW,
        system.requeueing(config, python, run),
    ]
    return "\n".join(section for section in sections if section)
