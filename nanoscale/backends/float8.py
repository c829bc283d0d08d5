"""Matrix products in 8 bits, with dynamic scales, by torchao.

| recipe | scales | types | gradients of weights |
|---|---|---|---|
| tensorwise | one per matrix, or per rank's shard of it | forward e4m3, gradients e5m2 | in 8 bits |
| rowwise | one per row, powers of two | e4m3 | in 8 bits |
| rowwise_with_gw_hp | as rowwise | e4m3 | in the compute dtype |

An outlier affects the scale of its row only, not the matrix's, so each recipe is more accurate than the
previous one, and slower. With tensor parallelism a rank scales its shards: one process computes the same
products of whole rows, and shards of rows have finer scales. Sums over ranks are in the compute dtype.

Sources: Micikevicius et al. 2022, arXiv:2209.05433, for the types; torchao's README of `torchao.float8` for the
recipes. Weights, optimizer and communication keep their dtypes. GPUs need compute capability 8.9 and every size
of a product a multiple of 16.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from nanoscale.backends.torchao_log import silence_missing_extensions
from nanoscale.config import parameters
from nanoscale.models.transformer import Transformer


def apply(model: Transformer, recipe: str, tp: int = 1, emulate: bool = False) -> None:
    """Convert the blocks' linear layers to 8-bit products, in place; the head is not converted, as is usual.

    Layers that would be slower in 8 bits are left, unless all would. Call it before anything is sharded or
    wrapped; names of parameters stay. `emulate` rounds to 8 bits and multiplies in the compute dtype, for tests
    on hardware without 8-bit products.
    """
    silence_missing_extensions()
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    sizes: dict[int, parameters.Shape] = {}
    for number, block in model.layers.items():
        table = parameters.block(model.shape.of_layer(int(number)))
        for name, module in block.named_modules():
            if isinstance(module, nn.Linear):
                sizes[id(module)] = table[f"{name}.weight"].local(tp)
    chosen_ids = [layer for layer, size in sizes.items() if is_faster(recipe, *size)] or [*sizes]
    convert_to_float8_training(
        model.layers, config=config, module_filter_fn=lambda layer, _: id(layer) in chosen_ids
    )


def is_faster(recipe: str, outputs: int, inputs: int) -> bool:
    """True if products with a matrix `[outputs, inputs]` are faster in 8 bits than in bf16, casts included.

    Source: torchao's measurements on an H100 with 16,384 tokens (README of `torchao.float8`, "Performance").
    """
    if recipe == "tensorwise":
        return outputs > 1024 or inputs > 4096
    return outputs > 2048 and inputs > 1024 and (outputs > 4096 or inputs > 2048)
