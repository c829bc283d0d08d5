"""The output of `nanoscale data`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from nanoscale.common import display
from nanoscale.common.json_text import Json
from nanoscale.common.units import byte_size, counted, duration
from nanoscale.config.token_files import manifest
from nanoscale.config.token_formats import is_parts
from nanoscale.config.violations import override

if TYPE_CHECKING:
    from pathlib import Path

    from nanoscale.data.prepare import PreparationRequest
    from nanoscale.data.prepare.folder import PreparationProgress

_LINE_S = 10.0
_BAR = 40


class PreparationScreen(display.LiveScreen):
    """A display of progress on standard error: a bar on a terminal, occasional lines elsewhere."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._began: tuple[float, int, int] | None = None
        self._last = time.monotonic()

    def note(self, sentence: str) -> None:
        self.console.print(sentence)

    def progress(self, progress: PreparationProgress, total: int) -> None:
        now = time.monotonic()
        if self._began is None:
            self._began = now, progress.read, progress.text_bytes
            return
        if self.live is None and now - self._last < _LINE_S:
            return
        self._last = now
        sentence = self._sentence(progress, total, now - self._began[0])
        if self.live is None:
            self.note(sentence)
        else:
            from rich.columns import Columns
            from rich.progress_bar import ProgressBar

            bar = ProgressBar(total=1.0, completed=progress.read / total, width=_BAR)
            self.live.update(Columns([bar, sentence]))

    def _sentence(self, progress: PreparationProgress, total: int, elapsed: float) -> str:
        assert self._began is not None
        _, read, text = self._began
        speed = (progress.text_bytes - text) / elapsed
        left = (total - progress.read) * elapsed / max(1, progress.read - read)
        words = [
            f"{byte_size(progress.read)} of {byte_size(total)}",
            f"{speed / 1e6:.2f} MB/s",
            f"ETA {duration(left)}",
            counted(progress.documents, "document"),
            f"{progress.tokens:,} tokens",
        ]
        if progress.bad:
            words.append(f"{progress.bad:,} bad records")
        return "  ".join(words)


def print_prepared(out: Path, manifest: Json) -> None:
    """Print what `data prepare` has written, and the command that trains on it."""
    for bad in manifest["bad_records"]:
        display.note(f"left out: {bad['place']} {bad['what']}")
    if manifest["bad"]:
        display.note(f"left out: {manifest['bad']:,} bad records in total")
    train, valid = manifest["train"], manifest["valid"]
    words = f"{counted(train['documents'], 'document')}, {train['tokens']:,} tokens"
    held = f"; held out {valid['documents']:,}, {valid['tokens']:,} tokens"
    kind = " (two documents a pair)" if manifest.get("pairs") else ""
    display.show(f"{words}{held if valid['documents'] else ''}, {manifest['type']}{kind}")
    if "answers" in train:
        display.show(f"  answers     {_share(train)} of the tokens are learned")
    display.show(f"  folder      {out.expanduser().absolute()}")
    display.show(f"  vocabulary  {manifest['vocabulary']:,}")
    rows = -(-manifest["vocabulary"] // 64) * 64
    begun = f" model.vocab={rows}"
    if manifest.get("labels"):
        how = f"train.objective=classify train.labels={manifest['labels']}"
        begun = f" model=hf model.name=… {how}"
    elif "answers" in train:
        how = "train.objective=dpo" if manifest.get("pairs") else "data.packing=whole"
        how = "train.objective=kto" if manifest.get("rated") else how
        begun = f" model.init_from=… {how}"
    display.show(
        f"  train       nanoscale train recipe=… data=megatron {override('data.path', str(out))}{begun}"
    )


def prepared_line(request: PreparationRequest, folder: Path) -> str:
    """Return what was made of a text file that data.path names."""
    prepared = manifest(folder)
    assert prepared is not None, "it was prepared"
    train = prepared["train"]
    documents = counted(train["documents"], "chat" if request.is_chat else "document")
    if request.kind == "pairs":
        documents = counted(train["documents"] // 2, "pair")
    learned = f", of which {_share(train)} are learned" if request.is_chat else ""
    if prepared.get("labels"):
        learned = f", labels: {', '.join(prepared.get('label_names', [])) or prepared['labels']}"
    tokenizer = request.tokenizer or "a new BPE"
    made = f"{documents}, {train['tokens']:,} tokens{learned}; tokenizer: {tokenizer}"
    name = request.sources[0]
    if is_parts(folder):
        rest = f"the rest of {byte_size(prepared['bytes'])} is prepared beside a training"
        return f"{name}: {made} in the first part; {rest}; kept in {folder}"
    return f"{name}: {made}; kept in {folder}"


def print_inspected(document: Json) -> None:
    """Print `data inspect`."""
    display.show(f"{document['path']} ({document['kind'].lower()}, {document['type']})")
    tokenizer = document["tokenizer"]
    if tokenizer:
        display.show("  ".join(f"{name} {value}" for name, value in tokenizer.items()))
    for name, split in document["splits"].items():
        _print_split(name, split)
    for problem in document["problems"]:
        display.show(f"wrong: {problem}")
    if document["model_vocab"] is not None and not document["problems"]:
        display.show(f"fits the model's vocabulary of {document['model_vocab']:,} tokens")


def _print_split(name: str, split: Json) -> None:
    display.show(f"\n{name}: {counted(split['documents'], 'document')}, {split['tokens']:,} tokens")
    display.show(f"  ids from {split['smallest_token']:,} to {split['largest_token']:,}")
    if split["ended_by_eos"] is not None:
        ended = counted(split["ended_by_eos"], "document")
        display.show(f"  end with the end-of-text token: {ended}")
    if split["answers"] is not None:
        display.show(f"  {_share(split)} of the tokens belong to answers, shown in ⟦ ⟧ below")
    lengths = split["lengths"]
    middle = f"median {lengths['median']:,}, mean {lengths['mean']:,.1f}"
    display.show(
        f"  tokens per document: {lengths['shortest']:,} to {lengths['longest']:,}, {middle}"
    )
    most = max(row["documents"] for row in lengths["histogram"])
    for row in lengths["histogram"]:
        bar = "█" * round(_BAR * row["documents"] / most)
        display.show(
            f"  {row['from']:>12,} … {row['below'] - 1:<12,} {row['documents']:>12,} {bar}"
        )
    for sample in split["samples"]:
        shown = sample["ids"] if sample["text"] is None else repr(sample["text"])
        display.show(f"  document {sample['document']:,} ({sample['tokens']:,} tokens): {shown}")


def _share(split: Json) -> str:
    return f"{split['answers']:,} ({split['answers'] / split['tokens']:.1%})"
