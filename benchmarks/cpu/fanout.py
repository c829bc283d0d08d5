"""The cost of connecting to many hosts: a stand-in for ssh answers after 0.2 s, as an agent would.

    python -m benchmarks.cpu.fanout [HOSTS …]

Prints the launcher's wall time and its own CPU time for connecting, requesting every host's facts, judging the
answers, and ending all agents.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

from nanoscale.agent.facts import facts
from nanoscale.config.rules import Host
from nanoscale.config.schema import Config, Launcher
from nanoscale.launch.fleet.fleet import Fleet
from nanoscale.launch.preflight.preflight import judge

STAND_IN = r"""#!/bin/sh
read -r order
sleep 0.2
cat {answer}
while read -r order; do
    case "$order" in *'"quit"'*) printf '\036{{"kind": "bye"}}\n'; exit;; esac
done
"""


def measure(count: int, folder: Path) -> tuple[float, float]:
    """Return wall and CPU seconds for this number of hosts."""
    config = Config(launcher=Launcher(name="ssh", device="cpu"))
    hosts = [Host(f"node-{number:04}", 8) for number in range(count)]
    began, cpu = time.perf_counter(), _cpu_s()
    with Fleet(config, hosts, folder) as fleet:
        fleet.prepare({}, will_launch=True)
        fleet.gather()
        assert all(member.is_present for member in fleet.members)
        judge(fleet.members, config)
    return time.perf_counter() - began, _cpu_s() - cpu


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _write_stand_in(folder: Path) -> None:
    """Write an `ssh` that is found first, and its answer: the facts of this machine."""
    place = {"root": str(folder), "probe": "", "cache_dir": None, "master_addr": "localhost"}
    question = {**place, "time": time.time()}
    answer = {"kind": "facts", **facts(question, 29500)}
    answer["root"]["visible"] = True
    (folder / "answer").write_bytes(b"\x1e" + json.dumps(answer).encode() + b"\n")
    program = folder / "ssh"
    program.write_text(STAND_IN.format(answer=folder / "answer"))
    program.chmod(0o755)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"


def main() -> None:
    counts = [int(word) for word in sys.argv[1:]] or [125, 250, 500, 1000]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_stand_in(folder)
        print(f"{'hosts':>6} {'wall':>8} {'CPU':>8} {'CPU a host':>11}")
        for count in counts:
            wall, cpu = measure(count, folder)
            print(f"{count:>6} {wall:>6.2f} s {cpu:>6.2f} s {cpu / count * 1e3:>8.2f} ms")


if __name__ == "__main__":
    main()
