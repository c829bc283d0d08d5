"""A real SLURM: slurmctld on `login`, slurmd on `s1` and `s2`, munged on each of them.

They are machines of machines.py, so a node can lose its power or its link, and SLURM sees what it would see.
Its commands work on these machines only, with `environment`; `command`, `sbatch` and others run on `login`.
There are two partitions. Jobs of `high` preempt jobs of `low`, the default; these are requeued if they take
more than 30 s to end.

Every node says that it has 4 CPUs, whatever it has. There is no accounting: what was a job is forgotten after
five minutes, and `show` asks slurmctld.

Pitfalls:

- slurmctld looks at time limits every 30 s, so USR1 comes up to 30 s before it was asked for, and the limit up
  to 30 s late. A limit of one minute takes up to 90 s; nothing makes that shorter.
- A requeued job waits two minutes (reason BeginTime), which `hasten` ends. A change too early is accepted
  without effect, and a job that starts in the second in which it was ended fails at once (`Job credential
  revoked`).
- A node is given up SlurmdTimeout after its last answer at the earliest, and each question waits MessageTimeout
  for its answer: with the usual 10 s of the latter a loss takes half a minute, with 5 s up to 20.
- proctrack/linuxproc follows parents. What becomes an orphan outlives its job; control groups would prevent it.
- munged wants its socket's folder to be its own and the key to be read by nobody else; a machine's own /run has
  the folder, at the place where libmunge looks.
- slurmctld has a child for scripts, which is not a process of a job.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.cluster.machines import LIMIT_S, Machines, wait_until

HOSTS = ("s1", "s2")
LOGIN = "login"

_CONFIG = """
ClusterName=tests
SlurmctldHost=login({login})
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n/spool
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
MailProg=/bin/true
MpiDefault=none
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
SlurmdTimeout=10
MessageTimeout=5
KillWait=5
PlugStackConfig={folder}/plugstack.conf
NodeName=s1 NodeAddr={s1} CPUs=4 State=UNKNOWN
NodeName=s2 NodeAddr={s2} CPUs=4 State=UNKNOWN
PartitionName=low Nodes=s1,s2 Default=YES PriorityTier=1 GraceTime=30 DefaultTime=10
PartitionName=high Nodes=s1,s2 PriorityTier=2 PreemptMode=OFF DefaultTime=10
"""
_CREDENTIALS_S = 1.1
"""A job's new credential must be younger than the end of its old one, in whole seconds."""
_READY = {"idle", "mixed", "allocated", "completing", "planned"}


class Slurm(Machines):
    """A SLURM cluster of two nodes and a login node, from `with` to its end."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, (*HOSTS, LOGIN))

    @property
    def environment(self) -> dict[str, str]:
        """The environment of SLURM's commands, on any of the machines."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def command(self, *argv: object, **options: Any) -> str:
        """Run one of SLURM's commands on the login node; return its output. Options are `call`'s."""
        environment = options.pop("env", os.environ) | self.environment
        done = self.call(LOGIN, argv, env=environment, **options)
        assert done.returncode == 0, f"{argv}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def sbatch(self, *argv: object, **options: Any) -> int:
        """Submit a job; its number."""
        return int(self.command("sbatch", "--parsable", *argv, **options))

    def show(self, job: int) -> dict[str, str]:
        """Return slurmctld's facts about a job, in its own terms: JobState, Reason, Restarts, ExitCode, …."""
        words = self.command("scontrol", "show", "job", "--oneliner", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_state(self, job: int, *states: str, limit_s: float = LIMIT_S) -> dict[str, str]:
        """Wait for a job to be in one of these states; return its `show`."""
        deadline = time.monotonic() + limit_s
        while (now := self.show(job))["JobState"] not in states:
            assert time.monotonic() < deadline, f"not {states} within {limit_s:g} s: {now}"
            time.sleep(0.2)
        return now

    def cancel(self, job: int) -> None:
        self.command("scancel", job)

    def limit(self, job: int, minutes: int) -> None:
        """Change the time after which a job is ended."""
        self.command("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")

    def hasten(self, job: int) -> None:
        """Let a requeued job start now, and not in two minutes."""
        argv = ["scontrol", "update", f"JobId={job}", "StartTime=now"]
        self.wait_state(job, "PENDING")
        time.sleep(_CREDENTIALS_S)

        def started() -> bool:
            state = self.show(job)["JobState"]
            if state == "PENDING":
                self.call(LOGIN, argv, env=os.environ | self.environment)
            return state not in ("PENDING", "COMPLETING")

        wait_until(started, f"new start of job {job}")

    def processes(self, *nodes: str) -> dict[int, str]:
        """Return the remaining processes of jobs and their commands."""
        found = super().processes(*nodes)
        return {pid: line for pid, line in found.items() if not _is_of_slurmctld(line)}

    def restore(self) -> None:
        self._bring_back()
        if self.command("squeue", "--noheader"):
            self.command("scancel", "--user=root")
        wait_until(lambda: not self.command("squeue", "--noheader"), "end of all jobs")
        self._end_processes()
        wait_until(lambda: set(self._states().values()) == {"idle"}, "idle nodes")

    def _prepare(self) -> None:
        super()._prepare()
        (self.folder / "state").mkdir()
        for node in self.names:
            (self.folder / node / "spool").mkdir()
        addresses = {node: self.address(node) for node in self.names}
        (self.folder / "slurm.conf").write_text(_CONFIG.format(folder=self.folder, **addresses))
        # With Debian's package slurm-wlm-torque, jobs have the variables of PBS too.
        (self.folder / "plugstack.conf").write_text("optional spank_pbs.so\n")
        self._munge_key.write_bytes(os.urandom(128))
        self._munge_key.chmod(0o400)

    @property
    def _munge_key(self) -> Path:
        return self.folder / "munge.key"

    def _start_services(self, nodes: Sequence[str]) -> None:
        for node in nodes:
            self._serve(node, self._munged(node), "munged.log")
        self._await_services(lambda: all(map(self._has_munge, nodes)), "munged")
        for node in nodes:
            daemon = "slurmctld" if node == LOGIN else "slurmd"
            environment = os.environ | self.environment
            self._serve(node, [daemon, "-D"], f"{daemon}.log", env=environment)
        self._await_services(lambda: self._has_registered(nodes), "SLURM")

    def _munged(self, node: str) -> list[str]:
        own = {
            "key-file": self._munge_key,
            "log-file": self.folder / node / "munged.detail.log",
            "pid-file": "/run/munge/munged.pid",
            "seed-file": "/run/munge/munged.seed",
            "socket": "/run/munge/munge.socket.2",
        }
        return ["munged", "--foreground", *(f"--{key}={value}" for key, value in own.items())]

    def _has_munge(self, node: str) -> bool:
        return self.call(node, ["munge", "--no-input"]).returncode == 0

    def _has_registered(self, nodes: Sequence[str]) -> bool:
        """True if slurmctld answers, and the compute nodes among these are available."""
        states = self._states()
        return len(states) == len(HOSTS) and all(
            states[node] in _READY for node in nodes if node in HOSTS
        )

    def _states(self) -> dict[str, str]:
        """Return the states of nodes; none if slurmctld does not answer."""
        command = ["sinfo", "--noheader", "--Node", "--partition=low", "--format=%N %T"]
        done = self.call(LOGIN, command, env=os.environ | self.environment)
        return dict(line.split() for line in done.stdout.splitlines())


def _is_of_slurmctld(command_line: str) -> bool:
    return "slurmscriptd" in command_line or command_line.startswith("slurmctld ")
