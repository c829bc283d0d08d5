"""Open what a configuration says to train on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from nanoscale.config.schema import Data, Train
from nanoscale.data import corpus
from nanoscale.data.datatrove import DatatroveTokens
from nanoscale.data.indexed import IndexedTokens
from nanoscale.data.loader import (
    Loader,
    Split,
    TokenFile,
    outside_vocabulary,
    split_tokens,
    too_small,
)
from nanoscale.data.tokenizer import ByteTokenizer, Tokenizer, load
from nanoscale.errors import UserError, Violation

_CHECKED = 1 << 22


@dataclass(frozen=True)
class Dataset:
    """The data of a run."""

    tokenizer: Tokenizer | None
    """None where the tokens come from a file and no tokenizer of theirs is known"""
    train: Loader
    valid: Loader | None
    """None where data.valid_fraction is 0, or too small for a sample and never evaluated"""
    fingerprint: str
    """equal for equal tokens; a run that resumes with another one continues on other data"""
    description: str
    """one line for people: what it is, how much, where"""


def open_data(data: Data, train: Train, vocab: int) -> Dataset:
    """Open the tokens of a run for a model of `vocab` ids; prepare the embedded corpus if needed.

    Raises UserError (kind `data`) for files that are missing, damaged or too small, for a cache
    that cannot be written and for tokens outside the vocabulary.
    """
    if data.source == "stdlib":
        return _open_stdlib(data, train, vocab)
    return _open_files(data, train, vocab)


def _open_stdlib(data: Data, train: Train, vocab: int) -> Dataset:
    prepared = corpus.prepare(data)
    tokenizer = prepared.tokenizer()
    if tokenizer.vocab_size > vocab:
        what = f"data.tokenizer={data.tokenizer} has {tokenizer.vocab_size} tokens"
        enough = (f"model.vocab={-(-tokenizer.vocab_size // 64) * 64}",)
        found = Violation("model.vocab", vocab, "", f"{what}, more than the model's", enough)
        raise UserError("data", f"model.vocab={vocab}: {what}", [found])
    name = f"Python {prepared.manifest['settings']['python'].split()[0]}'s standard library"
    tokens = IndexedTokens(prepared.prefix)
    return _dataset(data, train, vocab, tokens, tokenizer, prepared.fingerprint, name)


def _open_files(data: Data, train: Train, vocab: int) -> Dataset:
    tokens, largest = _open_file(data.source, "path", data.path, vocab)
    tokenizer = _files_tokenizer(data, largest, train.sample_tokens > 0)
    fingerprint = _fingerprint(tokens)
    name = tokens.path.name
    if data.valid_path is None:
        return _dataset(data, train, vocab, tokens, tokenizer, fingerprint, name)
    held_out, _ = _open_file(data.source, "valid_path", data.valid_path, vocab)
    both = hashlib.sha256(f"{fingerprint} {_fingerprint(held_out)}".encode()).hexdigest()
    return _dataset(data, train, vocab, tokens, tokenizer, both, name, held_out)


def _open_file(source: str, key: str, path: str | None, vocab: int) -> tuple[TokenFile, int]:
    """A file of tokens, and the largest of its first ones, which are looked at."""
    if path is None:
        found = Violation(f"data.{key}", None, "", f"data.source={source} needs it")
        what = f"data.{key} is not set, and data.source={source} needs it"
        raise UserError("data", what, [found])
    place = Path(path).expanduser().absolute()
    tokens: TokenFile = IndexedTokens(place) if source == "megatron" else DatatroveTokens(place)
    first = tokens.tokens[:_CHECKED]
    if first.max() >= vocab or first.min() < 0:
        raise outside_vocabulary(tokens, first, vocab)
    return tokens, int(first.max())


def _files_tokenizer(data: Data, largest: int, needed: bool) -> Tokenizer | None:
    """What decodes the ids of a file: `byte`, the default, only if they can be bytes."""
    if data.tokenizer == "byte" and largest < ByteTokenizer.vocab_size:
        return ByteTokenizer()
    if data.tokenizer == "bpe" or (data.tokenizer == "byte" and needed):
        what = f"{data.tokenizer} is not the tokenizer of {data.path}, which holds token {largest}"
        other = ("data.tokenizer=PATH/tokenizer.json", "train.sample_tokens=0")
        found = Violation("data.tokenizer", data.tokenizer, "", what, other)
        raise UserError("data", f"data.tokenizer: {what}", [found])
    return None if data.tokenizer == "byte" else load(data.tokenizer)


def _dataset(
    data: Data,
    train: Train,
    vocab: int,
    tokens: TokenFile,
    tokenizer: Tokenizer | None,
    fingerprint: str,
    name: str,
    apart: TokenFile | None = None,
) -> Dataset:
    """`apart` is a file of its own to validate on."""
    training, held_out = split_tokens(tokens, data.valid_fraction)
    if apart is not None:
        held_out = Split(0, len(apart.tokens))
    loader = Loader(tokens, training, train.seq_len, train.seed, vocab)
    valid = _valid_loader(data, train, vocab, apart or tokens, held_out)
    words = f"{name}: {len(tokens):,} documents, {len(tokens.tokens):,} tokens"
    words += f"; {len(loader):,} training samples"
    words += f", {len(valid):,} for validation" if valid else ", none for validation"
    if training.within_document:
        words += " (cut within a document)"
    return Dataset(tokenizer, loader, valid, fingerprint, f"{words}; {tokens.path}")


def _valid_loader(
    data: Data, train: Train, vocab: int, tokens: TokenFile, split: Split
) -> Loader | None:
    if len(split) > train.seq_len:
        return Loader(tokens, split, train.seq_len, train.seed, vocab)
    if train.eval_every == 0:
        return None
    error = too_small(tokens, split, train.seq_len)
    what = f"the validation split is too small: {error.violations[0].message}"
    key = "data.valid_path" if data.valid_path else "data.valid_fraction"
    value = data.valid_path or data.valid_fraction
    larger = () if data.valid_path else ("data.valid_fraction=0.1",)
    found = Violation(key, value, "", what, (*larger, "train.eval_every=0"))
    raise UserError("data", f"{key}={value}: {what}", [found])


def _fingerprint(tokens: TokenFile) -> str:
    """Of the first and the last tokens and of the lengths; a whole large file would take minutes."""
    digest = hashlib.sha256(f"{len(tokens)} {len(tokens.tokens)}".encode())
    digest.update(tokens.tokens[:_CHECKED].tobytes())
    digest.update(tokens.tokens[-_CHECKED:].tobytes())
    return digest.hexdigest()
