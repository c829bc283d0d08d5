"""The sources of a configuration's tokens: a data mixture, prepared folders, and token files, whose headers and
sizes are checked without reading the tokens. Imports no numpy.

Megatron-LM's `.idx`, little-endian: magic, version (u64), type code (u8), number of sequences (u64), number of
entries of the document index (u64), then the length of each sequence in tokens (i32), its position in the
`.bin` in bytes (i64), and for each document the sequence it begins with (i64), the number of sequences at the
end.

datatrove's `.ds.index`: the end of each document, in tokens (u64).
"""

from __future__ import annotations

import math
import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from nanoscale.common.json_text import parse
from nanoscale.config.objectives import has_whole_documents
from nanoscale.config.schema import Config, Data, Train
from nanoscale.config.training_phases import samples_after

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
FORMATS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}
"""Type code of tokens → the array module's letter; 6 and 7 are not integers."""
LOOKED_AT = 1 << 16
"""Tokens at the beginning of a file whose ids are checked."""


class DamagedError(Exception):
    """A damaged file, or one of another format."""

    def __init__(self, path: Path, what: str, kind: str = "damaged token file") -> None:
        super().__init__(f"{kind}: {path}: {what}")
        self.path, self.what, self.kind = path, what, kind


def read_index(path: Path) -> tuple[int, int]:
    """Return the type code and the number of sequences of an `.idx`, and check its length. Raises
    DamagedError."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        raw = stream.read(HEADER.size)
    if not raw.startswith(MAGIC):
        what = "it does not start with the header of an .idx"
        raise DamagedError(path, what, "not a Megatron index")
    if len(raw) < HEADER.size:
        raise DamagedError(path, f"it ends within its header, after {size} bytes")
    _, version, code, sequences, documents = HEADER.unpack(raw)
    if version != VERSION:
        raise DamagedError(path, f"its version is {version}, not {VERSION}")
    if code not in FORMATS:
        raise DamagedError(path, f"its type code {code} is not a token type")
    expected = HEADER.size + 12 * sequences + 8 * documents
    if size == expected + sequences and sequences > 0:
        raise DamagedError(path, "it holds a mode for each sequence, as multimodal data does")
    if size != expected or documents < 1:
        raise DamagedError(path, f"it holds {size} bytes, and its header declares {expected}")
    return code, sequences


def check_sizes(tokens: Path, index: Path, described: int) -> None:
    """Check that the `.bin` has the size that its `.idx` describes. Raises DamagedError."""
    size = tokens.stat().st_size
    if size < described:
        raise DamagedError(tokens, f"it holds {size} bytes, and {index.name} declares {described}")
    if size > described:
        what = f"it describes {described} bytes, and {tokens.name} holds {size}"
        raise DamagedError(index, what)
    if size == 0:
        raise DamagedError(tokens, "it holds no token", "no tokens to train on")


def glance_at_megatron(prefix: str) -> int:
    """Return the largest of the first ids, if a few bytes of a pair of files match.

    Raises:
        DamagedError: they do not match.
        OSError: a file cannot be read.
    """
    tokens, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    code, sequences = read_index(index)
    letter, last = FORMATS[code], sequences - 1
    described = 0
    if sequences:
        with index.open("rb") as stream:
            length = _read(stream, HEADER.size + 4 * last, "<i")
            place = _read(stream, HEADER.size + 4 * sequences + 8 * last, "<q")
        described = place + length * array(letter).itemsize
    check_sizes(tokens, index, described)
    return _largest(tokens, letter)


def glance_at_datatrove(path: str) -> int:
    """Return the same for a `.ds` and its `.ds.index`."""
    tokens, index = Path(path), Path(f"{path}.index")
    count, size = read_ends(index), tokens.stat().st_size
    return _largest(tokens, {2: "H", 4: "I"}[bytes_a_token(tokens, index, size, count)])


def read_ends(index: Path) -> int:
    """Return the number of tokens that a `.ds.index` describes. Raises DamagedError."""
    size = index.stat().st_size
    if size == 0 or size % 8:
        raise DamagedError(index, f"it holds {size} bytes, which are not ends of documents")
    with index.open("rb") as stream:
        return _read(stream, size - 8, "<Q")


def bytes_a_token(tokens: Path, index: Path, size: int, count: int) -> int:
    """Return the bytes per token of a `.ds` file of `size` bytes with `count` tokens: 2 or 4. Raises
    DamagedError."""
    if count == 0 or size == 0:
        raise DamagedError(tokens, "it holds no token", "no tokens to train on")
    if size % count or size // count not in (2, 4):
        what = f"it holds {size} bytes, and {index.name} declares {count} tokens of 2 or 4 bytes"
        raise DamagedError(tokens, what)
    return size // count


def _read(stream: BinaryIO, at: int, form: str) -> int:
    stream.seek(at)
    (found,) = struct.unpack(form, stream.read(struct.calcsize(form)))
    return int(found)


def _largest(path: Path, letter: str) -> int:
    """Return the largest of the first ids; a negative one counts as too large for any vocabulary."""
    first = array(letter)
    with path.open("rb") as stream:
        first.frombytes(stream.read(first.itemsize * LOOKED_AT))
    if sys.byteorder == "big":
        first.byteswap()
    return max(first) if min(first) >= 0 else sys.maxsize


# --- sources --------------------------------------------------------------------------------------


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
        found = parse((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def have_same_texts(file: Path, other: Path | None) -> bool:
    """True if no id means different texts in two tokenizer.json; None means bytes.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is not a tokenizer.json.
    """
    if other is None:
        return False
    if file.read_bytes() == other.read_bytes():
        return True
    texts, others = _texts(file), _texts(other)
    return all(texts[token] == others[token] for token in texts.keys() & others.keys())


def _texts(file: Path) -> dict[int, str]:
    content = parse(file.read_bytes())
    try:
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # of unigrams: texts with their scores
            texts = {token: entry[0] for token, entry in enumerate(vocabulary)}
        else:
            texts = {token: text for text, token in vocabulary.items()}
        return texts | {added["id"]: added["content"] for added in content["added_tokens"]}
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{file} is not a tokenizer.json") from error


StartOf = Callable[[int], int]
"""Returns the start of the document that holds the token at a position."""

STDLIB_TOKENS = {"byte": 9.9e6, "bpe": 3.7e6}
"""About how many tokens the embedded corpus has, by tokenizer: CPython 3.11's library, and 1,024 tokens."""


