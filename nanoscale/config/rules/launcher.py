"""Rules of the launcher: the machines of the ranks, and the keys of each launcher."""

from __future__ import annotations

import socket
from dataclasses import replace
from functools import reduce
from typing import Literal

from nanoscale.common.errors import Violation
from nanoscale.config import hostnames, reference
from nanoscale.config.composing import nodes
from nanoscale.config.rules.environment import check_environment
from nanoscale.config.rules.files import absolute
from nanoscale.config.rules.resolution import Case, listed
from nanoscale.config.rules.slurm import check_slurm
from nanoscale.config.schema import Launcher, Slurm
from nanoscale.config.values.composed import Composed

_CONCERNS: dict[str, tuple[str, ...]] = {
    "launcher.hostfile": ("ssh", "pdsh"),
    "launcher.include": ("ssh", "pdsh"),
    "launcher.exclude": ("ssh", "pdsh"),
    "launcher.nodes": ("ssh", "pdsh", "slurm"),
    "launcher.master_addr": ("ssh", "pdsh", "slurm"),
    "launcher.ssh_args": ("ssh", "pdsh"),
    "cluster.python": ("ssh", "pdsh", "slurm"),
    "cluster.pythons": ("ssh", "pdsh"),
    **{f"launcher.slurm.{name}": ("slurm",) for name in reference.members(Slurm)},
}
"""Keys that only some launchers use."""

_MAY_BE_ZERO = {
    "cluster.context_gib",
    "cluster.intra_host_us",
    "cluster.inter_host_us",
    "cluster.price",
}
"""Hardware figures that may be 0; the others are divisors."""


def by_hostfile(composed: Composed) -> bool:
    """True if the hosts are those of `launcher.hostfile`."""
    launcher = composed.config.launcher
    return launcher.hostfile is not None and _way(composed) in ("ssh", "pdsh")


def resolve_launcher(case: Case) -> Launcher:
    """Return the launcher with its name, and the hostfile with an absolute path."""
    _check_concerns(case)
    _check_ssh_args(case)
    _check_nodes(case)
    _check_master(case)
    _check_cluster(case)
    check_environment(case)
    check_slurm(case)
    launcher = case.config.launcher
    return replace(launcher, name=_name(case), hostfile=absolute(launcher.hostfile))


def resolve_ranks(
    case: Case, launcher: Launcher, device: Literal["cpu", "cuda"], ranks: int
) -> Launcher:
    """Return the launcher with this machine's ranks; elsewhere every host divides its own cores."""
    if case.hosts and launcher.name != "local":
        return replace(launcher, device=device)
    threads = launcher.threads
    if threads == "auto":
        threads = max(1, case.devices.cores // ranks)
    return replace(launcher, device=device, devices=ranks, threads=threads)


def _way(composed: Composed) -> str:
    """Return the requested launcher: a hostfile implies ssh, unless another one was requested."""
    launcher = composed.config.launcher
    unsaid = launcher.name == "local" and not composed.asked_for("launcher.name")
    return "ssh" if unsaid and launcher.hostfile is not None else launcher.name


def _name(case: Case) -> Literal["local", "ssh", "pdsh", "slurm"]:
    """Return the launcher's name: a hostfile of this machine alone needs no ssh, unless it was requested."""
    asked = case.config.launcher.name
    if asked == _way(case.composed):
        return asked
    if case.remote or not case.hosts:
        return "ssh"
    if len(case.hosts) > 1:
        names = listed([f"{host.name} ({host.source})" for host in case.hosts])
        one = f"{case.hosts[0].name} slots={case.slots}"
        message = f"names this machine {len(case.hosts)} times, as {names}: one line is enough"
        case.refuse("config", "launcher.hostfile", message, one, "launcher.name=ssh")
    return "local"


def _check_concerns(case: Case) -> None:
    launcher, way = case.config.launcher, _way(case.composed)
    if way in ("ssh", "pdsh") and launcher.hostfile is None:
        message = (
            f"is needed by launcher.name={way}: a file with a line `HOST slots=N` for each host"
        )
        case.refuse(
            "config", "launcher.hostfile", message, "--hostfile hosts", "launcher.name=local"
        )
    for key, ways in _CONCERNS.items():
        if way not in ways:
            others = "--hostfile hosts" if launcher.hostfile is None else "launcher.name=ssh"
            instead = others if "ssh" in ways and way == "local" else None
            for_slurm = "launcher.name=slurm" if ways == ("slurm",) else None
            case.refuse_idle("config", key, f"launcher.name={way}", instead, for_slurm)


def _check_ssh_args(case: Case) -> None:
    """Check `launcher.ssh_args`: pdsh splits ssh's arguments at spaces, whatever quotes there are."""
    key, words = "launcher.ssh_args", case.config.launcher.ssh_args
    if _way(case.composed) == "pdsh" and any(len(word.split()) != 1 for word in words):
        message = "cannot hold an argument with a space, at which pdsh would divide it"
        case.refuse("config", key, message, "launcher.name=ssh")


def _check_nodes(case: Case) -> None:
    wrong = nodes.violation(case.composed)
    if wrong is not None:
        case.add("config", wrong)
    count, dp = case.config.launcher.nodes, case.config.parallel.dp
    if nodes.elastic(count) and dp != "auto":
        message = (
            f"must be auto with launcher.nodes={count}: it follows from the hosts that are left"
        )
        most = str(count).partition(":")[2]
        case.refuse("layout", "parallel.dp", message, "parallel.dp=auto", f"launcher.nodes={most}")


def _check_master(case: Case) -> None:
    """Check the master address: the other hosts must reach the first one under this name."""
    key, given = "launcher.master_addr", case.config.launcher.master_addr
    if given is not None:
        problem = hostnames.problem(given) or ("holds a user" if "@" in given else "")
        if problem:
            address = hostnames.address(given)
            fits = address != given and not hostnames.problem(address)
            case.refuse("config", key, problem, f"{key}={address}" if fits else f"{key}=null")
        return
    if len(case.hosts) > 1 and case.remote and hostnames.is_loopback(case.hosts[0].name):
        first = case.hosts[0]
        message = (
            f"is needed: {first.name} ({first.source}), where the ranks meet, is another machine "
            "to every other host"
        )
        case.refuse("config", key, message, f"{key}={socket.gethostname()}")


def _check_cluster(case: Case) -> None:
    cluster = case.config.cluster
    for name, key in reference.declared().items():
        above = name.startswith("cluster.") and key.at_least == 0 and name not in _MAY_BE_ZERO
        if not above:
            continue
        value: object = reduce(getattr, name.split("."), case.config)
        if value == 0:
            case.refuse("config", name, "must be above 0", f"{name}=null")
    if cluster.python is not None and not _is_path(cluster.python):
        message = "is no path of an interpreter"
        case.refuse("config", "cluster.python", message, "cluster.python=null")
    for name, python in cluster.pythons.items():
        if not _is_path(python):
            source, message = case.composed.source("cluster.pythons"), "must be a path, as a text"
            example = (hostnames.own_python(name),)
            wrong = Violation(f"cluster.pythons.{name}", python, source, message, example)
            case.add("config", wrong)


def _is_path(value: object) -> bool:
    return isinstance(value, str) and value.isprintable() and value.strip("- ") != ""
