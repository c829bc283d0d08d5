"""The short causal convolution of each channel before a recurrence, within documents."""

import torch
from torch import Tensor


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, documents: Tensor, halo: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the outputs, at least in fp32, and the halo of the tokens that follow.

    Args:
        x: `[rows, channels, seq]`.
        weight: `[channels, width]`.
        bias: `[channels]`.
        documents: integers `[rows, seq]`, which differ for neighboring documents.
        halo: the last width - 1 inputs of the first token's document before it, zeros before its begin,
            `[rows, channels, width - 1]`; None: zeros.
    """
    reach, seq = weight.shape[1] - 1, x.shape[2]
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32)).unsqueeze(2)
    halo = x.new_zeros(*x.shape[:2], reach) if halo is None else halo
    x = torch.cat((halo, x), 2)
    numbers = torch.cat((documents[:, :1].expand(-1, reach), documents), 1)
    out = x[:, :, reach:] * wide[:, reach]
    for i in range(reach):
        other = (numbers[:, i : i + seq] != documents).unsqueeze(1)
        out = out + (x[:, :, i : i + seq] * wide[:, i]).masked_fill(other, 0)
    outside = (numbers[:, seq:] != documents[:, -1:]).unsqueeze(1)
    out = out if bias is None else out + bias.unsqueeze(1)
    return out, x[:, :, seq:].masked_fill(outside, 0)
