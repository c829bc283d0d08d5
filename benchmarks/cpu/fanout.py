"""The cost of a launch on many hosts: stand-ins for ssh and pdsh answer as the agents of 8 ranks each.

    python -m benchmarks.cpu.fanout [--way ssh|pdsh] [HOSTS …]

Each launch is a process of its own, and a whole `nanoscale train` from its command line to its end. The CPU
time is the launcher's own, up to the order to start the ranks and up to the end.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

SLOTS = 8
FACTS, ENDED = b'"facts"', {"kind": "ended", "attempt": 1, "outcome": "completed"}
STAND_IN = r"""#!/bin/sh
read -r order
cat {answer}
while read -r order; do
    case "$order" in
        *'"launch"'*) printf '\036{ended}\n';;
        *'"quit"'*) printf '\036{{"kind": "bye"}}\n'; exit;;
    esac
done
"""
STAND_IN_OF_ALL = """#!/bin/sh
PYTHONPATH={root} exec {python} -m benchmarks.cpu.fanout --agents {answer} "$@"
"""


def measure(count: int, way: str = "ssh") -> dict[str, float]:
    """Return the launcher's wall time and CPU time, s, and its memory, MiB, for this number of hosts."""
    command = [sys.executable, "-m", "benchmarks.cpu.fanout", "--way", way, "--once", str(count)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=root, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def launch(count: int, way: str, folder: Path) -> dict[str, float]:
    """Launch a job on this number of hosts from its command line to its end."""
    from nanoscale.cli.main import main as nanoscale
    from nanoscale.launch.lifecycle.job_execution import JobExecution

    _write_stand_ins(folder)
    hostfile = folder / "hosts"
    hostfile.write_text("".join(f"node-{it:04} slots={SLOTS}\n" for it in range(count)))
    ordered = 0.0
    order = JobExecution._launch

    def launched(execution: JobExecution) -> None:
        nonlocal ordered
        order(execution)
        ordered = time.process_time()

    JobExecution._launch = launched  # type: ignore[method-assign, assignment]
    arguments = [
        "train", "recipe=debug", f"launcher={way}", f"launcher.hostfile={hostfile}",
        "launcher.device=cpu", "parallel.tp=4", "parallel.pp=2", f"parallel.dp={count}",
        f"train.global_batch={8 * count}", "train.micro_batch=1", "launcher.lost_after_s=60",
        f"run.root={folder / 'runs'}", "run.name=r", "--force", "--quiet",
    ]  # fmt: skip
    began = time.perf_counter()
    with suppress(SystemExit):
        nanoscale(arguments)
    status = json.loads((folder / "runs" / "r" / "status.json").read_text())
    assert status["state"] == "completed", status
    return {
        "wall_s": time.perf_counter() - began,
        "ordered_s": ordered,
        "cpu_s": time.process_time(),
        "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _write_stand_ins(folder: Path) -> None:
    """Write an `ssh` and a `pdsh` that are found first, and their answer: the facts of this machine."""
    from nanoscale.agent.facts import facts

    question = {"root": str(folder), "probe": "", "cache_dir": None, "master_addr": "localhost"}
    answer: dict[str, Any] = {"kind": "facts", **facts({**question, "time": time.time()}, 29500)}
    answer["root"]["visible"] = True
    answer["devices"]["count"] = SLOTS
    network = {"addresses": {"192.0.2.1": "eth0"}, "asked_for": "node-0000", "found": ["192.0.2.1"]}
    answer["network"] |= network
    (folder / "answer").write_bytes(b"\x1e" + json.dumps(answer).encode() + b"\n")
    words = {"answer": folder / "answer", "ended": json.dumps(ENDED), "python": sys.executable}
    for name, text in (("ssh", STAND_IN), ("pdsh", STAND_IN_OF_ALL)):
        (folder / name).write_text(text.format(**words, root=Path(__file__).parents[2]))
        (folder / name).chmod(0o755)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"


def be_agents(answer: bytes, arguments: list[str]) -> None:
    """Be the agents that a pdsh with these arguments would start, in one process."""
    from nanoscale.processes.messages import BEAT, BEAT_S, Unpacker, introduce, pack
    from nanoscale.processes.proc import allow_open_files

    names = arguments[arguments.index("-w") + 1].split(",")
    *_, addresses, key_file = arguments[-1].split()
    key, port = Path(key_file).read_bytes(), int(addresses.rpartition(":")[2])
    allow_open_files(len(names) + 64)
    selector = selectors.DefaultSelector()
    for name in names:
        connection = socket.create_connection(("127.0.0.1", port))
        introduce(connection, key, {"names": [name], "addresses": []})
        selector.register(connection, selectors.EVENT_READ, Unpacker())
    replies = {"prepare": answer, "launch": pack(ENDED), "quit": pack({"kind": "bye"})}
    beat_at = time.monotonic() + BEAT_S
    while selector.get_map():
        for key_of, _ in selector.select(BEAT_S):
            connection = key_of.fileobj  # type: ignore[assignment]
            data = connection.recv(1 << 16)
            for order in key_of.data.feed(data):
                connection.sendall(replies.get(order["kind"], b""))
                data = b"" if order["kind"] == "quit" else data
            if not data:
                selector.unregister(connection)
                connection.close()
        if time.monotonic() > beat_at:
            beat_at = time.monotonic() + BEAT_S
            for entry in list(selector.get_map().values()):
                with suppress(OSError):
                    entry.fileobj.sendall(pack(BEAT))  # type: ignore[union-attr]


def main() -> None:
    if sys.argv[1:2] == ["--agents"]:
        be_agents(Path(sys.argv[2]).read_bytes(), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("hosts", nargs="*", type=int, default=[250, 500, 1000, 2000])
    parser.add_argument("--way", choices=["ssh", "pdsh"], default="ssh")
    parser.add_argument("--once", action="store_true", help="launch in this process; print JSON")
    arguments = parser.parse_args()
    if arguments.once:
        with tempfile.TemporaryDirectory() as name:
            print(json.dumps(launch(arguments.hosts[0], arguments.way, Path(name))))
        return
    print(f"{'hosts':>6} {'wall':>8} {'ordered':>8} {'CPU':>8} {'CPU a host':>11} {'memory':>9}")
    for count in arguments.hosts:
        it = measure(count, arguments.way)
        per_host = it["cpu_s"] / count * 1e3
        print(
            f"{count:>6} {it['wall_s']:>6.2f} s {it['ordered_s']:>6.2f} s {it['cpu_s']:>6.2f} s"
            f" {per_host:>8.2f} ms {it['mib']:>5.0f} MiB"
        )


if __name__ == "__main__":
    main()
