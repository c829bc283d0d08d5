"""Token files in Megatron-LM's format."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from nanoscale.data.tokens.files import bin_path, idx_path, index_parts


def write_indexed(prefix: str | Path, documents: Iterable[Any], dtype: Any = np.uint16) -> None:
    """Write documents (1-D integers) as PREFIX.bin and PREFIX.idx."""
    kind = np.dtype(dtype).newbyteorder("<")
    arrays = [np.asarray(document, dtype=kind) for document in documents]
    lengths = np.array([len(array) for array in arrays], dtype="<i4")
    bin_path(prefix).write_bytes(b"".join(array.tobytes() for array in arrays))
    idx_path(prefix).write_bytes(b"".join(index_parts(kind, lengths)))
