"""The formats of token files, one row each in `FORMATS`: where the tokens lie and where the documents end.
Indexes and sizes are checked without reading the tokens. Imports no numpy.

Megatron-LM's `.idx`, little-endian: magic, version (u64), type code (u8), number of sequences (u64), number of
entries of the document index (u64), then the length of each sequence in tokens (i32), its position in the
`.bin` in bytes (i64), and for each document the sequence it begins with (i64), the number of sequences at the
end.

datatrove's DocumentTokenizer writes:

NAME.ds           every token, 2 or 4 bytes each, unsigned, little-endian
NAME.ds.index     the end of each document, in tokens: u64
NAME.ds.metadata  lines: the tokenizer, in newer files with `|` and the bytes of a token; the tokens

OLMo-core's `.npy`: the tokens alone, unsigned, little-endian, 2 bytes each, or 4 if the vocabulary needs them;
the end-of-text token ends a document. A file of `numpy.save` has a header in front.
"""

import re
import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from mmap import ACCESS_READ, mmap
from pathlib import Path

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
MEGATRON_TYPES = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}
"""Type code of tokens → the array module's letter; 6 and 7 are not integers."""
LOOKED_AT = 1 << 16
"""Tokens at the beginning of a file whose ids are checked."""
_NUMPY = b"\x93NUMPY"
_ARRAY_OF_IDS = re.compile(rb"'descr': '[<|]([iu][1248])'.*'shape': \((\d+),\)")
_NUMPY_TYPES = {
    "u1": "B",
    "u2": "H",
    "u4": "I",
    "u8": "Q",
    "i1": "b",
    "i2": "h",
    "i4": "i",
    "i8": "q",
}
_HIGH_HALVES = 8
"""Tokens without a header have 4 bytes if the upper 2 of the first ones are below this: ids below 524,288."""


class DamagedError(Exception):
    """A damaged file, or one of another format."""

    def __init__(self, path: Path, what: str, kind: str = "damaged token file") -> None:
        super().__init__(f"{kind}: {path}: {what}")
        self.path, self.what, self.kind = path, what, kind


@dataclass(frozen=True)
class TokenIndex:
    """The position of a file's tokens, and the ends of its documents; `len` is the number of documents."""

    path: Path
    """The file of tokens."""
    index: Path
    """The file that says where documents end."""
    letter: str
    """The array module's letter for the type of a token, which is little-endian."""
    count: int
    """The number of tokens."""
    offset: int = 0
    """The bytes before the first token."""
    stored_ends: memoryview | None = None
    """The end of each text in `unit`; the last may be left out. None: a text ends with the token `eos`."""
    unit: int = 1
    """Units of `stored_ends` per token."""
    eos: int = 0
    documents: memoryview | None = None
    """The first text of each document, and the number of texts; None: each text is a document."""
    lengths: memoryview | None = None
    """The tokens of each text; None: they are not stored."""
    tokenizer: str | None = None
    """The tokenizer's name, if the files have it."""

    @cached_property
    def ends(self) -> memoryview:
        """The end of each text, in `unit`; if the file has no index, all tokens are searched for `eos`."""
        if self.stored_ends is not None:
            return self.stored_ends
        tokens, ends = mapped(self.path), array("Q")
        at = tokens.find(self._eos, self.offset)
        while at >= 0:
            token, is_within = divmod(at - self.offset, len(self._eos))
            if not is_within:
                ends.append(token + 1)
            at = tokens.find(self._eos, at + 1)
        if not ends or ends[-1] != self.count:
            ends.append(self.count)
        return memoryview(ends)

    def __len__(self) -> int:
        return len(self.ends) if self.documents is None else len(self.documents) - 1

    def document_start(self, document: int) -> int:
        """Return the position of a document's first token; for `len(self)`, the end of the last document."""
        text = document if self.documents is None else self.documents[document]
        if text == 0:
            return 0
        return self.count if text > len(self.ends) else int(self.ends[text - 1]) // self.unit

    def document_at(self, token: int) -> int:
        """Return the number of the document that holds the token at this position."""
        text = bisect_right(self.ends, token * self.unit)
        if self.documents is None:
            return text
        return bisect_right(self.documents, text, hi=len(self)) - 1

    def start_of(self, token: int) -> int:
        """Return the start of the document that holds the token at this position."""
        if self.stored_ends is not None:
            return self.document_start(self.document_at(token))
        tokens, width = mapped(self.path), len(self._eos)
        at = tokens.rfind(self._eos, self.offset, self.offset + token * width)
        while at >= 0 and (at - self.offset) % width:
            at = tokens.rfind(self._eos, self.offset, at + width - 1)
        return (at - self.offset) // width + 1 if at >= 0 else 0

    def largest(self) -> int:
        """Return the largest of the first ids; a negative one counts as too large for any vocabulary."""
        first = array(self.letter)
        with self.path.open("rb") as stream:
            stream.seek(self.offset)
            first.frombytes(stream.read(first.itemsize * min(LOOKED_AT, self.count)))
        return max(first) if min(first) >= 0 else sys.maxsize

    @cached_property
    def _eos(self) -> bytes:
        return self.eos.to_bytes(array(self.letter).itemsize, "little")


