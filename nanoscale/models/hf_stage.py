"""A pipeline stage of a model of transformers: some of its blocks, by the names of the whole model.

transformers' own code runs on every stage, with the blocks of other stages emptied. Block 0 hands on the stream
that the stage received, and the first block behind the stage's own ends the run.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from nanoscale.models import hf_attention


class StageEnd(Exception):  # noqa: N818
    """The stream behind the last block of a stage, its only argument."""


class Ends(NamedTuple):
    """The modules with parameters before and behind the blocks, by name."""

    before: set[str]
    behind: set[str]
    returns_tuple: bool
    """True if the model's code takes the first result of a block."""


def ends_of(make: Callable[..., Any], blocks_of: Callable[[Any], dict[str, Any]]) -> Ends:
    """Run a whole model on the meta device, whose blocks are emptied, to see which module runs where.

    Raises ValueError if its code does not hand one stream from block to block.
    """
    hf_attention.register()  # transformers would look for documents in numbers that the meta device lacks
    with torch.device("meta"):
        whole = make(real=True)
    blocks = blocks_of(whole)
    for block in blocks.values():
        _empty(block)
    outside = {name: it for name, it in whole.named_modules() if it._parameters}
    for returns_tuple in (False, True):
        ran: list[tuple[str, int]] = []
        with ExitStack() as hooks, torch.no_grad():
            for name, module in outside.items():
                hooks.callback(_watch(module, name, ran).remove)
            for block in blocks.values():
                _hand_on(block, None, returns_tuple)
                hooks.callback(_watch(block, "block", ran).remove)
            try:
                whole(input_ids=torch.zeros(1, 4, dtype=torch.long, device="meta"))
            except Exception:  # of any code, which may want another result of a block
                continue
        numbers = [number for number, (name, _) in enumerate(ran) if name == "block"]
        streams = [width for _, width in ran[numbers[0] : numbers[-1] + 2]] if numbers else []
        if len(numbers) == len(blocks) and len(streams) > len(blocks) and {*streams} == {3}:
            before = {name for name, _ in ran[: numbers[0]]}
            return Ends(before, {*outside} - before, returns_tuple)
    raise ValueError("its code does not hand one stream from block to block")


def cut(model: Any, blocks: list[Any], own: range, ends: Ends, received: list[Tensor]) -> None:
    """Leave a stage's own blocks, and what lies at its end of the model; in place. The last stage keeps a tied
    embedding. `received` holds the stream while the stage runs."""
    first, last = own.start == 0, own.stop == len(blocks)
    for number, block in enumerate(blocks):
        if number not in own:
            _empty(block)
            _hand_on(block, None if number else received, ends.returns_tuple)
        if number >= own.stop:
            block.forward = _end
    head = model.get_output_embeddings()
    for name in ends.before if not first else ():
        module = model.get_submodule(name)
        if not last or getattr(module, "weight", None) is not head.weight:
            _empty(module)
            module.forward = _same
    for name in ends.behind if not last else ():
        _empty(model.get_submodule(name))


def _empty(module: Any) -> None:
    for inner in module.modules():
        inner._parameters.clear()
        inner._buffers.clear()
    module._modules.clear()


def _hand_on(block: Any, received: list[Tensor] | None, returns_tuple: bool) -> None:
    def forward(*given: Any, **named: Any) -> Any:
        (hidden,) = received or [given[0] if given else named["hidden_states"]]
        return (hidden,) if returns_tuple else hidden

    block.forward = forward


def _end(*given: Any, **named: Any) -> NoReturn:
    raise StageEnd(given[0] if given else named["hidden_states"])


def _same(x: Tensor, *_: Any, **__: Any) -> Tensor:
    """Stand for an embedding or a norm before the blocks, whose result only the first stage uses."""
    return x if x.is_floating_point() else x.new_zeros((), dtype=torch.float32)


def _watch(module: Any, name: str, ran: list[tuple[str, int]]) -> Any:
    def note(_: Any, given: Any, named: Any) -> None:
        ran.append((name, next(iter(given or named.values())).ndim))

    return module.register_forward_pre_hook(note, with_kwargs=True)
