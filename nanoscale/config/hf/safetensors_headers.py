"""Safetensors files: their content by their headers, and the comparison of two tensors. Imports no torch.

A file is the length of its header (8 bytes, little-endian), the header (JSON: type, shape and range of every
tensor's bytes), and these bytes. Source: the format's section in the README of huggingface/safetensors.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoscale.common.errors import reason
from nanoscale.common.json_text import parse
from nanoscale.config.dtypes import DTYPES

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
IN_FP32 = "e_score_correction_bias"
"""The end of the names of tensors that files of every dtype hold in fp32, as transformers does."""
WIDTH = {dtype.safetensors_name: dtype.bytes for dtype in DTYPES.values()}
"""Bytes of a number of each dtype that weights may have."""
Shapes = dict[str, tuple[int, ...]]
_LONGEST_HEADER = 100_000_000
"""Bytes, the library's own limit."""
_READ_AT_ONCE = 1 << 24
"""Bytes of a tensor that are in memory together."""


class BadFileError(Exception):
    """A file is missing or does not match its header; the text names it."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """The first of its bytes in the file."""
    bytes: int
    scales: Stored | None = None
    """The scales of a quantized matrix (`quantized_files`), whose own bytes are its numbers."""
    zero_points: Stored | None = None
    block: tuple[int, int] = (1, 1)
    """Rows and columns of a quantized matrix that share a scale."""
    bits: int = 0
    """Bits of its numbers if they are packed into words."""

    def content(self) -> Iterator[memoryview]:
        """Yield its bytes, a part of them in memory at a time."""
        with self.file.open("rb") as opened:
            opened.seek(self.start)
            for begin in range(0, self.bytes, _READ_AT_ONCE):
                yield memoryview(opened.read(min(_READ_AT_ONCE, self.bytes - begin)))


def read_folder(folder: Path) -> dict[str, Stored]:
    """Return every tensor of a model's folder, by name.

    Raises:
        BadFileError: a file is missing, truncated, or has a damaged header.
    """
    index = folder / INDEX
    if not index.is_file():
        return read_header(_single(folder))
    try:
        where = parse(index.read_text("utf-8"))["weight_map"]
        files = sorted(set(where.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadFileError(f"{INDEX} has no readable weight_map: {error}") from error
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        do = "does" if len(missing) == 1 else "do"
        raise BadFileError(f"{INDEX} names {', '.join(missing[:4])}, which {do} not exist")
    headers = {file: read_header(folder / file) for file in files}
    lost = sorted(name for name, file in where.items() if name not in headers[file])
    if lost:
        raise BadFileError(f"{lost[0]} is not in {where[lost[0]]}, where {INDEX} has it")
    return {name: headers[file][name] for name, file in where.items()}


def read_header(file: Path) -> dict[str, Stored]:
    """Return the tensors of one file. Raises BadFileError if its header or its size is invalid."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            size = os.fstat(opened.fileno()).st_size
            if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
                raise BadFileError(f"{file.name} is damaged or cut off: it has no whole header")
            header = parse(opened.read(length))
    except OSError as error:
        raise BadFileError(f"{file.name} cannot be read: {reason(error)}") from error
    except ValueError as error:
        raise BadFileError(f"{file.name} is damaged: its header is not JSON") from error
    return _tensors(file, header, 8 + length, size - 8 - length)


def are_equal(a: Stored, b: Stored) -> bool:
    """True if two tensors have equal dtype, shape and content, which is read up to the first difference."""
    if (a.dtype, a.shape) != (b.dtype, b.shape) or a.dtype not in WIDTH:
        return False
    return all(map(operator.eq, a.content(), b.content()))


def _single(folder: Path) -> Path:
    file = folder / SINGLE
    if file.is_file():
        return file
    others = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if others:
        raise BadFileError(f"it has {others[0]} and no safetensors, the only format that is read")
    raise BadFileError(f"it has neither {SINGLE} nor {INDEX}")


def _tensors(file: Path, header: Any, begin: int, size: int) -> dict[str, Stored]:
    stored, end = {}, 0
    try:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            shape = tuple(int(length) for length in entry["shape"])
            first, last = entry["data_offsets"]
            width = WIDTH.get(entry["dtype"])
            if width is not None and last - first != width * math.prod(shape):
                what = f"the bytes of {name} do not fit its shape"
                raise BadFileError(f"{file.name} is damaged: {what}")
            stored[name] = Stored(file, name, entry["dtype"], shape, begin + first, last - first)
            end = max(end, last)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadFileError(f"{file.name} is damaged: its header is not valid") from error
    if end != size:
        raise BadFileError(f"{file.name} is cut off: its tensors need {end} bytes, it has {size}")
    return stored