PARTS = ".parts"
"""The ending of a folder of texts that are prepared beside the training; its parts are prepared folders."""


def is_parts(path: str | Path) -> bool:
    """True if a path names a folder of texts that are prepared beside the training."""
    return Path(path).suffix == PARTS


def part_of(folder: Path, number: int) -> Path:
    """Return the folder of a part, which exists as soon as it is prepared."""
    return folder / f"part-{number:05}"


def first_part(prefix: str) -> str:
    """Return a prefix of tokens; for a folder of parts, the prefix of its first part."""
    return str(part_of(Path(prefix), 0) / "tokens") if is_parts(prefix) else prefix


def _megatron(prefix: str, eos: int) -> TokenIndex:
    prefix = first_part(prefix)
    tokens, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    size = index.stat().st_size
    with index.open("rb") as stream:
        raw = stream.read(HEADER.size)
    if not raw.startswith(MAGIC):
        what = "it does not start with the header of an .idx"
        raise DamagedError(index, what, "not a Megatron index")
    if len(raw) < HEADER.size:
        raise DamagedError(index, f"it ends within its header, after {size} bytes")
    _, version, code, sequences, documents = HEADER.unpack(raw)
    if version != VERSION:
        raise DamagedError(index, f"its version is {version}, not {VERSION}")
    if code not in MEGATRON_TYPES:
        raise DamagedError(index, f"its type code {code} is not a token type")
    expected = HEADER.size + 12 * sequences + 8 * documents
    if size == expected + sequences and sequences > 0:
        raise DamagedError(index, "it holds a mode for each sequence, as multimodal data does")
    if size != expected or documents < 1:
        raise DamagedError(index, f"it holds {size} bytes, and its header declares {expected}")
    letter = MEGATRON_TYPES[code]
    itemsize = array(letter).itemsize
    content = memoryview(mapped(index))[HEADER.size :]
    lengths = content[: 4 * sequences].cast("i")
    starts = content[4 * sequences : 12 * sequences].cast("q")
    firsts = content[12 * sequences :].cast("q")
    described = starts[-1] + lengths[-1] * itemsize if sequences else 0
    if (held := tokens.stat().st_size) < described:
        raise DamagedError(tokens, f"it holds {held} bytes, and {index.name} declares {described}")
    if held > described:
        what = f"it describes {described} bytes, and {tokens.name} holds {held}"
        raise DamagedError(index, what)
    _require_tokens(tokens, held)
    if starts[0] != 0:
        raise DamagedError(index, "its offsets do not match its lengths")
    if firsts[0] != 0 or firsts[-1] != sequences:
        raise DamagedError(index, "its documents do not cover its sequences")
    return TokenIndex(
        tokens, index, letter, held // itemsize,
        stored_ends=starts[1:], unit=itemsize, documents=firsts, lengths=lengths,
    )  # fmt: skip


