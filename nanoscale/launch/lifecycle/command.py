"""The plan of a launch: command line and environment of each host's agent, and every rank's coordinates."""

import os
import socket
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate

from nanoscale.common.json_text import Json
from nanoscale.config.layout import coordinates
from nanoscale.config.machines import Host
from nanoscale.config.resolved import ResolvedConfig, ResolvedParallel
from nanoscale.config.schema import Config
from nanoscale.launch.transport.transport import transport_of
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.documents import damaged, read_document

_INHERITED = (
    "CUDA", "DS_", "FI_", "GLOO", "GOMP", "HF_", "KMP", "MKL", "NCCL", "OMP", "PYTHON", "PYTORCH",
    "TORCH", "UCX",
)  # fmt: skip
"""Prefixes of variables that affect a job on any host."""

_INHERITED_LOCALLY = ("LD_", "NVIDIA")
"""Prefixes of variables that affect it on this host."""

_NOT_INHERITED = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "PYTHONHOME", "PYTHONPATH")
"""Variables that differ on every host."""

_ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
"""Variables that configure PyTorch's allocator of device memory."""

_CONNECT_ALL = 256
"""Up to this many ranks, gloo connects all pairs when a group is created; beyond it, on their first message."""
_LAZY = "TORCH_GLOO_LAZY_INIT"

_PORTS = range(20_000, 32_000)
"""Below the ports that systems assign on request."""


AXES = ("pp", "dp", "cp", "tp")
"""The axes, the slowest first."""


@dataclass(frozen=True)
class RankPlacement:
    """A rank's host and coordinates."""

    rank: int
    host: str
    local_rank: int
    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Mesh:
    """The coordinates of all ranks."""

    axes: dict[str, int] = field(default_factory=dict)
    """The degree of every axis, the slowest first."""
    ranks: tuple[RankPlacement, ...] = ()

    @property
    def used(self) -> list[str]:
        """The axes of more than one rank."""
        return [axis for axis, degree in self.axes.items() if degree > 1]

    def __str__(self) -> str:
        return " × ".join(f"{axis} {self.axes[axis]}" for axis in self.used) or "one rank"


@dataclass(frozen=True)
class HostPlan:
    """One host's plan."""

    host: str
    slots: int
    """Ranks to start there."""
    ranks: tuple[int, ...]
    command: tuple[str, ...]
    """The command on this machine that starts the agent there."""
    devices: tuple[int, ...] | None = None
    """The devices to use, if not the first ones."""

    @property
    def used_devices(self) -> Sequence[int]:
        """The device of each rank, by the host's numbers."""
        return range(self.slots) if self.devices is None else self.devices


@dataclass(frozen=True)
class LaunchPlan:
    """The complete plan of a launch."""

    attempt: int
    world_size: int
    hosts: tuple[HostPlan, ...]
    master_addr: str
    master_port: int
    environment: dict[str, str]
    """The variables set for the agents."""
    inherited: tuple[str, ...]
    """Names of variables that are passed on from this machine; their values are private."""
    mesh: Mesh = field(default_factory=Mesh)

    def document(self) -> Json:
        """Return the content of launch.json, with a command for several hosts only at the first of them."""
        commands = {host.command: host.command for host in self.hosts}
        hosts = [replace(host, command=commands.pop(host.command, ())) for host in self.hosts]
        return asdict(replace(self, hosts=tuple(hosts)))


def read_plan(run: RunDirectory) -> LaunchPlan | None:
    """Read the plan of the newest attempt from launch.json; None if it does not exist.

    Raises:
        UserError: launch.json is damaged.
    """
    try:
        document = read_document(run.launch)
        hosts = tuple(HostPlan(**_tuples(host)) for host in document.pop("hosts"))
        mesh = document.pop("mesh")
        placements = tuple(RankPlacement(**placement) for placement in mesh["ranks"])
        return LaunchPlan(hosts=hosts, mesh=Mesh(mesh["axes"], placements), **_tuples(document))
    except FileNotFoundError:
        return None
    except (TypeError, KeyError, AttributeError) as error:
        raise damaged(run.launch, "is not an attempt plan") from error


