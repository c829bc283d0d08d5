"""The time of a small model's step on this machine's CPU: `python -m nanoscale.measure.this_cpu CONFIG`."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from nanoscale.config.composing.frozen import load
from nanoscale.config.schema import Config
from nanoscale.models.transformer import Transformer

_STEPS = 12
"""Steps that are timed; the fastest counts, since other processes use the CPU too."""
_WARM_UP = 3


def fastest_step(config: Config, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of the fastest of some steps of a job on one rank, without its data."""
    assert isinstance(config.launcher.threads, int) and isinstance(config.train.micro_batch, int)
    torch.set_num_threads(config.launcher.threads)
    model = Transformer(config.model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    shape = (config.train.micro_batch, config.train.seq_len)
    tokens = torch.randint(config.model.vocab, shape)
    seconds = []
    for _ in range(_WARM_UP + _STEPS):
        began = clock()
        model(tokens, targets=tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(clock() - began)
    return min(seconds[_WARM_UP:])


if __name__ == "__main__":
    print(fastest_step(load(Path(sys.argv[1]))))
