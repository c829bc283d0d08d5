"""What is started on each host: the command line and the environment of its agent."""

from __future__ import annotations

import os
import site
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import nanoscale
from nanoscale.config.schema import Config
from nanoscale.launch.mesh import Mesh, arrange
from nanoscale.runs.directory import RunDirectory

_TELLING = (
    "CUDA",
    "GLOO",
    "GOMP",
    "HF",
    "KMP",
    "LD",
    "MKL",
    "NCCL",
    "NVIDIA",
    "OMP",
    "PYTHON",
    "TORCH",
)
"""beginnings of the names of variables that change how a job runs"""


@dataclass(frozen=True)
class HostPlan:
    """One host's part."""

    host: str
    slots: int
    """devices on it"""
    ranks: tuple[int, ...]
    command: tuple[str, ...]


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that a launch will do."""

    attempt: int
    world_size: int
    hosts: tuple[HostPlan, ...]
    master_addr: str
    master_port: int
    environment: dict[str, str]
    """what is set for the agents, on top of what they inherit"""
    inherited: tuple[str, ...]
    """names of inherited variables that change how a job runs; their values are nobody's business"""
    mesh: Mesh = field(default_factory=Mesh)

    def document(self) -> dict[str, Any]:
        """launch.json."""
        return asdict(self)


def plan_local(
    config: Config, run: RunDirectory, attempt: int, world_size: int, master_port: int
) -> LaunchPlan:
    """All ranks on this host. `config` must be resolved."""
    assert isinstance(config.launcher.devices, int)
    host = socket.gethostname()
    here = HostPlan(
        host=host,
        slots=config.launcher.devices,
        ranks=tuple(range(world_size)),
        command=(sys.executable, "-P", "-m", "nanoscale.agent", str(run.path)),
    )
    return LaunchPlan(
        attempt=attempt,
        world_size=world_size,
        hosts=(here,),
        master_addr="127.0.0.1",
        master_port=master_port,
        environment=_environment(config, host, attempt, os.environ),
        inherited=tuple(sorted(name for name in os.environ if name.startswith(_TELLING))),
        mesh=arrange([(host, here.ranks)], config.parallel),
    )


def _environment(
    config: Config, host: str, attempt: int, inherited: Mapping[str, str]
) -> dict[str, str]:
    environment = {
        "NANOSCALE_HOST": host,
        "NANOSCALE_ATTEMPT": str(attempt),
        "OMP_NUM_THREADS": str(config.launcher.threads),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    chosen = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}.intersection(inherited)
    if config.launcher.device == "cpu" and not chosen:
        # By default threads spin so long at a barrier that one busy neighbour slows a step thirtyfold.
        environment["GOMP_SPINCOUNT"] = "1000"
    loopback = _loopback()
    if loopback and "GLOO_SOCKET_IFNAME" not in inherited:
        environment["GLOO_SOCKET_IFNAME"] = loopback  # works where the host's name leads nowhere
    path = _source_path(inherited)
    if path:
        environment["PYTHONPATH"] = path
    return environment


def _loopback() -> str | None:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), None)


def _source_path(inherited: Mapping[str, str]) -> str | None:
    """A PYTHONPATH that leads to this very nanoscale, where it is not an installed package."""
    root = str(Path(nanoscale.__file__).parent.parent)
    if root in (*site.getsitepackages(), site.getusersitepackages()):
        return None
    return os.pathsep.join(filter(None, [root, inherited.get("PYTHONPATH")]))
