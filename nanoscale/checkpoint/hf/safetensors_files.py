"""Writing safetensors files tensor by tensor, without torch.

`config.hf.safetensors_headers` describes the format.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nanoscale.common.json_text import Json
from nanoscale.config.hf.safetensors_headers import IN_FP32, SINGLE, WIDTH, Shapes


@dataclass(frozen=True)
class Entry:
    """A tensor to write."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int


Entries = dict[str, Entry]


def entries_of(shapes: Shapes, dtype: str) -> Entries:
    """Return tensors of a dtype, except tensors that are always in fp32."""
    dtypes = {name: "F32" if name.endswith(IN_FP32) else dtype for name in shapes}
    return {
        name: Entry(dtypes[name], shape, WIDTH[dtypes[name]] * math.prod(shape))
        for name, shape in shapes.items()
    }


def divide(entries: Entries, largest: int) -> dict[str, Entries]:
    """Divide tensors into files, in their order: at most `largest` bytes each, or one tensor that has more.
    Return their contents by name."""
    files: list[Entries] = [{}]
    file_bytes = 0
    for name, entry in entries.items():
        if files[-1] and file_bytes + entry.bytes > largest:
            files.append({})
            file_bytes = 0
        files[-1][name] = entry
        file_bytes += entry.bytes
    if len(files) == 1:
        return {SINGLE: files[0]}
    last = f"{len(files):05d}"
    return {f"model-{i:05d}-of-{last}.safetensors": it for i, it in enumerate(files, 1)}


def write_json(file: Path, document: Json) -> None:
    file.write_text(f"{json.dumps(document, indent=2)}\n", "utf-8")


def write_file(file: Path, entries: Entries, values: Iterator[memoryview]) -> None:
    """Write tensors in the order of `entries`."""
    header: Json = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, entry in entries.items():
        end = offset + entry.bytes
        header[name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for value in values:
            stream.write(value)
