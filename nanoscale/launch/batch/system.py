"""The interface to a batch system: five functions, and the texts of a batch script."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanoscale.common.errors import UserError
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.rules.launcher import time_limit_s
from nanoscale.config.schema import BatchName
from nanoscale.runs.submission import Submission

_KEPT_VARIABLES = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")
"""Variables of SLURM's address and credentials; all its other variables belong to the job we may be in."""
_JOB_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SCANCEL_", "SCONTROL_")
_TIMEOUT_S = 30.0
_WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_ENDED = (
    "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL",
    "DEADLINE", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL",
)  # fmt: skip

SHELL = Path(__file__).with_name("shell")
"""The folder of the parts of batch scripts that are the same in all jobs."""
TRAPS = (SHELL / "traps.sh").read_text("utf-8")
_LISTEN = """\
# USR1 comes before the time limit, and `nanoscale runs stop` sends TERM.
# The launcher saves and stops on either, and ends with code 75, or 130 after `nanoscale runs stop`.
exec >> {log} 2>&1
export NANOSCALE_BATCH={system}:{job} # tells runs that this job forwards signals
"""
_ALARM = "(sleep {} & trap 'kill $!; exit' TERM; wait $! && kill -s USR1 $$) & alarm=$!\n"
_REQUEUE = """\
[ -z "$alarm" ] || kill "$alarm" 2> /dev/null
if [ "$code" = 75 ] && [ "$heard" = USR1 ]; then
    {python} -m nanoscale.launch.submission.requeue {run}
fi
exit "$code"
"""


class BatchError(Exception):
    """An error of a batch system, or no answer; the message is its own."""


@dataclass(frozen=True)
class JobState:
    """The state of a job in its batch system."""

    job: str
    state: str
    """In SLURM's terms: PENDING, RUNNING, COMPLETED, CANCELLED, …."""
    reason: str = ""
    """The reason why it waits or ended; "" if there is none."""
    nodes: str = ""
    """Its nodes, as in `node[1-4]`; "" before it has any."""
    start: str | None = None
    """The local time of its start, or of the expected one."""
    restarts: int = 0
    """The number of times that it was requeued."""

    @property
    def waits(self) -> bool:
        return self.state in _WAITING

    @property
    def ended(self) -> bool:
        return self.state in _ENDED


class BatchSystem:
    """The way to a batch system. A subclass has `states`, `hosts` and `options`, and may replace the rest.

    Attributes:
        name: the value of `launcher.name`.
        title: its name in sentences.
        commands: the programs that submit, cancel and signal a job, with arguments before the job's.
        directive: the beginning of a line of the script with an option.
        job: the shell variable with the job's number.
        number: the pattern of the number in the answer to a submission.
        interactive: how to get hosts for a command.
    """

    name: BatchName
    title: str
    commands: tuple[str, str, str]
    directive: str
    job: str
    number = r"(\S+)\s*$"
    interactive: str

    @property
    def program(self) -> str:
        return self.commands[0].split()[0]

    def submit(
        self, script: Path, tasks: Sequence[int] = (), at_once: int | None = None
    ) -> Submission:
        """Submit a batch script, or only some tasks of an array; `at_once` tasks may run at the same time.

        Raises:
            UserError: the program is not installed here.
            BatchError: it refused.
        """
        if shutil.which(self.program) is None:
            message = (
                f"{self.program} is not installed here; run `nanoscale submit` on a login node"
            )
            raise UserError(self.name, message)
        arguments = self.arguments(str(script), tasks, at_once)
        text = "" if arguments else script.read_text("utf-8")
        answer = query([*self.commands[0].split(), *arguments], wait_s=None, stdin=text)
        job, _, cluster = re.findall(self.number, answer)[-1].partition(";")
        return Submission(job, None, str(script), cluster or None, system=self.name)

    def arguments(self, script: str, tasks: Sequence[int], at_once: int | None = None) -> list[str]:
        """Return the arguments that submit a script; without any, it is the standard input."""
        return [script]

    def states(self, jobs: Iterable[Submission]) -> dict[str, JobState]:
        """Return the states of jobs, by their numbers; unknown jobs are left out.

        Raises:
            BatchError: the batch system cannot be asked here, or does not answer.
        """
        raise NotImplementedError

    def cancel(self, job: Submission) -> list[str]:
        """Return the command that removes a waiting job from the queue; it may end one that has begun."""
        return [*self.commands[1].split(), str(job)]

    def signal(self, job: Submission, name: str) -> list[str]:
        """Return the command that sends a signal to the batch script of a running job."""
        return [*self.commands[2].split(), name, str(job)]

    def hosts(self, env: Mapping[str, str]) -> list[str] | None:
        """Return the hosts of the job that this process is a part of; None if it is not in one."""
        raise NotImplementedError

    def options(self, config: ResolvedConfig, name: str, logs: Path) -> list[str]:
        """Return the options of the batch script of a job, which prints to the folder `logs`."""
        raise NotImplementedError

    def listening(self, config: ResolvedConfig, logs: Path) -> str:
        """Return the lines of a batch script that receive signals, also before its time limit."""
        log = f'{shlex.quote(f"{logs}/{self.name}-")}"{self.job}".out'
        settings = config.launcher.batch
        limit_s = time_limit_s(settings.time)
        alarm = "alarm=\n"
        if limit_s is not None and settings.signal_before_s:
            alarm = _ALARM.format(limit_s - settings.signal_before_s)
        return _LISTEN.format(log=log, system=self.name, job=self.job) + TRAPS + alarm

    def requeueing(self, config: ResolvedConfig, python: str, run: str) -> str:
        """Return the lines that end a batch script; after the time limit they submit it again."""
        return _REQUEUE.format(python=python, run=run)


def query(
    command: Sequence[str], unknown: str = "", wait_s: float | None = _TIMEOUT_S, stdin: str = ""
) -> str:
    """Return the output of a command; `unknown` matches its message about a job that it does not know.

    Raises:
        BatchError: it failed, cannot be run here, or does not answer.
    """
    try:
        result = subprocess.run(
            command,
            env=without_job_variables(os.environ),
            input=stdin,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=wait_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise BatchError(f"there is no {command[0]} here") from error
    except OSError as error:
        raise BatchError(f"{command[0]} cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise BatchError(f"{command[0]} did not answer within {wait_s:g} s") from error
    message = result.stderr.strip()
    if result.returncode == 0 or (unknown and re.search(unknown, message)):
        return result.stdout
    lines = (message or result.stdout.strip()).splitlines()
    lines = [line.removeprefix(f"{command[0]}: ").removeprefix("error: ") for line in lines]
    raise BatchError("; ".join(lines) or f"{command[0]} ended with {result.returncode}")


def without_job_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without a SLURM job's variables, which would become options of the next job."""
    return {
        name: value
        for name, value in environment.items()
        if name in _KEPT_VARIABLES or not name.startswith(_JOB_PREFIXES)
    }
