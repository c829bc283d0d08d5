"""The time that a checkpoint stops the training, with asynchronous saving and without.

    python -m benchmarks.cpu.checkpoint [TURNS] [LAYERS]

Both save the same state of one process, in turns. Prints one JSON line.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from nanoscale.backends.native import NativeEngine
from nanoscale.checkpoint.saver import Saver
from nanoscale.common.devices import cores
from nanoscale.config.composing import frozen
from nanoscale.config.composing.compose import compose
from nanoscale.config.rules import Devices, check
from nanoscale.data.dataset import open_data
from nanoscale.runs import fence
from tests.support.runs import create_run

SHAPE = ("model.hidden=512", "model.heads=16", "model.ffn=1408")


def main(turns: int = 5, layers: int = 6) -> None:
    """Measure this many turns; the first is reported separately.

    The state has some 180 MB with 6 layers and AdamW's moments.
    """
    torch.set_num_threads(cores())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = ["recipe=tiny", *SHAPE, f"model.layers={layers}"]
        words += ["launcher.device=cpu", f"run.root={folder}"]
        config = check(compose(words), Devices("cpu", 1))
        run = create_run(folder, "bench")
        run.config.write_text(frozen.dump(config))
        fence.begin(run, 0)
        engine = NativeEngine(config, torch.device("cpu"))
        data = open_data(config.data, config.train, config.model.vocab)
        samples = config.train.global_batch
        (batch,) = data.train.micro_batches(0, samples, 0, 1, samples)
        savers = [
            Saver(run.workspace(0), replace(config.checkpoint, asynchronous=beside), 0)
            for beside in (True, False)
        ]
        beside, waiting = savers
        engine.before_update(beside.hold)

        def step() -> None:
            engine.train_step([batch], 1e-3)

        step()
        rounds = []
        for turn in range(turns):
            usual = timed(step)
            beside.begin(engine.state(), {"step": 2 * turn})
            meanwhile = timed(step)
            saved = beside.finish()
            assert saved is not None
            waited = waiting.write(engine.state(), {"step": 2 * turn + 1})
            rounds.append((saved.stall_s, waited.seconds, meanwhile - usual))
        size = sum(value.nbytes for value in engine.state().values())
    first, *kept = rounds
    result = {
        "megabytes": size / 1e6,
        "first_stall_s": first[0],
        "stall_s": statistics.median(stall for stall, *_ in kept),
        "save_s": statistics.median(waited for _, waited, _ in kept),
        "longer_s": statistics.median(longer for *_, longer in kept),
        "first_ratio": statistics.median(first[0] / waited for _, waited, _ in kept),
        "ratio": statistics.median(stall / waited for stall, waited, _ in kept),
    }
    print(json.dumps(result))


def timed(act: Callable[[], None]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
