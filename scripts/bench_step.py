"""The step time of nanoscale's loop over that of a plain PyTorch loop with the same model, in one process.

Blocks of steps alternate, and the ratio is the median over pairs of neighbouring blocks, so that what else the
machine does falls on both. Prints one JSON line.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn import functional as F

from nanoscale.backends.native import NativeEngine
from nanoscale.config import frozen
from nanoscale.config.compose import compose
from nanoscale.config.rules import Devices, check
from nanoscale.config.schema import Config
from nanoscale.data.dataset import Dataset, open_data
from nanoscale.metrics.meter import Meter
from nanoscale.metrics.sinks import open_sinks
from nanoscale.models.initialization import initialise
from nanoscale.models.transformer import Transformer
from nanoscale.runs.directory import RunDirectory
from nanoscale.train.loop import Progress, Training
from nanoscale.train.stop import StopAgreement
from nanoscale.worker import StopFlag

BLOCKS, STEPS = 12, 8


def main() -> None:
    torch.set_num_threads(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as folder:
        words = ["recipe=tiny", "train.steps=1000", "checkpoint.at_end=false", f"run.root={folder}"]
        config = check(compose(words), Devices("cpu", 1))
        data = open_data(config.data, config.train, config.model.vocab)
        run = RunDirectory.create(Path(folder), "bench")
        run.config.write_text(frozen.dump(config))
        ours, plain = Ours(config, data, run), Plain(config, data)
        ours.block(STEPS)
        plain.block(STEPS)
        pairs = [(ours.block(STEPS), plain.block(STEPS)) for _ in range(BLOCKS)]
    result = {
        "ours_s": statistics.median(pair[0] for pair in pairs),
        "plain_s": statistics.median(pair[1] for pair in pairs),
        "ratio": statistics.median(pair[0] / pair[1] for pair in pairs),
    }
    print(json.dumps(result))


class Ours:
    """The whole loop: data, engine, stop question, meter, metrics.jsonl."""

    def __init__(self, config: Config, data: Dataset, run: RunDirectory) -> None:
        cpu = torch.device("cpu")
        self.stop = StopAgreement(StopFlag())
        self.training = Training(
            run=run,
            config=config,
            engine=NativeEngine(config, cpu),
            data=data,
            progress=Progress(),
            rank=0,
            meter=Meter(config, 1, cpu),
            sinks=open_sinks(run, config.logger, 0),
            note=lambda *_, **__: None,
        )

    def block(self, steps: int) -> float:
        training = self.training
        began = time.perf_counter()
        training.sizes = replace(training.sizes, steps=training.progress.step + steps)
        training.go(self.stop)
        return (time.perf_counter() - began) / steps


class Plain:
    """What a careful person writes by hand."""

    def __init__(self, config: Config, data: Dataset) -> None:
        self.config, self.data = config, data
        self.model = Transformer(config.model)
        initialise(self.model, config.model, config.train.seed)
        o = config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=o.lr,
            betas=(o.beta1, o.beta2),
            weight_decay=o.weight_decay,
            fused=True,
        )
        self.step = 0

    def block(self, steps: int) -> float:
        batch = self.config.train.global_batch
        micro_batch = self.config.train.micro_batch
        began = time.perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad()
            micro_batches = self.data.train.micro_batches(
                self.step * batch, batch, 0, 1, micro_batch
            )
            for samples in micro_batches:
                inputs, targets = map(torch.from_numpy, (samples.inputs, samples.targets))
                logits = self.model(inputs)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
                (loss * len(samples) / batch).backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            loss.item()
            self.step += 1
        return (time.perf_counter() - began) / steps


if __name__ == "__main__":
    main()
