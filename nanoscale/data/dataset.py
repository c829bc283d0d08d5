"""Opening the data of a configuration."""

import hashlib
import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanoscale.common.errors import UserError, Violation
from nanoscale.common.units import counted
from nanoscale.config.schema import Data, Train
from nanoscale.config.token_files import (
    MANIFEST,
    TOKENS,
    MixtureSource,
    answers_of,
    manifest,
    sources_of,
)
from nanoscale.config.token_formats import is_parts
from nanoscale.config.training_phases import phases_of
from nanoscale.config.violations import refuse
from nanoscale.data import corpus
from nanoscale.data import samples as token_samples
from nanoscale.data.loader import (
    Form,
    Loader,
    Mixture,
    outside_vocabulary,
    samples_of,
    split_tokens,
    too_small,
)
from nanoscale.data.parts import Parts
from nanoscale.data.tokens.files import TokenFile, open_answers, open_tokens
from nanoscale.data.tokens.tokenizer import ByteTokenizer, Tokenizer, load
from nanoscale.runs.directory import file_sum

_CHECKED = 1 << 22


@dataclass(frozen=True)
class Validation:
    """The validation samples of one source."""

    name: str
    """The source's name; empty if it is the only one."""
    share: float
    """This source's share of the evaluation's samples, and of its loss."""
    loader: Loader

    def samples_of(self, total: int | None) -> int:
        """Return the number of this source's samples in an evaluation of `total` samples; None: all."""
        if total is None:
            return len(self.loader)
        return self.loader.evaluated(max(1, round(self.share * total)))


@dataclass(frozen=True)
class Dataset:
    """The data of a run."""

    tokenizer: Tokenizer | None
    """None if the tokens have no tokenizer, or come from a file and theirs is not known."""
    train: Loader | Mixture | Parts
    valid: tuple[Validation, ...]
    """Empty if data.valid_fraction is 0, or too small for a sample and never evaluated."""
    fingerprint: str
    """Equal for equal tokens; a resumed run with another fingerprint continues on other data."""
    description: str
    """One line for people: name, size and path of the data."""

    def answers(self) -> list[token_samples.AnswerSamples]:
        """List the answers of all sources, to train on and to validate on; without an objective of answers
        none."""
        if isinstance(self.train, Parts):
            return []
        train = self.train.loaders if isinstance(self.train, Mixture) else [self.train]
        loaders = [*train, *(split.loader for split in self.valid)]
        return [loader.answers for loader in loaders if loader.has_answers]

    def require_counted(self, samples: int | None, option: str) -> None:
        """Raise a UserError if a source has no token with a loss in an evaluation of `samples`; None: all.

        `option` sets the number of samples, as in `train.eval_samples=`.
        """
        firsts = [split.loader.first_counted() for split in self.valid]
        violations = []
        for split, first in zip(self.valid, firsts, strict=True):
            count = split.samples_of(samples)
            if first is not None and first < count:
                continue
            more = None if first is None else math.ceil((first + 1) / split.share)
            enough = () if more is None else (f"{option}{more}",)
            source = f" of {split.name}" if split.name else ""
            what = f"no token of the first {counted(count, 'validation sample')}{source} has a loss"
            suggestions = (*enough, "data.loss_on=all")
            violations.append(Violation("data.loss_on", "answers", "", what, suggestions))
        if violations:
            raise UserError("data", f"nothing to evaluate: {violations[0].message}", violations)


def open_data(
    data: Data, train: Train, vocab: int, own: Callable[..., Any] | None = None
) -> Dataset:
    """Open the tokens of a run for a model of `vocab` ids; prepare the embedded corpus if needed.

    `own` returns the user's samples of a `split`, for data.source=hooks.

    Raises UserError (kind `data`) for files that are missing, damaged or too small, for a cache that cannot be
    written and for tokens outside the vocabulary.
    """
    opener = _Opener(data, train, vocab)
    if data.source == "stdlib":
        return opener.stdlib()
    if data.source == "hooks":
        assert own is not None, "the rules require it"
        return opener.own(own)
    return opener.random() if data.source == "random" else opener.files()


