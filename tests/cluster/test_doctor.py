"""`nanoscale doctor` on several machines: healthy ones, and each way of being ill that it must tell."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.launches import left, nothing_left
from tests.cluster.machines import LIMIT_S, wait_until
from tests.cluster.nodes import LOGIN, NODES, Nodes

SOURCE = Path(__file__).parents[2]
CALM = "launcher.connect_timeout_s=60"
"""A busy machine takes its time to start an agent; a host that is off is known after 3 s."""


class Doctor:
    """Called on the login node, in a folder that all nodes see, with a hostfile of all of them."""

    def __init__(self, nodes: Nodes, folder: Path) -> None:
        self.nodes = nodes
        self.folder = folder
        self.write(*(f"{node} slots=2" for node in NODES))

    def write(self, *lines: str) -> None:
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")

    def start(
        self, verb: str, *words: str, program: Sequence[str] = ("-m", "nanoscale"), **options: Any
    ) -> subprocess.Popen[str]:
        command = [sys.executable, *program, verb, "--hostfile", "hosts"]
        return self.nodes.run_in(
            LOGIN,
            [*command, "launcher.device=cpu", CALM, *words],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(SOURCE)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def run(self, *words: str, verb: str = "doctor") -> subprocess.CompletedProcess[str]:
        before = left(self.nodes).keys()
        process = self.start(verb, *words)
        out, err = process.communicate(timeout=LIMIT_S)
        wait_until(lambda: left(self.nodes).keys() <= before, "end of all that it has started")
        return subprocess.CompletedProcess([], process.returncode, out, err)

    def turn_off(self, node: str) -> None:
        """Turn a host off, as if a while ago: the others no longer know its hardware address."""
        self.nodes.power_off(node)
        for other in filter(self.nodes.is_on, self.nodes.names):
            self.nodes.call(other, ["ip", "neigh", "flush", "all"])

    def left_on(self, node: str) -> list[str]:
        if not self.nodes.is_on(node):
            return []
        return [words for words in self.nodes.processes(node).values() if "nanoscale" in words]

    def look(self, *words: str, quick: bool = True) -> tuple[int, dict[str, Any]]:
        """Exit code and document."""
        done = self.run("--json", *(["--quick"] if quick else []), *words)
        assert done.stderr == ""
        return done.returncode, json.loads(done.stdout)

    def the_wrong_one(self, *words: str) -> tuple[str, dict[str, Any]]:
        code, document = self.look(*words)
        (found,) = wrong(document)
        assert code == 1
        return found


def wrong(document: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [
        (host["host"], verdict)
        for host in document["hosts"]
        for verdict in host["verdicts"]
        if not verdict["good"]
    ]


@pytest.fixture
def doctor(nodes: Nodes, tmp_path: Path) -> Doctor:
    return Doctor(nodes, tmp_path)


def test_healthy_hosts_and_how_fast_they_talk(doctor):
    code, document = doctor.look(quick=False)
    assert (code, wrong(document)) == (0, [])
    assert [host["host"] for host in document["hosts"]] == list(NODES)
    for host in document["hosts"]:
        found = {verdict["check"]: verdict["finding"] for verdict in host["verdicts"]}
        assert found["network"] == "meets the others over eth0"
        assert found["interpreter"] == sys.executable
        assert found["ssh"] == "answers" and str(doctor.folder) in found["run.root"]
    measured = document["bandwidth"]
    assert (measured["backend"], measured["ranks"], measured["left_out"]) == ("gloo", 3, [])
    assert {one["bytes"] for one in measured["all_reduce"]} >= {1 << 10, 1 << 16, 1 << 20}
    for one in measured["all_reduce"]:
        bus = one["bytes"] / one["latency_us"] / 1e3 * 2 * (3 - 1) / 3
        assert one["bus_gb_s"] == pytest.approx(bus)
    assert measured["within_hosts"] == []  # of one rank each: so pairs are measured
    pairs = {tuple(sorted(pair["ends"])) for pair in measured["point_to_point"]}
    assert pairs == {("n1", "n2"), ("n1", "n3"), ("n2", "n3")}
    assert all(pair["gb_s"] > 0.001 for pair in measured["point_to_point"])
    assert sorted(path.name for path in doctor.folder.iterdir()) == ["hosts"]


@pytest.mark.exhaustive
def test_a_host_that_is_off_is_told_and_left_out_of_the_measuring(doctor):
    doctor.turn_off("n2")
    done = doctor.run()
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[0]) == (1, "3 hosts: problems on n2")
    ((number, bad),) = [(n, line) for n, line in enumerate(lines) if line.startswith("✗")]
    assert bad.split()[1:3] == ["ssh", "n2"] and "host unreachable" in bad
    assert lines[number + 1].strip().startswith("remedy: ") and "--exclude n2" in lines[number + 1]
    assert any(line.split()[1:5] == ["torch", "n1", "and", "n3"] for line in lines)
    assert "all-reduce of 2 ranks over gloo, without n2" in lines and "point to point" in lines
    assert [line for line in lines if line.startswith("n1 – n3 ")]


def python_of(doctor: Doctor, folder: Path, **sources: Path) -> str:
    """Write an interpreter of nanoscale from each source at one path of hosts; return the override."""
    disks = doctor.nodes.make_private(folder)
    for node, source in sources.items():
        script(disks[node] / "python", f"exec env PYTHONPATH={source} {sys.executable}")
    return f"cluster.python={folder}/python"


def test_an_interpreter_that_is_not_there(doctor, tmp_path):
    """The remedy is typed back, with an interpreter that exists."""
    missing = python_of(doctor, tmp_path / "own", n1=SOURCE, n3=SOURCE)
    host, verdict = doctor.the_wrong_one(missing)
    assert (host, verdict["check"]) == ("n2", "interpreter")
    assert f"{tmp_path}/own/python" in verdict["finding"]
    (word,) = re.findall(r"cluster\.python=\S+", verdict["remedy"])
    assert doctor.look(word.replace("/path/to/python", sys.executable))[0] == 0


def test_an_agent_that_does_not_understand_us_is_known_by_its_version(doctor, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(SOURCE / "nanoscale", other / "nanoscale", ignore=lambda *_: ["__pycache__"])
    facts = other / "nanoscale" / "agent" / "facts.py"
    facts.write_text(facts.read_text().replace('order["probe"]', 'order["sign"]'))
    python = python_of(doctor, tmp_path / "own", n1=SOURCE, n2=other, n3=SOURCE)
    code, document = doctor.look(python)
    found = {(host, verdict["check"]) for host, verdict in wrong(document)}
    assert (code, found) == (1, {("n2", "agent"), ("n2", "nanoscale")})


def script(path: Path, command: str) -> Path:
    path.write_text(f'#!/bin/sh\n{command} "$@"\n')
    path.chmod(0o755)
    return path


def test_a_folder_of_runs_that_one_host_does_not_see(doctor, tmp_path):
    shared = tmp_path / "runs"
    shared.mkdir()
    nodes = doctor.nodes
    assert nodes.call("n2", ["mount", "-t", "tmpfs", "tmpfs", shared]).returncode == 0
    try:
        host, verdict = doctor.the_wrong_one("run.root=runs")
    finally:
        assert nodes.call("n2", ["umount", shared]).returncode == 0
    assert (host, verdict["check"]) == ("n2", "run.root")
    assert "does not see" in verdict["finding"] and "run.root=FOLDER" in verdict["remedy"]
    assert list(shared.iterdir()) == []


@pytest.mark.exhaustive
def test_two_names_of_one_machine(doctor):
    doctor.write("n1 slots=1", f"{doctor.nodes.address('n1')} slots=1", "n3 slots=1")
    host, verdict = doctor.the_wrong_one()
    assert (host, verdict["check"]) == (doctor.nodes.address("n1"), "machine")


def test_two_hosts_that_cannot_reach_each_other(doctor):
    """The launcher reaches both, and so would every other check be good."""
    n3 = doctor.nodes.address("n3")
    nowhere = ["ip", "neigh", "replace", n3, "lladdr", "02:00:00:00:ff:ff", "dev", "eth0"]
    assert doctor.nodes.call("n2", nowhere).returncode == 0
    try:
        code, document = doctor.look(quick=False)
    finally:
        doctor.nodes.call("n2", ["ip", "neigh", "del", n3, "dev", "eth0"])
    assert (code, wrong(document)) == (1, [])
    told = {one["host"]: one for one in document["bandwidth"]["verdicts"]}
    assert "n3" in told["n2"]["finding"] and "n2" in told["n3"]["finding"]
    assert all("firewall" in one["remedy"] and not one["good"] for one in told.values())


@pytest.mark.exhaustive
def test_ctrl_c_leaves_nothing_on_any_host(doctor):
    process = doctor.start("doctor")
    least = 5  # agent, fork server and its tracker, rank, and ssh's shell
    wait_until(
        lambda: (
            all(len(doctor.nodes.processes(node)) >= least for node in NODES)
            or process.poll() is not None
        ),
        "agents",
    )
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (130, "")
    nothing_left(doctor.nodes, LIMIT_S)


PATIENT = """
from nanoscale.cli.main import main
from nanoscale.launch.fleet import fleet
fleet._EXIT_S = 3600.0
main()
"""
"""A launcher that waits for a dead agent, and that no test waits for."""


@pytest.mark.exhaustive
def test_ctrl_c_waits_for_no_agent_that_looks_for_the_others_in_vain(doctor):
    n1 = doctor.nodes.address("n1")
    nowhere = ["ip", "neigh", "replace", n1, "lladdr", "02:00:00:00:ff:ff", "dev", "eth0"]
    assert doctor.nodes.call("n2", nowhere).returncode == 0
    process = doctor.start("doctor", program=("-c", PATIENT))
    try:
        wait_until(lambda: len(doctor.left_on("n2")) >= 1, "agent")
        wait_until(lambda: _connects(doctor, "n2"), "agent that looks for the first host")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=LIMIT_S)
    finally:
        doctor.nodes.call("n2", ["ip", "neigh", "del", n1, "dev", "eth0"])
    assert (process.returncode, out) == (130, "")
    nothing_left(doctor.nodes, LIMIT_S)


def _connects(doctor: Doctor, node: str) -> bool:
    """True if a connection from there is being established; 02 is the kernel's SYN_SENT."""
    table = doctor.nodes.call(node, ["cat", "/proc/net/tcp", "/proc/net/tcp6"]).stdout
    return any(line.split()[3] == "02" for line in table.splitlines() if ":" in line[:6])


def test_train_refuses_with_one_line_for_all_hosts_and_the_lost_ones_beside(doctor, tmp_path):
    python = python_of(doctor, tmp_path / "own", n1=SOURCE, n2=SOURCE)
    done = doctor.run(
        "recipe=debug", "run.root=own", "run.name=x", "train.global_batch=6", python, verb="train"
    )
    assert done.returncode == 2
    assert done.stderr.count("does not see") == 1
    assert "n1 and n2: does not see the folder of runs" in done.stderr
    assert "n3: the Python interpreter does not exist there" in done.stderr
    assert done.stderr.count("remedy: run.root=FOLDER") == 1
    assert not (tmp_path / "own" / "x").exists()
