"""Text in every supported form, and its expected tokens, by an independent reader."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import random
import signal
import struct
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from pyarrow import parquet

from nanoscale.data.prepare import PreparationRequest, prepare
from nanoscale.data.prepare.folder import PreparationProgress

WORDS = [
    "the",
    "of",
    "and",
    "naïve",
    "Grüße",
    "漢字",
    "tokens",
    "🙂",
    "model",
    "(x)",
    "def\n\t",
    "return",
]


def texts(count: int, seed: int = 0) -> list[str]:
    """Different texts of very different lengths."""
    dice = random.Random(seed)
    lengths = [dice.choice((1, 5, 40, 300)) for _ in range(count)]
    return [
        f"{number} " + " ".join(dice.choices(WORDS, k=length))
        for number, length in enumerate(lengths)
    ]


def write_jsonl(path: Path, documents: Sequence[str], field: str = "text") -> Path:
    lines = (json.dumps({"id": 1, field: text}) + "\n" for text in documents)
    return _write(path, "".join(lines).encode())


def write_records(path: Path, documents: Sequence[str]) -> Path:
    """Write a .json, .csv or .tar, perhaps compressed."""
    rows = [{"id": f"{number}", "text": text} for number, text in enumerate(documents)]
    text = io.StringIO()
    if ".tar" in path.suffixes:
        files = [
            (
                f"shard/{number:05}.{('json', 'txt')[number % 2]}",
                (json.dumps(row), row["text"])[number % 2],
            )
            for number, row in enumerate(rows)
        ]
        return _write(path, tar_of([("shard/00000.jpg", "an image"), *files]))
    if ".json" in path.suffixes:
        json.dump(rows, text)
    else:
        writer = csv.DictWriter(text, ["id", "text"])
        writer.writeheader()
        writer.writerows(rows)
    return _write(path, text.getvalue().encode())


def tar_of(files: Sequence[tuple[str, str]]) -> bytes:
    """Return a tar file that holds texts by path."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for name, text in files:
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return raw.getvalue()


def _write(path: Path, raw: bytes) -> Path:
    """Write bytes, compressed as the ending says."""
    if path.suffix == ".gz":
        raw = gzip.compress(raw)
    elif path.suffix == ".zst":
        raw = pa.compress(raw, codec="zstd", asbytes=True)
    path.write_bytes(raw)
    return path


def write_parquet(path: Path, documents: Sequence[str | None], rows: int = 10) -> Path:
    table = pa.table({"n": range(len(documents)), "text": pa.array(documents, pa.string())})
    parquet.write_table(table, path, row_group_size=rows)
    return path


class Silent:
    """Listens to a preparation."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.seen: list[PreparationProgress] = []

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)

    def progress(self, progress: PreparationProgress, total: int) -> None:
        self.seen.append(progress)


class Interrupter(Silent):
    """A listener that presses Ctrl-C at the report of this number."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def progress(self, progress: PreparationProgress, total: int) -> None:
        super().progress(progress, total)
        if len(self.seen) == self.at:
            os.kill(os.getpid(), signal.SIGINT)


def prepared(out: Path, *sources: Path | str, **settings: Any) -> dict[str, Any]:
    """Prepare with one worker and bytes as tokens unless told otherwise; the manifest."""
    words = tuple(str(source) for source in sources)
    watcher = settings.pop("watcher", None) or Silent()
    request = PreparationRequest(words, out, **{"tokenizer": "byte", **settings})
    return prepare(request, watcher)


def is_held_out(text: str, share: float) -> bool:
    return xxhash.xxh3_64(text.encode(), seed=7).intdigest() < share * 2**64


def pair(ids: Sequence[Sequence[int]], code: int) -> tuple[bytes, bytes]:
    """Return the .bin and the .idx of these documents in Megatron's layout."""
    letter, size = {8: ("H", 2), 4: ("i", 4)}[code]
    tokens = b"".join(struct.pack(f"<{len(one)}{letter}", *one) for one in ids)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(ids), len(ids) + 1)
    index += struct.pack(f"<{len(ids)}i", *map(len, ids))
    starts = [size * sum(map(len, ids[:number])) for number in range(len(ids))]
    index += struct.pack(f"<{len(ids)}q", *starts)
    return tokens, index + struct.pack(f"<{len(ids) + 1}q", *range(len(ids) + 1))


def found(folder: Path, name: str) -> tuple[bytes, bytes]:
    return (folder / f"{name}.bin").read_bytes(), (folder / f"{name}.idx").read_bytes()


def as_bytes(documents: Sequence[str]) -> list[list[int]]:
    """Return the ids of the byte tokenizer."""
    return [[*text.encode(), 256] for text in documents]


def every_file(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def write_datatrove(
    path: Path, documents: Sequence[Sequence[int]], letter: str, about: str
) -> None:
    path.write_bytes(b"".join(struct.pack(f"<{len(one)}{letter}", *one) for one in documents))
    ends = np.cumsum([len(one) for one in documents])
    Path(f"{path}.index").write_bytes(struct.pack(f"<{len(ends)}Q", *map(int, ends)))
    if about:
        Path(f"{path}.metadata").write_text(about)
