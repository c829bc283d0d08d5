"""The weights of a Hugging Face folder: headers compared with a shape, and tensors read into shards.

A rank reads its shard of each tensor, one tensor after another, for any layout and backend: to the rank they
are the tensors of a checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoscale.checkpoint.hf.names import (
    BIASES,
    PREFIXES,
    TensorPosition,
    bias_positions,
    hf_positions,
    is_buffer,
    is_merged,
    is_needless,
    shapes,
)
from nanoscale.config.hf.families import UnsupportedError
from nanoscale.config.hf.safetensors_headers import IN_FP32, WIDTH, BadFileError, Shapes, Stored
from nanoscale.config.hf.shape import family_of, read_shape
from nanoscale.config.hf.text_part import HEAD, folder_tensors, read_config, read_tensors
from nanoscale.config.parameters import Shape
from nanoscale.config.schema import Model

if TYPE_CHECKING:
    from torch import Tensor

    from nanoscale.checkpoint.flat import Box

_SHOWN = 4
_SAMPLED = 4096
"""Bytes of a tensor that enter its model's fingerprint."""


Readers = Callable[[Path], Any]
"""A function that returns the open reader of a file."""
StoredParameters = dict[str, list[tuple[TensorPosition, Stored]]]
"""Our parameters by name, each with its positions and the file tensors that hold them."""


def find(folder: Path, model: Model) -> StoredParameters:
    """Locate each parameter of the shape. Reads headers only, and imports no torch.

    Raises:
        BadFileError: files or tensors are missing, of other shapes, or not part of the shape.
    """
    file_tensors = read_tensors(folder)
    shapes_by_name = shapes(model)
    positions = hf_positions(model, _family(folder, model), merged=is_merged(file_tensors))
    needed = {
        position.name: position.shape(shapes_by_name[name])
        for name, parameter_positions in positions.items()
        for position in parameter_positions
    }
    biases = bias_positions(model)
    needed |= {position.name: (model.experts,) for position in biases.values()}
    stored = {
        name: tensor for name in needed if (tensor := find_tensor(file_tensors, name)) is not None
    }
    embedding = positions["embed.weight"][0].name
    for absent, other in ((HEAD, embedding), (embedding, HEAD)):
        tensor = find_tensor(file_tensors, other)
        if absent in needed.keys() - stored.keys() and tensor is not None and _is_tied(folder):
            stored[absent] = tensor
    problems = [f"{name} is missing" for name in needed if name not in stored]
    problems += differences(stored, needed)
    used = set(stored.values())
    problems += [
        f"{name} is not a parameter of this shape"
        for name, tensor in file_tensors.items()
        if tensor not in used and not is_needless(name, model)
    ]
    refuse_all(problems)
    return {
        name: [(position, stored[position.name]) for position in parameter_positions]
        for name, parameter_positions in positions.items()
    } | {name: [(position, stored[position.name])] for name, position in biases.items()}


def count_kept(folder: Path, used: Iterable[Stored]) -> int:
    """Return the number of tensors of a folder that an export copies: towers, and what its model ignores.

    A tied head and the buffers of old files are not counted.
    """
    rest = set(folder_tensors(folder).values()) - set(used)
    return sum(not (tensor.name.endswith(HEAD) or is_buffer(tensor.name)) for tensor in rest)


def differences(stored: dict[str, Stored], needed: Shapes) -> list[str]:
    """Describe tensors of other shapes or of unsupported dtypes."""
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    return differing_shapes(shapes, needed) + unreadable(stored.values())


def differing_shapes(stored: Shapes, needed: Shapes) -> list[str]:
    return [
        f"{name} is {_size(shape)}, and the shape needs {_size(needed[name])}"
        for name, shape in stored.items()
        if shape != needed[name]
    ]


def unreadable(tensors: Iterable[Stored]) -> list[str]:
    """Describe tensors of unsupported dtypes."""
    return [
        f"{tensor.name} is {tensor.dtype}, and only {', '.join(WIDTH)} are read without scales that fit"
        for tensor in tensors
        if tensor.dtype not in WIDTH and tensor.scales is None
    ]


def refuse_all(problems: list[str]) -> None:
    """Raise a BadFileError of the first problem, if there are any."""
    if problems:
        remainder = f", and {len(problems) - _SHOWN} more like it" if len(problems) > _SHOWN else ""
        raise BadFileError("; ".join(problems[:_SHOWN]) + remainder)


