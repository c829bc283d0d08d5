"""The index of a checkpoint's tensors: `.metadata` of torch.distributed.checkpoint. Imports no torch.

torch writes it with pickle, and a pickle can call any function that it names. Here every name is looked up in
the list of names that torch writes for a checkpoint of tensors, and each becomes an inert record: nothing is
imported and no object of torch is built while the file is read.
"""

from __future__ import annotations

import io
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoscale.common.json_text import Json

FILE = ".metadata"


class MetadataError(ValueError):
    """A checkpoint's index cannot be read; the text says why."""


@dataclass(frozen=True)
class StoredShard:
    """A shard of a tensor and the bytes of the checkpoint that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    """Its first byte in the file."""
    length: int
    """Bytes."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint, whole, and its shards."""

    dtype: str
    shape: tuple[int, ...]
    shards: list[StoredShard]


def read(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name, without running code of the file.

    Raises:
        MetadataError: the file contains a name that torch does not write there, or is not such an index.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        try:
            content = file.read()
            _require_known_instructions(content)
            return _tensors(_Unpickler(io.BytesIO(content)).load())
        except (OSError, MetadataError):
            raise
        except Exception as error:  # a damaged pickle raises nearly anything
            raise MetadataError(f"is not the index of a checkpoint ({error!r})") from error


_OF_FIXED_SIZE = re.compile(
    rb"(?:[()\]}N.abestuR\x81\x85-\x89\x8f\x90\x93\x94]|[Kh\x80].|M..|[Jj].{4}|[G\x95].{8})++",
    re.DOTALL,
)
"""Instructions of pickle's protocols 4 and 5 with arguments of a fixed size."""
_WITH_A_LENGTH = {b"\x8c": 1, b"\x8a": 1, b"X": 4, b"\x8d": 8}
"""Instructions with a text or a number of this many bytes of length."""


def _require_known_instructions(content: bytes) -> None:
    """Refuse instructions that Python does not write for these objects: some take memory without bounds, as the
    one that numbers a remembered object itself."""
    at = 0
    while at < len(content):
        if run := _OF_FIXED_SIZE.match(content, at):
            at = run.end()
            continue
        width = _WITH_A_LENGTH.get(content[at : at + 1])
        if width is None:
            raise MetadataError("has an instruction that torch does not write")
        at += 1 + width + int.from_bytes(content[at + 1 : at + 1 + width], "little")


class _Record:
    """An inert record of an object of torch: the arguments and the state that it would have."""

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> _Record:
        record = super().__new__(cls)
        record.arguments, record.state = arguments, None
        return record

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


_DTYPES = (
    *("float64", "float32", "bfloat16", "float16", "bool", "complex64", "complex128"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "builtins": ("getattr",),  # of a member of an enum, before Python 3.11.4
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),  # Python 3.13
}
"""All names except dtypes that torch 2.11 to 2.13 write for tensors, by their modules; BytesStorageMetadata is
not admitted: torch unpickles such an entry."""
_SUBSTITUTES: dict[tuple[str, str], Any] = {
    **{(at, name): type(name, (_Record,), {}) for at, names in _RECORDS.items() for name in names},
    **{("torch", name): name for name in _DTYPES},
}
"""The inert record, of the same name, or the dtype that stands for each name."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        substitute = _SUBSTITUTES.get((module, name))
        if substitute is None:
            raise MetadataError(
                f"names {module}.{name}, which no checkpoint of nanoscale does; nothing from it was executed"
            )
        return substitute


def _tensors(metadata: Any) -> dict[str, StoredTensor]:
    document = _state(metadata, "Metadata")
    locations = {
        (position["fqn"], _numbers(position["offset"])): _state(value, "_StorageInfo")
        for index, value in document["storage_data"].items()
        for position in [_state(index, "MetadataIndex")]
    }
    return {
        _text(name): _tensor(name, _state(value, "TensorStorageMetadata"), locations)
        for name, value in document["state_dict_metadata"].items()
    }


def _tensor(
    name: str, record: Json, locations: dict[tuple[str, tuple[int, ...]], Json]
) -> StoredTensor:
    (dtype, *_) = record["properties"].state
    shards = []
    for chunk_record in record["chunks"]:
        chunk = _state(chunk_record, "ChunkStorageMetadata")
        offsets = _numbers(chunk["offsets"])
        location = locations[name, offsets]
        if location.get("transform_descriptors"):
            raise MetadataError("stores encoded tensors, which no checkpoint of nanoscale does")
        start, length = _number(location["offset"]), _number(location["length"])
        file, sizes = _text(location["relative_path"]), _numbers(chunk["sizes"])
        shards.append(StoredShard(offsets, sizes, file, start, length))
    return StoredTensor(_text(dtype), _numbers(record["size"]), shards)


def _record(value: Any, kind: str) -> _Record:
    if not isinstance(value, _Record) or type(value).__name__ != kind:
        raise MetadataError("is not the index of a checkpoint")
    return value


def _state(value: Any, kind: str) -> Json:
    state = _record(value, kind).state
    if type(state) is not dict:
        raise MetadataError("is not the index of a checkpoint")
    return state


def _numbers(size: Any) -> tuple[int, ...]:
    (numbers,) = _record(size, "Size").arguments
    return tuple(map(_number, numbers))


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise MetadataError(f"holds {value!r:.40} instead of a number")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise MetadataError(f"holds {value!r:.40} instead of a name")
    return value