def _datatrove(path: str, eos: int) -> TokenIndex:
    tokens, index, metadata = Path(path), Path(f"{path}.index"), Path(f"{path}.metadata")
    size, length = tokens.stat().st_size, index.stat().st_size
    if length == 0 or length % 8:
        raise DamagedError(index, f"it holds {length} bytes, which are not ends of documents")
    ends = memoryview(mapped(index)).cast("Q")
    count = ends[-1]
    _require_tokens(tokens, size and count)
    width = size // count
    if size % count or width not in (2, 4):
        what = f"it holds {size} bytes, and {index.name} declares {count} tokens of 2 or 4 bytes"
        raise DamagedError(tokens, what)
    tokenizer = None
    if metadata.is_file():
        lines = metadata.read_text("utf-8", errors="replace").splitlines()
        tokenizer, _, declared = (lines[0] if lines else "").partition("|")
        if declared.isdecimal() and int(declared) != width:
            what = f"it declares {declared} bytes per token, and {tokens.name} has {width}"
            raise DamagedError(metadata, what)
        if len(lines) > 1 and lines[1].isdecimal() and int(lines[1]) != count:
            what = f"it declares {lines[1]} tokens, and {tokens.name} has {count}"
            raise DamagedError(metadata, what)
    letter = {2: "H", 4: "I"}[width]
    return TokenIndex(tokens, index, letter, count, stored_ends=ends, tokenizer=tokenizer)


def _npy(path: str, eos: int) -> TokenIndex:
    tokens, offset = Path(path), 0
    size = tokens.stat().st_size
    with tokens.open("rb") as stream:
        first = stream.read(2 * LOOKED_AT)
    if first.startswith(_NUMPY) and len(first) > 12:
        offset = 10 + struct.unpack_from("<H", first, 8)[0]
        if first[6] > 1:
            offset = 12 + struct.unpack_from("<I", first, 8)[0]
        header = _ARRAY_OF_IDS.search(first[:offset])
        if header is None:
            raise DamagedError(tokens, "its header is not one of a 1-D array of little-endian ids")
        letter, count = _NUMPY_TYPES[header[1].decode()], int(header[2])
    else:
        high_halves = memoryview(first[: len(first) // 4 * 4]).cast("H")[1::2]
        is_wide = size % 4 == 0 and size > 0 and max(high_halves) < _HIGH_HALVES
        letter, count = ("I", size // 4) if is_wide else ("H", size // 2)
    width = array(letter).itemsize
    if size != offset + count * width:
        what = f"it holds {size} bytes, which are not {count} tokens of {width} bytes"
        raise DamagedError(tokens, what)
    _require_tokens(tokens, count)
    if eos >= 256**width:
        raise DamagedError(tokens, f"data.eos={eos} does not fit into its tokens of {width} bytes")
    return TokenIndex(tokens, tokens, letter, count, offset, eos=eos)


def _require_tokens(tokens: Path, count: int) -> None:
    if count == 0:
        raise DamagedError(tokens, "it holds no token", "no tokens to train on")


def mapped(path: Path) -> mmap:
    """Map a whole file into memory."""
    with path.open("rb") as stream:
        return mmap(stream.fileno(), 0, access=ACCESS_READ)


@dataclass(frozen=True)
class TokenFormat:
    """A format of token files."""

    title: str
    files: tuple[str, ...]
    """Endings that the names of the files have in addition to `data.path`; the tokens' ending is the first."""
    suffix: str | None
    """The ending of a path by which `data inspect` recognizes it; None: any other."""
    path: str
    """A description of what `data.path` names."""
    read: Callable[[str, int], TokenIndex]
    """Reads the index of a `data.path`, given `data.eos`. Raises DamagedError and OSError."""
    reads_eos: bool = False
    """True if only `data.eos` says where documents end."""

    def stem(self, path: str) -> str:
        """Return the `data.path` of a path that may name one of its files."""
        return next(
            (path.removesuffix(end) for end in self.files if end and path.endswith(end)), path
        )

    def missing(self, path: str) -> list[str]:
        """List the files of a `data.path` that do not exist."""
        files = [f"{first_part(path)}{end}" for end in self.files]
        return [file for file in files if not Path(file).expanduser().is_file()]


FORMATS = {
    "megatron": TokenFormat("Indexed", (".bin", ".idx"), None,
        "a prepared folder, or the common path of the files, without .bin and .idx", _megatron),
    "datatrove": TokenFormat("Datatrove", ("", ".index"), ".ds", "the .ds file", _datatrove),
    "npy": TokenFormat("Npy", ("",), ".npy", "the .npy file", _npy, reads_eos=True),
}  # fmt: skip
"""The formats by their `data.source`."""


def format_of(path: str) -> str:
    """Return the `data.source` that reads a path."""
    suffixes = {row.suffix: name for name, row in FORMATS.items()}
    return suffixes.get(Path(path).suffix, suffixes[None])