def times_seen(config: Config) -> float | None:
    """Return how often a resolved configuration's training sees its samples; None if it is not known.

    Of the embedded corpus the size is about that of `STDLIB_TOKENS`.
    """
    train, samples = config.train, training_samples(config.data, config.train)
    if config.data.source == "stdlib":
        tokens = STDLIB_TOKENS.get(config.data.tokenizer, STDLIB_TOKENS["bpe"])
        samples = max(1, int(tokens / train.seq_len))
    if samples is None or train.steps is None:
        return None
    return samples_after(train, train.steps) / samples


def training_samples(data: Data, train: Train) -> int | None:
    """Return the samples of one epoch; None if they are not known before the launch.

    They are known for one token file whose samples are windows of a stream.
    """
    is_file = data.source != "stdlib" and data.path is not None and not data.mixture
    if not is_file or data.packing != "stream" or has_whole_documents(train):
        return None
    with suppress(DamagedError, OSError):
        tokens, _ = split_sizes(data, sources_of(data)[0])
        return (tokens - 1) // train.seq_len or None
    return None


def split_sizes(data: Data, source: MixtureSource) -> tuple[int, int]:
    """Return the tokens of a source to train on, and to validate on.

    Raises:
        DamagedError: an index is not what it should be.
        OSError: a file cannot be read.
    """
    read = {"megatron": _megatron, "datatrove": _datatrove}[data.source]
    assert source.path is not None
    total, start_of = read(source.path)
    if source.valid_path is not None:
        return total, read(source.valid_path)[0]
    end, _ = training_end(total, data.valid_fraction, start_of)
    return end, total - end


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
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    code, count = read_index(index)
    itemsize = array(FORMATS[code]).itemsize
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
