"""Opening the data of a configuration."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from nanoscale.common.errors import UserError, Violation
from nanoscale.config.data.token_sources import MixtureSource, answers_of, sources_of
from nanoscale.config.schema import Data, Train
from nanoscale.data import corpus
from nanoscale.data.loader import Form, Loader, Mixture, outside_vocabulary, split_tokens, too_small
from nanoscale.data.samples import ENDLESS, HELD_OUT, RandomSamples, Split
from nanoscale.data.tokens.files import DatatroveTokens, IndexedTokens, TokenFile, open_answers
from nanoscale.data.tokens.tokenizer import ByteTokenizer, Tokenizer, load

_CHECKED = 1 << 22


@dataclass(frozen=True)
class Validation:
    """The validation samples of one source."""

    name: str
    """The source's name; empty if it is the only one."""
    share: float
    """This source's share of the evaluation's samples, and of its loss."""
    loader: Loader


@dataclass(frozen=True)
class Dataset:
    """The data of a run."""

    tokenizer: Tokenizer | None
    """None if the tokens have no tokenizer, or come from a file and theirs is not known."""
    train: Loader | Mixture
    valid: tuple[Validation, ...]
    """Empty if data.valid_fraction is 0, or too small for a sample and never evaluated."""
    fingerprint: str
    """Equal for equal tokens; a resumed run with another fingerprint continues on other data."""
    description: str
    """One line for people: name, size and path of the data."""


def open_data(data: Data, train: Train, vocab: int) -> Dataset:
    """Open the tokens of a run for a model of `vocab` ids; prepare the embedded corpus if needed.

    Raises UserError (kind `data`) for files that are missing, damaged or too small, for a cache that cannot be
    written and for tokens outside the vocabulary.
    """
    if data.source == "stdlib":
        return _open_stdlib(data, train, vocab)
    if data.source == "random":
        return _open_random(train, vocab)
    return _open_files(data, train, vocab)


def _open_stdlib(data: Data, train: Train, vocab: int) -> Dataset:
    prepared = corpus.prepare(data)
    tokenizer = prepared.tokenizer()
    if tokenizer.vocab_size > vocab:
        what = f"data.tokenizer={data.tokenizer} has {tokenizer.vocab_size} tokens"
        suggestions = (f"model.vocab={-(-tokenizer.vocab_size // 64) * 64}",)
        violation = Violation(
            "model.vocab", vocab, "", f"{what}, more than the model's", suggestions
        )
        raise UserError("data", f"model.vocab={vocab}: {what}", [violation])
    name = f"Python {prepared.manifest['request']['python'].split()[0]}'s standard library"
    tokens = IndexedTokens(prepared.prefix)
    opened = _open_source(data, train, vocab, MixtureSource(None), tokens, None, name)
    return _dataset(data, train, [opened], tokenizer, prepared.fingerprint)


def _open_random(train: Train, vocab: int) -> Dataset:
    loaders = [
        Loader(RandomSamples(split, count, train.seq_len, train.seed, vocab), train.seed)
        for split, count in ((0, ENDLESS), (1, HELD_OUT))
    ]
    valid = (Validation("", 1.0, loaders[1]),)
    description = f"random tokens: ids in [0, {vocab}), seed {train.seed}, no file"
    fingerprint = hashlib.sha256(description.encode()).hexdigest()
    return Dataset(None, loaders[0], valid, fingerprint, description)


def _open_files(data: Data, train: Train, vocab: int) -> Dataset:
    sources, fingerprints, largest = [], [], 0
    for source in sources_of(data):
        tokens, highest = _open_file(data.source, f"{source.key}.path", source.path, vocab)
        largest = max(largest, highest)
        source_fingerprints, held_out = [_fingerprint(tokens)], None
        if source.valid_path is not None:
            key = f"{source.key}.valid_path"
            held_out, _ = _open_file(data.source, key, source.valid_path, vocab)
            source_fingerprints.append(_fingerprint(held_out))
        fingerprints.append(_combine(source_fingerprints))
        name = source.name or tokens.path.name
        sources.append(_open_source(data, train, vocab, source, tokens, held_out, name))
    tokenizer = _files_tokenizer(data, vocab, largest, train.sample_tokens > 0)
    return _dataset(data, train, sources, tokenizer, *fingerprints)


def _open_file(source: str, key: str, path: str | None, vocab: int) -> tuple[TokenFile, int]:
    """Open a file of tokens, and return it with the largest of its first tokens."""
    if path is None:
        violation = Violation(key, None, "", f"data.source={source} needs it")
        what = f"{key} is not set, and data.source={source} needs it"
        raise UserError("data", what, [violation])
    file = Path(path).expanduser().absolute()
    tokens: TokenFile = IndexedTokens(file) if source == "megatron" else DatatroveTokens(file)
    first = tokens.tokens[:_CHECKED]
    if first.max() >= vocab or first.min() < 0:
        raise outside_vocabulary(tokens, first, vocab)
    return tokens, int(first.max())


def _files_tokenizer(data: Data, vocab: int, largest: int, needed: bool) -> Tokenizer | None:
    """Return the tokenizer that decodes a file's ids; `byte`, the default, only if all ids can be bytes."""
    if data.tokenizer == "byte" and largest < ByteTokenizer.vocab_size <= vocab:
        return ByteTokenizer()
    if data.tokenizer == "bpe" or (data.tokenizer == "byte" and needed):
        what = f"{data.tokenizer} is not the tokenizer of {data.path}, which holds token {largest}"
        suggestions = ("data.tokenizer=PATH/tokenizer.json", "train.sample_tokens=0")
        violation = Violation("data.tokenizer", data.tokenizer, "", what, suggestions)
        raise UserError("data", f"data.tokenizer: {what}", [violation])
    return None if data.tokenizer == "byte" else load(data.tokenizer)


@dataclass(frozen=True)
class _OpenSource:
    """One source, ready for reading."""

    source: MixtureSource
    name: str
    train: Loader
    valid: Loader | None
    description: str


def _open_source(
    data: Data,
    train: Train,
    vocab: int,
    source: MixtureSource,
    tokens: TokenFile,
    validation_file: TokenFile | None,
    name: str,
) -> _OpenSource:
    """Open one source; `validation_file` is a separate file for validation."""
    training, held_out = split_tokens(
        tokens, 0.0 if validation_file is not None else data.valid_fraction
    )
    if validation_file is not None:
        held_out = Split(0, len(validation_file.tokens))
    form = _form(data, source.path, tokens)
    loader = Loader.from_file(tokens, training, train.seq_len, train.seed, vocab, form)
    validation_form = (
        _form(data, source.valid_path, validation_file) if validation_file is not None else form
    )
    valid = _valid_loader(
        data, train, vocab, source, validation_file or tokens, held_out, validation_form
    )
    description = f"{name}: {len(tokens):,} documents, {len(tokens.tokens):,} tokens"
    description += f"; {len(loader):,} training samples"
    description += f", {len(valid):,} for validation" if valid else ", none for validation"
    if training.within_document:
        description += " (cut within a document)"
    return _OpenSource(source, name, loader, valid, f"{description}; {tokens.path}")


def _dataset(
    data: Data,
    train: Train,
    sources: list[_OpenSource],
    tokenizer: Tokenizer | None,
    *fingerprints: str,
) -> Dataset:
    differences = _sample_differences(data)
    if not data.mixture:
        (only_source,) = sources
        valid = (Validation("", 1.0, only_source.valid),) if only_source.valid else ()
        fingerprint = _combine([fingerprints[0], *differences])
        return Dataset(
            tokenizer,
            only_source.train,
            valid,
            fingerprint,
            ", ".join([only_source.description, *differences]),
        )
    weights = [source.source.weight or float(len(source.train)) for source in sources]
    mixture = Mixture([source.train for source in sources], weights)
    shares = mixture.shares.tolist()
    parts = zip(sources, shares, strict=True)
    parts_text = [f"{share:.4g} of {source.description}" for source, share in parts]
    description = "; ".join([*parts_text, *differences])
    fingerprint = _combine([*fingerprints, *map(repr, shares), *differences])
    return Dataset(tokenizer, mixture, _validations(sources, shares), fingerprint, description)


