"""The time of a recipe's steps: the job of the ranks of `nanoscale bench`.

The first steps warm up, the next are timed while nothing else runs, and the last are recorded, which makes
them slower: recorded parts are given as shares, and the timed steps are the result.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from nanoscale.checkpoint.saver import Saver
from nanoscale.common.json_text import Json
from nanoscale.config.hardware.data_sheets import kind
from nanoscale.config.schema import Precision
from nanoscale.config.values.hooks import function
from nanoscale.data.dataset import open_data
from nanoscale.metrics.meter import Meter, peak_memory_gib, wait_for
from nanoscale.metrics.trace import STEP, events_of, parts_of
from nanoscale.parallel import process_group
from nanoscale.parallel.fsdp import TORCH_DTYPES
from nanoscale.runs.directory import RunDirectory, read_json, write_json
from nanoscale.runs.rank_context import RankContext
from nanoscale.train.checkpointing import Progress
from nanoscale.train.job import make_engine
from nanoscale.train.loop import Training
from nanoscale.train.profile import recording

RECORDED = 2
_SAID_EVERY_S = 1.0


def run(context: RankContext) -> str:
    """Measure, and write the figures to the first rank's result.

    The task holds the numbers of steps `warmup` and `steps`, and `folder`, the folder for a checkpoint; null:
    no checkpoint is written.

    Raises:
        UserError: the data do not fit the configuration.
    """
    config, task = context.config, read_json(context.run.task)
    device = process_group.local_device(config.launcher.device)
    data = open_data(config.data, config.train, config.model.vocab, function(config, "data"))
    timeout_s = config.launcher.collective_timeout_s
    process_group.join(context.world_size, device, timeout_s, even_alone=config.offloads)
    said_at = 0.0

    def say(text: str) -> None:
        """Print progress on the first rank's standard output, at most about once a second."""
        nonlocal said_at
        if context.rank == 0 and (time.monotonic() - said_at > _SAID_EVERY_S or text.endswith("…")):
            said_at = time.monotonic()
            print(text, flush=True)

    say("multiplying matrices …")
    process_group.gather(None)  # ranks on one host share its cores
    rate = fmean(process_group.gather(matmul_rate(config.precision, device)))
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    say("making the model …")
    training = Training(
        workspace=context.workspace,
        # The saver is created where the time of a checkpoint is measured.
        config=replace(config, checkpoint=replace(config.checkpoint, asynchronous=False)),
        engine=make_engine(config, device),
        data=data,
        progress=Progress(),
        rank=context.rank,
        meter=Meter(config, context.world_size, device),
        sinks=[],
        note=lambda *_, **__: None,
    )
    bench = _Bench(training, device, say)
    figures = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "matmul_flops": rate,
        **bench.time_steps(task["warmup"], task["steps"]),
        "parts": bench.record_steps(),
        "checkpoint": task["folder"] and bench.save(Path(task["folder"]), context),
    }
    if context.rank == 0:
        write_json(context.run.result, figures)
    process_group.leave()
    return "completed"


