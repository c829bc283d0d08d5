"""A reader of a checkpoint's tensors, for any layout that wrote it. Only `metadata` unpickles a file of it."""

import warnings
from collections.abc import Container
from functools import cached_property

import torch
import torch.distributed.checkpoint as dcp
from torch import Size, Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from nanoscale.checkpoint import metadata
from nanoscale.checkpoint.metadata import StoredTensor
from nanoscale.config.optimizers import AVERAGE


class Reader(FileSystemReader):
    """torch's reader of a checkpoint's files, with an index of tensors that was read without running code."""

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Return the checkpoint's tensors by name; read once, not once per tensor."""
        return metadata.read(self.path / metadata.FILE)  # type: ignore[operator]

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return one tensor, whole."""
        value = torch.empty(shape, dtype=getattr(torch, self.tensors[name].dtype))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or unini")
            dcp.load({name: value}, storage_reader=self, no_dist=True)
        return value

    def weights(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the result of the training for a parameter, whole: its average, if there is one."""
        return self.read(result_of(name, self.tensors), shape)

    def read_metadata(self) -> Metadata:  # torch also knows an index of one rank
        """Return the index that torch's own method would unpickle."""
        return self._metadata

    @cached_property
    def _metadata(self) -> Metadata:
        entries: dict[str, STORAGE_TYPES] = {}
        locations = {}
        for name, tensor in self.tensors.items():
            chunks = [
                ChunkStorageMetadata(Size(shard.offsets), Size(shard.sizes))
                for shard in tensor.shards
            ]
            properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
            entries[name] = TensorStorageMetadata(properties, Size(tensor.shape), chunks)
            for number, shard in enumerate(tensor.shards):
                location = _StorageInfo(shard.file, shard.start, shard.length)
                locations[MetadataIndex(name, shard.offsets, number)] = location
        return Metadata(
            entries, storage_data=locations, storage_meta=StorageMeta(load_id=self.load_id)
        )


def result_of(name: str, tensors: Container[str]) -> str:
    """Return the name of the tensor that a training ends with for `name`: the average of a parameter's weights
    if the checkpoint has one."""
    average = f"optimizer.{name.removeprefix('model.')}.{AVERAGE}"
    return average if average in tensors else name
