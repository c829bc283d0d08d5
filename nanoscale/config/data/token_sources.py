"""The sources of a configuration's tokens: a data mixture, prepared folders, and their numbers of samples.

Imports no numpy."""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoscale.config.data.token_headers import (
    FORMATS,
    HEADER,
    DamagedError,
    read_ends,
    read_index,
)
from nanoscale.config.schema import Config, Data


@dataclass(frozen=True)
class MixtureSource:
    """One source of `data.mixture`, or the only one."""

    path: str | None
    weight: float | None = None
    """Its weight among the sources; None: by its size, as for all others."""
    valid_path: str | None = None
    name: str = ""
    """Empty if it is the only source."""

    @property
    def key(self) -> str:
        """The section of the configuration that holds it."""
        return f"data.mixture.{self.name}" if self.name else "data"


MEMBERS = ("path", "weight", "valid_path")
"""The keys of a source in `data.mixture`."""


def sources_of(data: Data) -> list[MixtureSource]:
    """List the sources of a configuration that the rules have checked; those of weight 0 are left out."""
    if not data.mixture:
        return [MixtureSource(data.path, None, data.valid_path)]
    sources = [MixtureSource(**entry, name=name) for name, entry in data.mixture.items()]
    return [source for source in sources if source.weight != 0]


TOKENS = "tokens"
VALID = "valid"
TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
MANIFEST = "manifest.json"


def answers_of(prefix: str | Path) -> Path:
    """Return the file of the marks of answers of a prefix: one byte per token, 1 for tokens of an answer, else
    0."""
    return Path(f"{prefix}.answers")


def folder_of(path: str | Path) -> Path | None:
    """Return the prepared folder that a path is, or whose tokens it names; None if there is none."""
    given = Path(path).expanduser()
    for folder in (given, given.parent):
        named = folder == given or given.name in (TOKENS, VALID)
        if named and (folder / MANIFEST).is_file() and (folder / f"{TOKENS}.idx").is_file():
            return folder
    return None


def manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a prepared folder; None if it is missing or unreadable."""
    try:
        found = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


StartOf = Callable[[int], int]
"""Returns the start of the document that holds the token at a position."""


def times_seen(config: Config) -> float | None:
    """Return how often a resolved configuration's training sees its samples; None if it is not known."""
    samples = training_samples(config.data, config.train.seq_len)
    if samples is None or config.train.steps is None:
        return None
    return config.train.steps * config.train.global_batch / samples


def training_samples(data: Data, seq_len: int) -> int | None:
    """Return the samples of one epoch; None if they are not known before the launch.

    They are known for one token file whose samples are windows of a stream.
    """
    if data.source == "stdlib" or data.path is None or data.mixture or data.packing != "stream":
        return None
    with suppress(DamagedError, OSError):
        read = {"megatron": _megatron, "datatrove": _datatrove}[data.source]
        total, start_of = read(data.path)
        held_out = 0.0 if data.valid_path is not None else data.valid_fraction
        end, _ = training_end(total, held_out, start_of)
        return (end - 1) // seq_len or None
    return None


def training_end(total: int, valid_fraction: float, start_of: StartOf) -> tuple[int, bool]:
    """Return the number of tokens to train on, and True if they end within a document.

    Validation gets the last whole documents that hold at least `valid_fraction` of all tokens. If these would
    hold more than twice that, or leave less than half of the tokens that training should have (a single
    document, or a huge one at the border), the border lies within a document instead.
    """
    share = math.ceil(total * valid_fraction)
    if share == 0:
        return total, False
    wanted = total - share
    border = start_of(wanted)
    within = wanted - border > min(share, wanted // 2)
    return (wanted, True) if within else (border, False)


def _megatron(prefix: str) -> tuple[int, StartOf]:
    """Return the tokens of a `.bin`, and its documents."""
    from array import array

    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    header = read_index(index)
    itemsize = array(FORMATS[header.code]).itemsize
    count = header.sequences
    raw = _mapped(index)
    places = raw[HEADER.size + 4 * count : HEADER.size + 12 * count].cast("q")
    documents = raw[HEADER.size + 12 * count :].cast("q")

    def start_of(token: int) -> int:
        sequence = bisect_right(places, token * itemsize) - 1
        document = bisect_right(documents, sequence, hi=len(documents) - 1) - 1
        return int(places[documents[document]]) // itemsize

    return tokens.stat().st_size // itemsize, start_of


def _datatrove(path: str) -> tuple[int, StartOf]:
    index = Path(f"{path}.index")
    total = read_ends(index)
    ends = _mapped(index).cast("Q")

    def start_of(token: int) -> int:
        document = bisect_right(ends, token)
        return int(ends[document - 1]) if document else 0

    return total, start_of


def _mapped(path: Path) -> memoryview:
    from mmap import ACCESS_READ, mmap

    with path.open("rb") as stream:
        return memoryview(mmap(stream.fileno(), 0, access=ACCESS_READ))
