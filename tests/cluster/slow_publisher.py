"""`nanoscale` and its agent with a job that does nothing but save checkpoints, the real ones.

The first attempt saves one a step, further ones every tenth: what the first publishes late would stand out.

The first rank of the first attempt waits between the writing of its third checkpoint and the publishing, until
there is a file `go`. The job is complete once there is a file `enough`; both lie in the run directory.

python slow_publisher.py launch WORDS…
python slow_publisher.py agent
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanoscale.checkpoint import store
from nanoscale.runs.fence import FencedError
from nanoscale.runs.rank_context import RankContext

WAITS_AT = 3
STEP_S = 0.05


def job(context: RankContext) -> str:
    import torch  # the launcher and the agents, which import this file too, do without

    from nanoscale.checkpoint import sharded
    from nanoscale.metrics.sinks import open_sinks
    from nanoscale.metrics.trackers import Subject
    from nanoscale.parallel import process_group
    from nanoscale.train.job import make_note

    state = {"weights": torch.arange(1e4), "moments": torch.ones(100, 7)}
    process_group.join(context.world_size, torch.device("cpu"), 600.0)
    loaded = sharded.load_newest(context.workspace, state)
    step = loaded["step"] if loaded else 0
    subject = Subject(context.run, context.config, context.workspace, context.attempt)
    sinks = [] if context.rank else open_sinks(subject, step)
    note = make_note(context)
    note("running", f"training from step {step + 1}")
    while not process_group.broadcast((context.run.path / "enough").exists):
        step += 1 if context.attempt == 1 else 10
        if (context.attempt, context.rank, step) == (1, 0, WAITS_AT):
            _be_late(context, sinks, note)
        sharded.save(context.workspace, state, {"step": step, "attempt": context.attempt})
        for sink in sinks:
            sink.write({"step": step, "loss": 1.0, "step_time_s": STEP_S, **_FIGURES})
        time.sleep(STEP_S)
    process_group.leave()
    return "completed"


_FIGURES = {"lr": 0.0, "grad_norm": 0.0, "tokens_per_s": 1.0, "memory_gib": 0.0, "time": 0.0}


def _be_late(context: RankContext, sinks: list[Any], note: Callable[..., None]) -> None:
    """Wait before the next checkpoint is published, then try that and all else that changes a run."""
    publish = store.publish
    folder = context.run.path

    def late(*arguments: object) -> None:
        _leave(folder / "written", str(os.getpid()))
        while not (folder / "go").exists():
            time.sleep(0.02)
        attempts = [
            lambda: publish(*arguments),
            lambda: store.prune(context.workspace, 1, None),
            lambda: store.set_aside(
                context.workspace, store.find_checkpoint(context.run.checkpoints, 1)
            ),
            lambda: [sink.write({"step": -1}) for sink in sinks],
            lambda: note("late", "too late"),
        ]
        _leave(folder / "said", "\n".join(map(_outcome, attempts)))

    store.publish = late


def _leave(path: Path, text: str) -> None:
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)


def _outcome(attempt: Callable[[], object]) -> str:
    try:
        return f"done: {attempt()}"
    except Exception as error:
        return str(error) if isinstance(error, FencedError) else repr(error)


def launch(words: list[str]) -> int:
    from nanoscale.cli.main import run
    from nanoscale.launch.fleet.fleet import Fleet
    from nanoscale.launch.transport import transport

    Fleet.join_every_s = math.inf  # the job below cannot change its hosts
    transport.AGENT = ("-P", __file__, "agent")
    return run(words)


def agent() -> int:
    from nanoscale.agent.link import Link
    from nanoscale.agent.main import main
    from tests.cluster import slow_publisher  # by a name that the fork server can import

    return main(Link.over_standard_streams(), slow_publisher.job)


if __name__ == "__main__":
    sys.exit(launch(sys.argv[2:]) if sys.argv[1] == "launch" else agent())
