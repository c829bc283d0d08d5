"""What nanoscale is measured beside on a GPU: loops that a careful person writes by hand, and Trainer.

Usage: gpu_bare.py loop|trainer|device WINDOWS STEPS OVERRIDES…

`loop` trains the same Transformer on the same tokens with torch.compile of every block and of the loss, SDPA,
autocast and the same optimizer, and nothing else. `trainer` trains transformers' Llama of the same shape with
Hugging Face's Trainer. Both run WINDOWS times STEPS optimizer steps after as many to warm up. `device` measures
what matrix products and copies of memory reach. Prints one JSON line.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nanoscale.backends import float8
from nanoscale.backends.optimizer import make_optimizer
from nanoscale.config.compose import compose
from nanoscale.config.rules import check
from nanoscale.config.schema import Config
from nanoscale.data.dataset import open_data
from nanoscale.devices import detect
from nanoscale.metrics.meter import device_peak, peak_memory_gib
from nanoscale.models.initialization import initialise
from nanoscale.models.transformer import Transformer
from nanoscale.parallel import activation, compile
from nanoscale.plan.model_math import trained_flops_per_token

OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw8bit": "adamw_torch_8bit"}
"""what Trainer calls ours"""


def main() -> None:
    what, windows, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    config = check(compose(sys.argv[4:]), detect())
    device = torch.device(config.launcher.device)
    if what == "device":
        print(json.dumps(rates(device)))
        return
    begin: type[Loop | Trainer] = {"loop": Loop, "trainer": Trainer}[what]
    times = begin(config, device).run(windows + 1, steps)[1:]
    tokens = config.train.global_batch * config.train.seq_len * steps
    speed = len(times) * tokens / sum(times)
    peak = device_peak(config, device)
    found = {
        "step_time_s": sum(times) / len(times) / steps,
        "tokens_per_s": speed,
        "mfu": None if peak is None else speed * trained_flops_per_token(config) / peak,
        "memory_gib": peak_memory_gib(device),
    }
    print(json.dumps(found))


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class Loop:
    """fp32 weights under autocast; every micro batch's mean loss over the whole batch's tokens."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self.device = config, device
        self.data = open_data(config.data, config.train, config.model.vocab)
        with torch.device("meta"):
            self.model = Transformer(config.model)
        if config.precision.fp8:
            float8.apply(self.model, config.precision.fp8_recipe)
        activation.apply(self.model.layers, config.parallel)
        compile.apply(self.model.layers, config)
        self.model.materialise(device)
        initialise(self.model, config.model, config.train.seed)
        on = config.backend.compile == "on"
        self.loss: Callable[[Tensor, Tensor], Tensor] = (
            torch.compile(mean_loss) if on else mean_loss
        )
        self.optimizer = make_optimizer(list(self.model.named_parameters()), config.optimizer)
        self.consumed = 0

    def run(self, windows: int, steps: int) -> list[float]:
        """Seconds of each window of as many steps."""
        found = []
        for _ in range(windows):
            settle(self.device)
            began = time.perf_counter()
            for _ in range(steps):
                self.step()
            settle(self.device)
            found.append(time.perf_counter() - began)
        return found

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
    """Hugging Face's, as its guide to a single GPU has it: bf16, SDPA, our optimizer, compiled layers."""

    def __init__(self, config: Config, device: torch.device) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        shape = config.model
        self.config, self.device = config, device
        hf = LlamaConfig(
            vocab_size=shape.vocab,
            hidden_size=shape.hidden,
            intermediate_size=shape.ffn,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=config.train.seq_len,
            tie_word_embeddings=shape.tie_embeddings,
            use_cache=False,
            attn_implementation="sdpa",
        )
        with device:
            self.model = LlamaForCausalLM(hf)
        if config.backend.compile == "on":
            for layer in self.model.model.layers:
                layer.compile()

    def run(self, windows: int, steps: int) -> list[float]:
        import transformers

        train = self.config.train
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(
            self.config.model.vocab,
            (windows * steps * train.global_batch, train.seq_len),
            generator=generator,
        )
        clock = windows_clock(transformers.TrainerCallback, steps, self.device)
        options: dict[str, Any] = {
            "per_device_train_batch_size": train.micro_batch,
            "gradient_accumulation_steps": train.global_batch // int(train.micro_batch),
            "max_steps": windows * steps,
            "bf16": True,
            "optim": OPTIMIZERS[self.config.optimizer.name],
            "lr_scheduler_type": "constant",
            "gradient_checkpointing": self.config.parallel.activation_checkpointing == "full",
            "use_cpu": self.device.type == "cpu",
            "save_strategy": "no",
            "report_to": "none",
            "logging_steps": steps,
            "disable_tqdm": True,
            "output_dir": self.config.run.root,
        }
        trainer = transformers.Trainer(
            model=self.model,
            args=transformers.TrainingArguments(**options),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            callbacks=[clock],
        )
        trainer.train()
        ends: list[float] = clock.ends
        return [b - a for a, b in zip([clock.began, *ends], ends, strict=False)]


def windows_clock(base: type[Any], steps: int, device: torch.device) -> Any:
    """A callback of Trainer that notes when each window of steps has ended."""

    class Clock(base):  # type: ignore[misc]
        def __init__(self) -> None:
            self.began = 0.0
            self.ends: list[float] = []

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, _args: Any, state: Any, _control: Any, **__: Any) -> None:
            if state.global_step % steps == 0:
                settle(device)
                self.ends.append(time.perf_counter())

    return Clock()


def rates(device: torch.device, size: int = 8192) -> dict[str, float]:
    """TFLOP/s of square products in bf16 and in 8 bits, and GB/s of a copy, read and written."""
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
    for _ in range(5):
        act()
    settle(device)
    began = time.perf_counter()
    for _ in range(times):
        act()
    settle(device)
    return (time.perf_counter() - began) / times


if __name__ == "__main__":
    main()
