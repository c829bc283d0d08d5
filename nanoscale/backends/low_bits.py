"""Matrix products in 8 bits or 4, with dynamic scales, and frozen weights in 4 bits, by torchao.

| recipe | scales | types | gradients of weights |
|---|---|---|---|
| tensorwise | one per matrix, or per rank's shard of it | forward e4m3, gradients e5m2 | in 8 bits |
| rowwise | one per row, powers of two | e4m3 | in 8 bits |
| rowwise_with_gw_hp | as rowwise | e4m3 | in the compute dtype |
| mxfp8 | one per 32 numbers that a product sums, powers of two | e4m3 | in 8 bits |
| nvfp4 | one in e4m3 per 16 numbers that a product sums, or 16 x 16 weights | e2m1 | in 4 bits |

An outlier affects the scale of its row only, not the matrix's, so each row-wise recipe is more accurate than
the one before, and slower. GPUs of compute capability 10 apply the scales of mxfp8 within the product. With
tensor parallelism a rank scales its shards: one process computes the same products of whole rows, and shards of
rows have finer scales. Sums over ranks are in the compute dtype. Experts (`models.narrow_experts`) have
row-wise scales with tensorwise, too, do not support rowwise_with_gw_hp, and multiply in mxfp8 with nvfp4.

nvfp4 rounds gradients at random, with exact means, and both operands of a weight's gradient after a Hadamard
transform. The last blocks stay in the compute dtype (`dtypes.narrow_blocks`).

Sources: Micikevicius et al. 2022, arXiv:2209.05433, for the types; torchao's README of `torchao.float8` for the
first recipes; Mishra et al. 2025, arXiv:2506.08027, for mxfp8; NVIDIA 2025, arXiv:2509.25149, for nvfp4.
Weights, optimizer and gradients keep their dtypes. GPUs need compute capability 8.9 and every size of a product
a multiple of 16; mxfp8 needs 10 and 32, nvfp4 10 and 128.

Weights in 4 bits are torchao's NF4Tensor (QLoRA, Dettmers et al. 2023, arXiv:2305.14314, section 3). A product
dequantizes its weights, in the forward and in the backward pass, and keeps no copy of them. It computes with
the tensors in an NF4Tensor, so that torch.compile traces plain operations.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanoscale.config import parameters
from nanoscale.config.dtypes import narrow_blocks
from nanoscale.models.lora import frozen_matrices
from nanoscale.models.moe import Experts
from nanoscale.models.torchao_log import silence_torchao
from nanoscale.models.transformer import Transformer


def use_float8(model: Transformer, recipe: str, tp: int = 1, emulate: bool = False) -> None:
    """Convert the blocks' linear layers to 8-bit products, in place; the head is not converted, as is usual.

    Layers that would be slower in 8 bits are left, unless all would. Call it before anything is sharded or
    wrapped; names of parameters stay. `emulate` rounds to 8 bits and multiplies in the compute dtype, for tests
    on hardware without 8-bit products.
    """
    silence_torchao()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    sizes: dict[int, parameters.Shape] = {}
    for number, block in model.layers.items():
        if int(number) >= narrow_blocks(recipe, model.shape.layers):
            continue
        table = parameters.block(model.shape.of_layer(int(number)))
        for name, module in block.named_modules():
            if isinstance(module, nn.Linear) and module.out_features > 1:  # not a gate of experts
                sizes[id(module)] = table[f"{name}.weight"].local(tp)
            elif isinstance(module, Experts):
                module.recipe = recipe.replace("nvfp4", "mxfp8")
    chosen_ids = [layer for layer, size in sizes.items() if is_faster(recipe, *size)] or [*sizes]
    chosen = [it for it in model.layers.modules() if id(it) in chosen_ids]
    if recipe in ("mxfp8", "nvfp4"):
        to_nvfp4(chosen) if recipe == "nvfp4" else to_mxfp8(chosen, emulate)
        return
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    convert_to_float8_training(
        model.layers, config=config, module_filter_fn=lambda layer, _: id(layer) in chosen_ids
    )


def to_mxfp8(layers: list[Any], emulate: bool) -> None:
    """Let linear layers multiply in MXFP8, in place."""
    silence_torchao()
    from torchao.prototype.moe_training import mxfp8_linear

    for layer in layers:
        layer.__class__ = mxfp8_linear.MXFP8Linear
        choices = mxfp8_linear.KernelPreference
        layer.kernel_preference = choices.EMULATED if emulate else choices.AUTO
        layer.scale_calculation_mode = mxfp8_linear.ScaleCalculationMode.RCEIL
        layer.wgrad_with_hp = False


def to_nvfp4(layers: list[Any]) -> None:
    """Let linear layers multiply in NVFP4, in place; Inductor's product of torch 2.13 refuses their scales."""
    silence_torchao()
    from torch._inductor.lowering import make_fallback
    from torchao.prototype.moe_training.nvfp4_training import nvfp4_linear

    make_fallback(torch.ops.aten._scaled_mm_v2.default)
    for layer in layers:
        layer.__class__, layer.function = NVFP4Linear, nvfp4_linear.nvfp4_mm_triton


