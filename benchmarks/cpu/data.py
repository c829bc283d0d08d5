"""Measure `data prepare` and the tokenizers library, and the loader and numpy: `make bench`.

The text is the standard library's source code, as one JSON line a document. Each figure and its peer's are
measured in turns in one process, so that other load on the machine affects both. Prints one JSON line.

    python -m benchmarks.cpu.data [TURNS] [FILES]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from nanoscale.common.devices import cores
from nanoscale.data import corpus
from nanoscale.data.loader import Loader
from nanoscale.data.prepare import PreparationRequest, prepare
from nanoscale.data.sampler import sample_indices
from nanoscale.data.samples import Split
from nanoscale.data.tokens.files import bin_path, open_tokens
from nanoscale.data.tokens.tokenizer import train_bpe

THREADS = cores()
TIMES = 4
"""The text is repeated, so that the start of the workers counts as little as in practice."""
VOCAB, TRAINED_ON = 8192, 200
SEQ, BATCH, STEPS = 1024, 16, 200


class Silent:
    def note(self, sentence: str) -> None:
        pass

    def progress(self, progress: object, total: int) -> None:
        pass


def main(turns: int = 3, files: int = 10_000) -> None:
    """Measure this many files at most; the standard library has fewer by default."""
    os.environ["RAYON_NUM_THREADS"] = str(THREADS)  # read when the library makes its threads
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = library(files)
        tokenizer = folder / "tokenizer.json"
        train_bpe(texts[:TRAINED_ON], VOCAB, tokenizer)
        result = {
            **bench_prepare(folder, texts, tokenizer, turns),
            **bench_loader(folder / "out-0", 3 * turns),
        }
    print(json.dumps(result))


def library(most: int) -> list[str]:
    folder = corpus.stdlib_folder()
    files = [folder / path for path in corpus.source_files(folder)][:most]
    return [path.read_text(errors="replace") for path in files] * TIMES


def bench_prepare(folder: Path, texts: list[str], tokenizer: Path, turns: int) -> dict[str, float]:
    """MB/s of text: all of `prepare`, from file to folder; the library alone, from memory to nothing."""
    source = folder / "corpus.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    native = Tokenizer.from_file(str(tokenizer))
    pairs = []
    for turn in range(turns):
        request = PreparationRequest(
            (str(source),), folder / f"out-{turn}", str(tokenizer), workers=THREADS
        )
        ours = timed(partial(prepare, request, Silent()))
        theirs = timed(lambda: native.encode_batch_fast(texts, add_special_tokens=False))
        pairs.append((megabytes / ours, megabytes / theirs))
    ours, theirs = (statistics.median(speeds) for speeds in zip(*pairs, strict=True))
    ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    return {"threads": THREADS, "prepare": ours, "tokenizers": theirs, "prepare_ratio": ratio}


def bench_loader(folder: Path, turns: int) -> dict[str, float]:
    """Samples/s in random order: the loader, and slices of a numpy memmap in an order made before."""
    tokens = open_tokens("megatron", folder / "tokens")
    loader = Loader.from_file(tokens, Split(0, len(tokens.tokens)), SEQ, seed=1, vocab=VOCAB)
    bare = np.memmap(bin_path(folder / "tokens"), dtype=tokens.tokens.dtype, mode="r")
    order = sample_indices(1, np.arange(STEPS * BATCH), len(loader)).tolist()

    def ours() -> None:
        for step in range(STEPS):
            for _ in loader.micro_batches(step * BATCH, BATCH, 0, 1, BATCH):
                pass

    def theirs() -> None:
        for step in range(STEPS):
            chosen = order[step * BATCH : (step + 1) * BATCH]
            rows = [bare[i * SEQ : (i + 1) * SEQ + 1].astype(np.int64) for i in chosen]
            np.stack(rows)

    ours()
    theirs()
    pairs = [(timed(ours), timed(theirs)) for _ in range(turns)]
    samples = STEPS * BATCH
    return {
        "loader": samples / statistics.median(ours for ours, _ in pairs),
        "memmap": samples / statistics.median(theirs for _, theirs in pairs),
        "loader_ratio": statistics.median(theirs / ours for ours, theirs in pairs),
    }


def timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