@dataclass(frozen=True)
class _Bench:
    training: Training
    device: torch.device
    say: Any

    def time_steps(self, warmup: int, steps: int) -> Json:
        """Time uninterrupted steps, as if none were logged; the slowest rank's times count."""
        first, warming = None, time.perf_counter()
        for number in range(warmup):
            self.say(f"warming up: step {number + 1} of {warmup}")
            self.training.advance()
            if first is None:
                wait_for(self.device)
                first = time.perf_counter() - warming
        with self._clock() as (tick, times):
            for number in range(steps):
                result = self.training.advance()
                tick()
                self.say(f"step {number + 1} of {steps}")
        local = [result.loss_sum.item(), peak_memory_gib(self.device), *times]
        everyone = process_group.gather_numbers(local)
        slowest = everyone.max(dim=0).values.tolist()
        return {
            "first_step_s": first,
            "times_s": slowest[2:],
            "loss": everyone[:, 0].sum().item() / float(result.tokens),
            "memory_gib": slowest[1],
        }

    @contextmanager
    def _clock(self) -> Iterator[tuple[Any, list[float]]]:
        """Provide a tick to call after each step; the times between ticks are complete when the block ends.

        On a GPU ticks are events in its queue: the host continues, as it does in a training.
        """
        times: list[float] = []
        wait_for(self.device)
        process_group.gather(None)
        if self.device.type == "cuda":
            marks = [torch.cuda.Event(enable_timing=True)]
            marks[0].record()

            def tick() -> None:
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record()

            yield tick, times
            wait_for(self.device)
            times += [start.elapsed_time(end) / 1e3 for start, end in pairwise(marks)]
        else:
            ticks = [time.perf_counter()]
            yield lambda: ticks.append(time.perf_counter()), times
            times += [end - start for start, end in pairwise(ticks)]

    def record_steps(self) -> Json | None:
        """Return the parts of the mean step, averaged over ranks; blocking calls are the first rank's."""
        self.say("recording what the steps are made of …")
        profiler = recording(self.device, first=2, last=1 + RECORDED, begin=1)
        self.training.recorder.profiler = profiler
        profiler.start()
        for number in range(1 + RECORDED):
            with self.training.recorder.labeled(STEP):
                self.training.advance()
            if number in (0, RECORDED):  # operations queued before, or after, belong to other steps
                wait_for(self.device)
            profiler.step()
        profiler.stop()
        self.training.recorder.profiler = None
        everyone = process_group.gather(parts_of(events_of(profiler)))
        found = [asdict(parts) for parts in everyone if parts is not None]
        if not found:
            return None
        return {
            name: fmean(parts[name] for parts in found) if isinstance(value, float) else value
            for name, value in found[0].items()
        }

    def save(self, folder: Path, context: RankContext) -> Json:
        """Measure how long a checkpoint stops the training, until the device can continue.

        For asynchronous checkpoints the second one counts: the first also allocates the memory of its copy.
        """
        settings = context.config.checkpoint
        saver = Saver(RunDirectory(folder).workspace(1), settings, context.rank)
        stalls, saved = [], None
        try:
            for number in range(2 if settings.asynchronous else 1):
                self.say("saving a checkpoint …")
                wait_for(self.device)
                process_group.gather(None)
                began = time.perf_counter()
                state = self.training.engine.state()
                saved = saver.begin(state, {"step": number + 1})
                wait_for(self.device)
                stalls.append(max(process_group.gather(time.perf_counter() - began)))
                saved = saver.finish() or saved
        except OSError as error:
            return {"problem": str(error)}
        assert saved is not None
        return {
            "asynchronous": settings.asynchronous,
            "stall_s": stalls[-1],
            "first_stall_s": stalls[0],
            "seconds": saved.seconds,
            "gib": sum(it.stat().st_size for it in saved.path.iterdir()) / 2**30,
        }


_SIDES = {"cuda": (8192,), "cpu": (512, 1024)}
_BATCH_S = {"cuda": 0.2, "cpu": 0.005}
"""Seconds of a batch of products: on a GPU long enough for it to lower its clock under this load, on a CPU
short enough that other processes miss some batches."""
_BATCHES = {"cuda": 5, "cpu": 30}
_WARM_UP = 2


def matmul_rate(precision: Precision, device: torch.device) -> float:
    """Return the FLOP/s of square products in the compute dtype, of random numbers, one after another.

    The sides are 8192 on a GPU; on a CPU 512 or 1024, whichever is faster. The fastest of several batches
    counts: an upper bound, even if other processes use the device too.
    """
    fastest = 0.0
    for side in _SIDES[device.type]:
        multiply = _product(precision, side, device)
        for _ in range(_WARM_UP):
            once = _seconds(multiply, 1, device)
        count = max(1, round(_BATCH_S[device.type] / once))
        batches = [_seconds(multiply, count, device) for _ in range(_BATCHES[device.type])]
        fastest = max(fastest, count * 2 * side**3 / min(batches))
    return fastest


def _product(precision: Precision, side: int, device: torch.device) -> Callable[[], Tensor]:
    def draw(dtype: torch.dtype) -> Tensor:
        return torch.randn(side, side, device=device).to(dtype)

    if kind(precision) != "fp8":
        a, b = (draw(TORCH_DTYPES[precision.compute]) for _ in range(2))
        return lambda: a @ b
    eight, one = torch.float8_e4m3fn, torch.ones((), device=device)
    left, right = draw(eight), draw(eight).t()
    return lambda: torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16)


def _seconds(multiply: Callable[[], Tensor], count: int, device: torch.device) -> float:
    wait_for(device)
    began = time.perf_counter()
    for _ in range(count):
        multiply()
    wait_for(device)
    return time.perf_counter() - began
