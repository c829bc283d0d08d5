"""The sources of a configuration's tokens: a data mixture, and prepared folders. Imports no numpy."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from nanoscale.common.json_text import parse
from nanoscale.config.objectives import is_paired, rows_of_sample
from nanoscale.config.schema import Config, Data, DataSource, Train
from nanoscale.config.token_formats import FORMATS, DamagedError, TokenIndex
from nanoscale.config.training_phases import samples_after


@dataclass(frozen=True)
class MixtureSource(DataSource):
    """One source of `data.mixture`, or the only one."""

    name: str = ""
    """Empty if it is the only source."""

    @property
    def key(self) -> str:
        """The section of the configuration that holds it."""
        return f"data.mixture.{self.name}" if self.name else "data"


def sources_of(data: Data) -> list[MixtureSource]:
    """List the sources of a configuration that the rules have checked, without sources of weight 0."""
    if not data.mixture:
        return [MixtureSource(data.path, None, data.valid_path)]
    return [source for source in named_sources(data) if source.weight != 0]


def named_sources(data: Data) -> list[MixtureSource]:
    """List the sources of a data mixture."""
    return [MixtureSource(**vars(entry), name=name) for name, entry in data.mixture.items()]


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
        return len(_texts(file)) <= BYTE_VOCAB  # as exports of models of bytes have
    if file.read_bytes() == other.read_bytes():
        return True
    texts, others = _texts(file), _texts(other)
    return all(texts[token] == others[token] for token in texts.keys() & others.keys())


def known_tokenizers(data: Data) -> list[Path | None]:
    """Return the tokenizer.json of resolved data's tokens, or None for bytes; nothing if it is not known."""
    if data.tokenizer not in ("byte", "bpe"):
        return [Path(data.tokenizer)]
    if data.source == "stdlib":
        return [None] if data.tokenizer == "byte" else []
    folders = [folder_of(source.path) for source in sources_of(data) if source.path]
    return [None] if folders and all(folders) else []


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


PACKED_TOGETHER = 1 << 20
"""Documents that are packed together: neighbors in the file stay near each other."""
BYTE_VOCAB = 257
"""The tokens of `data.tokenizer=byte`: every byte, and the end of a text."""
STDLIB_TOKENS = {"byte": 9.9e6, "bpe": 3.7e6}
"""About how many tokens the embedded corpus has, by tokenizer: CPython 3.11's library, and 1,024 tokens."""


def times_seen(config: Config) -> float | None:
    """Return how often a resolved configuration's training sees its samples; None if it is not known.

    The size of the embedded corpus is about `STDLIB_TOKENS`.
    """
    train, samples = config.train, training_samples(config.data, config.train)
    if config.data.source == "stdlib":
        tokens = STDLIB_TOKENS.get(config.data.tokenizer, STDLIB_TOKENS["bpe"])
        samples = max(1, int(tokens / train.seq_len))
    if samples is None or train.steps is None:
        return None
    return samples_after(train, train.steps) / (samples * rows_of_sample(train))


def training_samples(data: Data, train: Train) -> int | None:
    """Return the samples of one epoch; None if they are not known before the launch.

    They are known for one token file.
    """
    if data.source not in FORMATS or data.path is None or data.mixture:
        return None
    form: str = "pairs" if is_paired(train) else data.packing
    form = train.objective if train.objective == "classify" else form
    if form != "stream" and FORMATS[data.source].reads_eos:
        return None  # only a search through the whole file finds its documents
    with suppress(DamagedError, OSError):
        files = (Path(f"{data.path}{end}").expanduser() for end in FORMATS[data.source].files)
        return _count(data, form, train.seq_len, *(it.stat().st_mtime_ns for it in files)) or None
    return None


