"""Frozen weights in 4 bits by torchao's NF4Tensor (QLoRA, Dettmers et al. 2023, arXiv:2305.14314, section 3).

A product dequantizes its weights, in the forward and in the backward pass, and keeps no copy of them. It
computes with the tensors in an NF4Tensor, so that torch.compile traces plain operations.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanoscale.backends.torchao_log import silence_missing_extensions
from nanoscale.models.lora import frozen_matrices
from nanoscale.models.transformer import Transformer

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


def prepare(model: Transformer) -> None:
    """Let the blocks' linear layers compute with weights in 4 bits, in place, before adapters are attached."""
    for layer in frozen_matrices(model):
        layer.__class__ = Quantized
    for block in model.layers.values():
        block.register_forward_pre_hook(_read_parts)


def quantize(model: Transformer, dtype: torch.dtype, device: torch.device) -> None:
    """Give the blocks' linear layers, on the meta device, weights in 4 bits for products in `dtype`, in place.

    Whatever is copied into such a weight is quantized, so a loaded model is never whole in memory. FSDP2
    ignores these weights (`parallel.fsdp`): each rank has them whole, in every stage of ZeRO.
    """
    for layer in frozen_matrices(model):
        zeros = torch.zeros(layer.weight.shape, dtype=dtype, device=device)
        layer.weight = nn.Parameter(to_nf4(zeros), requires_grad=False)


def to_nf4(weight: Tensor) -> Tensor:
    """Return a matrix in 4 bits, which has its dtype in products."""
    silence_missing_extensions()
    try:
        from torchao.quantization import to_nf4 as convert
    except ImportError:  # before torchao 0.18
        from torchao.dtypes.nf4tensor import to_nf4 as convert
    scales = math.gcd(_SCALES, weight.numel() // _BLOCK)
    quantized: Tensor = convert(weight, _BLOCK, scales)
    return quantized
