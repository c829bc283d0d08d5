"""A description of token files: the content of `nanoscale data inspect`."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate, groupby
from operator import itemgetter
from pathlib import Path

import numpy as np

from nanoscale.common.json_text import Json
from nanoscale.config import token_files
from nanoscale.config.token_files import answers_of
from nanoscale.config.token_formats import FORMATS, format_of, is_parts, part_of
from nanoscale.data.tokens.files import TokenFile, bin_path, open_answers, open_tokens
from nanoscale.data.tokens.tokenizer import ByteTokenizer, Tokenizer, digest, find, load

_BLOCK = 1 << 20
_SAMPLE = 64
"""Tokens of a document that are shown."""
_CHAT = 512
"""The same for a chat, whose beginning mostly has no loss."""


def inspect(
    path: str,
    tokenizer: str | None,
    vocab: int | None,
    samples: int,
    eos: int | None = None,
    init_from: str | None = None,
) -> Json:
    """Describe a prepared folder or the tokens of another format; every token is read.

    `tokenizer` decodes if the files do not name theirs, `vocab` is a model's, and `eos` is data.eos;
    `init_from` is the folder of a model that would be trained on the tokens. The
    returned document lists `problems`, a sentence for each inconsistency. Raises UserError for files that are
    missing or damaged.
    """
    folder = token_files.folder_of(path)
    manifest = token_files.manifest(folder) if folder else None
    source = "megatron" if folder else format_of(path)
    form, decoder = FORMATS[source], _decoder(folder, tokenizer)
    stem = Path(form.stem(path)).expanduser()
    place = part_of(folder, 0) if folder and is_parts(folder) else folder
    split_paths = {"train": place / token_files.TOKENS if place else stem}
    if place and bin_path(place / token_files.VALID).exists():
        split_paths["valid"] = place / token_files.VALID
    if eos is None:
        eos = decoder.eos if decoder else 0
    files = {name: open_tokens(source, file, eos) for name, file in split_paths.items()}
    answers = {
        name: open_answers(prefix, files[name]) if answers_of(prefix).is_file() else None
        for name, prefix in split_paths.items()
    }
    splits = {name: _split(file, decoder, samples, answers[name]) for name, file in files.items()}
    if manifest and (labels := manifest.get("labels")):
        names = dict(enumerate(manifest.get("label_names", map(str, range(labels)))))
        for sample in (it for split in splits.values() for it in split["samples"]):
            if sample["answers"][-1] and sample["text"] is not None:
                name = names.get(sample["ids"][-1], sample["ids"][-1])
                sample["text"] = f"{sample['text'].rpartition('⟦')[0]}⟦{name}⟧"
    largest = max(split["largest_token"] for split in splits.values())
    return {
        "path": str(folder or files["train"].path),
        "kind": "prepared" if folder else form.title,
        "type": str(files["train"].tokens.dtype),
        "tokenizer": _about(decoder, files["train"]),
        "splits": splits,
        "text_bytes": manifest["text_bytes"] if manifest else None,
        "bad": manifest["bad"] if manifest else None,
        "model_vocab": vocab,
        "problems": [
            *_vocabulary_problems(largest, decoder, vocab),
            *(_tokenizer_problems(folder, init_from) if folder and init_from else []),
            *(_manifest_problems(folder, manifest, splits) if folder else []),
        ],
    }


def _tokenizer_problems(folder: Path, init_from: str) -> list[str]:
    own = Path(init_from).expanduser() / token_files.TOKENIZER
    made_by = folder / token_files.TOKENIZER
    with suppress(OSError, ValueError):
        other = made_by if made_by.is_file() else None
        if own.is_file() and not token_files.have_same_texts(own, other):
            return [
                f"the ids mean other texts to the model in {init_from}, whose tokenizer is another"
            ]
    return []


def _decoder(folder: Path | None, tokenizer: str | None) -> Tokenizer | None:
    if tokenizer == "byte":
        return ByteTokenizer()
    if tokenizer is not None:
        return load(find(tokenizer, "--tokenizer"), key="--tokenizer")
    if folder is None:
        return None
    file = folder / token_files.TOKENIZER
    return load(file) if file.exists() else ByteTokenizer()


def _split(
    file: TokenFile, decoder: Tokenizer | None, samples: int, answers: np.ndarray | None
) -> Json:
    lengths = _lengths(file)
    ordered = sorted(lengths)
    seen = accumulate(lengths[length] for length in ordered)
    documents = len(file)
    eos = decoder.eos if decoder and answers is None else None  # a chat ends as its template does
    numbers = sorted(
        {number * documents // samples for number in range(samples)} if samples else ()
    )
    return {
        "documents": documents,
        "tokens": len(file.tokens),
        "smallest_token": int(file.tokens.min()),
        "largest_token": int(file.tokens.max()),
        "answers": None if answers is None else int(np.count_nonzero(answers)),
        "ended_by_eos": None if eos is None else _ended(file, eos),
        "lengths": {
            "shortest": ordered[0],
            "median": next(it for it, n in zip(ordered, seen, strict=True) if 2 * n >= documents),
            "mean": len(file.tokens) / documents,
            "longest": ordered[-1],
            "histogram": _histogram(lengths),
        },
        "samples": [_sample(file, number, decoder, answers) for number in numbers],
    }


def _document_starts(file: TokenFile) -> Iterator[np.ndarray]:
    """Yield the starts of a block of documents, and the end of the last of them."""
    for start in range(0, len(file), _BLOCK):
        yield file.document_starts(start, min(start + _BLOCK, len(file)))


def _lengths(file: TokenFile) -> Counter[int]:
    """Count the documents of each length, in tokens."""
    counts: Counter[int] = Counter()
    for starts in _document_starts(file):
        lengths, times = np.unique(np.diff(starts), return_counts=True)
        counts.update(dict(zip(lengths.tolist(), times.tolist(), strict=True)))
    return counts


def _ended(file: TokenFile, eos: int) -> int:
    """Count the documents whose last token is the end token."""
    count = 0
    for starts in _document_starts(file):
        last_tokens = starts[1:][np.diff(starts) > 0] - 1
        count += int((file.tokens[last_tokens] == eos).sum())
    return count


def _histogram(lengths: Counter[int]) -> list[dict[str, int]]:
    """Count documents by powers of two of their length: `from` ≤ tokens < `below`."""
    counts: Counter[int] = Counter()
    for length, times in lengths.items():
        counts[length.bit_length()] += times
    return [
        {"from": 1 << bits >> 1, "below": 1 << bits, "documents": counts[bits]}
        for bits in range(min(counts), max(counts) + 1)
    ]


def _sample(
    file: TokenFile, number: int, decoder: Tokenizer | None, answers: np.ndarray | None
) -> Json:
    tokens, start = file[number], file.index.document_start(number)
    ids = [int(token) for token in tokens[: _SAMPLE if answers is None else _CHAT]]
    marks = None if answers is None else answers[start : start + len(ids)].tolist()
    text = None
    if decoder:
        text = decoder.decode([i for i in ids if i >= 0]) if marks is None else ""
        for is_answer, run in groupby(zip(ids, marks or (), strict=False), itemgetter(1)):
            piece_text = decoder.decode([i for i, _ in run], keep_special=True)
            text += f"⟦{piece_text}⟧" if is_answer else piece_text
    result = {"document": number, "tokens": len(tokens), "ids": ids, "text": text}
    return result if marks is None else {**result, "answers": marks}


def _about(decoder: Tokenizer | None, file: TokenFile) -> Json | None:
    if decoder is not None:
        return {"vocabulary": decoder.vocab_size, "eos": decoder.eos}
    return {"name": name} if (name := file.index.tokenizer) else None


def _vocabulary_problems(largest: int, decoder: Tokenizer | None, vocab: int | None) -> list[str]:
    problems = []
    tokenizer_size = decoder.vocab_size if decoder else None
    if tokenizer_size is not None and largest >= tokenizer_size:
        problems.append(
            f"the files hold token {largest}, and the tokenizer has {tokenizer_size} tokens"
        )
    needed = max(largest + 1, tokenizer_size or 0)
    if vocab is not None and needed > vocab:
        suggested = -(-needed // 64) * 64
        problem = f"the model's vocabulary of {vocab} tokens is smaller than the data's of {needed}"
        problems.append(f"{problem}; model.vocab={suggested} is enough")
    return problems


def _manifest_problems(folder: Path, manifest: Json | None, splits: dict[str, Json]) -> list[str]:
    if manifest is None:
        return [f"{folder / token_files.MANIFEST} cannot be read"]
    problems = []
    for name, split in splits.items():
        recorded = manifest[name]
        if any(recorded[key] != split[key] for key in ("documents", "tokens")):
            problems.append(f"{name}: its documents and tokens are not those of the manifest")
    file = folder / token_files.TOKENIZER
    if (digest(file) if file.exists() else "byte") != manifest["tokenizer"]:
        problems.append(f"{file} is not the tokenizer that made the tokens")
    return problems
