"""The DeepSpeed backend: the same model, data, optimizer and loss scale, driven by DeepSpeed's engine."""

from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanoscale.backends import gradients
from nanoscale.backends.base import Engine, StepResult, make_stage
from nanoscale.backends.deepspeed import model_parallel, shard_ranges
from nanoscale.backends.deepspeed.import_library import load_deepspeed
from nanoscale.backends.deepspeed.model_parallel import Groups
from nanoscale.backends.optimizer import NamedParameters, initial_state, make_optimizer, set_lr
from nanoscale.checkpoint.flat import Box, FlatShard
from nanoscale.checkpoint.hf import load
from nanoscale.checkpoint.staging import State
from nanoscale.config.deepspeed import deepspeed_settings
from nanoscale.config.layout import coordinates
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.data.batch import Batch
from nanoscale.models import lora
from nanoscale.models.transformer import Transformer
from nanoscale.parallel.apply import prepare_blocks
from nanoscale.parallel.mesh import context_group


class DeepSpeedEngine(Engine):
    """DeepSpeed's engine around our model, or around one stage of it."""

    def __init__(self, config: ResolvedConfig, device: torch.device) -> None:
        super().__init__(config, device)
        library = load_deepspeed(device)
        self.zero_stage = config.zero.stage
        self.coordinates = coordinates(dist.get_rank(), config.parallel)
        self.groups = Groups(config, device.type)
        self.split_dims: model_parallel.SplitDims = {}
        self.pipelined = config.parallel.pp > 1
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._norm = torch.zeros((), device=device)
        self._micro_batch_queue: deque[model_parallel.StageInputs] = deque()
        settings = deepspeed_settings(config)
        self.model = self._build(library, settings)
        self.stages = {self.coordinates.pp: self.model}
        self.engine: Any = library.initialize(
            model=self._pipeline() if self.pipelined else self.model,
            optimizer=make_optimizer(self.parameters(), config.optimizer),
            mpu=None if self.pipelined else self.groups,
            config=settings,
            dist_init_required=False,
        )[0]
        if self.zero_stage == 0:
            self.engine.clip_fp32_gradients = self._clip
        if self.pipelined:
            from deepspeed.utils.timer import NoopTimer

            self.engine.timers = NoopTimer()  # its own timers record every step forever
        self.model.reset_buffers(device)  # DeepSpeed casts them like parameters
        self.balance = self._make_balance()
        self.shards = shard_ranges.find_shards(
            self.parameters(), self.engine.optimizer, self.zero_stage
        )
        # then all weights but adapters, or a head of classes, are loaded
        is_pretrained = config.model.init_from is not None and config.train.objective != "classify"
        if not is_pretrained or config.lora.rank:
            self._initialize(frozen=not is_pretrained)

    def parameters(self) -> NamedParameters:
        """List the trained parameters."""
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def train_step(self, micro_batches: list[Batch], lr: float, logged: bool = False) -> StepResult:
        self._begin_step(micro_batches, logged)
        self._loss_sum.zero_()
        set_lr(self.engine.optimizer, lr)
        self._set_scale()
        self.before_norm()  # the engine's step computes it
        batches = [self._local_batch(batch) for batch in micro_batches]
        if self.pipelined:
            self._micro_batch_queue.extend(
                (documents, targets, references) for _, targets, documents, references in batches
            )
            self.engine.train_batch((inputs, targets) for inputs, targets, *_ in batches)
        else:
            for inputs, targets, documents, references in batches:
                loss_sum = self.engine(inputs, documents, targets, references)
                self.engine.backward(self._backward_loss(loss_sum))
                self.engine.step()
        norm = self._norm
        if self.zero_stage > 0:
            norm = torch.as_tensor(self.engine.get_global_grad_norm(), device=self.device)
        skipped = self.scaling is not None and not self.scaling.update(bool(norm.isfinite()))
        self._fill_state()  # of a skipped step, and of parameters without a gradient
        if self.balance is not None:
            self.balance.end_step(self._counts_losses, not skipped)
        return StepResult(self._loss_sum * self._counts_losses, self._tokens, norm, skipped)

    def state(self) -> State:
        state: State = {}
        for shards in shard_ranges.group_by_tensor(self.shards):
            with shard_ranges.swapped_in(shards, self.engine.optimizer) as was_swapped:
                for name, value in self._tensors(shards):
                    state[name] = _copied(value) if was_swapped else value
        return state | self._small_state()

    def frozen_state(self) -> State:
        frozen = [(n, p) for n, p in self.model.named_parameters() if not p.requires_grad]
        if self.zero_stage < 3:
            return {f"model.{name}": parameter for name, parameter in frozen}
        local_shards = (
            shard_ranges.local_shard(parameter, self.engine.optimizer) for _, parameter in frozen
        )
        return {
            f"model.{name}": FlatShard(local, tuple(self._window(name)[0]), start)
            for (name, _), (start, local) in zip(frozen, local_shards, strict=True)
        }

    def replicated(self) -> Iterator[tuple[str, tuple[int, ...], list[Tensor]]]:
        if self.zero_stage < 3:  # stages 1 and 2 gather the weights after each update
            ranks = tuple(dist.get_process_group_ranks(self.groups.data))
            for name, parameter in self.model.named_parameters():
                yield name, ranks, [parameter]

    def empty_state(self) -> State:
        self._fill_state()
        return self.state()

    def _fill_state(self) -> None:
        """Give every parameter that has no state the one of its first update."""
        optimizer = self._torch_optimizer()
        for shards in shard_ranges.group_by_tensor(self.shards):
            flat = shards[0].flat
            if not optimizer.state[flat]:
                with shard_ranges.swapped_in(shards, self.engine.optimizer):
                    optimizer.state[flat].update(initial_state(optimizer, flat))

    def load_state(self, state: State) -> None:
        for shards in shard_ranges.group_by_tensor(self.shards):
            with shard_ranges.swapped_in(shards, self.engine.optimizer) as was_swapped:
                if was_swapped:
                    for name, value in self._tensors(shards):
                        _local(value).copy_(_local(state[name]))
        shard_ranges.refresh_weights(self.engine.optimizer, self.zero_stage, self.shards)

    def _tensors(self, shards: list[shard_ranges.ShardRange]) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint's tensors of some shards."""
        optimizer = self._torch_optimizer()
        for shard in shards:
            yield f"model.{shard.name}", self._shard(shard, shard.master)
            for name, moment in shard.moments(optimizer.state):
                value = moment if moment.ndim == 0 else self._shard(shard, moment)
                yield f"optimizer.{shard.name}.{name}", value

    def _build(self, library: Any, settings: dict[str, Any]) -> Transformer:
        """Build this rank's stage without values; stage 3 shards every module as soon as it is created."""
        parallel = self.config.parallel
        shards_on_creation = self.zero_stage == 3 and parallel.tp == 1
        context = (
            library.zero.Init(config_dict_or_path=settings) if shards_on_creation else nullcontext()
        )
        with context, torch.device(self.device if shards_on_creation else "meta"):
            model = make_stage(self.config, self.coordinates.pp, real=shards_on_creation)
            if self.config.lora.rank:
                lora.attach(model, self.config.lora)
        if parallel.tp > 1:
            self.split_dims = model_parallel.divide(model, self.groups.tensor)
        sequence = context_group(self.config, self.device.type)
        prepare_blocks(model, self.config, sequence, self.coordinates.cp)
        if not shards_on_creation:
            model_parallel.materialize(model, self.device)
        return model

    def _pipeline(self) -> Any:
        return model_parallel.make_module(
            self.model,
            self.coordinates.pp,
            self.config.parallel,
            self._backward_loss,
            self._micro_batch_queue,
        )

    @torch.no_grad()
    def _initialize(self, frozen: bool) -> None:
        """Write the initial weights, which depend on names and shapes alone, to the tensors that are updated.

        With `frozen`, also write the weights that are not updated.
        """
        draw = self.model.initializer(self.config.train.seed, self.device)
        for shards in shard_ranges.group_by_tensor(self.shards):
            with shard_ranges.swapped_in(shards, self.engine.optimizer):
                for shard in shards:
                    shape, window = self._window(shard.name)
                    initial = draw(shard.name, shape)
                    for axis, offset in enumerate(window.offsets):
                        initial = initial.narrow(axis, offset, window.sizes[axis])
                    end = shard.start + shard.numel
                    shard.master.copy_(initial.reshape(-1)[shard.start : end])
        for name, target in self.frozen_state().items() if frozen else ():
            whole = draw(name.removeprefix("model."), target.shape)
            for box, memory in load.boxes(target):
                ends = zip(box.offsets, box.sizes, strict=True)
                memory.copy_(whole[tuple(slice(at, at + size) for at, size in ends)])
        shard_ranges.refresh_weights(self.engine.optimizer, self.zero_stage, self.shards)

    def _shard(self, shard: shard_ranges.ShardRange, local: Tensor) -> FlatShard:
        shape, window = self._window(shard.name)
        return FlatShard(local, tuple(shape), shard.start, window)

    def _window(self, name: str) -> tuple[torch.Size, Box]:
        """Return the shape of a whole parameter, and this rank of tp's box of it."""
        parameter = self.model.get_parameter(name)
        sizes = list(getattr(parameter, "ds_shape", parameter.shape))
        offsets, full_sizes = [0] * len(sizes), list(sizes)
        axis = self.split_dims.get(name)
        if axis is not None:
            offsets[axis] = sizes[axis] * self.coordinates.tp
            full_sizes[axis] = sizes[axis] * self.config.parallel.tp
        return torch.Size(full_sizes), Box(tuple(offsets), tuple(sizes))

    def _torch_optimizer(self) -> torch.optim.Optimizer:
        """Return PyTorch's optimizer, inside DeepSpeed's."""
        return self.engine.basic_optimizer

    def _forward(self, inputs: Tensor, *others: Any) -> Tensor | None:
        if self.pipelined:
            return model_parallel.forward(self.model, inputs, others, self.groups.pipeline)
        return self.engine(inputs, *others)

    def _backward_loss(self, loss_sum: Tensor) -> Tensor:
        """Return a micro batch's loss, scaled for DeepSpeed's mean over micro batches and ranks."""
        self._loss_sum += loss_sum.detach()
        divisor = self.config.accumulation * self.config.parallel.dp * self.config.parallel.cp
        return self._mean(loss_sum, divisor)

    def _set_scale(self) -> None:
        """Set this step's loss scale in DeepSpeed; it skips the step on an overflow."""
        if self.scaling is None:
            return
        if self.zero_stage == 0:  # PyTorch's scaler, which would adapt by itself
            scaler_state = {"scale": self.scaling.scale, "_growth_tracker": 0, "growth_interval": 2}
            factors = {"growth_factor": 2.0, "backoff_factor": 0.5}
            self.engine.torch_autocast_z0_gradscaler.load_state_dict(scaler_state | factors)
        else:
            self.engine.optimizer.loss_scale = self.scaling.scale

    def _clip(self) -> None:
        """Clip before the update in stage 0: DeepSpeed would lose the norm, and clip by one stage's."""
        grads = [(name, p.grad) for name, p in self.parameters() if p.grad is not None]
        # Parameters that tp does not divide are the same on all its ranks, and count once.
        counted = [
            grad for name, grad in grads if self.coordinates.tp == 0 or name in self.split_dims
        ]
        square = gradients.square_norm(counted)
        dist.all_reduce(square)
        self._norm = (square / self.groups.data.size()).sqrt()
        if self.config.optimizer.clip_norm is not None:
            gradients.clip([grad for _, grad in grads], self._norm, self.config.optimizer.clip_norm)


def _copied(value: Tensor) -> Tensor:
    if isinstance(value, FlatShard):
        return FlatShard(value.local.clone(), tuple(value.shape), value.start, value.window)
    return value.clone()


def _local(value: Tensor) -> Tensor:
    return value.local if isinstance(value, FlatShard) else value
