"""Speed and memory of the training between two logged steps."""

import resource
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from nanoscale.config.hardware.data_sheets import peak_of
from nanoscale.config.model_math import experts, trained_flops_per_token
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.token_files import row_tokens
from nanoscale.config.training_phases import phase_at, phases_of
from nanoscale.metrics import waits

_SHORTEST_WAIT = 0.005
"""The least share of the time that is worth a metric."""


def device_peak(config: ResolvedConfig, device: torch.device) -> float | None:
    """Return the FLOP/s of one device at the trained precision; None if unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return peak_of(config, name)


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak of allocated memory so far, GiB; on a CPU, the peak of the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30


def forget_peak_memory(device: torch.device) -> None:
    """Begin `peak_memory_gib` again with what is in use now; on a CPU as far as the system allows."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_bytes(b"5")


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Meter:
    """A timer of steps; work between them (evaluation, checkpoints) does not count."""

    def __init__(
        self,
        config: ResolvedConfig,
        world_size: int,
        device: torch.device,
        recomputed: float | None = None,
    ) -> None:
        """Make a timer.

        Args:
            recomputed: all FLOPs over the model's, for `hfu`; None: unknown.
        """
        # Speeds count the tokens of documents, and not padding.
        self._row_tokens = row_tokens(config) or config.train.seq_len
        self._recomputed = recomputed
        # The active experts of a model=hf are not known.
        is_known = not experts(config.model)
        self._train, self._flops_per_token = config.train, {}
        for length in {phase.seq_len for phase in phases_of(config.train)} if is_known else ():
            rows = replace(config, train=replace(config.train, seq_len=length))
            self._flops_per_token[length] = trained_flops_per_token(rows)
        peak = device_peak(config, device)
        self._peak = peak * world_size if peak is not None else None
        self._start = self._waited_before = 0.0
        self._busy = self._waited = self._data = 0.0
        self._samples = self._flops = 0.0  # the samples, and the sum over them of a token's FLOPs
        self._steps = 0

    def begin(self) -> None:
        self._start, self._waited_before = time.perf_counter(), waits.seconds()

    def end(self, step: int = 1) -> None:
        self._busy += time.perf_counter() - self._start
        self._waited += waits.seconds() - self._waited_before
        self._steps += 1
        phase = phase_at(self._train, step)
        self._samples += phase.global_batch
        self._flops += phase.global_batch * self._flops_per_token.get(phase.seq_len, 0.0)

    def end_wait(self) -> None:
        """Count the time since `begin` as a wait for data, which the next step lasts longer."""
        seconds = time.perf_counter() - self._start
        self._busy += seconds
        self._data += seconds

    def own_time(self) -> float:
        """Return the mean seconds of a step since the last reading in which this rank waited for no other."""
        return (self._busy - self._waited - self._data) / self._steps

    def read(self, samples: int) -> dict[str, float | None]:
        """Return means over the steps since the last reading, in which all ranks have used this many samples.

        `mfu` is defined in Chowdhery et al. 2022 (PaLM), appendix B.
        """
        step_time = self._busy / self._steps
        samples_per_s = samples / self._busy
        tokens_per_s = samples_per_s * self._row_tokens
        mfu = None
        if self._peak is not None and self._flops_per_token:
            mfu = tokens_per_s * self._flops / self._samples / self._peak
        data_wait = self._data / self._busy
        self._busy = self._waited = self._data = 0.0
        self._steps = 0
        self._samples = self._flops = 0.0
        return {
            "step_time_s": step_time,
            "tokens_per_s": tokens_per_s,
            "samples_per_s": samples_per_s,
            "mfu": mfu,
            "hfu": mfu * self._recomputed if mfu and self._recomputed else None,
            **({"data_wait": data_wait} if data_wait >= _SHORTEST_WAIT else {}),
        }
