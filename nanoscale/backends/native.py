"""The native backend: PyTorch's own parts, from micro batches to one optimizer update."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from nanoscale.backends.optimizer import fill_state, make_optimizer, named_state
from nanoscale.config.derive import Derived, derive
from nanoscale.config.schema import Config
from nanoscale.models.initialization import initialise
from nanoscale.models.transformer import Transformer
from nanoscale.parallel import data as data_parallel
from nanoscale.parallel.mesh import data_mesh


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step gave, still on the device."""

    loss_sum: Tensor
    """this rank's share of the global batch: the sum of its tokens' losses, fp64, scalar"""
    grad_norm: Tensor
    """of the whole model before clipping, the same on every rank, scalar"""


class NativeEngine:
    """A model, its layout and its optimizer."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.sizes: Derived = derive(config)
        self.model = build_model(config, device)
        self.forward_model = self._wrap()
        self.optimizer = make_optimizer(self.model, config.optimizer)

    def train_step(self, micro_batches: list[np.ndarray], lr: float) -> StepResult:
        """One update from this rank's micro batches, each `[micro_batch, seq + 1]` of token ids."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        for i, tokens in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            data_parallel.begin_micro_batch(self.forward_model, self.config.zero.stage, last)
            micro_sum = self._token_losses(self.forward_model, self._to_device(tokens)).sum()
            self._backward(micro_sum)
            loss_sum += micro_sum.detach()
        grad_norm = self._clip()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return StepResult(loss_sum, grad_norm)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[tuple[np.ndarray, int]]) -> tuple[float, int]:
        """The sum of the losses and the number of this rank's validation tokens.

        A batch is token ids `[micro_batch, seq + 1]` and how many of its rows count.
        """
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        count = 0
        for tokens, rows in batches:
            losses = self._token_losses(self.model, self._to_device(tokens))[:rows]
            loss_sum += losses.double().sum()
            count += losses.numel()
        data_parallel.reshard(self.model)
        return loss_sum.item(), count

    @torch.no_grad()
    def next_token_logits(self, tokens: list[int]) -> Tensor:
        """Logits `[vocab]` of the token after these. Every rank calls it with the same tokens."""
        batch = torch.tensor([tokens], device=self.device)
        with self._autocast():
            logits = self.model(batch)[0, -1].float()
        data_parallel.reshard(self.model)
        return logits

    def state(self) -> dict[str, Tensor]:
        """Every tensor that training goes on from, by name: `model.<parameter>`, `optimizer.<…>`."""
        model = {f"model.{name}": value for name, value in self.model.named_parameters()}
        moments = named_state(self.model, self.optimizer)
        return model | {f"optimizer.{name}": value for name, value in moments.items()}

    def empty_state(self) -> dict[str, Tensor]:
        """`state()` before the first update, with room for everything that a checkpoint holds."""
        fill_state(self.optimizer)
        return self.state()

    def _wrap(self) -> nn.Module:
        mesh = data_mesh(self.config.parallel, self.device.type)
        if mesh is None or self.config.zero.stage > 0:
            return self.model
        wrapped = data_parallel.replicate(self.model, mesh)
        self._settle_buckets(wrapped)
        return wrapped

    def _settle_buckets(self, wrapped: nn.Module) -> None:
        """Let DDP regroup its gradients now, which it does once, after the first backward.

        An all-reduce of several ranks adds in an order that depends on the grouping. Without this the first
        step after a resume would round differently from the same step of a run that was never stopped.
        """
        tokens = torch.zeros((1, 1), dtype=torch.long, device=self.device)
        with self._autocast():
            wrapped(tokens).sum().backward()
        self.model.zero_grad()

    def _token_losses(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """The loss `[batch, seq]` of each predicted token, in fp32 or better."""
        with self._autocast():
            logits = model(tokens[:, :-1])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        targets = tokens[:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape)

    def _backward(self, micro_sum: Tensor) -> None:
        # The data-parallel wrappers average over the ranks, the loss is a mean over all tokens.
        (micro_sum * (self.sizes.dp / self.sizes.tokens_per_step)).backward()

    def _clip(self) -> Tensor:
        limit = self.config.optimizer.clip_norm
        parameters = list(self.model.parameters())
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if limit is not None:
            nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm

    def _autocast(self) -> AbstractContextManager[None]:
        """bf16 compute where FSDP2 does not cast by itself."""
        mixed = self.config.precision.compute == "bf16"
        sharded = isinstance(self.model, FSDPModule)
        return torch.autocast(self.device.type, torch.bfloat16, enabled=mixed and not sharded)

    def _to_device(self, tokens: np.ndarray) -> Tensor:
        host = torch.from_numpy(tokens)
        if self.device.type == "cuda":  # from pinned memory the copy does not hold up the host
            return host.pin_memory().to(self.device, non_blocking=True)
        return host


def build_model(config: Config, device: torch.device) -> Transformer:
    """The model in its layout with its initial weights, never whole in memory where it is sharded."""
    with torch.device("meta"):
        model = Transformer(config.model)
    model.to(data_parallel.DTYPES[config.precision.params])
    data_parallel.shard(model, config, data_mesh(config.parallel, device.type))
    model.to_empty(device=device)
    initialise(model, config.model, config.train.seed)
    return model
