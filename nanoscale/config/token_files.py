"""The sources of a configuration's tokens: a data mixture, and prepared folders. Imports no numpy."""

import math
from bisect import bisect_left, insort
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from nanoscale.common.json_text import Json, parse
from nanoscale.config.schema import Config, Data, DataSource, Train
from nanoscale.config.token_formats import (
    FORMATS,
    DamagedError,
    TokenIndex,
    first_part,
    is_parts,
    mapped,
)
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
ALL_PARTS = "all.json"
"""The file of a folder of parts with their number, once all are prepared."""
REFUSED = 2
"""The exit code of the process that prepares them if the request is wrong."""


def answers_of(prefix: str | Path) -> Path:
    """Return the file of the marks of answers of a prefix: one byte per token, 1 in an answer, else 0."""
    return Path(f"{first_part(str(prefix))}.answers")


def folder_of(path: str | Path) -> Path | None:
    """Return the prepared folder that a path is, or whose tokens it names; None if there is none."""
    given = Path(path).expanduser()
    for folder in (given, given.parent):
        named = folder == given or given.name in (TOKENS, VALID)
        tokens = Path(first_part(str(folder))) if is_parts(folder) else folder / TOKENS
        if named and (folder / MANIFEST).is_file() and Path(f"{tokens}.idx").is_file():
            return folder
    return None


def manifest(folder: Path) -> Json | None:
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


BAD = 2
"""The mark of a bad answer's tokens; tokens of good answers, and all others with a loss, have 1."""
PACKED_TOGETHER = 1 << 20
"""Documents that are packed together: neighbors in the file stay near each other."""
BYTE_VOCAB = 257
"""The tokens of `data.tokenizer=byte`: every byte, and the end of a text."""
STDLIB_TOKENS = {"byte": 9.9e6, "bpe": 3.7e6}
"""About how many tokens the embedded corpus has, by tokenizer: CPython 3.11's library, and 1,024 tokens."""


def times_seen(config: Config) -> float | None:
    """Return how often a resolved configuration's training sees its samples; None if it is not known.

    The size of the embedded corpus is about `STDLIB_TOKENS`. Texts that are prepared beside the training have
    about as many samples as their first part, for the same bytes.
    """
    train, samples = config.train, training_samples(config.data, config.train)
    if config.data.source == "stdlib":
        tokens = STDLIB_TOKENS.get(config.data.tokenizer, STDLIB_TOKENS["bpe"])
        samples = max(1, int(tokens / train.seq_len))
    if (path := config.data.path) and is_parts(path) and (prepared := manifest(Path(path))):
        first = _count(config.data, _form(config.data, train), train.seq_len)
        samples = max(1, first * prepared["bytes"] // prepared["read"])
    if samples is None or train.steps is None:
        return None
    return samples_after(train, train.steps) / (samples * train.rows_of_sample)


def row_tokens(config: Config) -> float | None:
    """Return the mean tokens of a row of one document, of pairs or texts with labels.

    None: rows hold several documents, or it is not known.
    """
    data, train = config.data, config.train
    if _form(data, train) not in ("pairs", "kto", "classify") or not training_samples(data, train):
        return None
    tokens = open_index(data, str(data.path))
    documents = tokens.document_at(tokens.count - 1) + 1
    return min(float(train.seq_len), tokens.count / documents - 1)


def training_samples(data: Data, train: Train) -> int | None:
    """Return the samples of one epoch; None if they are not known before the launch.

    They are known for one token file.
    """
    if data.source not in FORMATS or data.path is None or data.mixture or is_parts(data.path):
        return None
    form = _form(data, train)
    if form != "stream" and FORMATS[data.source].reads_eos:
        return None  # only a search through the whole file finds its documents
    with suppress(DamagedError, OSError):
        files = (Path(f"{data.path}{end}").expanduser() for end in FORMATS[data.source].files)
        return _count(data, form, train.seq_len, *(it.stat().st_mtime_ns for it in files)) or None
    return None


def _form(data: Data, train: Train) -> str:
    form = "pairs" if train.is_paired else data.packing
    return train.objective if train.objective in ("classify", "kto") else form


@lru_cache(16)
def _count(data: Data, form: str, seq_len: int, *changed: int) -> int:
    """Return the samples that a loader of the training's split has; `changed`: the files' times of change."""
    assert data.path is not None
    tokens, is_marked = open_index(data, data.path), data.loss_on == "answers"
    end, _ = training_end(tokens, 0.0 if data.valid_path is not None else data.valid_fraction)
    if form == "stream":
        return (end - 1) // seq_len
    starts = [tokens.document_start(it) for it in range(tokens.document_at(end - 1) + 2)]
    if form == "classify":
        return sum(stop - start > 1 and stop <= end for start, stop in pairwise(starts))
    if form in ("pairs", "kto"):
        marks = mapped(answers_of(data.path).expanduser()) if is_marked else None

        def fits(start: int, stop: int) -> bool:
            found = (
                marks is None or marks.find(it, start + 1, stop) >= 0
                for it in (b"\1", bytes([BAD]))
            )
            return 0 < stop - start - 1 <= seq_len and any(found)

        if form == "kto":
            return sum(stop <= end and fits(start, stop) for start, stop in pairwise(starts))
        pairs = zip(starts[0::2], starts[1::2], starts[2::2], strict=False)
        return sum(stop <= end and fits(it, mid) and fits(mid, stop) for it, mid, stop in pairs)
    starts[-1] = min(starts[-1], end)
    inputs = [stop - start - 1 for start, stop in pairwise(starts)]
    rows = sum(it // seq_len for it in inputs if it > 0)  # chunks of a whole row
    for window in range(0, len(inputs), PACKED_TOGETHER):
        together, sequences = inputs[window : window + PACKED_TOGETHER], Sequences(seq_len)
        rests = Counter(it % seq_len for it in together if it > 0 and it % seq_len)
        for length in sorted(rests, reverse=True):
            sequences.place(length, rests[length])
        rows += sequences.number
    return rows


class Sequences:
    """Sequences by their remaining room, into which documents are packed, the longest first."""

    def __init__(self, room: int) -> None:
        self.number = 0
        self._room = room
        self._rooms: list[int] = []
        """The different remaining rooms, rising."""
        self._sequences_with: dict[int, list[int]] = {}
        """The numbers of the sequences with each of these rooms."""

    def place(self, length: int, count: int) -> list[int]:
        """Choose sequences for `count` documents of one length; return their numbers."""
        placements: list[int] = []
        while count:
            room, numbers = self._best(length, count)
            each = room // length
            needed = -(-count // each)
            used = numbers[:needed]
            chosen = [number for number in used for _ in range(each)][:count]
            in_last = len(chosen) - each * (len(used) - 1)
            self._add(room, numbers[needed:])
            self._add(room - each * length, used[:-1])
            self._add(room - in_last * length, used[-1:])
            placements += chosen
            count -= len(chosen)
        return placements

    def _best(self, length: int, count: int) -> tuple[int, list[int]]:
        """Return the fullest sequences that fit such a document, and their room; new ones if none fits."""
        index = bisect_left(self._rooms, length)
        if index < len(self._rooms):
            room = self._rooms.pop(index)
            return room, self._sequences_with.pop(room)
        first = self.number
        self.number += -(-count // (self._room // length))
        return self._room, list(range(first, self.number))

    def _add(self, room: int, numbers: list[int]) -> None:
        if room == 0 or not numbers:
            return
        if room not in self._sequences_with:
            insort(self._rooms, room)
            self._sequences_with[room] = []
        self._sequences_with[room] += numbers


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
