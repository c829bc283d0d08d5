"""Rules of the data: its source, its mixture, its tokenizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from nanoscale.common.units import listed
from nanoscale.config.data.token_sources import MEMBERS, MixtureSource, answers_of, sources_of
from nanoscale.config.rules.resolution import Resolution
from nanoscale.config.rules.token_files import TokenFiles, look, refuse
from nanoscale.config.schema import Data
from nanoscale.config.violations import nearest, override

BYTE_VOCAB = 257
"""256 bytes and the end of a document."""


def resolve_data(resolution: Resolution) -> Data:
    """Return the data with absolute paths; a prepared folder is replaced by its files."""
    data = resolution.config.data
    if data.source in ("stdlib", "random"):
        for key in ("path", "valid_path", "mixture"):
            if getattr(data, key):
                message = "is read with data.source=megatron or datatrove only"
                resolution.refuse("data", f"data.{key}", message, "data=megatron")
    if data.source == "stdlib":
        _tokenizer(resolution, data)
    elif data.source == "random":
        _random(resolution)
    elif data.mixture:
        data = resolve_mixture(resolution)
        if all(source.valid_path for source in sources_of(data)):
            data = _nothing_held_out(resolution, data, "valid_path of every source")
        _tokenizer(resolution, data)
    else:
        data = _one_source(resolution, data)
    return replace(
        data,
        document_mask=_document_mask(resolution, data),
        loss_on=_loss_on(resolution, data),
        path=absolute(data.path),
        valid_path=absolute(data.valid_path),
        tokenizer=data.tokenizer
        if data.tokenizer in ("byte", "bpe")
        else str(absolute(data.tokenizer)),
        cache_dir=absolute(data.cache_dir),
    )


def _random(resolution: Resolution) -> None:
    """Refuse what needs text or documents, which random tokens do not have."""
    for key in ("tokenizer", "packing", "document_mask"):
        resolution.refuse_idle("data", f"data.{key}", "data.source=random", "data=megatron")
    if resolution.config.train.sample_tokens:
        message = "needs a tokenizer to write a text, and data.source=random has none"
        resolution.refuse("data", "train.sample_tokens", message, "train.sample_tokens=0")


def _one_source(resolution: Resolution, data: Data) -> Data:
    files = look(resolution, *sources_of(data))
    if files.tokenizer is not None and data.tokenizer == "byte":
        data = replace(data, tokenizer=str(files.tokenizer))
    data = replace(data, path=files.path, valid_path=files.valid_path)
    if data.valid_path is not None:
        data = _nothing_held_out(resolution, data, f"data.valid_path={data.valid_path}")
    if not files.prepared or data.tokenizer != "byte":
        _tokenizer(resolution, data)
    return data


def _nothing_held_out(resolution: Resolution, data: Data, instead: str) -> Data:
    if resolution.composed.by_hand("data.valid_fraction") and data.valid_fraction > 0:
        message = f"and {instead} both say what to validate on"
        resolution.refuse("data", "data.valid_fraction", message, "data.valid_fraction=0")
    return replace(data, valid_fraction=0.0)


def _document_mask(resolution: Resolution, data: Data) -> bool:
    whole = data.packing == "whole"
    if whole and not data.document_mask and resolution.composed.by_hand("data.document_mask"):
        message = "lets attention cross documents, and data.packing=whole packs unrelated documents together"
        resolution.refuse(
            "data", "data.document_mask", message, "data.document_mask=true", "data.packing=stream"
        )
    return data.document_mask or whole


def _loss_on(resolution: Resolution, data: Data) -> Literal["all", "answers"]:
    """Return `answers` if a source has marks of answers, unless all tokens are requested."""
    sources = sources_of(data) if data.source == "megatron" else []
    marks = [answers_of(Path(it.path).expanduser()) for it in sources if it.path is not None]
    marked = any(path.is_file() for path in marks)
    if data.loss_on == "answers" and not marked:
        where = " nor ".join(map(str, marks)) or f"data.source={data.source}"
        message = f"needs marked answers, and {where} has none: prepare the chats with --chat"
        resolution.refuse("data", "data.loss_on", message, "data.loss_on=all")
    return "answers" if marked and data.loss_on != "all" else "all"


def _tokenizer(resolution: Resolution, data: Data) -> None:
    vocab = resolution.config.model.vocab
    if data.tokenizer == "byte":
        if vocab < BYTE_VOCAB:
            _too_few_for_bytes(resolution, data)
    elif data.tokenizer == "bpe":
        if data.source != "stdlib":
            message = f"is trained on text, and data.source={data.source} has tokens already"
            example = "data.tokenizer=/path/to/tokenizer.json"
            resolution.refuse("data", "data.tokenizer", message, example, "data.tokenizer=byte")
        if vocab < data.bpe_vocab:
            resolution.refuse(
                "config",
                "data.bpe_vocab",
                f"is more than the rows of the embedding (model.vocab={vocab})",
                f"data.bpe_vocab={vocab}" if vocab >= BYTE_VOCAB else None,
                resolution.more_rows(data.bpe_vocab),
                "data.tokenizer=byte",
            )
    elif not Path(data.tokenizer).expanduser().is_file():
        message = "is neither byte nor bpe nor a file that exists"
        fits = data.source == "stdlib" and data.bpe_vocab <= vocab
        bpe = "data.tokenizer=bpe" if fits else None
        resolution.refuse("data", "data.tokenizer", message, "data.tokenizer=byte", bpe)
    elif data.tokenizer.endswith(".model"):
        resolution.require_for_ranks("data.tokenizer", "sentencepiece", "sentencepiece")


def _too_few_for_bytes(resolution: Resolution, data: Data) -> None:
    """Refuse a small vocabulary if bytes are needed; ids in a file may come from any tokenizer."""
    message = f"is less than the {BYTE_VOCAB} tokens of data.tokenizer=byte"
    rows = resolution.more_rows(BYTE_VOCAB)
    if data.source == "stdlib" or resolution.composed.by_hand("data.tokenizer"):
        resolution.refuse("config", "model.vocab", message, rows)
    elif resolution.config.train.sample_tokens > 0:
        named = f"{message}, which train.sample_tokens needs to write a text"
        instead = ("train.sample_tokens=0", "data.tokenizer=/path/to/tokenizer.json")
        resolution.refuse("config", "model.vocab", named, rows, *instead)


def absolute(path: str | None) -> Any:
    """Return a path that is the same from every folder."""
    return str(Path(path).expanduser().absolute()) if path else path


# --- mixture --------------------------------------------------------------------------------------

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


def _sources(resolution: Resolution, mixture: dict[str, Any]) -> Iterator[MixtureSource]:
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
        yield MixtureSource(**_typed(resolution, key, entry), name=name)


def _typed(resolution: Resolution, key: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a source that have values of the right type."""
    found: dict[str, Any] = {"path": None}
    for name in ("path", "valid_path"):
        value = entry.get(name)
        if value is None or isinstance(value, str):
            found[name] = absolute(value)
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


def _weights(resolution: Resolution, sources: list[MixtureSource]) -> None:
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
