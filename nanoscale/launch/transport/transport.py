"""Transports: how the agents of hosts are started, one small class for each launcher."""

import math
import os
import re
import shlex
import site
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import nanoscale
from nanoscale.common.errors import UserError
from nanoscale.config import machines
from nanoscale.config.machines import Host
from nanoscale.config.rules.launcher import requested_launcher
from nanoscale.config.schema import Config
from nanoscale.config.values.forms import elastic
from nanoscale.config.values.provenance import Composed
from nanoscale.launch.batch.allocation import allocated_nodes, cpus_a_node, idle_nodes
from nanoscale.launch.batch.systems import SYSTEMS
from nanoscale.launch.hosts.hosts import read_hostfile
from nanoscale.launch.hosts.outer_processes import names, outer_hosts, session_file, this_process
from nanoscale.launch.transport.container import container_prefix, srun_options
from nanoscale.processes import session
from nanoscale.processes.session import Session

Command = tuple[str, ...]

AGENT = ("-P", "-m", "nanoscale.agent")
_PLANNED = Session("LAUNCHER:PORT", "KEY_FILE")
"""Placeholders in a planned command for values that are known once the launcher listens."""
_CLEANUP_CONNECT_S = 2
_PDSH_ENDED = re.compile(rb"^pdsh@\S+: (\S+): ssh exited with exit code (\d+)")


class Transport(ABC):
    """The way from the launcher to the agents.

    Attributes:
        check: the name of the check that a host is reached.
        is_local: True if the only host is this machine, so that network and shared folders are of no concern.
        is_reverse: True if one command starts the agents of many hosts, which then open reverse connections.
        leaves_session: True if processes of the job on this machine may leave the session of its command.
        python_remedy: the remedy for a host whose interpreter does not suit the job.
    """

    check = "ssh"
    is_local = False
    is_reverse = False
    leaves_session = False
    python_remedy = (
        "name another interpreter, at the same path on all hosts: cluster.python=/path/to/python"
    )

    def __init__(self, config: Config) -> None:
        self.config = config

    @staticmethod
    def hosts(composed: Composed) -> tuple[Host, ...]:
        """Return the hosts of a configuration; none if all ranks are on this machine.

        Raises:
            UserError: with everything that is wrong with them.
        """
        return ()

    @abstractmethod
    def commands(self, hosts: Sequence[Host], launcher: Session = _PLANNED) -> list[Command]:
        """Return the command that starts the agent of each host; several hosts may share one.

        Args:
            launcher: where the launcher listens for reverse connections.
        """

    def cleanup_command(self, host: Host, mark: str) -> Command | None:
        """Return the command that ends all processes with the mark on a host; None if only the agent could."""
        return None

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the additional variables of the commands."""
        path = source_path(inherited)
        return {"PYTHONPATH": path} if path else {}

    def address_of(self, host: Host) -> str:
        """Return the address at which the ranks of other hosts reach a host."""
        return host.address

    def label(self, number: int, host: Host) -> str:
        """Return the beginning of a host's lines in the output of a command for many, without the colon."""
        return host.address

    def exit_code(self, line: bytes) -> tuple[str, int] | None:
        """Return the host whose agent has ended, and its exit code, if a line of the output reports that."""
        return None

    def exclusion_remedy(self, host: Host) -> str:
        return f"do without {host.name}"

    def idle_machines(self) -> str | None:
        """Return a sentence about machines of this session that no rank will run on, if there are any."""
        return None


class Local(Transport):
    """The agent of this machine, as a process of the launcher."""

    check = "agent"
    is_local = True
    leaves_session = True
    python_remedy = "use another interpreter"

    def commands(self, hosts: Sequence[Host], launcher: Session = _PLANNED) -> list[Command]:
        return [(sys.executable, *AGENT) for _ in hosts]

    def address_of(self, host: Host) -> str:
        return "127.0.0.1"

    def idle_machines(self) -> str | None:
        return idle_nodes(os.environ)


