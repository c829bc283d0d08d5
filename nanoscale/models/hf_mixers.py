"""Recurrent layers of transformers' models by our mixers, so that a state stays within its document.

transformers' layers call functions of their files, and hand on what else the trunk is called with. With the
argument `seq_idx`, which holds the documents as `Rows`, our function runs in the place of theirs.
"""

import inspect
import math
import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanoscale.common.errors import UserError
from nanoscale.models.mixers.pieces import Rows, convolve_rows, recur_rows

ROWS: ContextVar[Rows] = ContextVar("rows")
"""The documents of the rows that a model runs on."""
_STATES = ("A_log", "dt_bias")
"""The ends of names of parameters of layers with a recurrence."""
_CONVOLUTIONS = ("conv1d.weight", "conv.weight")
"""The ends of names of weights of short convolutions."""


def _convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    seq_idx: Rows,
    **_: Any,
) -> Tensor:
    from transformers.activations import ACT2FN

    out = convolve_rows(hidden_states, weight, bias, seq_idx).to(hidden_states.dtype)
    return out if activation is None else cast("Tensor", ACT2FN[activation](out))


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    seq_idx: Rows,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    q, k, v, decay, rate = _in_one_dtype(query, key, value, g, beta)
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    decay = decay if decay.ndim == 4 else decay.unsqueeze(-1)
    out = recur_rows(q * k.shape[-1] ** -0.5, k, v, decay, seq_idx, rate)
    return out.to(query.dtype), None


def _mamba2(
    hidden_states: Tensor,
    dt: Tensor,
    rate: Tensor,
    k: Tensor,
    q: Tensor,
    *,
    seq_idx: Rows,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    **others: Any,
) -> Tensor:
    x, step, rate, k, q = _in_one_dtype(hidden_states, dt, rate, k, q)
    step = step if dt_bias is None else step + dt_bias
    step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit).unsqueeze(-1)
    out = recur_rows(q, k, x * step, step * rate.unsqueeze(-1), seq_idx)
    skip = others.get("D")
    return (out if skip is None else out + x * skip.unsqueeze(-1)).contiguous()


def _in_one_dtype(*tensors: Tensor) -> list[Tensor]:
    dtype = torch.float32
    for it in tensors:
        dtype = torch.promote_types(dtype, it.dtype)
    return [it.to(dtype) for it in tensors]


RECURRENCES: dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
}
_FUNCTIONS = {"causal_conv1d_fn": _convolution} | RECURRENCES
"""Our functions, by the names of the functions of transformers that they replace."""


def mixers(model: nn.Module) -> dict[str, set[str]]:
    """Return the layers that pass something from token to token, with the functions that we have for them.

    A layer without functions is one that only the model's own code computes.
    """
    found: dict[str, set[str]] = {}
    for name, module in model.named_modules():
        if type(module).__module__.startswith("transformers.models."):
            names = inspect.unwrap(type(module).forward).__code__.co_names
            if called := {*names} & {*_FUNCTIONS}:
                found[name] = called
    for name, _ in model.named_parameters():
        if name.endswith((*_STATES, *_CONVOLUTIONS)):
            owners = [it for it in found if name.startswith(f"{it}.") and found[it]]
            needed = RECURRENCES if name.endswith(_STATES) else _FUNCTIONS
            if not any(found[it] & {*needed} for it in owners):
                found |= {it: set() for it in owners or [name.rpartition(".")[0]]}
    return found


def install(model: Any) -> None:
    """Let the layers of a model of transformers mix with our functions, within the documents of `ROWS`."""
    by_name = mixers(model)
    for name, functions in by_name.items():
        module = model.get_submodule(name)
        code = sys.modules[type(module).__module__]
        for function in functions:
            if not hasattr(getattr(code, function), "nanoscale"):
                setattr(code, function, _either(getattr(code, function), _FUNCTIONS[function]))
        module.register_forward_pre_hook(_require_documents, with_kwargs=True)
    if by_name:
        model.base_model.register_forward_pre_hook(_hand_documents, with_kwargs=True)


def _hand_documents(_: nn.Module, given: Any, named: dict[str, Any]) -> Any:
    return given, named | {"seq_idx": ROWS.get()}


def _either(original: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (original if kwargs.get("seq_idx") is None else own)(*args, **kwargs)

    run.nanoscale = True  # type: ignore[attr-defined]
    return run


def _require_documents(module: nn.Module, _: Any, named: dict[str, Any]) -> None:
    if named.get("seq_idx") is None:
        why = f"the model's code does not hand documents to {type(module).__name__}"
        raise UserError("config", f"{why}: data.packing=stream data.document_mask=false")
