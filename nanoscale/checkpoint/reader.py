"""One tensor of a checkpoint after another, whole, whatever layout wrote it."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata


class Reader(FileSystemReader):
    """Reads what a checkpoint says of itself once, not once for every tensor."""

    _metadata: Metadata | None = None

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        about: Any = self.read_metadata().state_dict_metadata[name]
        value = torch.empty(shape, dtype=about.properties.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or unini")
            dcp.load({name: value}, storage_reader=self, no_dist=True)
        return value

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata
