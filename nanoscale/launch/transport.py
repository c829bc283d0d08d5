"""How the agent of a host is started from here: this machine's own processes, ssh, pdsh or srun."""

from __future__ import annotations

import math
import os
import shlex
import site
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import nanoscale
from nanoscale.config.nodes import elastic
from nanoscale.config.rules.case import Host
from nanoscale.config.schema import Config
from nanoscale.launch.allocation import cpus_a_node
from nanoscale.launch.slurm import container_prefix, srun_options

_AGENT = ("-P", "-m", "nanoscale.agent")

CONNECT_ADDRESS, KEY_FILE = "LAUNCHER:PORT", "KEY_FILE"
"""stand in a planned command for what is known when the launcher listens"""


def commands(config: Config, hosts: Sequence[Host]) -> list[tuple[str, ...]]:
    """What is run here for each host; with pdsh and srun, one command for all of them."""
    match config.launcher.name:
        case "local":
            return [(sys.executable, *_AGENT) for _ in hosts]
        case "ssh":
            return [_ssh(config, host) for host in hosts]
        case "pdsh":
            return [_pdsh(config, hosts)] * len(hosts)
        case "slurm":
            return [_srun(config, hosts)] * len(hosts)


def with_callback(command: Sequence[str], addresses: str, key_file: str) -> list[str]:
    """A command for all hosts, now that it is known where the launcher listens."""
    quoted = {CONNECT_ADDRESS: addresses, KEY_FILE: shlex.quote(key_file)}
    plain = {CONNECT_ADDRESS: addresses, KEY_FILE: key_file}
    return [plain[word] if word in plain else _replaced(word, quoted) for word in command]


def _replaced(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(name, value)
    return word


def starts_all_at_once(config: Config) -> bool:
    """Whether one command starts the agents of all hosts, which then call back."""
    return config.launcher.name in ("pdsh", "slurm")


def environment(config: Config, inherited: Mapping[str, str]) -> dict[str, str]:
    """What a command of `commands` needs in its own environment."""
    match config.launcher.name:
        case "pdsh":
            options = shlex.join(_ssh_options(config))
            before = inherited.get("PDSH_SSH_ARGS_APPEND", "")
            return {
                "PDSH_RCMD_TYPE": inherited.get("PDSH_RCMD_TYPE", "ssh"),
                "PDSH_SSH_ARGS_APPEND": f"{options} {before}".strip(),
            }
        case "ssh":
            return {}
    path = source_path(inherited)
    return {"PYTHONPATH": path} if path else {}


def source_path(inherited: Mapping[str, str]) -> str | None:
    """A PYTHONPATH that leads to this very nanoscale, where it is not an installed package."""
    root = str(Path(nanoscale.__file__).parent.parent)
    if root in (*site.getsitepackages(), site.getusersitepackages()):
        return None
    return os.pathsep.join(filter(None, [root, inherited.get("PYTHONPATH")]))


def interpreter(config: Config, host: Host) -> str:
    """The path of Python on a host."""
    chosen = config.cluster.pythons
    named = chosen.get(host.name) or chosen.get(host.address) or config.cluster.python
    return str(named or sys.executable)


def _ssh(config: Config, host: Host) -> tuple[str, ...]:
    return ("ssh", *_ssh_options(config), host.name.strip("[]"), _remote(config, host, ()))


def _ssh_options(config: Config) -> list[str]:
    """A user's own come first, since ssh takes the first value that it is given."""
    launcher = config.launcher
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": math.ceil(launcher.connect_timeout_s),
        "ServerAliveInterval": max(1, int(launcher.lost_after_s)),
        "ServerAliveCountMax": 2,
    }
    words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return [*launcher.ssh_args, *words]


def _remote(config: Config, host: Host, arguments: Sequence[str]) -> str:
    """The agent's command line for the shell of another host, of which that shell interprets nothing."""
    python = interpreter(config, host)
    path = source_path(os.environ) if python == sys.executable else None
    prefix = ["env", f"PYTHONPATH={path}"] if path else []
    return shlex.join(["exec", *prefix, python, *_AGENT, *arguments])


def _pdsh(config: Config, hosts: Sequence[Host]) -> tuple[str, ...]:
    names = ",".join(host.name for host in hosts)
    remote = _remote(config, hosts[0], ("--connect", CONNECT_ADDRESS, KEY_FILE))
    return ("pdsh", "-S", "-f", str(len(hosts)), "-w", names, remote)


def _srun(config: Config, hosts: Sequence[Host]) -> tuple[str, ...]:
    """One task a node, which gets all that the allocation has there."""
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
        "--overlap",  # another step, as of a monitor, keeps nobody waiting
        "--kill-on-bad-exit=0",  # the launcher ends the others, once it knows why
        *(["--no-kill"] if elastic(config.launcher.nodes) else []),
        "--input=none",
        "--label",
        "--export=ALL",
        *srun_options(config),
        *container_prefix(config),
        interpreter(config, hosts[0]),
        *_AGENT,
        "--connect",
        CONNECT_ADDRESS,
        KEY_FILE,
    )