def load(folder: Path, model: Model, state: dict[str, Tensor]) -> None:
    """Fill the parameters among the tensors of `Engine.state`, in place; memory: one rank's shard of a tensor.

    Raises:
        BadFileError: see `find`, or a file is damaged otherwise.
    """
    full_shapes = {f"model.{name}": shape for name, shape in shapes(model).items()}
    read_parts(
        [
            (tensor, position, full_shapes.get(name, tensor.shape), state[name])
            for short, stored_positions in find(folder, model).items()
            if (name := short if short.startswith(BIASES) else f"model.{short}") in state
            for position, tensor in stored_positions
        ]
    )


def read_parts(requests: list[tuple[Stored, TensorPosition, Shape, Tensor]]) -> None:
    """Fill each tensor in place from a file tensor, its position there, and its whole shape.

    Raises:
        BadFileError: a file is damaged.
    """
    import torch

    from nanoscale.models.moe import BIAS_UNIT

    with file_readers() as opened, torch.no_grad():
        for tensor, position, full_shape, target in requests:
            for box, memory in boxes(target):
                if position.expert is not None:
                    if (row := position.row(box.offsets, box.sizes)) is None:
                        continue  # the box does not contain the expert
                    memory = memory[row]
                slices = position.slices(full_shape, box.offsets, box.sizes)
                values = read_part(opened, tensor, slices)
                if tensor.name.endswith(IN_FP32):
                    values = (values.double() / BIAS_UNIT).round()
                memory.copy_(values.mT if position.transposed else values)


def fingerprint(folder: Path, model: Model) -> str:
    """Return a fingerprint of a model's weights: dtype, shape and first bytes of every tensor; imports no
    torch.

    Training changes all of a tensor, so its first bytes suffice; the division of tensors into files does not
    matter.

    Raises:
        BadFileError: see `find`.
    """
    digest = hashlib.blake2b(digest_size=16)
    stored = read_tensors(folder)
    if model.source == "own":
        pairs = chain.from_iterable(find(folder, model).values())
        stored = {position.name: tensor for position, tensor in pairs}
    for name, tensor in sorted(stored.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        with tensor.file.open("rb") as opened:
            opened.seek(tensor.start)
            digest.update(opened.read(min(tensor.bytes, _SAMPLED)))
    return digest.hexdigest()


@contextmanager
def file_readers() -> Iterator[Readers]:
    """Open each file for the first part that is read of it, and all until the end."""
    from safetensors import safe_open

    with ExitStack() as files:
        yield cache(lambda file: files.enter_context(safe_open(file, "pt")))


def read_part(opened: Readers, tensor: Stored, slices: tuple[slice, ...]) -> Tensor:
    """Read these elements of a tensor, and at most the elements between them.

    Raises:
        BadFileError: a file is damaged.
    """
    from safetensors import SafetensorError

    from nanoscale.checkpoint.hf.quantized import read_quantized

    def read(part: Stored, box: tuple[slice, ...]) -> Tensor:
        return opened(part.file).get_slice(part.name)[box]

    whole = tuple(slice(it.start, it.stop) for it in slices)
    try:
        quantized = tensor.scales is not None
        values = read_quantized(read, tensor, whole) if quantized else read(tensor, whole)
    except (SafetensorError, OSError) as error:
        raise BadFileError(f"{tensor.file.name} cannot be read: {error}") from error
    return values[tuple(slice(None, None, it.step) for it in slices)]


def boxes(target: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Yield this rank's boxes of a whole tensor, each with the memory to fill."""
    from torch.distributed.tensor import DTensor

    from nanoscale.checkpoint.flat import Box, FlatShard
    from nanoscale.models.initialization import local_region

    if isinstance(target, FlatShard):
        yield from target.boxes()
    elif not isinstance(target, DTensor):
        yield Box.whole(tuple(target.shape)), target
    elif target.to_local().numel():
        yield Box(*local_region(target)), target.to_local()


def find_tensor(tensors: dict[str, Stored], name: str) -> Stored | None:
    """Return a file tensor; files of a model without its head lack the prefix of its trunk."""
    for prefix in ("", *PREFIXES):
        if name.startswith(prefix) and name.removeprefix(prefix) in tensors:
            return tensors[name.removeprefix(prefix)]
    return None


def _family(folder: Path, model: Model) -> str:
    try:
        return str(read_config(folder).get("model_type"))
    except UnsupportedError:
        return family_of(model)


def _is_tied(folder: Path) -> bool:
    try:
        return read_shape(folder).tie_embeddings
    except UnsupportedError:
        return False


def _size(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "scalar"
