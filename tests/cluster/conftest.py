"""Clusters on this machine. Without the required programs, tests skip and name them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.cluster.launches import SOURCE, TINY
from tests.cluster.nodes import Nodes
from tests.cluster.slurm import Slurm

INSTALL = "apt-get install"
MACHINES = {
    "ip": "iproute2",
    "bridge": "iproute2",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
}
SSH = {"ssh": "openssh-client", "ssh-keygen": "openssh-client", "sshd": "openssh-server"}
PDSH = {"pdsh": "pdsh"}
SLURM = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client"}
PBS = dict.fromkeys(("qsub", "qstat", "qdel", "generate_pbs_nodefile"), "slurm-wlm-torque")

_PROBE = """
mount -t tmpfs tmpfs /run && mount -t sysfs sysfs /sys && mount -t proc proc /proc
ip link add probe type bridge && ip link add name probe1 type veth peer name probe2
"""


@pytest.fixture(scope="session")
def nodes_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    _skip_without(MACHINES | SSH | PDSH)
    with Nodes(tmp_path_factory.mktemp("nodes")) as nodes:
        yield nodes


@pytest.fixture
def nodes(nodes_of_the_session: Nodes) -> Iterator[Nodes]:
    """Three nodes with sshd and a login node. The next test finds them on, connected and idle again."""
    yield nodes_of_the_session
    nodes_of_the_session.restore()


@pytest.fixture(scope="session")
def slurm_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    _skip_without(MACHINES | SLURM)
    with Slurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


@pytest.fixture
def slurm(slurm_of_the_session: Slurm) -> Iterator[Slurm]:
    """A SLURM of two nodes and a login node. The next test finds them on, connected and without jobs."""
    yield slurm_of_the_session
    slurm_of_the_session.restore()


@pytest.fixture
def pbs(slurm: Slurm) -> Slurm:
    """The same SLURM, with the commands of PBS."""
    _skip_without(PBS)
    return slurm


@pytest.fixture(scope="session")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of launches.TINY in one process on this machine."""
    folder = tmp_path_factory.mktemp("one")
    words = [*TINY, "parallel.dp=1", "train.steps=400", f"run.root={folder}"]
    subprocess.run(
        [sys.executable, "-m", "nanoscale", "train", *words],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    lines = (folder / "r" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def _skip_without(programs: dict[str, str]) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    missing = {program: package for program, package in programs.items() if not _is_here(program)}
    if missing:
        packages = " ".join(sorted(set(missing.values())))
        pytest.skip(f"needs {', '.join(missing)}: {INSTALL} {packages}")
    unshare = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork"]
    probe = subprocess.run([*unshare, "sh", "-ec", _PROBE], capture_output=True, text=True)
    if probe.returncode != 0:
        pytest.skip(f"needs namespaces, which the system refuses: {probe.stderr.strip()}")


def _is_here(program: str) -> bool:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is not None
