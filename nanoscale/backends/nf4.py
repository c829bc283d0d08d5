"""Frozen weights in 4 bits by torchao's NF4Tensor (QLoRA, Dettmers et al. 2023, arXiv:2305.14314, section 3).

A product dequantizes its weights, in the forward and in the backward pass, and keeps no copy of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nanoscale.backends.torchao_log import silence_missing_extensions
from nanoscale.models.lora import frozen_matrices
from nanoscale.models.transformer import Transformer

_BLOCK, _SCALES = 64, 256
"""Weights with a scale of their own, and scales with one, as in the paper."""


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
