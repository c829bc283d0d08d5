"""Attention of transformers' models by ours, so that documents, windows, sinks, bounded scores and divided
sequences work as in the native model.

transformers asks two functions by a name: one makes the mask of a kind of layers, before the first block; the
other attends. Our mask is the span of documents with the layers' window.
"""

from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanoscale.common.errors import UserError
from nanoscale.config.objectives import made_for
from nanoscale.models import hf_mixers
from nanoscale.models.attention import AttentionSpan
from nanoscale.models.transformer import scaled

NAME = "nanoscale"
"""The name of both functions in transformers."""
DOCUMENTS: ContextVar[tuple[AttentionSpan, bool]] = ContextVar("documents")
"""The documents of the rows that a model runs on, and False if each is a whole row."""
_CAUSAL = "causal"
"""The mask of layers that see all earlier tokens of rows of one document."""
_GIVEN = "position_ids"
"""A further argument of our function that attention within documents does not need."""
_KINDS = {"full_attention", "sliding_attention", "moe", "mlp"}
"""The kinds of layers, by `layer_types` of config.json, whose attention is causal within documents."""
_MIXING = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
"""The kinds of layers that pass a state, too."""


def problem(model: Any) -> str:
    """Return why attention and mixers by ours would not be the model's; empty if nothing is known against
    them."""
    is_causal = getattr(model.config, "is_causal", True)
    if made_for(model.config.to_dict()) != "next-token" or not is_causal:
        return "its attention sees later tokens"
    mixers = hf_mixers.mixers(model)
    if others := [name for name, functions in mixers.items() if not functions]:
        return f"{others[0]} passes a state from token to token, which only its own code computes"
    # Most families with recurrences do not set the flag.
    has_functions = getattr(model, "_supports_attention_backend", False)
    recurs = any(functions & hf_mixers.RECURRENCES.keys() for functions in mixers.values())
    if not has_functions and not (recurs and model._can_set_attn_implementation()):
        return "its attention is not one of transformers' functions"
    if model.config.model_type == "doge":  # it adds numbers of its own to the mask
        return "its attention makes a mask of its own"
    kinds = {*(getattr(model.config, "layer_types", None) or ())}
    if others := sorted(kinds - _KINDS - (_MIXING if mixers else set())):
        return f"layers of the kind {others[0]} are not attention to earlier tokens"
    ropes = getattr(model.config, "rope_parameters", None) or {}
    ropes = [it for it in (ropes, *ropes.values()) if isinstance(it, dict)]
    ropes = [it.get("rope_type") for it in ropes if it.get("rope_type") in ("dynamic", "longrope")]
    return f"its positions ({ropes[0]}) depend on the longest document" if ropes else ""


def mixes_faster(model: Any) -> bool:
    """Return True if recurrences by ours replace transformers' plain code: no package of kernels is installed
    that it would call instead."""
    kernels = any(map(find_spec, ("fla", "mamba_ssm")))
    return not kernels and bool(hf_mixers.mixers(model)) and not problem(model)


def register() -> None:
    """Make the functions known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _span_of_layers)
    # It would guess documents from positions, and wait for the device.
    masking_utils.find_packed_sequence_indices = lambda position_ids: None


def set_core(model: Any, core: nn.Module) -> None:
    """Let all layers of a model of transformers attend with `core`, a `CausalAttention`."""
    if model.config._attn_implementation != NAME:
        register()
        model.set_attn_implementation(NAME)
    for module in model.modules():
        for reader in (module, *getattr(module, "copied_modules", ())):
            object.__setattr__(reader, "nanoscale_core", core)  # not a module of theirs


def _span_of_layers(
    *, mask_function: Any, use_vmap: bool = False, local_size: int | None = None, **_: Any
) -> AttentionSpan | str:
    """Return the mask of a kind of layers, or what is wrong with it, since no layer may be of this kind."""
    here, later = torch.tensor(0), torch.tensor(local_size or 1)

    def sees(query: Tensor, key: Tensor) -> bool:
        return bool(mask_function(here, here, query, key))

    if use_vmap or sees(here, later):
        return "sees later tokens"
    if local_size is not None and (sees(later, here) or not sees(later, here + 1)):
        return f"divides a sequence into chunks of {local_size} tokens"
    span, several = DOCUMENTS.get()
    return span._replace(window=local_size) if several or local_size is not None else _CAUSAL


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: AttentionSpan | Tensor | str | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' layers ask for it; q, k, v `[batch, heads, seq, width]`; values are padded to the
    width of keys, which every kernel accepts."""
    if isinstance(attention_mask, str) and attention_mask != _CAUSAL:
        raise _refusal(attention_mask)
    if not isinstance(attention_mask, AttentionSpan | str) or query.shape[2] != key.shape[2]:
        raise _refusal(f"has masks or keys of its own in {type(module).__name__}")
    if more := [it for it, value in others.items() if isinstance(value, Tensor) and it != _GIVEN]:
        raise _refusal(f"reads {more[0]}")
    mask = None if isinstance(attention_mask, str) else attention_mask
    width, value_width = query.shape[-1], value.shape[-1]
    query = query if scaling is None else scaled(query, scaling * width**0.5)
    value = F.pad(value, (0, width - value_width)) if value_width < width else value
    core: Any = module.nanoscale_core
    out = core(query, key, value, mask, sinks=s_aux, softcap=softcap)
    return out[..., :value_width].transpose(1, 2).contiguous(), None


def _refusal(what: str) -> UserError:
    why = f"the model's attention {what}, which only its own code computes"
    return UserError("config", f"{why}: data.packing=stream data.document_mask=false parallel.cp=1")
