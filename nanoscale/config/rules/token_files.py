"""Rules of token files: they exist, and a prepared folder names its own."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoscale.common.errors import Violation
from nanoscale.config.data import prepared_folder as prepared
from nanoscale.config.data.mixture import Source
from nanoscale.config.data.token_headers import (
    DamagedError,
    glance_at_datatrove,
    glance_at_megatron,
)
from nanoscale.config.rules.resolution import Case
from nanoscale.config.violations import override


@dataclass(frozen=True)
class TokenFiles:
    """The files of a source."""

    path: str | None
    valid_path: str | None
    tokenizer: Path | None = None
    """The tokenizer of the prepared folder."""
    prepared: bool = False


def look(case: Case, source: Source) -> TokenFiles:
    """Return the files of a source, all of which must exist."""
    found = TokenFiles(source.path, source.valid_path)
    if source.path and case.config.data.source == "megatron":
        folder = prepared.folder_of(source.path)
        if folder is not None:
            found = _taken_apart(case, source, folder)
    _present(case, source, "path", found.path)
    if found.valid_path is not None:
        _present(case, source, "valid_path", found.valid_path)
    return found


def refuse(case: Case, key: str, value: Any, message: str, *suggestions: str | None) -> None:
    """Record a violation like `Case.refuse`, also of a key within `data.mixture`."""
    where = "data.mixture" if key.startswith("data.mixture") else key
    proposals = tuple(text for text in suggestions if text)
    case.add("data", Violation(key, value, case.composed.source(where), message, proposals))


def _taken_apart(case: Case, source: Source, folder: Path) -> TokenFiles:
    """Return a prepared folder's own files in place of the folder, unless others are requested."""
    manifest = prepared.manifest(folder) or {}
    vocab, needed = case.config.model.vocab, manifest.get("vocabulary", 0)
    if needed > vocab:
        enough = case.more_rows(-(-needed // 64) * 64)
        message = f"is less than the {needed} tokens of the vocabulary that made {folder}"
        case.refuse("data", "model.vocab", message, enough)
    path, valid_path = source.path, source.valid_path
    if Path(path or "").expanduser().absolute() == folder.absolute():
        path = str(folder / prepared.TOKENS)
        if valid_path is None and (folder / f"{prepared.VALID}.idx").is_file():
            valid_path = str(folder / prepared.VALID)
    tokenizer = folder / prepared.TOKENIZER
    return TokenFiles(path, valid_path, tokenizer if tokenizer.is_file() else None, prepared=True)


def _present(case: Case, source: Source, name: str, path: str | None) -> None:
    kind, key = case.config.data.source, f"{source.key}.{name}"
    if path is None:
        what = {
            "megatron": "a prepared folder, or the files' common path, without .bin and .idx",
            "datatrove": "the .ds file",
        }[kind]
        message = f"is needed by data.source={kind}: {what}"
        refuse(case, key, None, message, f"{key}=/path/to/corpus")
        return
    ends = {"megatron": (".bin", ".idx"), "datatrove": ("", ".index")}[kind]
    missing = [end for end in ends if not Path(f"{path}{end}").expanduser().is_file()]
    if missing:
        files = " and ".join(f"{path}{end}" for end in missing)
        stem = path.removesuffix(".bin").removesuffix(".idx")
        plain = stem != path and Path(f"{stem}.bin").is_file()
        refuse(case, key, path, f"has no {files}", override(key, stem) if plain else None)
        return
    _glance(case, key, str(Path(path).expanduser()))


def _glance(case: Case, key: str, path: str) -> None:
    """Check early for mismatched or truncated files and larger vocabularies, which fail a launch later."""
    look = {"megatron": glance_at_megatron, "datatrove": glance_at_datatrove}
    try:
        largest = look[case.config.data.source](path)
    except (DamagedError, OSError) as error:
        refuse(case, key, path, str(error))
        return
    vocab = case.config.model.vocab
    if largest >= vocab and not any(it.key == "model.vocab" for it in case.violations):
        held = f"token {largest}" if largest < sys.maxsize else "a negative token"
        enough = case.more_rows(largest + 1) if largest < sys.maxsize else None
        message = f"has too few tokens for {path}, which holds {held}: ids lie in [0, {vocab})"
        case.refuse("data", "model.vocab", message, enough)
