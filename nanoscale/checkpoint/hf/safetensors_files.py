"""Writing safetensors files tensor by tensor, without torch.

`config.hf.safetensors_headers` describes the format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nanoscale.config.hf.safetensors_headers import IN_FP32, SINGLE, WIDTH, Shapes


def divide(shapes: Shapes, dtype: str, largest: int) -> list[Shapes]:
    """Divide tensors into files, in their order: at most `largest` bytes each, or one tensor that has more."""
    files: list[Shapes] = [{}]
    file_bytes = 0
    for name, shape in shapes.items():
        size = WIDTH[dtype_of(name, dtype)] * math.prod(shape)
        if files[-1] and file_bytes + size > largest:
            files.append({})
            file_bytes = 0
        files[-1][name] = shape
        file_bytes += size
    return files


def dtype_of(name: str, dtype: str) -> str:
    return "F32" if name.endswith(IN_FP32) else dtype


def file_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def write_file(file: Path, shapes: Shapes, dtype: str, values: Iterator[memoryview]) -> None:
    """Write tensors of a dtype, except tensors that are always in fp32, in the order of `shapes`."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        kind = dtype_of(name, dtype)
        size = WIDTH[kind] * math.prod(shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": (offset, offset + size)}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for value in values:
            stream.write(value)
