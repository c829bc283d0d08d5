"""The native backend: PyTorch's own parts, from micro batches to one optimizer update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from nanoscale.backends import float8, gradients, nf4
from nanoscale.backends.base import Engine, StepResult, make_stage
from nanoscale.backends.gradients import local_tensor
from nanoscale.backends.master_weights import MasterWeights, cast_frozen
from nanoscale.backends.optimizer import (
    clip_in_update,
    fill_own_state,
    fill_state,
    load_state,
    make_optimizer,
    named_state,
    own_optimizer,
    plain_tensors,
    set_lr,
)
from nanoscale.backends.qk_clip import QKClip
from nanoscale.backends.schedule_free import update_averages
from nanoscale.config.layout import is_replicated
from nanoscale.config.optimizers import AVERAGE, keeps_average, rounds
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.data.batch import Batch
from nanoscale.models import lora
from nanoscale.models.initialization import fill
from nanoscale.models.transformer import Transformer
from nanoscale.parallel import fsdp as data_parallel
from nanoscale.parallel.apply import parallelize
from nanoscale.parallel.ddp import GradientReducer
from nanoscale.parallel.mesh import Layout, make_layout
from nanoscale.parallel.pipeline import Boundary, Pipeline, stages_of


class NativeEngine(Engine):
    """A model, its layout and its optimizer."""

    def __init__(self, config: ResolvedConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.layout = make_layout(config, device.type)
        self.coordinates = self.layout.coordinates
        self.stages = build_stages(config, self.layout, device)
        self.masters = self._make_masters()
        self.balance = self._make_balance()
        if config.optimizer.qk_clip is not None:
            stages = list(self.stages.values())
            self.qk_clip = QKClip(config, self.coordinates.tp, stages, device)
        self.pipeline = self._make_pipeline()
        self.reducer = self._make_reducer()
        rounded = rounds(config.optimizer, config.precision)
        self.optimizer = make_optimizer(
            self.parameters(), config.optimizer, rounded=rounded, build=own_optimizer(config)
        )
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """List the parameters that this rank trains, by names in the whole model."""
        return [(name, p) for name, p in self._all_parameters() if p.requires_grad]

    def _all_parameters(self) -> list[tuple[str, nn.Parameter]]:
        if self.masters is not None:
            return self.masters.parameters
        return [pair for stage in self.stages.values() for pair in stage.named_parameters()]

    def train_step(self, micro_batches: list[Batch], lr: float) -> StepResult:
        self._loss_sum.zero_()
        self._tokens = self._count_tokens(micro_batches)
        if self.balance is not None:
            # Each rank of tp has the loss of the whole sequence, and their gradients add up.
            sequences = sum(map(len, micro_batches)) * self.config.parallel.dp
            sequence_weight = self._scale / sequences
            self.balance.begin_step(sequence_weight / self.config.parallel.tp)
        if self.pipeline is not None:
            local = self._local_batch(Batch.concatenate(micro_batches))
            self.pipeline.step(*local, len(micro_batches))
        else:
            self._accumulate(micro_batches)
        grad_norm = self._finish_gradients()
        skipped = self.scaling is not None and not self.scaling.update(bool(grad_norm.isfinite()))
        if not skipped:
            set_lr(self.optimizer, lr)
            self.optimizer.step()
            if self.qk_clip is not None:
                self.qk_clip.end_step(self.parameters())
            if self.config.optimizer.ema_decay is not None:
                update_averages(self.optimizer, self.config.optimizer.ema_decay)
            if self.masters is not None:
                self.masters.update_compute_copy()
        elif self.qk_clip is not None:  # a skipped step has scores that are not finite
            self.qk_clip.end_step([])
        self._fill_state()  # of a skipped step
        self.optimizer.zero_grad()
        if self.balance is not None:
            self.balance.end_step(self._counts_losses, skipped)
        return StepResult(self._loss_sum * self._counts_losses, self._tokens, grad_norm, skipped)

    def state(self) -> dict[str, Tensor]:
        return self._state(to_load=False)

    def empty_state(self) -> dict[str, Tensor]:
        self._fill_state()
        if self.config.optimizer.name == "hooks":
            fill_own_state(self.optimizer)
        return self._state(to_load=True)

    def _fill_state(self) -> None:
        if self.config.optimizer.name != "hooks":  # no step is skipped before its first one
            fill_state(self.optimizer, averages=self.config.optimizer.ema_decay is not None)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        if not keeps_average(self.config.optimizer):
            yield
            return
        states = self.optimizer.state
        trained = {parameter: parameter.detach().clone() for parameter in states}
        self._set_weights({parameter: state[AVERAGE] for parameter, state in states.items()})
        try:
            yield
        finally:
            self._set_weights(trained)

    @torch.no_grad()
    def _set_weights(self, values: dict[Tensor, Tensor]) -> None:
        for parameter, value in values.items():
            local_tensor(parameter).copy_(local_tensor(value))
        if self.masters is not None:
            self.masters.update_compute_copy()

    def _state(self, *, to_load: bool) -> dict[str, Tensor]:
        model: dict[str, Tensor] = {f"model.{name}": value for name, value in self.parameters()}
        moments = named_state(self.parameters(), self.optimizer, to_load=to_load)
        optimizer = {f"optimizer.{name}": value for name, value in moments.items()}
        return model | optimizer | self._small_state()

    def _torch_optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer

    def frozen_state(self) -> dict[str, Tensor]:
        return {f"model.{name}": p for name, p in self._all_parameters() if not p.requires_grad}

    def replicated(self) -> Iterator[tuple[str, tuple[int, ...], list[Tensor]]]:
        for name, parameter in self._all_parameters():
            if isinstance(parameter, DTensor):
                ranks = _replica_ranks(parameter.device_mesh, tuple(parameter.placements))
            elif self.layout.data is not None:  # whole, or in 4 bits, on each rank of dp and cp
                ranks = tuple(self.layout.data.mesh.flatten().tolist())
            else:
                ranks = (0,)
            moments = self.optimizer.state.get(parameter, {}).values()
            # The counts of steps are scalars: a wrong one changes the next update, and so the weights.
            local = [local_tensor(it) for it in (parameter, *moments) if it.ndim]
            yield name, ranks, [plain for it in local for plain in plain_tensors(it)]

    def load_state(self, state: dict[str, Tensor]) -> None:
        moments = {
            name.removeprefix("optimizer."): value
            for name, value in state.items()
            if name.startswith("optimizer.")
        }
        load_state(self.parameters(), self.optimizer, moments)
        if self.masters is not None:
            self.masters.update_compute_copy()

    @torch.no_grad()
    def reinitialize(self) -> None:
        """Return to the initial weights, unless they come from files, and to an unused optimizer."""
        self.optimizer.state.clear()
        for stage in self.stages.values():
            stage.reset_buffers(self.device)
            _fill_initial(stage, self.config, self.device)
            if self.masters is not None:
                draw = stage.initializer(self.config.train.seed, self.device)
                for name, master in self.masters.parameters:
                    master.copy_(draw(name, master.shape))
                lora.fill_magnitudes(dict(self.masters.parameters))
                self.masters.update_compute_copy()

    def _accumulate(self, micro_batches: list[Batch]) -> None:
        (model,) = self.stages.values()
        for i, batch in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            data_parallel.begin_micro_batch(model, self.config.zero.stage, last)
            if self.reducer is not None:
                self.reducer.begin_micro_batch(last)
            inputs, targets, documents, references = self._local_batch(batch)
            loss_sum = model(inputs, documents, targets, references)
            self._loss(loss_sum).backward()

    def _forward(self, inputs: Tensor, *others: Tensor | None) -> Tensor | None:
        if self.pipeline is not None:
            return self.pipeline.forward(inputs, *others)
        (model,) = self.stages.values()
        output: Tensor = model(inputs, *others)
        return output

    def _loss(self, loss_sum: Tensor) -> Tensor:
        """Return the loss of a micro batch's backward pass, from the sum of its losses."""
        self._loss_sum += loss_sum.detach()
        return self._mean(loss_sum, self._scale)

    @property
    def _scale(self) -> float:
        """The factor on a sum over the global batch in the backward pass: FSDP averages over its ranks."""
        ranks = self.config.parallel.cp * self.config.parallel.dp if self.reducer is None else 1
        return ranks * (self.scaling.scale if self.scaling is not None else 1.0)

    def _finish_gradients(self) -> Tensor:
        """Undo the loss scale and clip; return the norm before clipping."""
        if self.reducer is not None:
            self.reducer.finish()
        grads = gradients.fill(
            [p for group in self.optimizer.param_groups for p in group["params"]]
        )
        if self.scaling is not None:
            gradients.scale(grads, 1 / self.scaling.scale)
        # Each replica has the whole gradient, and all have the same.
        compute_norm = gradients.global_norm if self.reducer is None else gradients.local_norm
        norm = compute_norm(grads)  # on the host if they are offloaded
        limit = self.config.optimizer.clip_norm
        # On CPUs, losses of different layouts differ three times as much after 120 steps if the update clips.
        in_update = (
            limit is not None and norm.is_cuda and clip_in_update(self.optimizer, norm, limit)
        )
        if limit is not None and not in_update:
            gradients.clip(grads, norm, limit)
        return norm.to(self.device)

    def _make_masters(self) -> MasterWeights | None:
        """Create master weights in a single process, in which FSDP2 does not cast the weights."""
        precision = self.config.precision
        if self.layout.data is not None or precision.compute == precision.params:
            return None
        (model,) = self.stages.values()
        return MasterWeights(
            model.named_parameters(), data_parallel.TORCH_DTYPES[precision.compute]
        )

    def _after_forward(self) -> None:
        for stage in self.stages.values():
            data_parallel.reshard(stage)

    def _make_reducer(self) -> GradientReducer | None:
        if self.layout.data is None or not is_replicated(self.config):
            return None
        group = self.layout.data.get_group("dp_replicate")
        return GradientReducer([p for _, p in self.parameters()], group)

    def _make_pipeline(self) -> Pipeline | None:
        if self.layout.pipeline is None:
            return None
        parallel, train = self.config.parallel, self.config.train
        shards = next(iter(self.stages.values())).sequence_shards
        seq = train.seq_len // parallel.cp // shards
        boundary = Boundary(
            (self.config.train.micro_batch, seq, self.config.model.hidden),
            data_parallel.TORCH_DTYPES[self.config.precision.compute],
            self.device,
        )
        return Pipeline(
            self.stages,
            parallel,
            self.layout.pipeline,
            boundary,
            self._loss,
        )


