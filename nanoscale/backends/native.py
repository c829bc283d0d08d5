"""The native backend: PyTorch's own parts, from micro batches to one optimizer update."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F

from nanoscale.backends import float8, gradients
from nanoscale.backends.optimizer import (
    fill_state,
    load_state,
    make_optimizer,
    named_state,
    set_lr,
)
from nanoscale.backends.scaling import LossScale
from nanoscale.config.derive import Derived, derive
from nanoscale.config.schema import Config
from nanoscale.config.stages import stage_layers
from nanoscale.models.initialization import initialise
from nanoscale.models.transformer import Transformer
from nanoscale.parallel import data as data_parallel
from nanoscale.parallel.apply import parallelise
from nanoscale.parallel.mesh import Layout, lay_out
from nanoscale.parallel.pipeline import Boundary, Pipeline, stages_of


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step gave, still on the device."""

    loss_sum: Tensor
    """this rank's share of the global batch: the sum of its tokens' losses, fp64, scalar; over all ranks each
    token counts once"""
    grad_norm: Tensor
    """of the whole model before clipping, the same on every rank, scalar"""
    skipped: bool = False
    """whether fp16 has overflown and the weights are as before"""


class NativeEngine:
    """A model, its layout and its optimizer."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.sizes: Derived = derive(config)
        self.layout = lay_out(config, device.type)
        self.parts = build_parts(config, self.layout, device)
        self.pipeline = self._make_pipeline()
        self.optimizer = make_optimizer(self.parameters(), config.optimizer)
        fp16 = config.precision.compute == "fp16"
        self.scaling = LossScale(config.precision) if fp16 else None
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        # Ranks of tp compute the loss of the same tokens.
        self._counts = self.layout.place.tp == 0

    @property
    def dp_rank(self) -> int:
        """Which share of the global batch is this rank's."""
        return self.layout.place.dp

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters of this rank by their names in the whole model."""
        return [pair for part in self.parts.values() for pair in part.named_parameters()]

    def train_step(self, micro_batches: list[np.ndarray], lr: float) -> StepResult:
        """One update from this rank's micro batches, each `[micro_batch, seq + 1]` of token ids."""
        self._loss_sum.zero_()
        with self._divided_loss():
            if self.pipeline is not None:
                self.pipeline.step(*self._divide(np.concatenate(micro_batches)))
            else:
                self._accumulate(micro_batches)
        grad_norm = self._finish_gradients()
        skipped = self.scaling is not None and not self.scaling.update(bool(grad_norm.isfinite()))
        if not skipped:
            set_lr(self.optimizer, lr)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return StepResult(self._loss_sum * self._counts, grad_norm, skipped)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[tuple[np.ndarray, int]]) -> tuple[float, int]:
        """The sum of the losses and the number of this rank's validation tokens.

        A batch is token ids `[micro_batch, seq + 1]` and how many of its rows count.
        """
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        count = 0
        for tokens, rows in batches:
            inputs, targets = self._divide(tokens)
            logits = self._forward(inputs)
            if logits is None:
                continue
            with self._divided_loss():
                losses = self._token_losses(logits, targets)[:rows]
            loss_sum += losses.double().sum() * self._counts
            count += losses.numel() * self._counts
        self._reshard()
        return loss_sum.item(), count

    @torch.no_grad()
    def next_token_logits(self, tokens: list[int]) -> Tensor:
        """Logits `[vocab]` of the token after these. Every rank calls it with the same tokens."""
        inputs = torch.tensor([tokens + [0] * self._padding(len(tokens))], device=self.device)
        position = self._positions(inputs.shape[1])
        logits = self._forward(inputs[:, position])
        self._reshard()
        found = torch.zeros(self.config.model.vocab, device=self.device)
        here = (position == len(tokens) - 1).nonzero()
        if logits is not None and len(here) and self.layout.place.dp == 0:
            _place(found, logits, int(here[0]))
        if dist.is_initialized():
            dist.all_reduce(found)
        return found

    def state(self) -> dict[str, Tensor]:
        """Every tensor that training goes on from, by name: `model.<parameter>`, `optimizer.<…>`."""
        model: dict[str, Tensor] = {f"model.{name}": value for name, value in self.parameters()}
        moments = named_state(self.parameters(), self.optimizer)
        scaling = self.scaling.state() if self.scaling is not None else {}
        return (
            model
            | {f"optimizer.{name}": value for name, value in moments.items()}
            | {f"loss_scale.{name}": value for name, value in scaling.items()}
        )

    def empty_state(self) -> dict[str, Tensor]:
        """`state()` before the first update, with room for everything that a checkpoint holds."""
        fill_state(self.optimizer)
        return self.state()

    def take(self, state: dict[str, Tensor]) -> None:
        """Go on from what was loaded into the tensors of `empty_state`."""
        moments = {
            name.removeprefix("optimizer."): value
            for name, value in state.items()
            if name.startswith("optimizer.")
        }
        load_state(self.parameters(), self.optimizer, moments)

    def figures(self) -> dict[str, float]:
        """What a logged step shows beside the loss; fp16 has a loss scale."""
        if self.scaling is None:
            return {}
        return {"loss_scale": self.scaling.scale, "skipped_steps": self.scaling.skipped_steps}

    @property
    def scale_is_exhausted(self) -> bool:
        """Whether a smaller loss scale no longer helps against overflows."""
        return self.scaling is not None and self.scaling.exhausted

    def _accumulate(self, micro_batches: list[np.ndarray]) -> None:
        (model,) = self.parts.values()
        for i, tokens in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            data_parallel.begin_micro_batch(model, self.config.zero.stage, last)
            inputs, targets = self._divide(tokens)
            with self._autocast():
                logits = model(inputs)
            self._loss(logits, targets).backward()

    def _forward(self, inputs: Tensor) -> Tensor | None:
        if self.pipeline is not None:
            return self.pipeline.forward(inputs)
        (model,) = self.parts.values()
        with self._autocast():
            return model(inputs)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """What the backward pass of a micro batch begins with."""
        micro_sum = self._token_losses(logits, targets).sum()
        self._loss_sum += micro_sum.detach()
        # FSDP averages over its ranks; the loss is a mean over all tokens.
        ranks = self.config.parallel.cp * self.sizes.dp
        scale = self.scaling.scale if self.scaling is not None else 1.0
        return micro_sum * (ranks * scale / self.sizes.tokens_per_step)

    def _token_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss `[batch, seq]` of each predicted token, in fp32 or better."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        if isinstance(losses, DTensor):
            losses = losses.to_local()
        return losses.view(targets.shape)

    def _divided_loss(self) -> AbstractContextManager[None]:
        """Losses of logits that are divided along the vocabulary, without ever gathering them."""
        return loss_parallel() if self.layout.tensor is not None else nullcontext()

    def _finish_gradients(self) -> Tensor:
        """Undo the loss scale and clip; the norm before clipping."""
        grads = [p.grad for _, p in self.parameters() if p.grad is not None]
        if self.scaling is not None:
            gradients.scale(grads, 1 / self.scaling.scale)
        norm = gradients.global_norm(grads)
        if self.config.optimizer.clip_norm is not None:
            gradients.clip(grads, norm, self.config.optimizer.clip_norm)
        return norm

    def _autocast(self) -> AbstractContextManager[None]:
        """Narrow compute where FSDP2 does not cast by itself: in a single process."""
        compute = data_parallel.DTYPES[self.config.precision.compute]
        mixed = compute in (torch.bfloat16, torch.float16) and self.layout.data is None
        return torch.autocast(self.device.type, compute if mixed else None, enabled=mixed)

    def _divide(self, tokens: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and targets of this rank's part of the sequence, `[batch, seq / cp]`, on the device."""
        host = torch.from_numpy(tokens)
        inputs, targets = host[:, :-1], host[:, 1:]
        if self.layout.context is not None:
            position = self._positions(inputs.shape[1]).cpu()
            inputs, targets = inputs[:, position], targets[:, position]
        return self._to_device(inputs), self._to_device(targets)

    def _positions(self, seq: int) -> Tensor:
        """The positions `[seq / cp]` of a sequence that this rank has."""
        part = next(iter(self.parts.values()))
        return part.place(seq // self.config.parallel.cp, self.device)

    def _padding(self, length: int) -> int:
        """How many tokens to add, so that every axis can divide the sequence."""
        parallel = self.config.parallel
        quantum = 2 * parallel.cp * parallel.tp
        padded = min(-(-length // quantum) * quantum, self.config.train.seq_len)
        return padded - length if quantum > 2 else 0

    def _to_device(self, host: Tensor) -> Tensor:
        if self.device.type == "cuda":  # from pinned memory the copy does not hold up the host
            return host.contiguous().pin_memory().to(self.device, non_blocking=True)
        return host

    def _reshard(self) -> None:
        for part in self.parts.values():
            data_parallel.reshard(part)

    def _make_pipeline(self) -> Pipeline | None:
        if self.layout.pipeline is None:
            return None
        parallel, train = self.config.parallel, self.config.train
        shards = next(iter(self.parts.values())).sequence_shards
        seq = train.seq_len // parallel.cp // shards
        boundary = Boundary(
            (self.sizes.micro_batch, seq, self.config.model.hidden),
            data_parallel.DTYPES[self.config.precision.compute],
            self.device,
        )
        return Pipeline(
            self.parts,
            parallel,
            self.layout.pipeline,
            self.sizes.accumulation,
            boundary,
            self._loss,
        )


def build_parts(config: Config, layout: Layout, device: torch.device) -> dict[int, Transformer]:
    """This rank's stages of the model with their initial weights, by number; never whole where sharded."""
    parallel = config.parallel
    mine = stages_of(parallel, layout.place.pp)
    parts = {}
    for number in mine:
        with torch.device("meta"):
            part = Transformer(config.model, _layers(config, number))
        part.to(data_parallel.DTYPES[config.precision.params])
        if config.precision.fp8:
            float8.apply(part)
        parallelise(part, config, layout)
        part.to_empty(device=device)
        initialise(part, config.model, config.train.seed)
        parts[number] = part
    return parts


def _layers(config: Config, stage: int) -> range:
    """The numbers of a stage's blocks."""
    parallel = config.parallel
    assert isinstance(parallel.virtual_stages, int)
    counts = stage_layers(
        config.model, parallel.pp * parallel.virtual_stages, parallel.layers_per_stage
    )
    first = sum(counts[:stage])
    return range(first, first + counts[stage])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _place(found: Tensor, logits: Tensor, index: int) -> None:
    """Write one position's logits of this rank's part of the vocabulary into `found` `[vocab]`."""
    mine = _local(logits)[0, index].to(found.dtype)
    first = logits.device_mesh.get_local_rank() * len(mine) if isinstance(logits, DTensor) else 0
    found[first : first + len(mine)] = mine