@lru_cache(16)
def _count(data: Data, form: str, seq_len: int, *changed: int) -> int:
    """Return the samples that a loader of the training's split has; `changed`: the files' times of change."""
    assert data.path is not None
    tokens = open_index(data, data.path)
    held_out = 0.0 if data.valid_path is not None else data.valid_fraction
    end, _ = training_end(tokens, held_out)
    if form == "stream":
        return (end - 1) // seq_len
    starts = [tokens.document_start(it) for it in range(tokens.document_at(end - 1) + 2)]
    if form == "pairs":
        marks = answers_of(data.path).expanduser() if data.loss_on == "answers" else None
        return _pairs(starts, end, seq_len, marks)
    if form == "classify":
        return sum(stop - start > 1 and stop <= end for start, stop in pairwise(starts))
    starts[-1] = min(starts[-1], end)
    lengths = [stop - start - 1 for start, stop in pairwise(starts)]
    windows = range(0, len(lengths), PACKED_TOGETHER)
    return sum(packed_rows(lengths[it : it + PACKED_TOGETHER], seq_len) for it in windows)


def _pairs(starts: list[int], end: int, seq_len: int, marks: Path | None) -> int:
    """Count the pairs of whole documents with answers; `marks` is None if every token has a loss."""
    learned: mmap | None = None
    if marks is not None:
        with marks.open("rb") as stream:
            learned = mmap(stream.fileno(), 0, access=ACCESS_READ)
    both = zip(starts[0::2], starts[1::2], starts[2::2], strict=False)
    return sum(
        all(
            0 < b - a - 1 <= seq_len and (learned is None or learned.find(b"\1", a + 1, b) >= 0)
            for a, b in pairwise(pair)
        )
        for pair in both
        if pair[2] <= end
    )


def packed_rows(lengths: Iterable[int], room: int) -> int:
    """Return the rows that documents of so many inputs take, as `data.samples.pack` places them.

    The number of documents of each length decides alone, so the time grows with the different lengths.
    """
    inputs = [it for it in lengths if it > 0]
    rows, counts = sum(it // room for it in inputs), Counter(it % room for it in inputs)
    left: Counter[int] = Counter()
    spaces: list[int] = []  # the keys of `left`, rising: rows by the space that they have left
    for length in sorted(counts.keys() - {0}, reverse=True):
        count = counts[length]
        while count:
            if (at := bisect_left(spaces, length)) < len(spaces):
                space = spaces.pop(at)
                number = left.pop(space)
            else:
                space, number = room, -(-count // (room // length))
                rows += number
            each = space // length
            used = min(number, -(-count // each))
            in_last = min(count - each * (used - 1), each)
            count -= each * (used - 1) + in_last
            for rest, times in (
                (space, number - used),
                (space - each * length, used - 1),
                (space - in_last * length, 1),
            ):
                if rest and times:
                    if rest not in left:
                        insort(spaces, rest)
                    left[rest] += times
    return rows


def split_sizes(data: Data, source: MixtureSource) -> tuple[int, int]:
    """Return the tokens of a source to train on, and to validate on.

    Raises:
        DamagedError: an index is not what it should be.
        OSError: a file cannot be read.
    """
    assert source.path is not None
    tokens = open_index(data, source.path)
    if source.valid_path is not None:
        return tokens.count, open_index(data, source.valid_path).count
    end, _ = training_end(tokens, data.valid_fraction)
    return end, tokens.count - end


def open_index(data: Data, path: str) -> TokenIndex:
    """Read the index of a file of `data.source`.

    Raises:
        DamagedError: it is not what it should be.
        OSError: a file cannot be read.
    """
    return FORMATS[data.source].read(path, data.eos or 0)


def training_end(tokens: TokenIndex, valid_fraction: float) -> tuple[int, bool]:
    """Return the number of tokens to train on, and True if they end within a document.

    Validation gets the last whole documents that hold at least `valid_fraction` of all tokens. If these would
    hold more than twice that, or leave less than half of the tokens that training should have (a single
    document, or a huge one at the border), the border lies within a document instead.
    """
    total = tokens.count
    share = math.ceil(total * valid_fraction)
    if share == 0:
        return total, False
    wanted = total - share
    border = tokens.start_of(wanted)
    within = wanted - border > min(share, wanted // 2)
    return (wanted, True) if within else (border, False)
