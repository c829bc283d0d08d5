"""transformers' conversions between published weights and its parameters, computed by shard.

transformers' own operations run on tensors without content, which record how a tensor is made of others. A box
of the result is then read from the boxes of the sources that it consists of, so a rank reads only its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoscale.checkpoint.hf.load import file_readers, read_part
from nanoscale.config.hf.safetensors_headers import BadFileError, Stored
from nanoscale.config.hf.text_part import read_tensors
from nanoscale.config.parameters import Shape

Fill = Callable[[Tensor, Shape], object]
"""A function that fills memory with the box of a tensor that begins at these offsets."""
CHANGED = Stored(Path(), "", "", (), 0, 0)
"""The source of tensors that are not as in files."""
_COMPUTED = {"MergeModulelist", "SplitModulelist", "Concatenate", "Chunk", "Split", "Transpose"}
"""The operations of transformers that need no more of a source than the box of the result does."""


class RecordedTensor:
    """A tensor without content, of which any box can be filled.

    Attributes:
        sources: the tensors of files that it consists of; none of a checkpoint's.
    """

    def __init__(self, shape: Shape, fill: Fill, sources: Iterable[Stored] = ()) -> None:
        self.shape, self.fill, self.sources = shape, fill, tuple(sources)

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any, kwargs: Any = None) -> Any:
        return _RECORDED[function](*args, **kwargs or {})

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def contiguous(self) -> RecordedTensor:
        return self

    def squeeze(self, dim: int) -> RecordedTensor:
        return self.viewed(
            lambda numbers: _replaced(numbers, dim),
            lambda memory: memory.unsqueeze(dim),
            lambda offsets: (*offsets[:dim], 0, *offsets[dim:]),
        )

    def viewed(
        self,
        shape: Callable[[Shape], Shape],
        memory_of: Callable[[Tensor], Tensor],
        offsets_of: Callable[[Shape], Shape],
    ) -> RecordedTensor:
        """Return the tensor of another shape; the functions turn its memory and offsets into ours."""
        return RecordedTensor(
            shape(self.shape),
            lambda memory, offsets: self.fill(memory_of(memory), offsets_of(offsets)),
            self.sources,
        )


def box_slices(memory: Tensor, offsets: Shape) -> tuple[slice, ...]:
    ends = zip(offsets, memory.shape, strict=True)
    return tuple(slice(begin, begin + size, 1) for begin, size in ends)


def _replaced(numbers: Shape, dim: int, *new: int) -> Shape:
    return (*numbers[:dim], *new, *numbers[dim + 1 :])


def _cat(parts: Sequence[RecordedTensor], dim: int) -> RecordedTensor:
    def fill(memory: Tensor, offsets: Shape) -> None:
        begin, end = offsets[dim], offsets[dim] + memory.shape[dim]
        for part in parts:
            first, last = max(begin, 0), min(end, part.shape[dim])
            if first < last:
                local = memory.narrow(dim, first - begin, last - first)
                part.fill(local, _replaced(offsets, dim, first))
            begin, end = begin - part.shape[dim], end - part.shape[dim]

    if len(others := {_replaced(part.shape, dim) for part in parts}) > 1:
        raise ValueError(f"its parts have different shapes: {', '.join(map(str, others))}")
    shape = _replaced(parts[0].shape, dim, sum(part.shape[dim] for part in parts))
    return RecordedTensor(shape, fill, (it for part in parts for it in part.sources))


def _stack(parts: Sequence[RecordedTensor], dim: int) -> RecordedTensor:
    def inserted(shape: Shape) -> Shape:
        return (*shape[:dim], 1, *shape[dim:])

    def unsqueezed(part: RecordedTensor) -> RecordedTensor:
        return part.viewed(inserted, lambda it: it.squeeze(dim), lambda it: _replaced(it, dim))

    return _cat([unsqueezed(part) for part in parts], dim)


def _split(whole: RecordedTensor, sizes: Sequence[int], dim: int) -> list[RecordedTensor]:
    def part(begin: int, size: int) -> RecordedTensor:
        return whole.viewed(
            lambda shape: _replaced(shape, dim, size),
            lambda memory: memory,
            lambda offsets: _replaced(offsets, dim, offsets[dim] + begin),
        )

    if sum(sizes) != whole.shape[dim]:
        raise ValueError(f"{whole.shape[dim]} is not {' + '.join(map(str, sizes))}")
    return [part(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def _chunk(whole: RecordedTensor, count: int, dim: int) -> list[RecordedTensor]:
    length, size = whole.shape[dim], -(-whole.shape[dim] // count)
    return _split(whole, [min(size, length - at) for at in range(0, length, size)], dim)


def _transpose(whole: RecordedTensor, dim0: int, dim1: int) -> RecordedTensor:
    def swapped(numbers: Shape) -> Shape:
        return _replaced(_replaced(numbers, dim0, numbers[dim1]), dim1, numbers[dim0])

    return whole.viewed(swapped, lambda memory: memory.transpose(dim0, dim1), swapped)


_RECORDED: dict[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.stack: _stack,
    torch.split: _split,
    torch.chunk: _chunk,
    torch.transpose: _transpose,
}


def file_tensors(folder: Path, files: ExitStack) -> dict[str, RecordedTensor]:
    """Return the tensors of a folder, of which a file is opened for the first box that is read of it."""
    opened = files.enter_context(file_readers())

    def recorded(stored: Stored) -> RecordedTensor:
        def fill(memory: Tensor, offsets: Shape) -> None:
            memory.copy_(read_part(opened, stored, box_slices(memory, offsets)))

        return RecordedTensor(stored.shape, fill, [stored])

    return {name: recorded(stored) for name, stored in read_tensors(folder).items()}


def converted(
    tensors: Mapping[str, RecordedTensor], model: Any, known_names: set[str]
) -> tuple[dict[str, RecordedTensor], dict[str, str]]:
    """Return transformers' tensors by name, made of the tensors of files as `from_pretrained` makes them.

    The second value maps the names of tensors that the model lacks to the names that transformers gives them.
    The model remembers which conversions were used, as after `from_pretrained`.

    Raises:
        BadFileError: transformers makes one by another operation than stacking, dividing, concatenating or
            transposing, or a source is missing.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    changes = get_model_conversion_mapping(model)
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    renamings: Any = [change for change in changes if not isinstance(change, WeightConverter)]
    by_pattern = {pattern: it for it in converters for pattern in it.source_patterns}
    known, prefix = dict.fromkeys(known_names, True), model.base_model_prefix
    made: dict[str, RecordedTensor] = {}
    unknown, steps = {}, dict[str, WeightConverter]()
    for name in sorted(tensors, key=dot_natural_key):
        changed, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if changed not in known and name in known:
            changed, pattern = rename_source_key(name, [], [], prefix, known)
        if changed not in known:
            unknown[name] = changed
        elif pattern is None:
            made.setdefault(changed, tensors[name])
        else:
            step = steps.setdefault(changed, deepcopy(by_pattern[pattern]))
            step.add_tensor(changed, name, pattern, tensors[name])  # type: ignore[arg-type]
    for name, step in steps.items():
        if others := _other_operations(step):
            raise BadFileError(
                f"{name} is stored in a form that transformers converts on loading by "
                f"{' and '.join(others)}, and only {', '.join(sorted(_COMPUTED))} and new names are "
                f"computed; model.init_from=null starts with random weights"
            )
        try:
            made |= _only(step.convert(name, model=model, config=model.config))
        except ValueError as error:
            what = f"{name} cannot be made of the tensors of the files: {error}"
            raise BadFileError(what) from error
    model._weight_conversions = [change for change in changes if change.was_used()]
    return made, unknown


def reverted(parameters: dict[str, RecordedTensor], model: Any) -> dict[str, RecordedTensor]:
    """Return the tensors of published files, made of transformers' as `save_pretrained` makes them.

    A model that transformers converts by other operations keeps its own form, which transformers loads too.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    if any(_other_operations(change) for change in get_model_conversion_mapping(model)):
        return parameters
    return _only(revert_weight_conversion(model, parameters))  # type: ignore[arg-type]


def _only(results: dict[str, Any]) -> dict[str, RecordedTensor]:
    return {name: it[0] if isinstance(it, list) else it for name, it in results.items()}


def _other_operations(change: Any) -> list[str]:
    names = [type(operation).__name__ for operation in getattr(change, "operations", ())]
    return [name for name in names if name not in _COMPUTED]
