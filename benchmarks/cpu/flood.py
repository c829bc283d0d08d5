"""Measure the cost of a rank that prints very much: `python -m benchmarks.cpu.flood [MIB] [TIMES]`.

A rank of a real local launch prints as fast as it can. The time until its log is complete is compared with
the time of `cat`, which writes the same bytes into the same file right after. A second launch gets Ctrl-C in
the middle of such output. The last line of the output has the medians, in JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import psutil

from nanoscale.runs import events
from nanoscale.runs.rank_context import RankContext

BLOCK = bytes(range(128, 256)) * 8192
"""1 MiB without the end of a line, and not UTF-8."""
_MIB, _BEGAN = "BENCH_FLOOD_MIB", "began"
LIMIT_S = 300.0


def flood(context: RankContext) -> str:
    """Print this many MiB, or until asked to stop. This is the rank."""
    events.append(context.run, "running", "training from step 1")
    (context.run.path / _BEGAN).write_text(str(time.time()))
    for _ in range(int(os.environ[_MIB])):
        sys.stdout.buffer.write(BLOCK)
        if context.stop.requested:
            return "stopped"
    sys.stdout.buffer.flush()
    return "completed"


def launch(root: str) -> int:
    """Launch one rank that floods, as `nanoscale train` launches one that trains."""
    from nanoscale.cli.jobs import launching as cli
    from nanoscale.config.resolved import resolved
    from nanoscale.config.rules import Devices
    from nanoscale.config.schema import Config, Launcher, Parallel, Run, Train
    from nanoscale.config.values.provenance import Composed
    from nanoscale.launch.fleet.signals import Signals
    from nanoscale.launch.lifecycle.prepare import new_run
    from nanoscale.launch.request import Request
    from nanoscale.launch.transport.transport import Local

    config = resolved(
        Config(
            run=Run(name="run", root=root),
            parallel=Parallel(dp=1, virtual_stages=1),
            launcher=Launcher(device="cpu", devices=1, threads=1),
            train=Train(steps=5, micro_batch=1),
        )
    )
    request = Request(Composed(config, {}, None, ()), config, Devices("cpu", 1))
    Local.commands = lambda *_: [_command("agent")]  # type: ignore[method-assign]
    with Signals() as signals, cli.ready_fleet(request, signals) as fleet, new_run(request) as lock:
        return cli.follow(lock, request, 1, fleet, signals, sys.stdout).exit_code


def agent() -> NoReturn:
    """Serve the launcher, with the flood in place of the training."""
    from nanoscale.agent.__main__ import end
    from nanoscale.agent.link import Link
    from nanoscale.agent.main import main as serve

    end(serve(Link.over_standard_streams(), flood))


def _command(*words: str) -> tuple[str, ...]:
    """Return the command of this program in another process, under its importable name."""
    code = "import sys; from benchmarks.cpu import flood; sys.exit(flood.main(sys.argv[1:]))"
    return (sys.executable, "-c", code, *words)


@contextmanager
def _launched(mib: int) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Start a launcher whose rank floods, and provide the rank's log."""
    with tempfile.TemporaryDirectory() as name, (Path(name) / "screen").open("wb") as screen:
        environment = {**os.environ, _MIB: str(mib), "PYTHONPATH": str(Path(__file__).parents[2])}
        process = subprocess.Popen(
            _command("launch", name), env=environment, stdout=screen, stderr=screen
        )
        try:
            run = Path(name) / "run"
            _wait(lambda: (run / _BEGAN).exists() and (run / _BEGAN).read_text() != "", process)
            (log,) = run.glob("logs/attempt-1/*.out")
            yield process, log
        finally:
            process.kill()
            process.wait()


def _wait(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> float:
    """Wait until the condition holds; return the time at which it did."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if process.poll() not in (None, 0) or time.monotonic() > deadline:
            sys.exit(f"the launch ended with {process.poll()}, or takes too long")
        time.sleep(0.005)
    return time.time()


def measure_flood(mib: int) -> dict[str, float]:
    """Return the seconds until the log is complete and until the job has ended, the seconds of `cat`, and the
    growth of memory."""
    size = mib << 20
    with _launched(mib) as (process, log):
        began = float((log.parents[2] / _BEGAN).read_text())
        watched = {"launcher": process.pid, "agent": psutil.Process(process.pid).children()[0].pid}
        before = {name: _peak_mib(pid) for name, pid in watched.items()}
        whole = _wait(lambda: log.stat().st_size >= size, process) - began
        grown = {f"{name}_mib": _peak_mib(pid) - before[name] for name, pid in watched.items()}
        ended = _wait(lambda: process.poll() == 0, process) - began
        with log.open("rb") as file:
            assert hashlib.file_digest(file, "sha256").digest() == _digest(mib)
        return {"whole_s": whole, "ended_s": ended, "cat_s": _cat(log), **grown}


def measure_stop(mib: int) -> float:
    """Return the seconds from Ctrl-C to the launcher's end, while a rank prints more."""
    with _launched(1 << 20) as (process, log):
        _wait(lambda: log.stat().st_size > mib << 20, process)
        asked = time.time()
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT_S)
        assert process.returncode == 130, process.returncode
        return time.time() - asked


def _cat(log: Path) -> float:
    """Let `cat` write a copy of the log into the log; return seconds."""
    copy = log.with_suffix(".copy")
    log.rename(copy)
    with log.open("wb") as file:
        began = time.time()
        subprocess.run(["cat", str(copy)], stdout=file, check=True)
        return time.time() - began


def _digest(mib: int) -> bytes:
    digest = hashlib.sha256()
    for _ in range(mib):
        digest.update(BLOCK)
    return digest.digest()


def _peak_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024


def main(words: list[str]) -> int:
    match words:
        case ["launch", root]:
            return launch(root)
        case ["agent"]:
            agent()
    mib, times = (int(word) for word in (*words, *("1024", "5")[len(words) :]))
    rounds: list[dict[str, Any]] = []
    for _ in range(times):
        rounds.append({**measure_flood(mib), "stop_s": measure_stop(mib // 4)})
        figures = "  ".join(f"{name} {value:.2f}" for name, value in rounds[-1].items())
        print(f"{figures}  load {os.getloadavg()[0]:.1f}", flush=True)
    medians = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    ratios = [one["whole_s"] / one["cat_s"] for one in rounds]
    print(json.dumps({**medians, "ratio": statistics.median(ratios)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
