"""Matrix products in 8 bits: forward in e4m3, gradients in e5m2, with a scale for each tensor or a rank's part
of it, found anew each time.

Source: Micikevicius et al. 2022, arXiv:2209.05433; the work is torchao's. Weights, optimizer and communication
stay in the types they have. GPUs need compute capability 8.9 and every size of a product a multiple of 16.
"""

from __future__ import annotations

from nanoscale.models.transformer import Transformer


def apply(model: Transformer, emulate: bool = False) -> None:
    """Let the blocks' linear layers multiply in 8 bits, in place; the head does not, as is usual.

    To be called before anything is divided or wrapped; names of parameters stay. `emulate` rounds to 8 bits
    and multiplies in the wider type, for a test where the hardware has no 8-bit products.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(model.layers, config=Float8LinearConfig(emulate=emulate))