@dataclass(frozen=True)
class _OpenSource:
    """One source, ready for reading."""

    name: str
    weight: float
    """The weight that is set, else the number of training samples."""
    train: Loader
    valid: Loader | None
    description: str


@dataclass(frozen=True)
class _Opener:
    data: Data
    train: Train
    vocab: int

    def stdlib(self) -> Dataset:
        prepared = corpus.prepare(self.data)
        tokenizer, vocab = prepared.tokenizer(), self.vocab
        if tokenizer.vocab_size > vocab:
            what = f"is less than the {tokenizer.vocab_size} tokens of data.tokenizer={self.data.tokenizer}"
            suggestions = (f"model.vocab={-(-tokenizer.vocab_size // 64) * 64}",)
            refuse([Violation("model.vocab", vocab, "", what, suggestions)], "data")
        name = f"Python {prepared.manifest['request']['python'].split()[0]}'s standard library"
        source = self._open_source(
            MixtureSource(None), open_tokens("megatron", prepared.prefix), None, name
        )
        return self._dataset([source], tokenizer, prepared.fingerprint)

    def random(self) -> Dataset:
        train, vocab = self.train, self.vocab
        tokens: list[token_samples.Samples] = [
            token_samples.RandomSamples(
                split, count, train.seq_len, train.seed, vocab, train.labels
            )
            for split, count in ((0, token_samples.ENDLESS), (1, token_samples.HELD_OUT))
        ]
        if train.is_masked:
            tokens = [token_samples.Masked(samples, train, vocab) for samples in tokens]
        loaders = [Loader(samples, train.seed) for samples in tokens]
        valid = (Validation("", 1.0, loaders[1]),)
        description = f"random tokens: ids in [0, {vocab}), seed {train.seed}, no file"
        fingerprint = hashlib.sha256(description.encode()).hexdigest()
        return Dataset(None, loaders[0], valid, fingerprint, description)

    def own(self, open_split: Callable[..., Any]) -> Dataset:
        train, vocab = self.train, self.vocab
        found = [open_split(split=split) for split in ("train", "valid")]
        splits = [
            token_samples.OwnSamples(it, train.seq_len, vocab) for it in found if it is not None
        ]
        if found[0] is None or not all(map(len, splits)):
            raise UserError("data", "data() of hooks.path returned no sample")
        if len(splits) < 2 and train.eval_every:
            message = 'has nothing to evaluate: data(config, "valid") of hooks.path returned None'
            advice = ("train.eval_every=0",)
            refuse([Violation("train.eval_every", train.eval_every, "", message, advice)], "data")
        loaders = [Loader(samples, train.seed) for samples in splits]
        valid = tuple(Validation("", 1.0, loader) for loader in loaders[1:])
        description = f"data() of hooks.path: {len(loaders[0]):,} training samples"
        fingerprint = _combine([samples.digest() for samples in splits])
        return Dataset(None, loaders[0], valid, fingerprint, description)

    def files(self) -> Dataset:
        sources, fingerprints, largest = [], [], 0
        for source in sources_of(self.data):
            tokens, highest = self._open_file(source.path)
            largest = max(largest, highest)
            source_fingerprints, held_out = [_fingerprint(tokens)], None
            if source.valid_path is not None:
                held_out, _ = self._open_file(source.valid_path)
                source_fingerprints.append(_fingerprint(held_out))
            fingerprints.append(_combine(source_fingerprints))
            name = source.name or tokens.path.name
            sources.append(self._open_source(source, tokens, held_out, name))
        dataset = self._dataset(sources, self._files_tokenizer(largest), *fingerprints)
        path = self.data.path
        return self._with_parts(dataset, Path(path)) if path and is_parts(path) else dataset

    def _with_parts(self, dataset: Dataset, folder: Path) -> Dataset:
        """Train on all parts of a folder in place of the first one."""
        train = self.train

        def samples(part: Path) -> token_samples.Samples:
            for name, recorded in (manifest(part) or {}).get("sums", {}).items():
                if file_sum(part / name) != recorded:
                    remedy = f"have its folder prepared again: rm -r -- {shlex.quote(str(folder))}"
                    raise UserError("data", f"{part / name} is damaged (its sum differs); {remedy}")
            prefix = str(part / TOKENS)
            tokens = open_tokens("megatron", prefix)
            whole = token_samples.Split(0, len(tokens.tokens))
            form = self._form(prefix, tokens)
            return samples_of(tokens, whole, train.seq_len, self.vocab, form)

        fingerprint = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
        description = (
            f"the first part of texts that are prepared beside the training: {dataset.description}"
        )
        parts = Parts(folder, samples, train.seed)
        return replace(dataset, train=parts, fingerprint=fingerprint, description=description)

    def _open_file(self, path: str | None) -> tuple[TokenFile, int]:
        """Open a file of tokens, and return it with the largest of its first tokens."""
        assert path is not None, "the rules require it"
        tokens = open_tokens(
            self.data.source, Path(path).expanduser().absolute(), self.data.eos or 0
        )
        first = tokens.tokens[:_CHECKED]
        if first.max() >= self.vocab or first.min() < 0:
            raise outside_vocabulary(tokens, first, self.vocab)
        return tokens, int(first.max())

    def _files_tokenizer(self, largest: int) -> Tokenizer | None:
        """Return the tokenizer that decodes a file's ids; `byte`, the default, only if all ids can be bytes."""
        data = self.data
        if data.tokenizer == "byte" and largest < ByteTokenizer.vocab_size <= self.vocab:
            return ByteTokenizer()
        if data.tokenizer == "bpe" or (data.tokenizer == "byte" and self.train.sample_tokens > 0):
            what = f"is not the tokenizer of {data.path}, which holds token {largest}"
            suggestions = ("data.tokenizer=PATH/tokenizer.json", "train.sample_tokens=0")
            refuse([Violation("data.tokenizer", data.tokenizer, "", what, suggestions)], "data")
        return None if data.tokenizer == "byte" else load(data.tokenizer)

    def _open_source(
        self, source: MixtureSource, tokens: TokenFile, valid_tokens: TokenFile | None, name: str
    ) -> _OpenSource:
        """Open one source; `valid_tokens` is a separate file for validation."""
        held_out_share = self.data.valid_fraction if valid_tokens is None else 0.0
        training, held_out = split_tokens(tokens, held_out_share)
        form = self._form(source.path, tokens)
        if self.train.is_paired and len(tokens) % 2:
            message = f"holds {len(tokens)} documents, which are not pairs of a chosen and a rejected answer"
            refuse([Violation(f"{source.key}.path", source.path, "", message)], "data")
        loader = self._loader(tokens, training, form)
        if valid_tokens is None:
            valid = self._valid_loader(source, tokens, held_out, form)
        else:
            whole = token_samples.Split(0, len(valid_tokens.tokens))
            valid_form = self._form(source.valid_path, valid_tokens)
            valid = self._valid_loader(source, valid_tokens, whole, valid_form)
        description = f"{name}: {len(tokens):,} documents, {len(tokens.tokens):,} tokens"
        description += f"; {len(loader):,} training samples"
        description += f", {len(valid):,} for validation" if valid else ", none for validation"
        if loader.has_answers and (left_out := loader.answers.left_out):
            why = "too long for train.seq_len, or no answer"
            sample = "pair" if self.train.is_paired else "answer"
            description += f"; {counted(left_out, sample)} left out: {why}"
        if loader.cut:
            description += f"; {counted(loader.cut, 'text')} cut to train.seq_len"
        if training.within_document:
            description += " (cut within a document)"
        weight = source.weight or float(len(loader))
        return _OpenSource(name, weight, loader, valid, f"{description}; {tokens.path}")

    def _form(self, path: str | None, tokens: TokenFile) -> Form:
        """Return how the tokens of a file become samples.

        If only other files have marks of answers, every token of this one has a loss.
        """
        data, answers = self.data, None
        if data.loss_on == "answers" and path is not None:
            prefix = Path(path).expanduser()
            if path == data.path or answers_of(prefix).is_file():
                answers = open_answers(prefix, tokens)
        packing = "answers" if self.train.is_of_answers else data.packing
        masked = self.train if self.train.is_masked else None
        labels, rows = self.train.labels or 0, self.train.rows_of_sample
        return Form(packing, data.document_mask, answers, masked, labels, rows)

    def _loader(self, tokens: TokenFile, split: token_samples.Split, form: Form) -> Loader:
        train = self.train
        return Loader.from_file(tokens, split, train.seq_len, train.seed, self.vocab, form)

    @property
    def _least_tokens(self) -> int:
        """A split needs more tokens than this for a sample."""
        is_stream = self.data.packing == "stream" and not self.train.has_whole_documents
        return self.train.seq_len if is_stream else 1

    def _valid_loader(
        self, source: MixtureSource, tokens: TokenFile, split: token_samples.Split, form: Form
    ) -> Loader | None:
        error = too_small(tokens, split, self.train.seq_len)
        if len(split) > self._least_tokens:
            try:
                return self._loader(tokens, split, form)
            except UserError as nothing:  # half of a pair, for example
                error = nothing
        if self.train.eval_every:
            what = f"the validation split is too small: {error.violations[0].message}"
            if source.valid_path is None:
                key, advice = "data.valid_fraction", self._enough_fraction(tokens)
            else:
                key, advice = f"{source.key}.valid_path", error.violations[0].suggestions
            value = source.valid_path or self.data.valid_fraction
            refuse([Violation(key, value, "", what, (*advice, "train.eval_every=0"))], "data")
        return None

    def _enough_fraction(self, tokens: TokenFile) -> tuple[str, ...]:
        """Return a share that leaves a sample to train on and one to validate on, if there is one."""
        for fraction in (0.1, 0.2, 0.5):
            if all(len(split) > self._least_tokens for split in split_tokens(tokens, fraction)):
                return (f"data.valid_fraction={fraction}",)
        return ()

    def _dataset(
        self, sources: list[_OpenSource], tokenizer: Tokenizer | None, *fingerprints: str
    ) -> Dataset:
        data = self.data
        # from a stream of tokens in which every token has a loss
        differences = ["whole documents packed"] if data.packing == "whole" else []
        differences += ["attention within documents"] if data.document_mask else []
        differences += ["loss on answers"] if data.loss_on == "answers" else []
        differences += ["pairs"] if self.train.is_paired else []
        differences += ["rated answers"] if self.train.objective == "kto" else []
        if not data.mixture:
            (only,) = sources
            valid = (Validation("", 1.0, only.valid),) if only.valid else ()
            fingerprint = _combine([*fingerprints, *differences])
            description = ", ".join([only.description, *differences])
            return Dataset(tokenizer, only.train, valid, fingerprint, description)
        weights = {it.name: it.weight for it in sources}
        phases, rows = phases_of(self.train), self.train.rows_of_sample
        by_name = [phase.weights or weights for phase in phases]
        changes = [
            (phase.first_sample // rows, [set_weights.get(name, 0.0) for name in weights])
            for phase, set_weights in zip(phases, by_name, strict=True)
        ]
        mixture = Mixture([it.train for it in sources], changes[0][1], changes[1:])
        shares = mixture.shares.tolist()
        parts = zip(sources, shares, strict=True)
        texts = [f"{share:.4g} of {source.description}" for source, share in parts]
        later = map(repr, changes[1:] if any(phase.weights for phase in phases) else ())
        fingerprint = _combine([*fingerprints, *map(repr, shares), *later, *differences])
        description = "; ".join([*texts, *differences])
        # The shares of the sources with held-out samples are scaled to a sum of 1.
        held_out = [
            (source.name, share, source.valid)
            for source, share in zip(sources, shares, strict=True)
            if source.valid is not None
        ]
        total = sum(share for _, share, _ in held_out)
        valids = tuple(Validation(name, share / total, loader) for name, share, loader in held_out)
        return Dataset(tokenizer, mixture, valids, fingerprint, description)


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
