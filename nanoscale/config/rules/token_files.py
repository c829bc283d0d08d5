"""Rules of token files: they exist, and a prepared folder names its own."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoscale.common.errors import Violation
from nanoscale.config.data import token_sources as prepared
from nanoscale.config.data.token_headers import (
    DamagedError,
    glance_at_datatrove,
    glance_at_megatron,
)
from nanoscale.config.data.token_sources import MixtureSource
from nanoscale.config.rules.resolution import Resolution
from nanoscale.config.violations import override


@dataclass(frozen=True)
class TokenFiles:
    """The files of a source."""

    path: str | None
    valid_path: str | None
    tokenizer: Path | None = None
    """The tokenizer of the prepared folder."""
    prepared: bool = False


def look(resolution: Resolution, source: MixtureSource) -> TokenFiles:
    """Return the files of a source, all of which must exist."""
    found = TokenFiles(source.path, source.valid_path)
    if source.path and resolution.config.data.source == "megatron":
        folder = prepared.folder_of(source.path)
        if folder is not None:
            found = _taken_apart(resolution, source, folder)
    _present(resolution, source, "path", found.path)
    if found.valid_path is not None:
        _present(resolution, source, "valid_path", found.valid_path)
    return found


def refuse(
    resolution: Resolution, key: str, value: Any, message: str, *suggestions: str | None
) -> None:
    """Record a violation like `Resolution.refuse`, also of a key within `data.mixture`."""
    where = "data.mixture" if key.startswith("data.mixture") else key
    proposals = tuple(text for text in suggestions if text)
    resolution.add(
        "data", Violation(key, value, resolution.composed.source(where), message, proposals)
    )


def _taken_apart(resolution: Resolution, source: MixtureSource, folder: Path) -> TokenFiles:
    """Return a prepared folder's own files in place of the folder, unless others are requested."""
    manifest = prepared.manifest(folder) or {}
    vocab, needed = resolution.config.model.vocab, manifest.get("vocabulary", 0)
    if needed > vocab:
        enough = resolution.more_rows(-(-needed // 64) * 64)
        message = f"is less than the {needed} tokens of the vocabulary that made {folder}"
        resolution.refuse("data", "model.vocab", message, enough)
    path, valid_path = source.path, source.valid_path
    if Path(path or "").expanduser().absolute() == folder.absolute():
        path = str(folder / prepared.TOKENS)
        if valid_path is None and (folder / f"{prepared.VALID}.idx").is_file():
            valid_path = str(folder / prepared.VALID)
    tokenizer = folder / prepared.TOKENIZER
    return TokenFiles(path, valid_path, tokenizer if tokenizer.is_file() else None, prepared=True)


def _present(resolution: Resolution, source: MixtureSource, name: str, path: str | None) -> None:
    kind, key = resolution.config.data.source, f"{source.key}.{name}"
    if path is None:
        what = {
            "megatron": "a prepared folder, or the common path of the files, without .bin and .idx",
            "datatrove": "the .ds file",
        }[kind]
        message = f"is needed by data.source={kind}: {what}"
        refuse(resolution, key, None, message, f"{key}=/path/to/corpus")
        return
    ends = {"megatron": (".bin", ".idx"), "datatrove": ("", ".index")}[kind]
    missing = [end for end in ends if not Path(f"{path}{end}").expanduser().is_file()]
    if missing:
        files = " and ".join(f"{path}{end}" for end in missing)
        stem = path.removesuffix(".bin").removesuffix(".idx")
        plain = stem != path and Path(f"{stem}.bin").is_file()
        refuse(resolution, key, path, f"has no {files}", override(key, stem) if plain else None)
        return
    _glance(resolution, key, str(Path(path).expanduser()))


def _glance(resolution: Resolution, key: str, path: str) -> None:
    """Check early for mismatched or truncated files and larger vocabularies, which fail a launch later."""
    look = {"megatron": glance_at_megatron, "datatrove": glance_at_datatrove}
    try:
        largest = look[resolution.config.data.source](path)
    except (DamagedError, OSError) as error:
        refuse(resolution, key, path, str(error))
        return
    vocab = resolution.config.model.vocab
    if largest >= vocab and not any(it.key == "model.vocab" for it in resolution.violations):
        held = f"token {largest}" if largest < sys.maxsize else "a negative token"
        enough = resolution.more_rows(largest + 1) if largest < sys.maxsize else None
        message = f"has too few tokens for {path}, which holds {held}: ids are in [0, {vocab})"
        resolution.refuse("data", "model.vocab", message, enough)
