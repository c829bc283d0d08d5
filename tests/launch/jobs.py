"""The jobs of ranks in these tests: a training that costs nothing, and failures of several kinds."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from nanoscale.common.errors import UserError, Violation
from nanoscale.runs import events

STEP_S = 0.02


def loop(context):
    """Train until asked to stop, or for so many steps that no test waits for the end."""
    return _train(context, steps=10_000)


def daemons(context):
    """Train like `loop`, with processes in sessions of their own, one of them without the environment."""
    for name, command in {"session": ["setsid"], "nothing": ["setsid", "env", "-i"]}.items():
        process = subprocess.Popen([*command, "/bin/sleep", "1000"])
        (context.run.path / f"{name}-{context.rank}").write_text(str(process.pid))
    return loop(context)


def short(context):
    """Train to the end."""
    searched = len(gc.get_objects())  # without frozen ones
    print(f"garbage is looked for: {gc.isenabled()}, in torch too: {searched > 100_000}")
    return _train(context, steps=5)


def slow_start(context):
    """Never begin to train."""
    _leave_pid(context)
    time.sleep(1000)


def explode(context):
    """Rank 1 raises in the middle, which the others notice as a lost connection."""
    return _train(context, steps=10_000, bad_step=5, bad_rank=1)


def flood(context):
    """Print the bytes of the file FLOOD_BLOCK until asked to stop, or until there are FLOOD_MIB of them."""
    events.append(context.run, "running", "training from step 1")
    block = Path(os.environ["FLOOD_BLOCK"]).read_bytes()
    left = int(os.environ.get("FLOOD_MIB", 1 << 40)) << 20
    while left > 0:
        left -= sys.stdout.buffer.write(block)
        if context.stop.requested:
            return "stopped"
    return "completed"


def full_log(context):
    """Raise a user's error when the rank's log is full, as on a full disk that needs long to say so."""
    sys.stderr.write("x" * (1 << 20) + "\n")
    write, sys.stderr.write = sys.stderr.write, lambda text: time.sleep(0.3) or write(text)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    wrong_data(context)


def wrong_data(context):
    """Raise a user's error."""
    violation = Violation("data.path", "x.bin", "command line", "is not there", ("data.path=y",))
    raise UserError("data", "x.bin is not there", [violation])


def _train(context, steps, bad_step=-1, bad_rank=-1):
    import torch  # the agents, which import this file, do without
    import torch.distributed as dist

    dist.init_process_group("gloo")
    _semaphore = multiprocessing.get_context("forkserver").Semaphore()  # a hook may have one
    _leave_pid(context)
    if context.rank == 0:
        events.append(context.run, "running", "training from step 1")
    outcome = "completed"
    for step in range(1, steps + 1):
        if step == bad_step and context.rank == bad_rank:
            raise ValueError("the ninth wave")
        stop = torch.tensor([float(context.stop.requested)])
        dist.all_reduce(stop)
        if stop.item() > 0:
            outcome = "stopped"
            break
        _log(context, step)
        time.sleep(STEP_S)
    if context.rank == 0:
        events.append(context.run, "end", outcome, outcome=outcome, step=step)
        events.append(context.run, "sample", "a sample", text="def f():\n    return 1")
        print("printed by a rank")
    dist.destroy_process_group()
    return outcome


def _leave_pid(context):
    path = context.run.path / f"pid-{context.rank}"
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)


def _log(context, step):
    if context.rank == 0:
        record = {
            "step": step,
            "loss": 1 / step,
            "grad_norm": 1.0,
            "lr": 1e-3,
            "tokens": step,
            "step_time_s": STEP_S,
            "tokens_per_s": 1 / STEP_S,
            "mfu": None,
            "memory_gib": 0.5,
            "time": time.time(),
        }
        with context.run.metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")
