"""The nodes are what tests of launches take them for: separate machines that can be lost."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.machines import LIMIT_S, wait_until
from tests.cluster.nodes import LOGIN, NODES, Nodes

pytestmark = pytest.mark.exhaustive
"""They test what the other tests of clusters build on."""

LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], 4711))
print("listening", flush=True)
connection = server.accept()[0]
while received := connection.recv(100):
    print(received.decode(), flush=True)
print("end of file", flush=True)
"""

SPEAK = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 4711), timeout=5)
connection.settimeout(1.0)
for line in sys.stdin:
    try:
        connection.sendall(line.strip().encode())
        answer = connection.recv(100)
        print("end of file" if not answer else answer, flush=True)
    except TimeoutError:
        print("silence", flush=True)
    except ConnectionResetError:
        print("reset", flush=True)
"""


def ssh(nodes: Nodes, node: str, command: str, *options: str) -> subprocess.CompletedProcess[str]:
    return nodes.call(LOGIN, ["ssh", "-F", nodes.ssh_config, *options, node, command])


def start(nodes: Nodes, node: str, program: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a Python program on a node that communicates by lines."""
    return nodes.run_in(
        node,
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )


def say(process: subprocess.Popen[str], line: str) -> str:
    process.stdin.write(line + "\n")
    return process.stdout.readline().strip()


def connect(nodes: Nodes) -> tuple[subprocess.Popen[str], subprocess.Popen[str]]:
    """n1 speaks and n2 listens."""
    listener = start(nodes, "n2", LISTEN, nodes.address("n2"))
    assert listener.stdout.readline() == "listening\n"
    speaker = start(nodes, "n1", SPEAK, nodes.address("n2"))
    assert say(speaker, "hello") == "silence"
    assert listener.stdout.readline() == "hello\n"
    return speaker, listener


def test_nodes_are_different_machines(nodes):
    facts = [
        ssh(nodes, node, "hostname; readlink /proc/self/ns/net /proc/self/ns/pid /proc/self/ns/ipc")
        for node in NODES
    ]
    assert [fact.stdout.split()[0] for fact in facts] == list(NODES)
    assert len({word for fact in facts for word in fact.stdout.split()}) == 4 * len(NODES)
    here = {str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("net", "pid", "ipc")}
    assert not here & {word for fact in facts for word in fact.stdout.split()}


def test_a_signal_reaches_the_program_and_its_code_comes_back(nodes, tmp_path):
    process = nodes.run_in(
        LOGIN,
        ["sh", "-c", "trap 'exit 7' INT; echo ready; while :; do sleep 0.01; done"],
        stdout=subprocess.PIPE,
        cwd=tmp_path,
    )
    process.stdout.readline()
    assert process.pid in nodes.processes(LOGIN)
    process.send_signal(signal.SIGINT)
    assert process.wait(5) == 7
    assert nodes.processes(LOGIN) == {}


def test_what_a_client_leaves_behind_is_seen(nodes):
    ssh(nodes, "n1", "sleep 1234 > /dev/null 2>&1 &")
    wait_until(lambda: len(nodes.processes("n1")) == 1, "end of the session")
    assert list(nodes.processes("n1").values()) == ["sleep 1234"]
    assert list(nodes.processes()) == list(nodes.processes("n1"))
    nodes.restore()
    assert nodes.processes() == {}


def test_orphans_of_a_node_are_reaped(nodes):
    ssh(nodes, "n1", "(sleep 0.05 &) ; true")
    wait_until(lambda: nodes.processes("n1") == {}, "end of the orphan")
    states = nodes.call("n1", ["ps", "-e", "-o", "stat="]).stdout.split()
    assert not [state for state in states if state.startswith("Z")]


def test_a_node_without_power_is_silent_and_comes_back_as_another(nodes):
    speaker, listener = connect(nodes)
    boot = nodes.call("n2", ["cat", "/proc/sys/kernel/random/boot_id"]).stdout
    nodes.power_off("n2")
    assert listener.wait(LIMIT_S) == -signal.SIGKILL
    assert say(speaker, "are you there?") == "silence"  # a closed connection would say end or reset
    unreachable = ssh(nodes, "n2", "hostname", "-o", "ConnectTimeout=2")
    assert unreachable.returncode == 255
    assert "timed out" in unreachable.stderr or "No route" in unreachable.stderr
    nodes.power_on("n2")
    assert ssh(nodes, "n2", "hostname").stdout == "n2\n"
    assert nodes.call("n2", ["cat", "/proc/sys/kernel/random/boot_id"]).stdout != boot
    assert wait_until(lambda: _unless_silent(say(speaker, "?")), "answer", 10) == "reset"


def _unless_silent(answer: str) -> str | None:
    return None if answer == "silence" else answer


OWNER = """
import sys, time
from pathlib import Path
from tests.cluster.nodes import Nodes
with Nodes(Path(sys.argv[1])) as nodes:
    process = nodes.run_in("n1", ["sleep", "4321"], start_new_session=True)
    inits = [machine.init.pid for machine in nodes._machines.values()]
    print(process.pid, nodes._switch.pid, *inits, flush=True)
    time.sleep(1000)
"""


# An init ends once processes that were put into its namespace from outside are reaped. It is not always sure.
HEIR = """
import os, subprocess, sys
from nanoscale.launch.fleet.processes import adopt_orphans
adopt_orphans()
owner = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]])
sys.stdin.readline()
owner.kill()
try:
    while True:
        os.wait()
except ChildProcessError:
    pass
"""


def test_nothing_is_left_of_nodes_whose_owner_is_killed(nodes, tmp_path):
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", HEIR, OWNER, str(tmp_path / "nodes")]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], **pipes) as heir:
        pids = heir.stdout.readline().split()
        assert len(pids) == 6
        assert ssh(nodes, "n1", "hostname").stdout == "n1\n"  # the others do not disturb
        try:
            heir.communicate("end\n", timeout=20)
        finally:
            heir.kill()
    assert heir.returncode == 0
    assert not any(psutil.pid_exists(int(pid)) for pid in pids)