_SIGNS = (1, -1, -1, 1, 1, 1, -1, 1, -1, -1, -1, 1, -1, 1, 1, -1)  # random, as in the paper


class NVFP4Linear(nn.Linear):
    """A linear layer that multiplies in NVFP4."""

    function: Any

    def forward(self, x: Tensor) -> Tensor:
        key = x.new_zeros(1, dtype=torch.int64)  # positions in its stream of numbers are drawn
        result: Tensor = self.function.apply(x, self.weight, self.bias, key, _SIGNS)
        return result


def is_faster(recipe: str, outputs: int, inputs: int) -> bool:
    """True if products with a matrix `[outputs, inputs]` are faster in 8 bits than in bf16, casts included.

    Source: torchao's measurements on an H100 with 16,384 tokens (README of `torchao.float8`, "Performance").
    The bounds of mxfp8 and nvfp4 are assumed: mxfp8's products have the speed of tensor-wise ones.
    """
    if recipe in ("tensorwise", "mxfp8", "nvfp4"):
        return outputs > 1024 or inputs > 4096
    return outputs > 2048 and inputs > 1024 and (outputs > 4096 or inputs > 2048)


_BLOCK, _SCALES = 64, 256
"""Weights with a scale of their own, and scales with one, as in the paper."""


class Quantized(nn.Linear):
    """A linear layer with a frozen weight in 4 bits."""

    parts: tuple[Tensor, ...]
    """Codes, their scales, the factors and the mean of scales, and the values of codes."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Product.apply(x, *self.parts, self.in_features)
        return result if self.bias is None else result + self.bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weight: Any) -> Tensor:
        ctx.save_for_backward(*weight[:-1])
        ctx.columns = weight[-1]
        return F.linear(x, dequantize(*weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad @ dequantize(*(*ctx.saved_tensors, ctx.columns)), *[None] * 6


def dequantize(
    codes: Tensor, scales: Tensor, factors: Tensor, mean: Tensor, values: Tensor, columns: int
) -> Tensor:
    """Return the matrix of two codes a byte, whose scales are in 8 bits, as torchao's NF4Tensor computes it."""
    scale = (scales.view(len(factors), -1) / factors.unsqueeze(1)).flatten().to(values.dtype) + mean
    pairs = values[torch.stack((codes >> 4, codes & 15), -1).int()]
    return (pairs.view(len(scale), -1) * scale.unsqueeze(1)).view(-1, columns)


def _read_parts(block: nn.Module, _inputs: object) -> None:
    for layer in block.modules():
        if isinstance(layer, Quantized):
            it: Any = layer.weight
            layer.parts = (
                it.quantized_data, it.quantized_scalers, it.quantization_factor, it.scaler_mean, it.nf4
            )  # fmt: skip


def prepare_nf4(model: Transformer) -> None:
    """Let the blocks' linear layers compute with weights in 4 bits, in place, before adapters are attached."""
    for layer in frozen_matrices(model):
        layer.__class__ = Quantized
    for block in model.layers.values():
        block.register_forward_pre_hook(_read_parts)


def quantize_nf4(model: Transformer, dtype: torch.dtype, device: torch.device) -> None:
    """Give the blocks' linear layers, on the meta device, weights in 4 bits for products in `dtype`, in place.

    Whatever is copied into such a weight is quantized, so a loaded model is never whole in memory. FSDP2
    ignores these weights (`parallel.fsdp`): each rank has them whole, in every stage of ZeRO.
    """
    for layer in frozen_matrices(model):
        zeros = torch.zeros(layer.weight.shape, dtype=dtype, device=device)
        layer.weight = nn.Parameter(to_nf4(zeros), requires_grad=False)


def to_nf4(weight: Tensor) -> Tensor:
    """Return a matrix in 4 bits, which has its dtype in products."""
    silence_torchao()
    try:
        from torchao.quantization import to_nf4 as convert
    except ImportError:  # before torchao 0.18
        from torchao.dtypes.nf4tensor import to_nf4 as convert
    scales = math.gcd(_SCALES, weight.numel() // _BLOCK)
    return convert(weight, _BLOCK, scales)
