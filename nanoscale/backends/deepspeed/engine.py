"""The DeepSpeed backend: the same model, data and optimizer, driven by DeepSpeed's engine."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from nanoscale.backends import gradients
from nanoscale.backends.base import Engine, StepResult
from nanoscale.backends.deepspeed import pieces
from nanoscale.backends.deepspeed.library import load_deepspeed
from nanoscale.backends.optimizer import make_optimizer, set_lr
from nanoscale.checkpoint.flat import FlatShard
from nanoscale.config.deepspeed import deepspeed_settings
from nanoscale.config.layout import coordinates
from nanoscale.config.schema import Config
from nanoscale.models.initialization import draw
from nanoscale.models.transformer import Transformer
from nanoscale.parallel import activation, compile


class DeepSpeedEngine(Engine):
    """DeepSpeed's engine around our model."""

    def __init__(self, config: Config, device: torch.device) -> None:
        super().__init__(config, device)
        library = load_deepspeed(device)
        self.stage = config.zero.stage
        self.place = coordinates(dist.get_rank(), config.parallel)
        settings = deepspeed_settings(config)
        self.model = self._build(library, settings)
        self.parts = {0: self.model}
        self.engine: Any = library.initialize(
            model=self.model,
            optimizer=make_optimizer(self.parameters(), config.optimizer),
            config=settings,
            dist_init_required=False,
        )[0]
        self.pieces = pieces.find(self.parameters(), self.engine.optimizer, self.stage)
        self._initialise()
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.model.named_parameters())

    def train_step(self, micro_batches: list[np.ndarray], lr: float) -> StepResult:
        self._loss_sum.zero_()
        set_lr(self.engine.optimizer, lr)
        self._set_scale()
        for tokens in micro_batches[:-1]:
            self._forward_and_backward(tokens)
            self.engine.step()
        self._forward_and_backward(micro_batches[-1])
        own_norm = self._norm_of_whole_gradients() if self.stage == 0 else None
        self.engine.step()
        norm = own_norm if own_norm is not None else self._reported_norm()
        skipped = self.scaling is not None and not self.scaling.update(bool(norm.isfinite()))
        return StepResult(self._loss_sum * self._counts, norm, skipped)

    def state(self) -> dict[str, Tensor]:
        optimizer = self._stepped_optimizer()
        state: dict[str, Tensor] = {}
        for piece in self.pieces:
            shape = self._shape(piece.name)
            state[f"model.{piece.name}"] = FlatShard(piece.master, shape, piece.start)
            for name, moment in piece.moments(optimizer.state):
                shard = moment if moment.ndim == 0 else FlatShard(moment, shape, piece.start)
                state[f"optimizer.{piece.name}.{name}"] = shard
        if self.scaling is not None:
            state |= {f"loss_scale.{name}": value for name, value in self.scaling.state().items()}
        return state

    def empty_state(self) -> dict[str, Tensor]:
        pieces.fill_state(self.pieces, self._stepped_optimizer())
        return self.state()

    def take(self, state: dict[str, Tensor]) -> None:
        pieces.refresh_weights(self.engine.optimizer, self.stage)

    def _build(self, library: Any, settings: dict[str, Any]) -> Transformer:
        """The model without values; with stage 3 every module is taken apart as soon as it is made."""
        apart = self.stage == 3
        context = library.zero.Init(config_dict_or_path=settings) if apart else nullcontext()
        with context, torch.device(self.device if apart else "meta"):
            model = Transformer(self.config.model)
        activation.apply(model.layers, self.config.parallel)
        model.run_layers = activation.runner(self.config.parallel, model.run_layers)
        compile.apply(model.layers, self.config)
        return model if apart else model.to_empty(device=self.device)

    @torch.no_grad()
    def _initialise(self) -> None:
        """Write the initial weights, which depend on names and shapes alone, where they are updated."""
        by_name: dict[str, list[pieces.Piece]] = {}
        for piece in self.pieces:
            by_name.setdefault(piece.name, []).append(piece)
        model, seed = self.config.model, self.config.train.seed
        for name, mine in by_name.items():
            whole = draw(name, self._shape(name), model, seed, self.device).view(-1)
            for piece in mine:
                piece.master.copy_(whole[piece.start : piece.start + piece.numel])
        pieces.refresh_weights(self.engine.optimizer, self.stage)

    def _shape(self, name: str) -> torch.Size:
        parameter = self.model.get_parameter(name)
        return torch.Size(getattr(parameter, "ds_shape", parameter.shape))

    def _stepped_optimizer(self) -> torch.optim.Optimizer:
        """PyTorch's, inside of DeepSpeed's."""
        optimizer: torch.optim.Optimizer = self.engine.basic_optimizer
        return optimizer

    def _forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.engine(inputs)
        return logits

    def _forward_and_backward(self, tokens: np.ndarray) -> None:
        inputs, targets = self._divide(tokens)
        losses = self._token_losses(self._forward(inputs), targets)
        self._loss_sum += losses.detach().double().sum()
        # DeepSpeed takes the mean over micro batches and ranks, and all of them have as many tokens.
        self.engine.backward(losses.mean())

    def _set_scale(self) -> None:
        """Give DeepSpeed this step's loss scale; an overflow makes it leave the step out."""
        if self.scaling is None:
            return
        if self.stage == 0:  # PyTorch's scaler, which would like to move by itself
            about = {"scale": self.scaling.scale, "_growth_tracker": 0, "growth_interval": 2}
            factors = {"growth_factor": 2.0, "backoff_factor": 0.5}
            self.engine.torch_autocast_z0_gradscaler.load_state_dict(about | factors)
        else:
            self.engine.optimizer.loss_scale = self.scaling.scale

    def _norm_of_whole_gradients(self) -> Tensor:
        scale = self.scaling.scale if self.scaling is not None else 1.0
        grads = [p.grad for _, p in self.parameters() if p.grad is not None]
        return gradients.local_norm(grads) / scale

    def _reported_norm(self) -> Tensor:
        return torch.as_tensor(self.engine.get_global_grad_norm(), device=self.device)
