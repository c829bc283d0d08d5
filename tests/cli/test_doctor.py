"""The command `nanoscale doctor` on this machine, and its output for many."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from nanoscale.common import display
from nanoscale.launch.lifecycle.examination import Measured
from nanoscale.launch.preflight.verdicts import Verdict
from nanoscale.view.doctor_text import print_doctor

SOURCE = Path(__file__).parents[2]
LIMIT_S = 120


def environment(tmp_path: Path) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(SOURCE), "HOME": str(tmp_path), "XDG_CACHE_HOME": ""}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "nanoscale", "doctor", *words]


def doctor(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words, "launcher.device=cpu"),
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def verdicts(done: subprocess.CompletedProcess[str]) -> dict[str, dict]:
    (host,) = json.loads(done.stdout)["hosts"]
    assert host["host"] == socket.gethostname()
    return {verdict["check"]: verdict for verdict in host["verdicts"]}


def code_of(found: dict[str, dict]) -> int:
    return 0 if all(verdict["good"] for verdict in found.values()) else 1


@pytest.mark.slow
def test_this_machine_is_looked_at_and_measured(tmp_path):
    done = doctor(tmp_path, "--json")
    found, measured = verdicts(done), json.loads(done.stdout)["bandwidth"]
    assert {"python", "torch", "devices", "memory", "run.root", "cache", "port"} <= set(found)
    assert found["interpreter"]["finding"] == sys.executable
    assert found["python"]["finding"] == f"Python {sys.version.split()[0]}"
    assert found["run.root"]["good"] and str(tmp_path) in found["run.root"]["finding"]
    assert done.returncode == code_of(found), done.stderr
    assert (measured["backend"], measured["ranks"]) == ("gloo", 2)
    sizes = [one["bytes"] for one in measured["all_reduce"]]
    assert sizes[0] == 1024 and sizes == sorted(sizes)
    for one in measured["all_reduce"]:  # of two ranks, 2(n - 1)/n is one
        assert one["bus_gb_s"] == pytest.approx(one["bytes"] / one["latency_us"] / 1e3)
    kinds = {one["operation"] for one in measured["collectives"]}
    assert kinds in ({"all-reduce", "all-gather", "reduce-scatter", "all-to-all"}, set())
    assert measured["within_hosts"] == measured["point_to_point"] == []  # there is one host
    assert list(tmp_path.glob("runs*")) == []


@pytest.mark.slow
def test_the_quick_part_starts_no_ranks_and_says_all_in_plain_lines(tmp_path):
    done = doctor(tmp_path, "--quick")
    first, blank, *lines = done.stdout.splitlines()
    assert first.startswith(f"{socket.gethostname()}: ") and blank == ""
    assert all(line == line.rstrip() and "\x1b" not in line for line in lines)
    assert any(line.split()[1:] == ["python", sys.version.split()[0]] for line in lines)
    assert "all-reduce" not in done.stdout
    assert json.loads(doctor(tmp_path, "--no-bandwidth", "--json").stdout)["bandwidth"] is None


@pytest.mark.slow
def test_a_lock_that_a_killed_compilation_left_is_found(tmp_path):
    lock = tmp_path / ".cache/torch_extensions/py311_cpu/cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert "locks" not in verdicts(doctor(tmp_path, "--quick", "--json"))
    os.utime(lock, (time.time() - 4000,) * 2)
    done = doctor(tmp_path, "--quick", "--json")
    assert done.returncode == 1
    assert verdicts(done)["locks"]["remedy"] == f"rm -- {lock}"


@pytest.mark.slow
def test_a_port_that_is_taken_is_told(tmp_path):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        done = doctor(tmp_path, "--json", f"launcher.master_port={port}")
    assert done.returncode == 1
    assert str(port) in verdicts(done)["port"]["finding"]
    assert json.loads(done.stdout)["bandwidth"] == {
        "hosts": [],
        "left_out": [socket.gethostname()],
        "verdicts": [],
    }


def test_a_folder_of_runs_that_takes_nothing_is_told(tmp_path):
    done = doctor(tmp_path, "--quick", "--json", "run.root=/proc/sys/runs")
    assert done.returncode == 1
    assert not verdicts(done)["run.root"]["good"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--hostfile", "nowhere"], "does not exist"),
        (["--hostfile", "hosts"], "hosts:2"),
        (["launcher.devicess=2"], "unknown key"),
        (["--includ", "x"], "launcher.include=x"),
    ],
)
def test_what_is_mistyped_is_wrong_as_everywhere(tmp_path, words, text):
    (tmp_path / "hosts").write_text("n1 slots=1\nn2 slot=1\n")
    done = doctor(tmp_path, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert text in done.stderr


def test_no_law_of_a_job_stands_in_the_way(tmp_path):
    done = doctor(tmp_path, "--quick", "--json", "train.global_batch=7", "parallel.tp=3")
    assert done.returncode == code_of(verdicts(done))


HEAVY = """
import sys
from nanoscale.cli.main import run
run(["doctor", "--json", "--quick"])
print(*{"torch", "numpy", "deepspeed", "transformers"} & set(sys.modules), file=sys.stderr)
"""


def test_the_launchers_half_imports_nothing_heavy(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", HEAVY],
        cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.stderr.strip() == "" and json.loads(done.stdout)["hosts"]


@pytest.mark.slow
@pytest.mark.parametrize("agent_has", ["begun", "started its ranks"])
def test_ctrl_c_leaves_nothing_behind(tmp_path, agent_has):
    mark = f"{tmp_path}"
    process = subprocess.Popen(
        command("launcher.device=cpu"),
        cwd=tmp_path,
        env=environment(tmp_path) | {"TEST_MARK": mark},
        stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + LIMIT_S
    wanted = (
        2 if agent_has == "begun" else 6
    )  # launcher, agent, fork server, its tracker, two ranks
    while len(marked(mark)) < wanted:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (130, b"")
    # An agent whose start was interrupted has no launcher: it exits when it notices that.
    while marked(mark):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            dead = process.status() == psutil.STATUS_ZOMBIE
            if not dead and process.environ().get("TEST_MARK") == mark:
                found.append(process)
        except psutil.Error:
            pass
    return found


# --- output for many hosts ---------------------------------------------------------------------------

MANY = [f"n{number:03}" for number in range(128)]


def judged(ill: int) -> list[Verdict]:
    found = []
    for number, host in enumerate(MANY):
        good = number >= ill
        text = "torch 2.13.0" if good else "torch 2.12.0, and 2.13.0 on most"
        found.append(Verdict(host, "torch", good, text, "install torch 2.13.0 there"))
        found.append(Verdict(host, "memory", True, "{} GiB free", amount=float(number)))
    return found


def shown(capsys, verdicts, measured=None, *, verbose=False, names=MANY) -> str:
    print_doctor(display.console(), names, verdicts, measured, verbose=verbose)
    return capsys.readouterr().out


def test_of_many_hosts_only_what_is_wrong_is_shown(capsys):
    lines = shown(capsys, judged(16)).splitlines()
    assert lines[0] == "128 hosts: problems on 16 of them: n000, n001 and 14 more"
    assert len(lines) == 4
    assert lines[2].split(maxsplit=2)[1:] == [
        "torch",
        "n000, n001 and 14 more  2.12.0, and 2.13.0 on most",
    ]
    assert lines[3].strip() == "remedy: install torch 2.13.0 there"
    assert shown(capsys, judged(0)).splitlines() == ["128 hosts: no problem found"]


def test_verbose_shows_all_of_it_with_every_name(capsys):
    text = shown(capsys, judged(5), verbose=True)
    assert "n000, n001 and 3 more" in text and f"hosts: {', '.join(MANY[:5])}\n" in text
    assert f"hosts: {', '.join(MANY[5:])}\n" in text
    assert "all" in text and "0.0 to 127.0 GiB free" in text


def test_everything_is_shown_of_few_hosts(capsys):
    few = [verdict for verdict in judged(0) if verdict.host in MANY[:4]]
    text = shown(capsys, few, names=MANY[:4])
    assert "2.13.0" in text and "0.0 to 3.0 GiB free" in text


def figures(backend, ranks, hosts, within=(), pairs=()):
    return {
        "backend": backend, "transports": ["P2P/CUMEM"] * (backend == "nccl"), "ranks": ranks, "hosts": hosts,
        "all_reduce": [{"bytes": 1 << 26, "latency_us": 1500.0, "bus_gb_s": 87.25}],
        "collectives": [
            {"operation": "all-to-all", "bytes": 1 << 30, "latency_us": 2500.0, "bus_gb_s": 429.25}
        ],
        "within_hosts": within, "point_to_point": pairs,
    }  # fmt: skip


def test_the_slowest_hosts_and_pairs_are_shown_of_many(capsys):
    within = [{"host": MANY[n], "bus_gb_s": 400.0 + n, "slow": n == 0} for n in range(20)]
    pairs = [
        {"ends": MANY[n : n + 2], "latency_us": 10.0 + n, "gb_s": 1.0 + n, "slow": n == 0}
        for n in range(20)
    ]
    measured = Measured(figures("nccl", 1024, MANY, within, pairs))
    text = shown(capsys, judged(0), measured)
    assert "all-reduce of 1,024 ranks over nccl by P2P/CUMEM" in text
    assert "64 MiB       1,500                87.2" in text
    assert re.search(r"all-to-all +1 GiB +2,500 +429\n", text)
    assert "all-reduce within each host, the slowest 6 of 20 hosts" in text
    assert "n005                 405" in text and "406" not in text
    assert "point to point, the slowest 6 of 20 pairs" in text
    assert "n005 – n006          15               6" in text and "n006 – n007" not in text
    assert "n019 – n020" in shown(capsys, judged(0), measured, verbose=True)


def test_hosts_that_were_not_measured_are_named(capsys):
    measured = Measured(figures("gloo", 2, ["n000", "n002"]))
    text = shown(capsys, judged(0), measured, names=MANY[:3])
    assert "all-reduce of 2 ranks over gloo, without n001" in text
    assert "within" not in text and "point to point" not in text
