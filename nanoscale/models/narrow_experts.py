"""Products of experts in 8 bits, by torchao. MXFP8 is emulated on a CPU.

Each pass is one operation: otherwise the compiler would cast the matrices for the backward pass during the
forward pass, and keep the results in addition to the matrices.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op


@custom_op("nanoscale::multiply_narrow", mutates_args=())
def multiply_narrow(recipe: str, ends: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """Return the products of the rows that end at `ends` with their expert's matrix, `[experts, out, in]`."""
    function, context, settings = _function(recipe, ends, rows, weight)
    return function.forward(context, rows, weight.mT, ends, **settings)


@custom_op("nanoscale::narrow_gradients", mutates_args=())
def narrow_gradients(
    recipe: str, ends: Tensor, rows: Tensor, weight: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    function, context, _ = _function(recipe, ends, rows, weight)
    of_rows, of_weight, *_ = function.backward(context, grad)
    return of_rows, of_weight.mT


def _function(recipe: str, ends: Tensor, rows: Tensor, weight: Tensor) -> Any:
    """Return torchao's function, what it keeps between the passes, and its settings."""
    from torchao.prototype.moe_training import fp8_grouped_mm, mxfp8_grouped_mm

    settings: Any = {"pad_token_groups_for_grouped_mm": False}
    function = fp8_grouped_mm._Float8GroupedMM
    if recipe == "mxfp8":
        function, choices = mxfp8_grouped_mm._MXFP8GroupedMM, mxfp8_grouped_mm.KernelPreference
        settings["kernel_preference"] = choices.EMULATED if rows.is_cpu else choices.AUTO
    context = SimpleNamespace(
        save_for_backward=lambda *_: None,
        saved_tensors=(rows, weight.mT, ends, None, ends),
        num_tokens=len(rows),
        out_dtype=rows.dtype,
        float8_dtype=torch.float8_e4m3fn,
        scale_calculation_mode=mxfp8_grouped_mm.ScaleCalculationMode.RCEIL,
        wgrad_with_hp=False,
        **settings,
    )
    return function, context, settings


def _save(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.recipe, *tensors = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return None, None, *narrow_gradients(ctx.recipe, *ctx.saved_tensors, grad)


multiply_narrow.register_autograd(_backward, setup_context=_save)
multiply_narrow.register_fake(
    lambda _, __, rows, weight: rows.new_empty(len(rows), weight.shape[1])
)
narrow_gradients.register_fake(lambda *inputs: tuple(map(torch.empty_like, inputs[2:4])))
