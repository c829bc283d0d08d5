"""`nanoscale data`: text to tokens on disk, and a look at them. What works on tokens is imported inside."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import DONE, FAILED, console, print_json
from nanoscale.common import display
from nanoscale.common.devices import cores
from nanoscale.config.violations import override

if TYPE_CHECKING:
    from types import TracebackType

    from nanoscale.data.prepare.folder import PreparationProgress

app = typer.Typer(no_args_is_help=True, help="Prepare and inspect tokens.")

_LINE_S = 10.0
_BAR = 40


@app.command("prepare")
def prepare_data(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCES",
            help="Read these files, folders, patterns, or hf:NAME:CONFIG:SPLIT datasets",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            "--out", metavar="DIR", help="Write the tokens to this new folder", show_default=False
        ),
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENIZER",
            help="Use byte, a tokenizer.json, a folder with one, or a model's name on the hub",
            show_default=False,
        ),
    ] = None,
    train_tokenizer: Annotated[
        bool, typer.Option("--train-tokenizer", help="Train a byte-level BPE on the sources")
    ] = False,
    vocab_size: Annotated[
        int, typer.Option(min=257, help="Limit the vocabulary of --train-tokenizer")
    ] = 32768,
    eos: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            help="End each document with this token",
            show_default="the tokenizer's own",
        ),
    ] = None,
    field: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Read the text, or the messages, from this key or column",
            show_default="text; messages with --chat",
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Read records as chats (lists of messages), and train on their answers",
        ),
    ] = False,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Make text of chats with this Jinja template",
            show_default="the tokenizer's own",
        ),
    ] = None,
    separator: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help=r"Split a .txt or .md into documents at this text; \n is the end of a line",
            show_default="each file is one",
        ),
    ] = None,
    validation: Annotated[
        float, typer.Option(min=0, max=0.9, help="Hold out this share of the documents")
    ] = 0.0,
    bad: Annotated[
        Literal["refuse", "skip"], typer.Option(help="Refuse or skip records that are not text")
    ] = "refuse",
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Start this number of processes", show_default="one for each core"
        ),
    ] = None,
    as_json: opt.AsJson = False,
) -> int:
    """Tokenize text into a folder to train on: data=megatron data.path=DIR.

    SOURCES are files, folders and patterns of .txt, .md, .jsonl, .json, .csv (all also .gz and .zst) and
    .parquet, and Hugging Face datasets as hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT, with NAME from the
    hub or a folder; `-` is standard input. The same command continues after an interruption, and writes the
    same bytes with any number of workers.
    """
    from nanoscale.common.errors import UserError
    from nanoscale.data.prepare import PreparationRequest, prepare
    from nanoscale.processes.pool import LostProcessError

    if not chat and chat_template is not None:
        raise UserError("usage", "--chat-template is for chats; add --chat")
    request = PreparationRequest(
        sources=tuple(sources),
        out=out,
        tokenizer=_one_tokenizer(tokenizer, train_tokenizer, eos, chat),
        vocab_size=vocab_size,
        eos=eos,
        field=field or ("messages" if chat else "text"),
        separator=_unescaped(separator),
        validation=validation,
        skip_bad=bad == "skip",
        chat=chat,
        chat_template=chat_template,
        workers=workers or cores(),
    )
    with _Screen() as screen:
        try:
            manifest = prepare(request, screen)
        except LostProcessError as error:
            screen.note(
                f"error: a worker ended by {error}; if memory ran out, use fewer: --workers N. What was "
                "prepared so far is kept: the same command continues from there"
            )
            return FAILED
        except KeyboardInterrupt:
            screen.note("interrupted; the same command continues from here")
            raise
    if as_json:
        print_json({"path": str(out.expanduser().absolute()), **manifest})
    else:
        _print_prepared(out, manifest)
    return DONE


@app.command("inspect")
def inspect_data(
    path: Annotated[
        str,
        typer.Argument(
            help="Name a prepared folder, the stem of a .bin and .idx, or a datatrove .ds"
        ),
    ],
    overrides: opt.Overrides = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENIZER",
            help="Decode with this tokenizer, in the form that prepare accepts",
            show_default="the folder's",
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=0, help="Show this number of documents")] = 3,
    as_json: opt.AsJson = False,
) -> int:
    """Show what token files hold, and with overrides whether a model fits them.

    The exit code is 1 if the files, the tokenizer or the model's vocabulary do not match.
    """
    from nanoscale.data.inspect import inspect

    document = inspect(path, tokenizer, _vocab(overrides), samples)
    if as_json:
        print_json(document)
    else:
        _print_inspected(document)
    return FAILED if document["problems"] else DONE


def _one_tokenizer(tokenizer: str | None, train: bool, eos: str | None, chat: bool) -> str | None:
    from nanoscale.common.errors import UserError, Violation

    if chat and train:
        what = "chats need the tokenizer of the model that is trained on them, not a new one"
        found = Violation("--train-tokenizer", True, "command line", what, ("--tokenizer DIR",))
        raise UserError("usage", what, [found])
    if (tokenizer is None) is not train:
        what = "give --tokenizer or --train-tokenizer, which says how text becomes tokens"
        instead = ("--tokenizer byte", "--tokenizer PATH/tokenizer.json", "--train-tokenizer")
        found = Violation("--tokenizer", tokenizer, "command line", what, instead)
        raise UserError("usage", what, [found])
    if eos is not None and tokenizer in (None, "byte"):
        what = (
            "--eos names a token of a tokenizer.json; bytes and a BPE trained here have their own"
        )
        raise UserError("usage", what)
    return tokenizer


def _unescaped(separator: str | None) -> str | None:
    if separator is None:
        return None
    plain = separator.replace(r"\n", "\n").replace(r"\t", "\t").replace(r"\r", "\r")
    if not plain:
        from nanoscale.common.errors import UserError

        raise UserError("usage", "--separator is empty; leave it out where each file is a document")
    return plain


def _vocab(overrides: list[str] | None) -> int | None:
    if not overrides:
        return None
    from nanoscale.config.composing.compose import compose

    return compose(overrides).config.model.vocab


class _Screen:
    """A display of progress on standard error: a bar on a terminal, occasional lines elsewhere."""

    def __init__(self) -> None:
        self._console = console(error=True)
        self._live: Any = None
        self._began: tuple[float, int, int] | None = None
        self._last = time.monotonic()

    def __enter__(self) -> _Screen:
        if self._console.is_terminal:
            from rich.live import Live

            self._live = Live(console=self._console, transient=True)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def note(self, sentence: str) -> None:
        self._console.print(sentence, markup=False)

    def progress(self, progress: PreparationProgress, total: int) -> None:
        now = time.monotonic()
        if self._began is None:
            self._began = now, progress.read, progress.text_bytes
            return
        if self._live is None and now - self._last < _LINE_S:
            return
        self._last = now
        sentence = self._sentence(progress, total, now - self._began[0])
        if self._live is None:
            self.note(sentence)
        else:
            self._live.update(_with_bar(sentence, progress.read / total))

    def _sentence(self, progress: PreparationProgress, total: int, elapsed: float) -> str:
        from nanoscale.common.units import byte_size, duration

        assert self._began is not None
        _, read, text = self._began
        speed = (progress.text_bytes - text) / elapsed
        left = (total - progress.read) * elapsed / max(1, progress.read - read)
        words = [
            f"{byte_size(progress.read)} of {byte_size(total)}",
            f"{speed / 1e6:.2f} MB/s",
            f"ETA {duration(left)}",
            f"{progress.documents:,} documents",
            f"{progress.tokens:,} tokens",
        ]
        if progress.bad:
            words.append(f"{progress.bad:,} bad records")
        return "  ".join(words)


def _with_bar(sentence: str, share: float) -> Any:
    from rich.columns import Columns
    from rich.progress_bar import ProgressBar

    return Columns([ProgressBar(total=1.0, completed=share, width=_BAR), sentence])


def _print_prepared(out: Path, manifest: dict[str, Any]) -> None:
    for bad in manifest["bad_records"]:
        display.note(f"left out: {bad['place']} {bad['what']}")
    if manifest["bad"]:
        display.note(f"left out: {manifest['bad']:,} bad records in total")
    train, valid = manifest["train"], manifest["valid"]
    words = f"{train['documents']:,} documents, {train['tokens']:,} tokens"
    held = f"; held out {valid['documents']:,}, {valid['tokens']:,} tokens"
    display.show(f"{words}{held if valid['documents'] else ''}, {manifest['type']}")
    if "answers" in train:
        display.show(f"  answers     {_share(train)} of the tokens are learned")
    display.show(f"  folder      {out.expanduser().absolute()}")
    display.show(f"  vocabulary  {manifest['vocabulary']:,}")
    begun = " model.init_from=… data.packing=whole" if "answers" in train else ""
    display.show(
        f"  train       nanoscale train recipe=… data=megatron {override('data.path', str(out))}{begun}"
    )


def _share(split: dict[str, Any]) -> str:
    return f"{split['answers']:,} ({split['answers'] / split['tokens']:.1%})"


def _print_inspected(document: dict[str, Any]) -> None:
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


def _print_split(name: str, split: dict[str, Any]) -> None:
    display.show(f"\n{name}: {split['documents']:,} documents, {split['tokens']:,} tokens")
    display.show(f"  ids from {split['smallest_token']:,} to {split['largest_token']:,}")
    if split["ended_by_eos"] is not None:
        display.show(f"  {split['ended_by_eos']:,} documents end with the end-of-text token")
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
