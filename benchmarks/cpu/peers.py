"""The peers of nanoscale's step: the same model, data, precision, clipping and AdamW in other programs.

The rank must have joined the others, if there are any; Trainer does so by itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from nanoscale.backends.deepspeed.import_library import load_deepspeed
from nanoscale.backends.optimizer import make_optimizer
from nanoscale.config.deepspeed import deepspeed_settings
from nanoscale.config.hf.shape import write_shape
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.data.dataset import Dataset
from nanoscale.data.loader import Loader
from nanoscale.models.initialization import initialize
from nanoscale.models.transformer import Transformer


class Plain:
    """A training loop written by hand: PyTorch, and DDP with other ranks."""

    def __init__(self, config: ResolvedConfig, data: Dataset) -> None:
        self.config, self.batches = config, Batches(config, data)
        self.model = make_model(config)
        self.run: nn.Module = self.model
        if dist.is_initialized():
            self.run = DistributedDataParallel(self.model)
        o = config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=o.lr,
            betas=(o.beta1, o.beta2),
            weight_decay=o.weight_decay,
            fused=True,
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        for inputs, targets in (micro_batches := self.batches.next()):
            loss = loss_of(self.run(inputs), targets) / len(micro_batches)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip_norm_of(self.config))
        self.optimizer.step()
        loss.item()


class DeepSpeed:
    """A loop with `deepspeed.initialize` around our model, with the optimizer of our backends."""

    def __init__(self, config: ResolvedConfig, data: Dataset) -> None:
        library = load_deepspeed(torch.device("cpu"))
        self.batches = Batches(config, data)
        model = make_model(config)
        self.engine: Any = library.initialize(
            model=model,
            optimizer=make_optimizer(list(model.named_parameters()), config.optimizer),
            config=deepspeed_settings(config),
            dist_init_required=False,
        )[0]

    def step(self) -> None:
        for inputs, targets in self.batches.next():
            loss = loss_of(self.engine(inputs), targets)
            self.engine.backward(loss)
            self.engine.step()
        loss.item()


def drive_trainer(
    config: ResolvedConfig,
    data: Dataset,
    folder: Path,
    steps: int,
    wait: Callable[[], bool],
    report: Callable[[float], bool],
) -> None:
    """Let transformers' Trainer train its Llama in turns of this many steps.

    Args:
        wait: returns when the first turn begins.
        report: takes the seconds a step of a turn, waits for the next one, and returns True if there is one.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        PrinterCallback,
        Trainer,
        TrainerCallback,
    )
    from transformers import TrainingArguments as Arguments

    class Turns(TrainerCallback):
        began = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            wait()
            self.began = time.perf_counter()

        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:  # type: ignore[override]
            if state.global_step % steps == 0:
                seconds = time.perf_counter() - self.began
                control.should_training_stop = not report(seconds / steps)
                self.began = time.perf_counter()

    o = config.optimizer
    arguments = Arguments(
        output_dir=str(folder),
        use_cpu=True,
        ddp_backend="gloo" if "RANK" in os.environ else None,
        ddp_find_unused_parameters=False,
        max_steps=config.train.steps,
        per_device_train_batch_size=config.train.micro_batch,
        gradient_accumulation_steps=config.accumulation,
        learning_rate=o.lr,
        adam_beta1=o.beta1,
        adam_beta2=o.beta2,
        weight_decay=o.weight_decay,
        max_grad_norm=clip_norm_of(config),
        optim="adamw_torch_fused",
        logging_steps=config.train.log_every,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = LlamaForCausalLM(LlamaConfig(**write_shape(config.model)))
    trainer = Trainer(model, arguments, train_dataset=Samples(data), callbacks=[Turns()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The training samples, one by one, in the form of transformers' Llama."""

    def __init__(self, data: Dataset) -> None:
        assert isinstance(data.train, Loader)
        self.loader = data.train

    def __len__(self) -> int:
        return len(self.loader)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        batch = self.loader.batch([number])
        inputs, targets = torch.from_numpy(batch.inputs[0]), torch.from_numpy(batch.targets[0])
        return {"input_ids": inputs, "labels": targets, "shift_labels": targets}


class Batches:
    """A rank's micro batches, step by step, as nanoscale's own loop gets them."""

    def __init__(self, config: ResolvedConfig, data: Dataset) -> None:
        self.config, self.loader = config, data.train
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.consumed = 0

    def next(self) -> list[tuple[Tensor, Tensor]]:
        found = self.loader.micro_batches(
            self.consumed,
            self.config.train.global_batch,
            self.rank,
            self.config.parallel.dp,
            self.config.train.micro_batch,
        )
        self.consumed += self.config.train.global_batch
        return [(torch.from_numpy(it.inputs), torch.from_numpy(it.targets)) for it in found]


def make_model(config: ResolvedConfig) -> Transformer:
    model = Transformer(config.model)
    initialize(model, config.model, config.train.seed)
    return model


def clip_norm_of(config: ResolvedConfig) -> float:
    """Return the norm to which all programs clip the gradients."""
    norm = config.optimizer.clip_norm
    assert norm is not None
    return norm


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
