"""Rotary positions: the angles of every position, and the rotation of queries and keys.

Source: Su et al. 2021, arXiv:2104.09864, eq. 15. Angles need at least fp32 to tell far positions apart.
"""

import math

import torch
from torch import Tensor

from nanoscale.config.schema import Model, RopeScaling

Rotation = tuple[Tensor, Tensor] | None
"""Cosine and sine of the angles of positions: `[seq, 1, pairs]`, or `[batch, seq, 1, pairs]` if rows differ;
None if positions are not rotated."""


def rope_rotation(
    shape: Model, positions: Tensor, dtype: torch.dtype, length: int, *, local: bool = False
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of each position's angles: `Rotation` for positions `[seq]` or `[batch, seq]`.

    Args:
        dtype: the dtype of queries and keys.
        length: the tokens of the whole sequence.
        local: True for layers with a window and a base of their own.
    """
    angle_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    width, scaling = shape.rotated_width, None if local else shape.rope_scaling
    exponent = torch.arange(0, width, 2, device=positions.device, dtype=angle_dtype) / width
    frequencies = ((shape.rope_theta_local if local else None) or shape.rope_theta) ** -exponent
    if scaling is not None:
        frequencies = scale_frequencies(frequencies, scaling, shape.rope_theta, length)
    angles = positions.to(angle_dtype).unsqueeze(-1).unsqueeze(-1) * frequencies  # of all heads
    factor = 1.0
    if scaling is not None and scaling.kind in ("yarn", "longrope"):
        factor = scaling.attention_factor
    return angles.cos() * factor, angles.sin() * factor


def scale_frequencies(
    frequencies: Tensor, scaling: RopeScaling, theta: float, length: int
) -> Tensor:
    """Slow the rotary frequencies `[pairs]` for sequences longer than the original context.

    dynamic: sequences of at most `model.max_seq_len`, and there are no longer ones, are not scaled.
    """
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling)
    if scaling.kind == "yarn":
        return _yarn(frequencies, scaling, theta)
    if scaling.kind == "longrope":
        # Ding et al. 2024, arXiv:2402.13753, and the switch of Phi-3's published code
        is_long = length > scaling.original_seq_len
        factors = scaling.long_factor if is_long else scaling.short_factor
        pinned = frequencies.is_cuda  # so that the host does not wait for the device
        divisors = torch.tensor(factors, dtype=frequencies.dtype, pin_memory=pinned)
        return frequencies / divisors.to(frequencies.device, non_blocking=True)
    return frequencies


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Stretch wavelengths longer than the original context allows by `factor`, keep short ones, and blend
    medium ones linearly in (original context / wavelength).

    Source: Llama 3.1's model card and the `rope_scaling` of its published configuration.
    """
    wavelength = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((scaling.original_seq_len / wavelength - low) / (high - low)).clamp(0, 1)
    return smooth * frequencies + (1 - smooth) * frequencies / scaling.factor


def _yarn(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Scale frequencies by their rotations in the original context, blended linearly in their index.

    Source: Peng et al. 2023, arXiv:2309.00071, section 3.2, with the whole indices of the authors' code.
    """
    pairs = len(frequencies)

    def index(rotations: float) -> float:
        return (
            pairs * math.log(scaling.original_seq_len / (rotations * 2 * math.pi)) / math.log(theta)
        )

    first, last = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    span = last - first or 0.001
    numbers = torch.arange(pairs, device=frequencies.device, dtype=frequencies.dtype)
    scaled_share = ((numbers - first) / span).clamp(0, 1)
    return frequencies * (1 - scaled_share) + frequencies / scaling.factor * scaled_share


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor], pairs: str = "halves") -> Tensor:
    """Rotate `[batch, seq, heads, head_dim]`: pairs of the two halves, as in Hugging Face, or of neighbors.

    The result is stored in this order, in which attention then returns its own: no copy for the product after
    it. Numbers beyond the pairs of `rotation` stay as they are.
    """
    cos, sin = (angles.to(x.dtype) for angles in rotation)
    width = 2 * cos.shape[-1]
    turned, rest = (x, None) if width == x.shape[-1] else (x[..., :width], x[..., width:])
    if pairs == "neighbors":
        first, second = turned[..., 0::2], turned[..., 1::2]
        new = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return new.flatten(-2) if rest is None else torch.cat((new.flatten(-2), rest), dim=-1)
    first, second = turned.chunk(2, dim=-1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(parts if rest is None else (*parts, rest), dim=-1)
