"""The native backend: PyTorch's own parts, from micro batches to one optimizer update."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nanoscale.backends import construction, gradients
from nanoscale.backends import optimizer as optimizers
from nanoscale.backends.adamw import ScheduleFreeAdamW, update_averages
from nanoscale.backends.base import StepResult
from nanoscale.backends.native_state import NativeState
from nanoscale.backends.qk_clip import QKClip
from nanoscale.config.layout import is_replicated
from nanoscale.config.optimizers import AVERAGE, rounds
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.values.hooks import function
from nanoscale.data.batch import Batch
from nanoscale.models.moe import Experts
from nanoscale.parallel import fsdp
from nanoscale.parallel.ddp import GradientReducer
from nanoscale.parallel.mesh import make_layout


class NativeEngine(NativeState):
    """A model, its layout and its optimizer."""

    def __init__(self, config: ResolvedConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self.layout = layout = make_layout(config, device.type)
        self.coordinates = layout.coordinates
        self.stages = construction.build_stages(config, layout, device)
        # Masters come before the reducer and the optimizer, which work on them in place of the parameters.
        self.masters, precision = None, config.precision
        if layout.data is None and precision.compute != precision.params:  # FSDP2 casts otherwise
            (model,) = self.stages.values()
            compute_dtype = fsdp.TORCH_DTYPES[precision.compute]
            self.masters = construction.MasterWeights(model.named_parameters(), compute_dtype)
        self.balance = self._make_balance()
        if config.optimizer.qk_clip is not None:
            stages = list(self.stages.values())
            self.qk_clip = QKClip(config, self.coordinates.tp, stages, device)
        modules = (it for stage in self.stages.values() for it in stage.modules())
        self.experts = [it for it in modules if isinstance(it, Experts)]
        self.pipeline = construction.make_pipeline(self.stages, config, layout, device, self._loss)
        named = [pair for stage in self.stages.values() for pair in stage.named_parameters()]
        self.named = named if self.masters is None else self.masters.parameters
        trained = [(name, parameter) for name, parameter in self.named if parameter.requires_grad]
        self.trained = trained
        self.reducer: GradientReducer | None = None
        """The reducer of the gradients of replicas; None if FSDP2 reduces them, or nothing does."""
        if layout.data is not None and is_replicated(config):
            group = layout.data.get_group("dp_replicate")
            self.reducer = GradientReducer([p for _, p in trained], group)
        self.tied: gradients.TiedGradient | None = None
        """The sum of the gradients of a tied embedding; None if this rank shares none with another stage."""
        if layout.ends is not None:
            tied_name = next(iter(self.stages.values())).tied_name
            self.tied = gradients.TiedGradient(dict(trained)[tied_name], layout.ends)
        rounded = rounds(config.optimizer, config.precision)
        own = function(config, "optimizer") if config.optimizer.name == "hooks" else None
        self.optimizer = optimizers.make_optimizer(
            trained, config.optimizer, rounded=rounded, build=own
        )
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.filled: list[nn.Parameter] = []  # had no gradient in the last step, and got zeros
        self.skipped_steps = torch.zeros((), device=device)
        self._hooks: list[Callable[[], None]] = []

    def train_step(self, micro_batches: list[Batch], lr: float, logged: bool = False) -> StepResult:
        # Before the first backward pass, which divides by the tokens of the whole global batch.
        self._begin_step(micro_batches, logged)
        self._loss_sum.zero_()
        if self.balance is not None:
            # Each rank of tp has the loss of the whole sequence, and their gradients add up.
            sequences = sum(map(len, micro_batches)) * self.config.parallel.dp
            sequence_weight = self._scale / sequences
            self.balance.begin_step(sequence_weight / self.config.parallel.expert_tp)
        if self.pipeline is not None:
            # The schedule decides when each micro batch runs, so the pipeline gets all of them at once.
            local = self._local_batch(Batch.concatenate(micro_batches))
            self.pipeline.step(*local, len(micro_batches))
        else:
            self._accumulate(micro_batches)
        grad_norm = self._finish_gradients()
        # Decided by the norm of the whole model, so that all ranks skip the same steps: on the device, or on
        # the host where the loss scale or the update needs it.
        skipped, found_inf = False, None
        if self.scaling is not None:
            skipped = not self.scaling.update(bool(grad_norm.isfinite()))
        elif not optimizers.skips_on_device(self.optimizer):
            skipped = not bool(grad_norm.isfinite())
            self.skipped_steps += skipped
        else:
            found_inf = (~grad_norm.isfinite()).float()
            self.skipped_steps += found_inf
            on_optimizer: Any = self.optimizer
            on_optimizer.found_inf = found_inf.to(
                self.optimizer.param_groups[0]["params"][0].device
            )
        if not skipped:
            optimizers.set_lr(self.optimizer, lr)
            for hook in self._hooks:
                hook()
            self.optimizer.step()
            # Clipped before the average is taken and the copy is made: both hold the clipped weights.
            if self.qk_clip is not None:
                self.qk_clip.end_step(self._copies(), found_inf)
            if self.config.optimizer.ema_decay is not None:
                update_averages(self.optimizer, self.config.optimizer.ema_decay)
            self._update_compute_copy()
        elif self.qk_clip is not None:  # a skipped step has scores that are not finite
            self.qk_clip.end_step([])
        for experts in self.experts:
            experts.kept = []  # of the former weights
        self._fill_state()  # of a skipped step
        self.optimizer.zero_grad()
        if self.balance is not None:
            taken = not skipped if found_inf is None else (1 - found_inf).to(torch.int64)
            counts_tokens = self._counts_losses or self.config.parallel.ep_over_tp
            self.balance.end_step(counts_tokens, taken)
        return StepResult(self._loss_sum * self._counts_losses, self._tokens, grad_norm, skipped)

    def figures(self) -> dict[str, float]:
        skipped = self.skipped_steps.item()
        return super().figures() | ({"skipped_steps": skipped} if skipped else {})

    def _copies(self) -> list[tuple[str, Tensor]]:
        """List the weights, and the averages that the next update computes new weights from, by name."""
        named: list[tuple[str, Tensor]] = [*self.parameters()]
        if isinstance(self.optimizer, ScheduleFreeAdamW):
            named += [(name, self.optimizer.state[p][AVERAGE]) for name, p in self.parameters()]
        return named

    def _accumulate(self, micro_batches: list[Batch]) -> None:
        (model,) = self.stages.values()
        for i, batch in enumerate(micro_batches):
            # Gradients add up on each rank, and are reduced once, in the backward pass of the last one.
            last = i == len(micro_batches) - 1
            fsdp.begin_micro_batch(model, self.config.zero.stage, last)
            if self.reducer is not None:
                self.reducer.begin_micro_batch(last)
            inputs, targets, documents, references = self._local_batch(batch)
            loss_sum = model(inputs, documents, targets, references)
            self._loss(loss_sum).backward()

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
        self.before_norm()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.filled = [p for p in parameters if p.grad is None]
        if self.reducer is not None:  # before the norm, which is that of the reduced gradients
            self.filled = self.reducer.finish()
        grads = counted = gradients.fill(parameters)
        if self.tied is not None:
            counted = self.tied.add_up(grads)
        # Unscaled before the norm is taken: clip_norm and the logged norm mean the true gradients.
        if self.scaling is not None:
            gradients.scale(grads, 1 / self.scaling.scale)
        # Each replica has the whole gradient, and all have the same.
        compute_norm = gradients.global_norm if self.reducer is None else gradients.local_norm
        norm = compute_norm(counted)  # on the host if they are offloaded
        limit = self.config.optimizer.clip_norm
        # On CPUs, losses of different layouts differ three times as much after 120 steps if the update clips.
        in_update = (
            limit is not None
            and norm.is_cuda
            and optimizers.clip_in_update(self.optimizer, norm, limit)
        )
        if limit is not None and not in_update:
            gradients.clip(grads, norm, limit)
        return norm.to(self.device)

    def _forward(self, inputs: Tensor, *others: Any) -> Tensor | None:
        if self.pipeline is not None:
            return self.pipeline.forward(inputs, *others)
        (model,) = self.stages.values()
        return model(inputs, *others)

    def _after_forward(self) -> None:
        for stage in self.stages.values():
            fsdp.reshard(stage)

    def before_update(self, hook: Callable[[], None]) -> None:
        self._hooks.append(hook)

    def _torch_optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer
