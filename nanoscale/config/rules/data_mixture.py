"""Rules of `data.mixture`: every source has its files, and all have tokens of one vocabulary."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from nanoscale.config.data.mixture import MEMBERS, Source
from nanoscale.config.rules.resolution import Resolution, listed
from nanoscale.config.rules.token_files import TokenFiles, look, refuse
from nanoscale.config.schema import Data
from nanoscale.config.suggest import nearest
from nanoscale.config.violations import override

KEY = "data.mixture"


def resolve_mixture(resolution: Resolution) -> Data:
    """Return the data with each source's own files, and the tokenizer that made all of them."""
    data = resolution.config.data
    for name in ("path", "valid_path"):
        value = getattr(data, name)
        if value is not None:
            message = f"and {KEY} both name token files"
            refuse(resolution, f"data.{name}", value, message, f"data.{name}=null")
    before = len(resolution.violations)
    sources = list(_sources(resolution, data.mixture))
    # otherwise a mistyped weight would be reported as missing, too
    if len(resolution.violations) == before:
        _weights(resolution, sources)
    prepared: dict[str, TokenFiles] = {}
    resolved: dict[str, dict[str, Any]] = {}
    for source in sources:
        files = look(resolution, source)
        if files.prepared and source.weight != 0:
            prepared[source.name] = files
        found = replace(source, path=files.path, valid_path=files.valid_path)
        resolved[source.name] = {key: asdict(found)[key] for key in MEMBERS}
    _require_one_tokenizer(resolution, prepared)
    tokenizer = data.tokenizer
    if tokenizer == "byte":
        named = [str(files.tokenizer) for files in prepared.values() if files.tokenizer]
        tokenizer = named[0] if named else "byte"
    return replace(data, mixture=resolved, tokenizer=tokenizer)


def _sources(resolution: Resolution, mixture: dict[str, Any]) -> Iterator[Source]:
    for name, entry in mixture.items():
        key = f"{KEY}.{name}"
        if not isinstance(entry, dict):
            example = override(f"{key}.path", entry) if isinstance(entry, str) else f"{key}.path=…"
            message = f"is a section of {listed(list(MEMBERS))}"
            refuse(resolution, key, entry, message, example)
            continue
        for unknown in entry.keys() - set(MEMBERS):
            near = nearest(unknown, MEMBERS) or MEMBERS
            proposals = [override(f"{key}.{member}", entry[unknown]) for member in near]
            refuse(resolution, f"{key}.{unknown}", entry[unknown], "unknown key", *proposals)
        yield Source(**_typed(resolution, key, entry), name=name)


def _typed(resolution: Resolution, key: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a source that have values of the right type."""
    found: dict[str, Any] = {"path": None}
    for name in ("path", "valid_path"):
        value = entry.get(name)
        if value is None or isinstance(value, str):
            found[name] = _absolute(value)
        else:
            refuse(resolution, f"{key}.{name}", value, "must be a text or null")
    weight = entry.get("weight")
    number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if weight is None or (number and math.isfinite(weight) and weight >= 0):
        found["weight"] = weight
    else:
        refuse(
            resolution, f"{key}.weight", weight, "must be a number, at least 0", f"{key}.weight=1"
        )
    return found


def _absolute(path: str | None) -> str | None:
    return path if path is None else str(Path(path).expanduser().absolute())


def _weights(resolution: Resolution, sources: list[Source]) -> None:
    """Check that all weights are given, or none; 0 leaves a source out in either resolution."""
    given = [source.name for source in sources if source.weight]
    missing = [f"{source.key}.weight=1" for source in sources if source.weight is None]
    if given and missing:
        message = "has weights for some sources only; without weights, sources count by their sizes"
        refuse(resolution, KEY, given, message, " ".join(missing))
    elif not given and not missing:
        names = [source.name for source in sources]
        refuse(resolution, KEY, names, "has no weight above 0", f"{sources[0].key}.weight=1")


def _require_one_tokenizer(resolution: Resolution, prepared: dict[str, TokenFiles]) -> None:
    """Refuse sources whose ids come from different tokenizers, bytes included: they mean different texts."""
    if not prepared:
        return
    (first, files), *others = prepared.items()
    for name, other in others:
        if _vocabulary(other) != _vocabulary(files):
            message = (
                f"holds {_tokens_of(other)}, and {KEY}.{first} holds {_tokens_of(files)}: "
                "a model is trained on the tokens of one tokenizer"
            )
            alone = f"{KEY}.{name}.weight=0"
            refuse(resolution, f"{KEY}.{name}", other.path, message, alone)


def _vocabulary(files: TokenFiles) -> bytes | None:
    """Return the tokenizer's file, or None for bytes."""
    return files.tokenizer.read_bytes() if files.tokenizer else None


def _tokens_of(files: TokenFiles) -> str:
    return f"tokens of {files.tokenizer}" if files.tokenizer else "bytes (no tokenizer.json)"
