"""Adapters of linear layers (LoRA): W becomes V = W + scale · B·A, and W is frozen. Code for one device.

B begins at 0, so that the first step is the base model's. Hu et al. 2021, arXiv:2106.09685, section 4.1. With
`lora.dora` row i becomes m[i] · V[i] / ‖V[i]‖. The magnitudes m are trained and begin as the norms of W; the
norms of V are constants in the backward pass. Liu et al. 2024, arXiv:2402.09353, sections 4.1 and 4.3.

Shapes: W `[out, in]`, A `[rank, in]`, B `[out, rank]`, m `[out]`.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from nanoscale.config import model_math
from nanoscale.config.schema import Lora
from nanoscale.models.initialization import ADAPTER, local_region
from nanoscale.models.transformer import Transformer

MAGNITUDE = f"{ADAPTER}magnitude"


class Adapter(nn.Module):
    """A low-rank adapter, `[…, in]` to `[…, out]`; its output is added to a layer's result."""

    def __init__(self, layer: nn.Linear, settings: Lora, dtype: torch.dtype | None) -> None:
        super().__init__()
        dtype, device, rank = dtype or layer.weight.dtype, layer.weight.device, settings.rank
        self.a = nn.Parameter(torch.empty(rank, layer.in_features, dtype=dtype, device=device))
        self.b = nn.Parameter(torch.empty(layer.out_features, rank, dtype=dtype, device=device))
        magnitude = torch.empty(layer.out_features, dtype=dtype, device=device)
        self.magnitude: Tensor | None
        self.register_parameter("magnitude", nn.Parameter(magnitude) if settings.dora else None)
        self.norm: Tensor | None = None
        """The norms of the rows of V on this rank, with DoRA, as of the block's last call."""
        self.bias: Tensor | None = None
        """The bias in the layer's result on this rank, with DoRA, which does not scale it."""
        self.adds_bias = True
        self.sum_over_ranks: Callable[[Tensor], Tensor] = lambda squares: squares
        """A sum over the ranks that have the other columns of W."""
        self.scale = settings.scale

    def forward(self, x: Tensor, frozen: Callable[[Tensor], Tensor]) -> Tensor:
        delta = F.linear(F.linear(x, self.a) * self.scale, self.b)
        result = frozen(x) + delta
        if self.magnitude is None or self.norm is None:
            return result
        gain = self.magnitude / self.norm
        return result * gain if self.bias is None else result * gain + self.bias * (1 - gain)


def attach(model: Transformer, settings: Lora, dtype: torch.dtype | None = None) -> None:
    """Freeze a stage and give its layers adapters without values, in place; names of parameters stay.

    Args:
        dtype: the adapters' dtype; None: as their layers' weights.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer in adapted_layers(model, settings):
        layer.adapter = Adapter(layer, settings, dtype)
        layer.forward = _adapted(layer.adapter, layer.forward)  # type: ignore[assignment, method-assign]
    for block in model.layers.values() if settings.dora else ():
        # After FSDP2 has gathered the weights, and outside of the regions that activation checkpointing repeats
        # and torch.compile traces.
        block.register_forward_pre_hook(_update_norms)


def frozen_matrices(model: Transformer) -> Iterator[nn.Linear]:
    """Yield the layers of the blocks whose weights are in 4 bits with `lora.base=nf4`."""
    for block in model.layers.values():
        yield from (layer for layer in block.modules() if isinstance(layer, nn.Linear))


def adapted_layers(model: Transformer, settings: Lora) -> Iterator[nn.Linear]:
    """Yield the layers that have adapters, or will have them."""
    for block in model.layers.values():
        if model.shape.source != "own":
            yield from linear_layers(block, settings.targets).values()
            continue
        for name in model_math.adapted_layers(model.shape, settings).values():
            layer = block.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            yield layer


def linear_layers(block: nn.Module, targets: Sequence[str] | None) -> dict[str, nn.Linear]:
    """Return the linear layers of a block of transformers by name, all or those whose last name is chosen."""
    return {
        name: module
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear)
        and (targets is None or name.rpartition(".")[2] in targets)
        # Classes of these names return several tensors, or products of parts.
        and not any(kind in type(module).__name__ for kind in ("Router", "Grouped"))
    }


def _adapted(adapter: Adapter, frozen: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    # The compiler would compile every block again for a `partial`, whose identity it checks.
    return lambda x: adapter(x, frozen)


@torch.no_grad()
def _update_norms(block: nn.Module, _inputs: object) -> None:
    for layer in block.modules():
        adapter = getattr(layer, "adapter", None)
        if isinstance(layer, nn.Linear) and isinstance(adapter, Adapter):
            weight, a, b = map(_local, (layer.weight, adapter.a, adapter.b))
            squares = adapter.sum_over_ranks(_squares(weight, a, b, adapter.scale))
            adapter.norm = squares.sqrt().to(weight.dtype)
            if layer.bias is not None and adapter.adds_bias:
                adapter.bias = _local(layer.bias).detach()


def _squares(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return ‖V[i]‖² by row in fp32 or better, without V: ‖w‖² + 2·scale·b·(A·w) + scale²·b·(A·Aᵀ)·b."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    products = (a @ weight.T).to(dtype)
    a, b = a.to(dtype), scale * b.to(dtype)
    change = 2 * products.T + b @ (a @ a.T)
    return torch.linalg.vector_norm(weight, dim=1, dtype=dtype).square() + (b * change).sum(1)


@torch.no_grad()
def fill_magnitudes(state: dict[str, Tensor]) -> None:
    """Set the magnitudes among named parameters to the norms of the rows of their layers' weights, in place."""
    for name, magnitude in state.items():
        if name.endswith(MAGNITUDE):
            weight = state[f"{name.removesuffix(MAGNITUDE)}.weight"]
            squares = _local(weight).double().square().sum(1)
            if isinstance(weight, DTensor):
                for axis, placement in enumerate(weight.placements):
                    if placement.is_shard(1):
                        dist.all_reduce(squares, group=weight.device_mesh.get_group(axis))
            # FSDP2 may shard the magnitudes and not the weight. This rank then has a part of the weight's rows.
            (start, count), (first, _) = _rows(magnitude), _rows(weight)
            _local(magnitude).copy_(squares[start - first : start - first + count].sqrt())


def _rows(tensor: Tensor) -> tuple[int, int]:
    """Return the first row of a tensor on this rank and the number of its rows."""
    if not isinstance(tensor, DTensor):
        return 0, len(tensor)
    offsets, sizes = local_region(tensor)
    return offsets[0], sizes[0]


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
