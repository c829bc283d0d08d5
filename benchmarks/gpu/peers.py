"""The machine, and the peers of nanoscale: a hand-written loop, and Trainer.

Usage: python3 -m benchmarks.gpu.peers machine|device|loop|Trainer cpu|cuda FOLDER OVERRIDES…

`machine` imports the libraries, computes one product on the device, writes random tokens into FOLDER and
prints versions. `device` measures matrix products and copies of memory. `loop` trains the same Transformer on
the same tokens with torch.compile of every block and of the loss, SDPA, autocast and the same optimizer, and
nothing else. `Trainer` trains transformers' Llama of the same shape with Hugging Face's Trainer. Both time
some steps and record one more. Prints one JSON line.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import record_function

from benchmarks.gpu.parts import TIMED, VOCABULARIES, WARM_UP
from nanoscale.backends import low_bits
from nanoscale.backends.optimizer import make_optimizer
from nanoscale.common.devices import detect, driver
from nanoscale.config.composing.compose import compose
from nanoscale.config.hf.shape import write_shape
from nanoscale.config.model_math import trained_flops_per_token
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.rules import check
from nanoscale.data.dataset import open_data
from nanoscale.data.tokens.files import bin_path, idx_path, index_parts
from nanoscale.metrics.meter import device_peak, peak_memory_gib, wait_for
from nanoscale.metrics.trace import STEP, events_of, parts_of
from nanoscale.models.initialization import initialize
from nanoscale.models.transformer import Transformer
from nanoscale.parallel import activation, compile
from nanoscale.train.profile import recording

OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw8bit": "adamw_torch_8bit"}
"""Trainer's names of nanoscale's optimizers."""
LIBRARIES = ("torch", "triton", "torchao", "transformers", "accelerate", "hydra-core", "numpy")


def main() -> None:
    kind, device, folder = sys.argv[1], torch.device(sys.argv[2]), Path(sys.argv[3])
    if kind == "machine":
        found = machine(device)
        write_tokens(folder, *((16, 512) if device.type == "cpu" else (1024, max(VOCABULARIES))))
    elif kind == "device":
        found = rates(device)
    else:
        found = trained(kind, device, sys.argv[4:])
    print(json.dumps(found))


def machine(device: torch.device) -> dict[str, Any]:
    """Return names and versions of the machine's software, and the duration of importing the libraries."""
    libraries: dict[str, str | None] = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            libraries[name] = version(name)
        except PackageNotFoundError:
            libraries[name] = None
    if libraries["transformers"]:
        import transformers  # noqa: F401
    found: dict[str, Any] = {"device": "CPU", "driver": driver(), "versions": libraries}
    ones = torch.ones(1024, 1024, device=device, dtype=torch.bfloat16)
    found["product_works"] = (ones @ ones)[0, 0].item() == 1024
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["capability"] = torch.cuda.get_device_capability(device)
        found["architectures"] = torch.cuda.get_arch_list()
        found["memory_gib"] = torch.cuda.get_device_properties(device).total_memory / 2**30
        libraries |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
    return {**found, "imported_s": time.time() - psutil.Process().create_time()}


def write_tokens(folder: Path, documents: int, most: int) -> None:
    """Write random tokens of each vocabulary, or of the `most` tokens that a toy model knows."""
    for vocabulary in VOCABULARIES:
        size = (4 * documents, 1 << 10)
        tokens = np.random.default_rng(0).integers(min(vocabulary, most), size=size)
        prefix, lengths = (
            folder / f"tokens-{vocabulary}",
            np.full(4 * documents, 1 << 10, dtype="<i4"),
        )
        bin_path(prefix).write_bytes(tokens.astype("<i4").tobytes())
        idx_path(prefix).write_bytes(b"".join(index_parts(np.dtype("<i4"), lengths)))


def trained(kind: str, device: torch.device, overrides: list[str]) -> dict[str, Any]:
    """Return the results of `loop` or `Trainer` with a configuration."""
    config = check(compose(overrides), detect())
    clock = Clock(device)
    programs: dict[str, type[Loop | Trainer]] = {"loop": Loop, "Trainer": Trainer}
    programs[kind](config, device).run(clock)
    tokens = config.train.global_batch * config.train.seq_len
    speed, peak = tokens / clock.step_s, device_peak(config, device)
    return {
        "step_time_s": clock.step_s,
        "tokens_per_s": speed,
        "mfu": None if peak is None else speed * trained_flops_per_token(config) / peak,
        "memory_gib": clock.memory_gib,
        "parts": clock.parts,
    }