@cache
def _replica_ranks(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[int, ...]:
    """Return the ranks that hold the same shard as this one of a tensor with these placements."""
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    axes = zip(coordinates, placements, strict=True)
    index = tuple(slice(None) if placement.is_replicate() else at for at, placement in axes)
    return tuple(mesh.mesh[index].flatten().tolist())


def build_stages(
    config: ResolvedConfig, layout: Layout, device: torch.device
) -> dict[int, Transformer]:
    """Build this rank's stages of the model with their initial weights, by number; never whole if sharded."""
    parallel = config.parallel
    local_stages = stages_of(parallel, layout.coordinates.pp)
    stages = {}
    for number in local_stages:
        with torch.device("meta"):
            stage = make_stage(config, number)
        stage.to(data_parallel.TORCH_DTYPES[config.precision.params])
        if config.precision.fp8:
            float8.apply(stage, config.precision.fp8_recipe)
        parallelize(stage, config, layout)
        if layout.data is None:  # FSDP2 casts what it gathers
            cast_frozen(stage, data_parallel.TORCH_DTYPES[config.precision.compute])
        if config.lora.base == "nf4":
            nf4.quantize(stage, data_parallel.TORCH_DTYPES[config.precision.compute], device)
        if config.offloads:
            stage.materialize(torch.device("cpu"))
            stage.reset_buffers(device)
        else:
            stage.materialize(device)
        _fill_initial(stage, config, device)
        stages[number] = stage
    return stages


def _fill_initial(stage: Transformer, config: ResolvedConfig, device: torch.device) -> None:
    # then everything but adapters, or a head of classes, is loaded
    is_pretrained = config.model.init_from is not None and config.train.objective != "classify"
    if not is_pretrained or config.lora.rank:
        fill(stage, stage.initializer(config.train.seed, device), adapters_only=is_pretrained)
        lora.fill_magnitudes(dict(stage.named_parameters()))
