"""The folder of an unfinished preparation: commits are durable, and the result appears in one step.

    OUT.part/        lock  request.json  progress.json  tokens.lengths  valid.lengths
    OUT.part/whole/  tokens.bin  valid.bin  tokenizer.json …  becomes OUT by one rename

A commit makes the tokens durable and then replaces progress.json, which holds the lengths of the files. Bytes
written after the last commit are cut off when the work resumes.
"""

import fcntl
import json
import os
import shlex
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from nanoscale.common.errors import UserError, Violation, reason
from nanoscale.common.json_text import Json, parse
from nanoscale.config.token_files import MANIFEST, TOKENS, VALID, answers_of
from nanoscale.data.prepare.chunks import Chunk, Cursor
from nanoscale.data.prepare.encode import Encoded, Tokens
from nanoscale.data.prepare.records import Bad
from nanoscale.data.tokens.files import bin_path, idx_path, index_parts
from nanoscale.processes.scratch import flock
from nanoscale.runs.directory import file_sum, sync_folder

SHOWN = 20
"""Bad records that are kept with their positions."""


@dataclass(frozen=True)
class Count:
    """The size of a split."""

    documents: int = 0
    tokens: int = 0
    answers: int = 0
    """For chats: tokens of answers."""


@dataclass(frozen=True)
class PreparationProgress:
    """The progress of a preparation."""

    cursor: Cursor = field(default_factory=Cursor)
    train: Count = field(default_factory=Count)
    valid: Count = field(default_factory=Count)
    text_bytes: int = 0
    empty: int = 0
    bad: int = 0
    shown: tuple[Bad, ...] = ()
    """The first bad records."""
    read: int = 0
    """Bytes of the sources that are read."""

    @property
    def documents(self) -> int:
        return self.train.documents + self.valid.documents

    @property
    def tokens(self) -> int:
        return self.train.tokens + self.valid.tokens


class UnfinishedFolder:
    """An unfinished preparation."""

    def __init__(self, path: Path, dtype: np.dtype[Any], sizes: list[int], chat: bool) -> None:
        self._path = path
        self._whole = path / "whole"
        self.dtype = dtype
        self._before = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
        self.progress = committed(path) or PreparationProgress()
        self._splits = {
            name: _Split(self._whole, path, name, count, dtype.itemsize, chat)
            for name, count in ((TOKENS, self.progress.train), (VALID, self.progress.valid))
        }

    def add(self, chunk: Chunk, encoded: Encoded) -> None:
        """Append the documents of the next chunk."""
        train = self._splits[TOKENS].append(encoded.train)
        valid = self._splits[VALID].append(encoded.valid)
        progress = self.progress
        self.progress = replace(
            progress,
            cursor=chunk.after,
            train=train,
            valid=valid,
            text_bytes=progress.text_bytes + encoded.text_bytes,
            empty=progress.empty + encoded.empty,
            bad=progress.bad + len(encoded.bad),
            shown=(progress.shown + encoded.bad)[:SHOWN],
            read=self._before[chunk.source] + chunk.read,
        )

    def commit(self) -> None:
        """Make the appended documents durable."""
        for split in self._splits.values():
            split.sync()
        write_document(self._path / "progress.json", asdict(self.progress))

    def publish(self, out: Path, manifest: Json, *, sums: bool = False) -> None:
        """Rename the complete folder to `out`; with `sums`, its manifest has the sums of its files."""
        self.commit()
        kept_splits = [TOKENS, *([VALID] if self.progress.valid.documents else [])]
        for name, split in self._splits.items():
            split.close()
            if name in kept_splits:
                split.write_index(self.dtype)
            else:
                bin_path(self._whole / name).unlink()
                answers_of(self._whole / name).unlink(missing_ok=True)
        names = sorted({path.name for path in self._whole.iterdir()} - {MANIFEST})
        files = {name: (self._whole / name).stat().st_size for name in names}
        added: Json = {"files": files}
        if sums:
            added["sums"] = {name: file_sum(self._whole / name) for name in names}
        write_document(self._whole / MANIFEST, manifest | added)
        self._whole.rename(out)
        sync_folder(out.parent)
        shutil.rmtree(self._path)


