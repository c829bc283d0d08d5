"""What is started on each host: the command line and the environment of its agent."""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from nanoscale.config.machines import Host
from nanoscale.config.schema import Config
from nanoscale.launch.hosts.mesh import Mesh, Place, arrange
from nanoscale.launch.transport import transport
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.documents import damaged, read_document

_PASSED_ON = (
    "CUDA",
    "DS_",
    "FI_",
    "GLOO",
    "GOMP",
    "HF_",
    "KMP",
    "MKL",
    "NCCL",
    "OMP",
    "PYTHON",
    "PYTORCH",
    "TORCH",
    "UCX",
)
"""beginnings of the names of variables that change how a job runs on any host"""

_LOCAL = ("LD_", "NVIDIA")
"""and of those that do so on this one"""

_NOT_PASSED_ON = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONHOME", "PYTHONPATH")
"""they are another matter on every host"""

_ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
"""by which PyTorch's allocator of device memory is told how to work"""

_CONNECT_ALL = 256
"""ranks, up to which gloo connects all pairs when a group is made, not two ranks when they first talk"""
_LAZY = "TORCH_GLOO_LAZY_INIT"

_PORTS = range(20_000, 32_000)
"""below those that systems give to whoever asks for any"""


@dataclass(frozen=True)
class HostPlan:
    """One host's part."""

    host: str
    slots: int
    """ranks to start there"""
    ranks: tuple[int, ...]
    command: tuple[str, ...]
    """what is typed here to start the agent there"""
    devices: tuple[int, ...] | None = None
    """which of its devices, where not the first ones"""

    @property
    def used_devices(self) -> Sequence[int]:
        """The device of each rank, as the host counts them."""
        return range(self.slots) if self.devices is None else self.devices


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that a launch will do."""

    attempt: int
    world_size: int
    hosts: tuple[HostPlan, ...]
    master_addr: str
    master_port: int
    environment: dict[str, str]
    """what is set for the agents"""
    inherited: tuple[str, ...]
    """names of variables of here that they get as well; their values are nobody's business"""
    mesh: Mesh = field(default_factory=Mesh)

    def document(self) -> dict[str, Any]:
        """launch.json."""
        return asdict(self)


def read_plan(run: RunDirectory) -> LaunchPlan | None:
    """The plan of the newest attempt, from launch.json; None where there is none.

    Raises:
        UserError: launch.json is damaged.
    """
    try:
        document = read_document(run.launch)
        hosts = tuple(HostPlan(**_tuples(host)) for host in document.pop("hosts"))
        mesh = document.pop("mesh")
        places = tuple(Place(**place) for place in mesh["ranks"])
        return LaunchPlan(hosts=hosts, mesh=Mesh(mesh["axes"], places), **_tuples(document))
    except FileNotFoundError:
        return None
    except (TypeError, KeyError, AttributeError) as error:
        raise damaged(run.launch, "is no plan of an attempt") from error


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists only."""
    return {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}


def plan_launch(
    config: Config,
    run: RunDirectory,
    attempt: int,
    world_size: int,
    hosts: Sequence[Host] = (),
    master_port: int | None = None,
) -> LaunchPlan:
    """Who does what. `config` must be resolved.

    Args:
        hosts: the hosts to use; none: this one alone.
        master_port: the port that the first host has reserved, once it has.
    """
    local = config.launcher.name == "local"
    hosts = hosts or (here(config),)
    commands = transport.commands(config, hosts)
    ranks = _ranks(hosts)
    plans = tuple(
        HostPlan(host.address, host.slots, own, command, host.devices)
        for host, own, command in zip(hosts, ranks, commands, strict=True)
    )
    return LaunchPlan(
        attempt=attempt,
        world_size=world_size,
        hosts=plans,
        master_addr=config.launcher.master_addr or ("127.0.0.1" if local else hosts[0].address),
        master_port=master_port or wanted_port(config, run),
        environment=_environment(config, world_size, os.environ),
        inherited=tuple(sorted(name for name in os.environ if _is_passed_on(config, name))),
        mesh=arrange([(plan.host, plan.ranks) for plan in plans], config.parallel),
    )


def here(config: Config) -> Host:
    """This machine as the one host of a resolved configuration."""
    assert isinstance(config.launcher.devices, int)
    return Host(socket.gethostname(), config.launcher.devices)


def wanted_port(config: Config, run: RunDirectory) -> int:
    """Where the ranks meet unless the first host finds that port taken; two runs seldom want the same."""
    if config.launcher.master_port != "auto":
        return config.launcher.master_port
    return _PORTS[zlib.crc32(str(run.path).encode()) % len(_PORTS)]


def passed_on(config: Config, plan: LaunchPlan, inherited: Mapping[str, str]) -> dict[str, str]:
    """The whole environment that the agents are to have on top of that of their hosts."""
    return {name: inherited[name] for name in plan.inherited} | plan.environment


def _ranks(hosts: Sequence[Host]) -> list[tuple[int, ...]]:
    """Every host's ranks, in the hosts' order."""
    shares, first = [], 0
    for host in hosts:
        shares.append(tuple(range(first, first + host.slots)))
        first += host.slots
    return shares


def _is_passed_on(config: Config, name: str) -> bool:
    if config.launcher.name == "local":
        return name.startswith(_PASSED_ON + _LOCAL)
    if name in _NOT_PASSED_ON:
        return False
    chosen = config.launcher.pass_env
    beginnings = tuple(entry[:-1] for entry in chosen if entry.endswith("*"))
    return name in chosen or name.startswith(_PASSED_ON + beginnings)


def _environment(config: Config, world_size: int, inherited: Mapping[str, str]) -> dict[str, str]:
    environment = {}
    if config.launcher.threads != "auto":
        environment["OMP_NUM_THREADS"] = str(config.launcher.threads)
    chosen = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}.intersection(inherited)
    if config.launcher.device == "cpu" and not chosen:
        # By default threads spin so long at a barrier that one busy neighbour slows a step thirtyfold.
        environment["GOMP_SPINCOUNT"] = "1000"
    if config.launcher.device == "cuda" and not _ALLOCATOR.intersection(inherited):
        # Segments that grow leave fewer holes between tensors of many sizes; without them long runs that
        # nearly fill a device end for want of one piece that is large enough.
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if world_size > _CONNECT_ALL and _LAZY not in inherited:
        # Each of several groups would connect all pairs. But a rank that hangs before it has talked to another
        # one is then noticed later, so smaller jobs connect all.
        environment[_LAZY] = "1"
    return environment | {name: str(value) for name, value in config.launcher.env.items()}
