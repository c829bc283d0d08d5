"""`nanoscale data`: text to tokens on disk, and a look at them. What works on tokens is imported inside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import DONE, FAILED, print_json
from nanoscale.common.devices import cores

app = typer.Typer(no_args_is_help=True, help="Prepare and inspect tokens.")


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
            help="Use byte, a tokenizer.json, a .model, their folder, or a name on the hub",
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
    from nanoscale.view.data_text import PreparationScreen, print_prepared

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
    with PreparationScreen() as screen:
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
        print_prepared(out, manifest)
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
    from nanoscale.view.data_text import print_inspected

    document = inspect(path, tokenizer, _vocab(overrides), samples)
    if as_json:
        print_json(document)
    else:
        print_inspected(document)
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