class _Split:
    """The tokens and the lengths of one split, open for appending."""

    def __init__(
        self, whole: Path, part: Path, name: str, count: Count, itemsize: int, chat: bool
    ) -> None:
        self._prefix = whole / name
        self._lengths_path = part / f"{name}.lengths"
        self._count = count
        self._itemsize = itemsize
        self._tokens = _reopened(bin_path(self._prefix), count.tokens * itemsize)
        self._lengths = _reopened(self._lengths_path, count.documents * 4)
        self._streams = [self._tokens, self._lengths]
        if chat:
            self._answers = _reopened(answers_of(self._prefix), count.tokens)
            self._streams.append(self._answers)

    def append(self, tokens: Tokens) -> Count:
        self._tokens.write(tokens.tokens)
        self._lengths.write(tokens.lengths)
        if tokens.answers:
            self._answers.write(tokens.answers)
        self._count = Count(
            self._count.documents + len(tokens.lengths) // 4,
            self._count.tokens + len(tokens.tokens) // self._itemsize,
            self._count.answers + len(tokens.answers) - tokens.answers.count(0),
        )
        return self._count

    def sync(self) -> None:
        for stream in self._streams:
            stream.flush()
            os.fsync(stream.fileno())

    def close(self) -> None:
        for stream in self._streams:
            stream.close()

    def write_index(self, dtype: np.dtype[Any]) -> None:
        lengths = np.memmap(self._lengths_path, dtype="<i4", mode="r")
        write_whole(idx_path(self._prefix), index_parts(dtype, lengths))


def _reopened(path: Path, size: int) -> Any:
    stream = path.open("r+b" if path.exists() else "w+b")
    stream.truncate(size)
    stream.seek(size)
    return stream


@contextmanager
def opened(out: Path, identity: Json) -> Iterator[Path]:
    """Lock the folder OUT.part of this request, which is new or left by an earlier attempt.

    It is removed if the body fails before the first commit. Raises UserError if another process holds it, or
    another request left it.
    """
    unfinished = out.with_name(f"{out.name}.part")
    try:
        (unfinished / "whole").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            "data",
            f"cannot create {unfinished}: {reason(error)}; choose a folder that can be written to "
            "(--out, data.cache_dir)",
        ) from error
    with (unfinished / "lock").open("a", encoding="utf-8") as lock:
        if not flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB):
            raise UserError("data", f"{out} is being prepared by another process")
        _check_request(unfinished, identity)
        try:
            yield unfinished
        except BaseException:
            if unfinished.exists() and committed(unfinished) is None:
                shutil.rmtree(unfinished)
            raise


def _check_request(unfinished: Path, identity: Json) -> None:
    path = unfinished / "request.json"
    if not path.exists():
        write_document(path, identity)
        return
    earlier = parse(path.read_bytes())
    differences = [
        Violation(f"--{name}".replace("--sources", "SOURCES"), None, "", "had another value")
        for name in {**earlier, **identity}
        if identity.get(name) != earlier.get(name)
    ]
    if differences:
        names = ", ".join(violation.key for violation in differences)
        refusal = Violation(
            "--out", str(unfinished), "", f"it was started with other settings: {names}",
            remedy=f"repeat the earlier request, or start again: rm -r -- {shlex.quote(str(unfinished))}",
        )  # fmt: skip
        raise UserError("data", f"{unfinished}: {refusal.message}", [refusal])


def committed(unfinished: Path) -> PreparationProgress | None:
    """Return the progress of the last commit; None before the first."""
    try:
        progress = parse((unfinished / "progress.json").read_bytes())
    except FileNotFoundError:
        return None
    progress["cursor"] = Cursor(**progress["cursor"])
    for name in ("train", "valid"):
        progress[name] = Count(**progress[name])
    progress["shown"] = tuple(Bad(**bad) for bad in progress["shown"])
    return PreparationProgress(**progress)


def write_document(path: Path, document: Json) -> None:
    write_whole(path, [json.dumps(document, indent=1, ensure_ascii=False).encode()])


def write_whole(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a file durably and atomically."""
    temporary = path.with_name(f"{path.name}.new")
    with temporary.open("wb") as stream:
        stream.writelines(chunks)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.rename(path)
    sync_folder(path.parent)