def _validations(sources: list[_OpenSource], shares: list[float]) -> tuple[Validation, ...]:
    """List the sources with held-out samples; their shares are scaled to a sum of 1."""
    with_validation = [
        (source, share)
        for source, share in zip(sources, shares, strict=True)
        if source.valid is not None
    ]
    total = sum(share for _, share in with_validation)
    return tuple(
        Validation(source.name, share / total, source.valid)
        for source, share in with_validation
        if source.valid is not None
    )


def _sample_differences(data: Data) -> list[str]:
    """Describe how samples differ from a stream of tokens in which every token has a loss."""
    differences = ["whole documents packed"] if data.packing == "whole" else []
    differences += ["attention within documents"] if data.document_mask else []
    return differences + (["loss on answers"] if data.loss_on == "answers" else [])


def _form(data: Data, path: str | None, tokens: TokenFile) -> Form:
    """Return how the tokens of a file become samples.

    If only other files have marks of answers, every token of this one has a loss.
    """
    answers = None
    if data.loss_on == "answers" and path is not None:
        prefix = Path(path).expanduser()
        if path == data.path or answers_of(prefix).is_file():
            answers = open_answers(prefix, tokens)
    return Form(data.packing, data.document_mask, answers)


def _valid_loader(
    data: Data,
    train: Train,
    vocab: int,
    source: MixtureSource,
    tokens: TokenFile,
    split: Split,
    form: Form,
) -> Loader | None:
    if len(split) > (train.seq_len if data.packing == "stream" else 1):
        return Loader.from_file(tokens, split, train.seq_len, train.seed, vocab, form)
    if train.eval_every == 0:
        return None
    error = too_small(tokens, split, train.seq_len)
    what = f"the validation split is too small: {error.violations[0].message}"
    has_own_file = source.valid_path is not None
    key = f"{source.key}.valid_path" if has_own_file else "data.valid_fraction"
    value = source.valid_path if has_own_file else data.valid_fraction
    fraction = None if has_own_file else _enough_fraction(tokens, train, data)
    shorter_sequences = error.violations[0].suggestions if has_own_file else ()
    suggestions = shorter_sequences if fraction is None else (f"data.valid_fraction={fraction}",)
    violation = Violation(key, value, "", what, (*suggestions, "train.eval_every=0"))
    raise UserError("data", f"{key}={value}: {what}", [violation])


def _enough_fraction(tokens: TokenFile, train: Train, data: Data) -> float | None:
    """Return a share that leaves a sample to train on and one to validate on; None if there is none."""
    needed = train.seq_len if data.packing == "stream" else 1
    for fraction in (0.1, 0.2, 0.5):
        if all(len(split) > needed for split in split_tokens(tokens, fraction)):
            return fraction
    return None


def _combine(fingerprints: list[str]) -> str:
    """Combine fingerprints into one; a single fingerprint is returned as it is."""
    if len(fingerprints) == 1:
        return fingerprints[0]
    return hashlib.sha256(" ".join(fingerprints).encode()).hexdigest()


def _fingerprint(tokens: TokenFile) -> str:
    """Return a digest of the first and last tokens and the lengths; a whole large file takes minutes."""
    digest = hashlib.sha256(f"{len(tokens)} {len(tokens.tokens)}".encode())
    digest.update(tokens.tokens[:_CHECKED].tobytes())
    digest.update(tokens.tokens[-_CHECKED:].tobytes())
    return digest.hexdigest()