class Clock:
    """A timer of some steps, which records one more.

    Attributes:
        steps: the number of all steps, with the warm-up and one step in which the profiler begins.
        step_s: the mean timed step, seconds.
        memory_gib: the peak of allocated memory until then.
        parts: `metrics.trace.Parts` of the recorded step.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps, self.done = WARM_UP + TIMED + 2, 0
        self.began = self.step_s = self.memory_gib = 0.0
        self.parts: dict[str, Any] | None = None
        self.profiler = recording(device, first=1, last=1, begin=0)
        self.mark = record_function(STEP)

    def begin_step(self) -> None:
        if self.done == self.steps - 2:
            self.profiler.start()
        if self.done == self.steps - 1:
            self.mark.__enter__()

    def end_step(self) -> None:
        self.done += 1
        if self.done in (WARM_UP, self.steps - 2, self.steps - 1):  # and at no other step
            wait_for(self.device)
        if self.done == WARM_UP:
            self.began = time.perf_counter()
        if self.done == self.steps - 2:
            self.step_s = (time.perf_counter() - self.began) / TIMED
            self.memory_gib = peak_memory_gib(self.device)
        if self.done == self.steps - 1:
            self.profiler.step()
        if self.done == self.steps:
            self.mark.__exit__(None, None, None)
            wait_for(self.device)
            self.profiler.step()
            self.profiler.stop()
            parts = parts_of(events_of(self.profiler))
            self.parts = None if parts is None else asdict(parts)


class Loop:
    """A hand-written loop: fp32 weights under autocast, and the mean loss over the whole batch's tokens."""

    def __init__(self, config: ResolvedConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        self.data = open_data(config.data, config.train, config.model.vocab)
        with torch.device("meta"):
            self.model = Transformer(config.model)
        if config.precision.fp8:
            low_bits.use_float8(self.model, config.precision.fp8_recipe)
        activation.apply(self.model.layers, config.parallel)
        compile.apply(self.model.layers, config)
        self.model.materialize(device)
        initialize(self.model, config.model, config.train.seed)
        on = config.backend.compile == "on"
        self.loss: Callable[[Tensor, Tensor], Tensor] = (
            torch.compile(mean_loss) if on else mean_loss
        )
        self.optimizer = make_optimizer(list(self.model.named_parameters()), config.optimizer)
        self.consumed = 0

    def run(self, clock: Clock) -> None:
        for _ in range(clock.steps):
            clock.begin_step()
            self.step()
            clock.end_step()

    def step(self) -> None:
        train = self.config.train
        batches = self.data.train.micro_batches(
            self.consumed, train.global_batch, 0, 1, train.micro_batch
        )
        for batch in batches:
            inputs, targets = self.put(batch.inputs), self.put(batch.targets)
            with torch.autocast(self.device.type, torch.bfloat16):
                logits = self.model(inputs)
            (self.loss(logits, targets) * (len(batch) / train.global_batch)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.consumed += train.global_batch

    def put(self, rows: np.ndarray) -> Tensor:
        host = torch.from_numpy(rows).contiguous()
        if self.device.type == "cuda":
            return host.pin_memory().to(self.device, non_blocking=True)
        return host


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Trainer:
    """Hugging Face's Trainer, set up by its guide to a single GPU: bf16, SDPA, compiled layers."""

    def __init__(self, config: ResolvedConfig, device: torch.device) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        self.config, self.device = config, device
        settings: dict[str, Any] = {"use_cache": False, "attn_implementation": "sdpa"}
        with device:
            self.model = LlamaForCausalLM(LlamaConfig(**write_shape(config.model), **settings))
        if config.backend.compile == "on":
            for layer in self.model.model.layers:
                layer.compile()

    def run(self, clock: Clock) -> None:
        from transformers import Trainer, TrainerCallback, TrainingArguments

        class Steps(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                clock.begin_step()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                clock.end_step()

        train = self.config.train
        generator = torch.Generator().manual_seed(0)
        shape = (clock.steps * train.global_batch, train.seq_len)
        rows = torch.randint(self.config.model.vocab, shape, generator=generator)
        options: dict[str, Any] = {
            "per_device_train_batch_size": train.micro_batch,
            "gradient_accumulation_steps": train.global_batch // int(train.micro_batch),
            "max_steps": clock.steps,
            "bf16": True,
            "optim": OPTIMIZERS[self.config.optimizer.name],
            "lr_scheduler_type": "constant",
            "gradient_checkpointing": self.config.parallel.activation_checkpointing == "full",
            "use_cpu": self.device.type == "cpu",
            "save_strategy": "no",
            "report_to": "none",
            "logging_steps": clock.steps,
            "disable_tqdm": True,
            "output_dir": self.config.run.root,
        }
        Trainer(
            model=self.model,
            args=TrainingArguments(**options),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            callbacks=[Steps()],
        ).train()


def rates(device: torch.device, size: int = 8192) -> dict[str, float]:
    """Return TFLOP/s of square products in bf16 and fp8, and GB/s of a copy, read and written."""
    size = size if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = 2 * size**3 / 1e12
    found = {"bf16_tflops": product / seconds_of(lambda: a @ b, device)}
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        one = torch.ones((), device=device)
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        found["fp8_tflops"] = product / seconds_of(
            lambda: torch._scaled_mm(
                a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
            ),
            device,
        )
    source = torch.empty(size**2 // 2 * 32, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.numel() / 1e9
    found["copy_gbs"] = copied / seconds_of(lambda: target.copy_(source), device)
    return found


def seconds_of(act: Callable[[], Any], device: torch.device, times: int = 20) -> float:
    """Return the mean time of an operation on the device, seconds."""
    for _ in range(min(5, times)):
        act()
    wait_for(device)
    began = time.perf_counter()
    for _ in range(times):
        act()
    wait_for(device)
    return (time.perf_counter() - began) / times


if __name__ == "__main__":
    main()
