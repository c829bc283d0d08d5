"""The commands that start a host's agent: this machine's own processes, ssh, pdsh or srun."""

from __future__ import annotations

import math
import os
import shlex
import site
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import nanoscale
from nanoscale.config.composing.nodes import elastic
from nanoscale.config.machines import Host
from nanoscale.config.schema import Config
from nanoscale.launch.slurm.allocation import cpus_a_node
from nanoscale.launch.slurm.slurm import container_prefix, srun_options

_AGENT = ("-P", "-m", "nanoscale.agent")

_CONNECT_ADDRESS, _KEY_FILE = "LAUNCHER:PORT", "KEY_FILE"
"""Placeholders in a planned command for values that are known once the launcher listens."""

_SWEEP_CONNECT_S = 2


def commands(
    config: Config,
    hosts: Sequence[Host],
    addresses: str = _CONNECT_ADDRESS,
    key_file: str = _KEY_FILE,
) -> list[tuple[str, ...]]:
    """Return the command for each host; one command of pdsh or srun serves many hosts.

    Args:
        addresses: the launcher's addresses for reverse connections.
        key_file: the file of the key by which the agents authenticate.
    """
    call = ("--connect", addresses, key_file)
    match config.launcher.name:
        case "local":
            return [(sys.executable, *_AGENT) for _ in hosts]
        case "ssh":
            return [_ssh(config, host) for host in hosts]
        case "pdsh":
            return _pdsh_by_interpreter(config, hosts, call)
        case "slurm":
            return [_srun(config, hosts, call)] * len(hosts)


def sweep_command(config: Config, host: Host, mark: str) -> tuple[str, ...] | None:
    """Return the command that ends all processes with the mark on a host; None if only the agent could."""
    arguments = ("--sweep", mark)
    limited = replace(config.launcher, connect_timeout_s=_SWEEP_CONNECT_S)
    config = replace(config, launcher=limited)
    match config.launcher.name:
        case "ssh":
            return _ssh(config, host, arguments)
        case "pdsh":
            return _pdsh(config, [host], arguments)
    return None


def starts_all_at_once(config: Config) -> bool:
    """True if one command starts the agents of all hosts, which then open reverse connections."""
    return config.launcher.name in ("pdsh", "slurm")


def environment(config: Config, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the additional variables of the commands."""
    match config.launcher.name:
        case "pdsh":
            # pdsh splits this at spaces and supports no quotes: the rules refuse arguments that would need
            # them.
            options = " ".join(_ssh_options(config)).replace("%", "%%")
            before = inherited.get("PDSH_SSH_ARGS_APPEND", "")
            return {
                "PDSH_RCMD_TYPE": inherited.get("PDSH_RCMD_TYPE", "ssh"),
                "PDSH_SSH_ARGS_APPEND": f"{before} {options}".strip(),
            }
        case "ssh":
            return {}
    path = source_path(inherited)
    return {"PYTHONPATH": path} if path else {}


def source_path(inherited: Mapping[str, str]) -> str | None:
    """Return a PYTHONPATH to this very nanoscale, if it is not an installed package."""
    root = str(Path(nanoscale.__file__).parent.parent)
    if root in (*site.getsitepackages(), site.getusersitepackages()):
        return None
    return os.pathsep.join(filter(None, [root, inherited.get("PYTHONPATH")]))


def interpreter(config: Config, host: Host) -> str:
    """Return the path of Python on a host."""
    chosen = config.cluster.pythons
    named = chosen.get(host.name) or chosen.get(host.address) or config.cluster.python
    return str(named or sys.executable)


def _ssh(config: Config, host: Host, arguments: Sequence[str] = ()) -> tuple[str, ...]:
    return ("ssh", *_ssh_options(config), _destination(host), _remote(config, host, arguments))


def _destination(host: Host) -> str:
    """Return the host with its user, and without the brackets of IPv6, which neither ssh nor pdsh supports."""
    user, at, _ = host.name.rpartition("@")
    return f"{user}{at}{host.address}"


def _ssh_options(config: Config) -> list[str]:
    """Return the options of ssh; a user's own come first, since ssh uses the first value of each."""
    launcher = config.launcher
    options = {
        "BatchMode": "yes",
        "ControlMaster": "no",  # other sessions could share our connection, and would end with it
        "ConnectTimeout": math.ceil(launcher.connect_timeout_s),
        "ServerAliveInterval": max(1, int(launcher.lost_after_s)),
        "ServerAliveCountMax": 2,
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return [*launcher.ssh_args, *words]


def _remote(config: Config, host: Host, arguments: Sequence[str]) -> str:
    """Return the agent's command line, quoted for the shell of another host."""
    python = interpreter(config, host)
    path = source_path(os.environ) if python == sys.executable else None
    prefix = ["env", f"PYTHONPATH={path}"] if path else []
    return shlex.join(["exec", *prefix, python, *_AGENT, *arguments])


def _pdsh_by_interpreter(
    config: Config, hosts: Sequence[Host], arguments: Sequence[str]
) -> list[tuple[str, ...]]:
    """Return one command per interpreter: a command of pdsh is the same on all its hosts."""
    groups: dict[str, list[Host]] = {}
    for host in hosts:
        groups.setdefault(interpreter(config, host), []).append(host)
    made = {python: _pdsh(config, group, arguments) for python, group in groups.items()}
    return [made[interpreter(config, host)] for host in hosts]


def _pdsh(config: Config, hosts: Sequence[Host], arguments: Sequence[str]) -> tuple[str, ...]:
    names = ",".join(map(_destination, hosts))
    remote = _remote(config, hosts[0], arguments).replace("%", "%%")  # pdsh replaces %h, %u and %n
    timeout = str(math.ceil(config.launcher.connect_timeout_s))
    return ("pdsh", "-S", "-t", timeout, "-f", str(len(hosts)), "-w", names, remote)


def _srun(config: Config, hosts: Sequence[Host], arguments: Sequence[str]) -> tuple[str, ...]:
    """Return a command with one task per node, which gets all of the node's allocation."""
    count = len(hosts)
    nodes = ",".join(host.name for host in hosts)
    cpus = cpus_a_node(os.environ)
    return (
        "srun",
        f"--nodes={count}",
        f"--ntasks={count}",
        "--ntasks-per-node=1",
        f"--nodelist={nodes}",
        *([f"--cpus-per-task={cpus}"] if cpus else []),
        "--cpu-bind=none",
        "--mem=0",
        "--overlap",  # another step, such as a monitor's, does not block
        "--kill-on-bad-exit=0",  # the launcher ends the others, once it knows the cause
        *(["--no-kill"] if elastic(config.launcher.nodes) else []),
        "--input=none",
        "--label",
        "--export=ALL",
        *srun_options(config),
        *container_prefix(config),
        interpreter(config, hosts[0]),
        *_AGENT,
        *arguments,
    )
