"""A model of the user's own code in place of our transformer: `model()` of hooks.path.

It is trained like a model of transformers: whole blocks are found, and sharded, recomputed and compiled one by
one. They are the modules of the classes that `_no_split_modules` of the model names, or its longest list.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from nanoscale.common.errors import UserError
from nanoscale.config.schema import Model
from nanoscale.models.attention import Mask
from nanoscale.models.hf_model import PREFIX, HFModel, parameters_on_meta
from nanoscale.models.initialization import Draw

Make = Callable[[], nn.Module]
"""A function that makes the user's model, with initial values from PyTorch's generator."""


class OwnModel(HFModel):
    """A model of the user from token ids `[batch, seq]` to logits `[batch, seq, vocab]`."""

    def __init__(self, shape: Model, make: Make, *, real: bool = False) -> None:
        object.__setattr__(self, "_make", make)
        super().__init__(shape, real=real)

    def _build(self, dtype: torch.dtype = torch.float32, *, real: bool = False) -> Any:
        with nullcontext() if real else parameters_on_meta():
            return build(self.__dict__["_make"], dtype)

    def _logits(self, tokens: Tensor, mask: Mask) -> Tensor:
        logits: Tensor = self.hf(tokens)
        wanted = (*tokens.shape, self.shape.vocab)
        if logits.shape != wanted:
            what = f"returned {list(logits.shape)} for tokens {list(tokens.shape)}"
            raise UserError(
                "hooks", f"the model of hooks.path {what}, and not logits {list(wanted)}"
            )
        return logits

    def initializer(self, seed: int, device: torch.device) -> Draw:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = build(self.__dict__["_make"])
        values = {name: value.detach() for name, value in model.named_parameters()}
        return lambda name, size: values[name.removeprefix(PREFIX)].to(device)


def build(make: Make, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build the user's model. Raises UserError if it is not a module of PyTorch, or has no parameter."""
    model = make()
    if not isinstance(model, nn.Module) or not any(True for _ in model.parameters()):
        what = f"returned {type(model).__name__}"
        raise UserError("hooks", f"model() of hooks.path {what}, and not a module with parameters")
    return model.to(dtype)