class Ssh(Transport):
    """A connection of ssh for each host of a hostfile."""

    @staticmethod
    def hosts(composed: Composed) -> tuple[Host, ...]:
        return read_hostfile(composed)

    def commands(self, hosts: Sequence[Host], launcher: Session = _PLANNED) -> list[Command]:
        return [self._command(host) for host in hosts]

    def cleanup_command(self, host: Host, mark: str) -> Command | None:
        launcher = replace(self.config.launcher, connect_timeout_s=_CLEANUP_CONNECT_S)
        quick = type(self)(replace(self.config, launcher=launcher))
        return quick._command(host, "--end-orphans", mark)

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        return {}

    def exclusion_remedy(self, host: Host) -> str:
        launcher, entry = self.config.launcher, machines.in_filter(host.name)
        if launcher.include is not None:
            return f"take {entry} out of --include {shlex.quote(launcher.include)}"
        excluded = launcher.exclude.split("@") if launcher.exclude else []
        slots_of_host = re.compile(rf"\s*{re.escape(entry)}\s*(:.*)?", re.IGNORECASE)
        others = [other for other in excluded if not slots_of_host.fullmatch(other)]
        return f"leave it out with --exclude {shlex.quote('@'.join([*others, entry]))}"

    def _command(self, host: Host, *arguments: str) -> Command:
        return ("ssh", *self._options(), _destination(host), self._remote(*arguments))

    def _options(self) -> list[str]:
        """Return the options of ssh; a user's own come first, since ssh uses the first value of each."""
        launcher = self.config.launcher
        options = {
            "BatchMode": "yes",
            "ControlMaster": "no",  # other sessions could share our connection, and would end with it
            "ConnectTimeout": math.ceil(launcher.connect_timeout_s),
            "ServerAliveInterval": max(1, int(launcher.lost_after_s)),
            "ServerAliveCountMax": 2,
        }
        pairs = (("-o", f"{name}={value}") for name, value in options.items())
        return [*launcher.ssh_args, *chain.from_iterable(pairs)]

    def _remote(self, *arguments: str) -> str:
        """Return the agent's command line, quoted for the shell of another host."""
        python = self.config.cluster.python or sys.executable
        path = source_path(os.environ) if python == sys.executable else None
        prefix = ["env", f"PYTHONPATH={path}"] if path else []
        return shlex.join(
            ["exec", *container_prefix(self.config), *prefix, python, *AGENT, *arguments]
        )


class Pdsh(Ssh):
    """One command of pdsh, which starts ssh, for all hosts of a hostfile."""

    is_reverse = True
    leaves_session = True

    def commands(self, hosts: Sequence[Host], launcher: Session = _PLANNED) -> list[Command]:
        command = self._pdsh(hosts, "--connect", launcher.addresses, launcher.key_file)
        return [command] * len(hosts)

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        # pdsh splits this at spaces and supports no quotes: the rules refuse arguments that would need them.
        options = " ".join(self._options()).replace("%", "%%")
        inherited_options = inherited.get("PDSH_SSH_ARGS_APPEND", "")
        return {
            "PDSH_RCMD_TYPE": inherited.get("PDSH_RCMD_TYPE", "ssh"),
            "PDSH_SSH_ARGS_APPEND": f"{inherited_options} {options}".strip(),
        }

    def exit_code(self, line: bytes) -> tuple[str, int] | None:
        ended = _PDSH_ENDED.match(line)
        return (ended[1].decode(errors="replace"), int(ended[2])) if ended else None

    def _command(self, host: Host, *arguments: str) -> Command:
        return self._pdsh([host], *arguments)

    def _pdsh(self, hosts: Sequence[Host], *arguments: str) -> Command:
        names = ",".join(map(_destination, hosts))
        remote = self._remote(*arguments).replace("%", "%%")  # pdsh replaces %h, %u, %n
        timeout = str(math.ceil(self.config.launcher.connect_timeout_s))
        return ("pdsh", "-S", "-t", timeout, "-f", str(len(hosts)), "-w", names, remote)


class BatchSsh(Ssh):
    """A connection of ssh for each other host of a job of a batch system."""

    hosts = staticmethod(allocated_nodes)

    def exclusion_remedy(self, host: Host) -> str:
        return Transport.exclusion_remedy(self, host)

    def _command(self, host: Host, *arguments: str) -> Command:
        if machines.is_here(host.name):
            return ("sh", "-c", self._remote(*arguments))
        return super()._command(host, *arguments)


class Srun(Transport):
    """One command of srun for all nodes of a job, with one task per node, which gets all of its allocation."""

    check = "srun"
    is_reverse = True
    hosts = staticmethod(allocated_nodes)

    def commands(self, hosts: Sequence[Host], launcher: Session = _PLANNED) -> list[Command]:
        cpus = cpus_a_node(os.environ)
        command = (
            "srun",
            f"--nodes={len(hosts)}",
            f"--ntasks={len(hosts)}",
            "--ntasks-per-node=1",
            f"--nodelist={','.join(host.name for host in hosts)}",
            *([f"--cpus-per-task={cpus}"] if cpus else []),
            "--cpu-bind=none",
            "--mem=0",
            "--overlap",  # another step, such as a monitor's, does not block
            "--kill-on-bad-exit=0",  # the launcher ends the others, once it knows the cause
            *(["--no-kill"] if elastic(self.config.launcher.nodes) else []),
            "--input=none",
            "--label",
            "--export=ALL",
            *srun_options(self.config),
            *container_prefix(self.config),
            self.config.cluster.python or sys.executable,
            *AGENT,
            *("--connect", launcher.addresses, launcher.key_file),
        )
        return [command] * len(hosts)

    def label(self, number: int, host: Host) -> str:
        return str(number)


class Env(Transport):
    """Processes that another program has started, and which connect by themselves; one is the launcher."""

    check = "connection"
    is_reverse = True
    hosts = staticmethod(outer_hosts)

    def commands(self, hosts: Sequence[Host], launcher: Session = _PLANNED) -> list[Command]:
        if launcher != _PLANNED:
            session.write(session_file(self.config), launcher)
        first = names(this_process())[0]
        own = (sys.executable, *AGENT, "--connect", launcher.addresses, launcher.key_file)
        return [own if host.name == first else () for host in hosts]

    def address_of(self, host: Host) -> str:
        return os.environ.get("MASTER_ADDR") or host.address


class Elsewhere(Env):
    """Hosts that Kubernetes or SkyPilot provides later, for which a file is written here."""

    @staticmethod
    def hosts(composed: Composed) -> tuple[Host, ...]:
        name = composed.config.launcher.name
        what = f"launcher={name} is for `nanoscale submit --dry-run`, which writes a file for it"
        raise UserError("usage", what)


_BY_LAUNCHER: dict[str, type[Transport]] = {
    **dict.fromkeys(SYSTEMS, BatchSsh),
    "local": Local, "ssh": Ssh, "pdsh": Pdsh, "slurm": Srun, "env": Env,
    "kubernetes": Elsewhere, "skypilot": Elsewhere,
}  # fmt: skip


def read_hosts(composed: Composed) -> tuple[Host, ...]:
    """Return the hosts of a composed configuration, as its launcher names them: see `Transport.hosts`."""
    return _BY_LAUNCHER[requested_launcher(composed)].hosts(composed)


def transport_of(config: Config) -> Transport:
    """Return the transport of a resolved configuration, by launcher.name."""
    return _BY_LAUNCHER[config.launcher.name](config)


def source_path(inherited: Mapping[str, str]) -> str | None:
    """Return a PYTHONPATH to this very nanoscale, if it is not an installed package."""
    root = str(Path(nanoscale.__file__).parent.parent)
    if root in (*site.getsitepackages(), site.getusersitepackages()):
        return None
    return os.pathsep.join(filter(None, [root, inherited.get("PYTHONPATH")]))


def _destination(host: Host) -> str:
    """Return the host with its user, and without the brackets of IPv6, which neither ssh nor pdsh supports."""
    user, at, _ = host.name.rpartition("@")
    return f"{user}{at}{host.address}"
