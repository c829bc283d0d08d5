"""The parts of the native engine before the first step: stages, master weights, pipeline, gradient reducer."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from nanoscale.backends import low_bits
from nanoscale.backends.base import make_stage
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.models import lora
from nanoscale.models.initialization import fill
from nanoscale.models.transformer import Transformer
from nanoscale.parallel.apply import parallelize
from nanoscale.parallel.fsdp import TORCH_DTYPES
from nanoscale.parallel.mesh import Layout
from nanoscale.parallel.pipeline import Pipeline, stages_of


def build_stages(
    config: ResolvedConfig, layout: Layout, device: torch.device
) -> dict[int, Transformer]:
    """Build this rank's stages of the model with their initial weights, by number; never whole if sharded."""
    stages, compute_dtype = {}, TORCH_DTYPES[config.precision.compute]
    for number in stages_of(config.parallel, layout.coordinates.pp):
        with torch.device("meta"):
            stage = make_stage(config, number)
        # Adapters are attached later, in the dtype of trained weights.
        stage.to(compute_dtype if config.lora.rank else TORCH_DTYPES[config.precision.params])
        if config.precision.fp8:
            emulate = device.type == "cpu"
            low_bits.use_float8(stage, config.precision.fp8_recipe, config.parallel.tp, emulate)
        if config.lora.base == "nf4":
            low_bits.prepare_nf4(stage)
        parallelize(stage, config, layout)
        if config.lora.base == "nf4":
            low_bits.quantize_nf4(stage, compute_dtype, device)
        # Memory is taken only now, for this rank's shards.
        if config.offloads:
            stage.materialize(torch.device("cpu"))
            stage.reset_buffers(device)
        else:
            stage.materialize(device)
        fill_initial(stage, config, device)
        stages[number] = stage
    return stages


def fill_initial(stage: Transformer, config: ResolvedConfig, device: torch.device) -> None:
    """Draw the initial weights of a stage, except weights that are loaded from files."""
    # then everything but adapters, or a head of classes, is loaded
    is_pretrained = config.model.init_from is not None and config.train.objective != "classify"
    if not is_pretrained or config.lora.rank:
        fill(stage, stage.initializer(config.train.seed, device), adapters_only=is_pretrained)
        lora.fill_magnitudes(dict(stage.named_parameters()))


def make_pipeline(
    stages: dict[int, Transformer],
    config: ResolvedConfig,
    layout: Layout,
    device: torch.device,
    loss: Callable[[Tensor], Tensor],
) -> Pipeline | None:
    """Create the pipeline of stages; None without one."""
    if layout.pipeline is None:
        return None
    dtype = TORCH_DTYPES[config.precision.compute]
    stream = torch.empty(0, config.model.hidden, dtype=dtype, device=device)
    return Pipeline(stages, config.parallel, layout.pipeline, stream, loss)


class MasterWeights:
    """fp32 master weights of a model that computes in bf16 or fp16."""

    def __init__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], compute_dtype: torch.dtype
    ) -> None:
        """Cast trained parameters to `compute_dtype`, and keep their values as master weights."""
        self.parameters: list[tuple[str, nn.Parameter]] = []
        """The master weights by the names of their parameters, and frozen parameters themselves."""
        self._masters: list[Tensor] = []
        self._compute_copy: list[Tensor] = []
        for name, parameter in named_parameters:
            master = parameter
            if parameter.requires_grad:
                master = nn.Parameter(parameter.data)
                parameter.register_post_accumulate_grad_hook(partial(_move_gradient, master))
                self._masters.append(master)
                self._compute_copy.append(parameter)
                parameter.data = parameter.data.to(compute_dtype)
            self.parameters.append((name, master))

    @torch.no_grad()
    def update_compute_copy(self) -> None:
        """Copy the master weights to the compute copy."""
        torch._foreach_copy_(self._compute_copy, self._masters)


@torch.no_grad()
def _move_gradient(master: nn.Parameter, parameter: Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad += gradient