def _tuples(values: Json) -> Json:
    """Convert JSON's lists to tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }


def plan_launch(
    config: ResolvedConfig,
    run: RunDirectory,
    attempt: int,
    hosts: Sequence[Host] = (),
    master_port: int | None = None,
) -> LaunchPlan:
    """Plan the launch of a resolved configuration.

    Args:
        hosts: the hosts to use; none: this one alone.
        master_port: the port that the first host has reserved, once it has.
    """
    transport = transport_of(config)
    hosts = hosts or (local_host(config.world_size),)
    commands = transport.commands(hosts)
    first_ranks = accumulate((host.slots for host in hosts), initial=0)
    plans = tuple(
        HostPlan(host.address, host.slots, tuple(range(it, it + host.slots)), command, host.devices)
        for host, it, command in zip(hosts, first_ranks, commands, strict=False)
    )
    return LaunchPlan(
        attempt=attempt,
        world_size=config.world_size,
        hosts=plans,
        master_addr=config.launcher.master_addr or transport.address_of(hosts[0]),
        master_port=master_port or wanted_port(config, run),
        environment=_environment(config, config.world_size, os.environ),
        inherited=tuple(sorted(name for name in os.environ if _is_inherited(config, name))),
        mesh=arrange([(plan.host, plan.ranks) for plan in plans], config.parallel),
    )


def local_host(slots: int) -> Host:
    """Return this machine as the one host of a job."""
    return Host(socket.gethostname(), slots)


def wanted_port(config: Config, run: RunDirectory) -> int:
    """Return the port of the rendezvous unless the first host finds it in use; it differs between most runs."""
    if config.launcher.master_port != "auto":
        return config.launcher.master_port
    return _PORTS[zlib.crc32(str(run.path).encode()) % len(_PORTS)]


def agent_environment(
    config: Config, world_size: int, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of the agents in addition to their hosts' environment."""
    passed = {name: value for name, value in inherited.items() if _is_inherited(config, name)}
    return passed | _environment(config, world_size, inherited)


def _is_inherited(config: Config, name: str) -> bool:
    if transport_of(config).is_local:
        return name.startswith(_INHERITED + _INHERITED_LOCALLY)
    if name in _NOT_INHERITED:
        return False
    patterns = [*config.launcher.pass_env]
    patterns += ["WANDB_*"] if config.logger.wandb != "off" else []  # the trackers' keys included
    patterns += ["MLFLOW_*"] if config.logger.mlflow == "on" else []
    patterns += ["AWS_*", "GOOGLE_APPLICATION_CREDENTIALS"] if config.checkpoint.upload else []
    prefixes = tuple(entry[:-1] for entry in patterns if entry.endswith("*"))
    return name in patterns or name.startswith(_INHERITED + prefixes)


def _environment(config: Config, world_size: int, inherited: Mapping[str, str]) -> dict[str, str]:
    environment = {}
    if config.launcher.threads != "auto":
        environment["OMP_NUM_THREADS"] = str(config.launcher.threads)
    spin_settings = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}.intersection(inherited)
    if config.launcher.device == "cpu" and not spin_settings:
        # By default threads spin so long at a barrier that one busy process slows a step thirtyfold.
        environment["GOMP_SPINCOUNT"] = "1000"
    if config.launcher.device == "cuda" and not _ALLOCATOR.intersection(inherited):
        # Expandable segments reduce fragmentation; without them long runs that nearly fill a device run out of
        # contiguous memory.
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if world_size > _CONNECT_ALL and _LAZY not in inherited:
        # Each of several groups would connect all pairs. But a rank that hangs before its first message to
        # another one is then noticed later, so smaller jobs connect all.
        environment[_LAZY] = "1"
    return environment | {name: str(value) for name, value in config.launcher.env.items()}


# --- the mesh for people and for launch.json -----------------------------------------------------------


def arrange(hosts: Iterable[tuple[str, tuple[int, ...]]], parallel: ResolvedParallel) -> Mesh:
    """Return the mesh of a resolved layout; `hosts` lists each with its ranks."""
    ranks_of_mesh = [
        RankPlacement(rank, host, local_rank, **asdict(coordinates(rank, parallel)))
        for host, ranks in hosts
        for local_rank, rank in enumerate(ranks)
    ]
    return Mesh({axis: getattr(parallel, axis) for axis in AXES}, tuple(ranks_of_mesh))
