"""Training on the nodes over ssh and pdsh: jobs of one machine run on several, and end there too."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nanoscale.runs import status
from nanoscale.runs.directory import RunDirectory
from tests.cluster.launches import (
    LONG,
    SOURCE,
    TINY,
    Launch,
    agrees,
    hostfile,
    interrupt,
    left,
    nothing_left,
)
from tests.cluster.machines import LIMIT_S, wait_until
from tests.cluster.nodes import LOGIN, NODES, Nodes

STEPS = 120
JOB = (*TINY, f"train.steps={STEPS}")
SECRET = "MY_API_TOKEN"


@contextmanager
def paused(*ranks: int) -> Iterator[None]:
    """Stop all ranks within the body, also ranks that wait for another."""
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)


class Hostile:
    """Values that a shell on their way would execute, and the file that it would create."""

    def __init__(self) -> None:
        self.bait = f"bait-{uuid.uuid4().hex}"
        touch = f"touch {self.bait}"
        self.name = f"a $({touch})`{touch}`'\";{touch};&|#%h%u\\ *"
        """The name of a file."""
        self.environment = {
            "V_SUBSTITUTED": f"$({touch})",
            "V_BACKTICKS": f"`{touch}`",
            "V_QUOTES": "it's \"both\" '",
            "V_LINES": f"one\n{touch}\n",
            "V_COMMAND": f"; {touch} & | {touch} #",
            "V_SPACES": "  two  ",
            "V_PDSH": "%h %u %n %%",
            "V_BACKSLASH": "\\n $HOME ~ * \\",
        }

    def was_taken(self, *folders: Path) -> list[Path]:
        """Return the places where the command was executed."""
        places = {Path("/"), Path.home(), Path.cwd(), *folders}
        return [path for place in places for path in place.glob(f"*{self.bait}") if _is_bait(path)]


def _is_bait(path: Path) -> bool:
    return path.name.startswith("bait-")


def write_interpreter(path: Path, scratch: Path, source: Path) -> None:
    """Write a Python that keeps its temporary files in `scratch`, and has nanoscale from `source`."""
    words = {"TMPDIR": scratch, "PYTHONPATH": source}
    settings = "\n".join(f"export {name}='{value}'" for name, value in words.items())
    path.write_text(f'#!/bin/sh\n{settings}\nexec {sys.executable} "$@"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def recipe(folder: Path, **sections: object) -> Path:
    """Write the debug recipe with further sections, in which YAML keeps every character."""
    document = {"defaults": ["debug"], **sections}
    path = folder / "mine.yaml"
    path.write_text(json.dumps(document))
    return path


def environment_of(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def tells_where(log: Path) -> bool:
    return log.exists() and "most recent call first" in log.read_text()


def test_hosts_that_differ_train_and_stop_through_pdsh(nodes: Nodes, tmp_path: Path) -> None:
    train_and_stop(nodes, tmp_path, "pdsh")


def train_and_stop(nodes: Nodes, tmp_path: Path, launcher: str) -> Launch:
    """Train on two hosts that differ in what a user can choose for each, until it is stopped.

    Ctrl-C stops pdsh's, and `nanoscale runs stop` ssh's; test_faults.py has Ctrl-C over ssh.
    """
    hostile = Hostile()
    own = nodes.make_private(tmp_path / "own")
    shutil.copytree(SOURCE / "nanoscale", own["n2"] / "copy" / "nanoscale")
    sources = {"n1": SOURCE, "n2": tmp_path / "own" / "copy", "n3": SOURCE}
    for node, source in sources.items():
        write_interpreter(own[node] / hostile.name, tmp_path / "own", source)
    root = tmp_path / f"{hostile.name}\nruns"
    hosts = hostfile(tmp_path, "root@n1 slots=2", "n2 slots=1", "n3 slots=2")
    secret = uuid.uuid4().hex
    words = recipe(
        tmp_path,
        run={"root": str(root)},
        cluster={"python": str(tmp_path / "own" / hostile.name)},
        launcher={"env": hostile.environment, "pass_env": [f"{SECRET[:-3]}*"]},
    )
    first = Launch(
        nodes,
        tmp_path,
        *("train", *JOB[1:], f"recipe={words}", f"launcher.name={launcher}"),
        *("--hostfile", hosts, "--exclude", "n3"),
        root=root,
        environment={SECRET: secret, **nodes.pdsh_environment},
    )
    first.trains(3)
    with paused(*first.ranks("n2")):
        assert [len(first.ranks(node)) for node in NODES] == [2, 1, 0]
        for node in ("n1", "n2"):
            (server,) = first.fork_servers(node)
            found = environment_of(server)
            assert hostile.environment.items() <= found.items()
            assert found[SECRET] == secret
        assert environment_of(*first.fork_servers("n2"))["PYTHONPATH"] == f"{tmp_path}/own/copy"
        assert not [line for line in left(nodes).values() if secret in line]
        for node, ranks in (("n1", (0, 1)), ("n2", (2,))):
            (folder,) = own[node].glob("nanoscale-*")
            assert all(RunDirectory(folder).log(1, node, rank, "err").exists() for rank in ranks)
    for node, ranks in (("n1", (0, 1)), ("n2", (2,))):
        for pid in first.ranks(node):
            os.kill(pid, signal.SIGUSR2)  # then it writes its stack
        logs = [first.run.log(1, node, rank, "err") for rank in ranks]
        wait_until(lambda logs=logs: all(map(tells_where, logs)), f"words of the ranks of {node}")
    if launcher == "ssh":
        with paused(*first.ranks("n2")):
            stop = Launch(nodes, tmp_path, "runs", "stop", first.run.path)
            wait_until(lambda: first.events("signal"), "word that it was asked to stop")
        stop.must_end(0)
    else:
        interrupt(first)
    first.must_end(130)
    nothing_left(nodes, LIMIT_S)
    assert status.read(first.run).state == "stopped"
    assert first.run.checkpoint_steps() == [len(first.metrics)]
    assert not [path for node in NODES for path in own[node].glob("nanoscale-*")]
    files = [path for path in first.run.path.rglob("*") if path.is_file()]
    assert files and not [path for path in files if secret.encode() in path.read_bytes()]
    assert hostile.was_taken(tmp_path, root, *own.values()) == []
    return first


def test_hosts_that_differ_train_stop_and_go_on_as_one_process(
    nodes: Nodes, tmp_path: Path, one_process: list[float]
) -> None:
    first = train_and_stop(nodes, tmp_path, "ssh")
    last = Launch(
        nodes,
        tmp_path,
        *("resume", first.run.path, "--exclude", "n1@n2", "parallel.tp=2"),
        root=first.run.path.parent,
    )
    last.must_end(0)
    nothing_left(nodes, LIMIT_S)
    assert [record["step"] for record in last.metrics] == list(range(1, STEPS + 1))
    assert agrees(last.losses, one_process)


@pytest.mark.exhaustive
def test_ctrl_c_twice_kills(nodes: Nodes, tmp_path: Path) -> None:
    """A stopped rank does not receive the first request to stop."""
    hosts = hostfile(tmp_path, "n1 slots=1", "n2 slots=1")
    words = (
        "train",
        *TINY,
        *LONG,
        "--hostfile",
        hosts,
        "launcher.lost_after_s=3600",
        "launcher.stop_grace_s=3600",
    )
    launch = Launch(nodes, tmp_path, *words)
    launch.trains(3)
    os.kill(launch.only_rank("n2"), signal.SIGSTOP)
    interrupt(launch)
    wait_until(lambda: launch.events("signal"), "word that Ctrl-C was heard")
    interrupt(launch)
    launch.must_end(130)
    nothing_left(nodes, LIMIT_S)
    assert status.read(launch.run).state == "stopped"


def test_ctrl_c_while_a_host_does_not_answer(nodes: Nodes, tmp_path: Path) -> None:
    hosts = hostfile(tmp_path, "n1 slots=1", "n2 slots=1")
    nodes.partition("n2")
    launch = Launch(nodes, tmp_path, "train", *TINY, *LONG, "--hostfile", hosts)
    wait_until(lambda: launch.agents("n1"), "agent on n1", LIMIT_S)
    interrupt(launch)
    launch.must_end(130)
    nothing_left(nodes, LIMIT_S)
    assert not launch.run.path.exists()
    assert list(launch.run.path.parent.glob(".*")) == []


@pytest.mark.exhaustive
def test_two_jobs_on_the_same_hosts_do_not_touch_each_other(
    nodes: Nodes, tmp_path: Path, one_process: list[float]
) -> None:
    """One of them knows the hosts by their IPv6 addresses."""
    if nodes.call(LOGIN, ["ip", "-6", "address", "show", "dev", "eth0"]).stdout == "":
        pytest.skip("needs a kernel with IPv6")
    folders = [tmp_path / "names", tmp_path / "addresses"]
    for folder in folders:
        folder.mkdir()
    by_name = hostfile(folders[0], "n1 slots=1", "n2 slots=1")
    first, second = nodes.address6("n1"), nodes.address6("n2")
    by_address = hostfile(folders[1], f"root@[{first}] slots=1", f"{second} slots=1")
    bad = Launch(nodes, folders[0], "train", *TINY, *LONG, "--hostfile", by_name)
    bad.trains(1)
    rank = bad.only_rank("n2")
    good = Launch(nodes, folders[1], "train", *JOB, "--hostfile", by_address)
    good.trains(3)
    os.kill(rank, signal.SIGKILL)
    bad.must_end(1)
    assert bad.cause.who == "rank 1 on n2"
    good.must_end(0)
    nothing_left(nodes, LIMIT_S)
    assert agrees(good.losses, one_process)
    assert good.run.log(1, second, 1, "err").exists()
