"""`nanoscale data`: text to tokens on disk, and a look at them. What works on tokens is imported inside."""

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import DONE, FAILED, answer
from nanoscale.common.devices import cores
from nanoscale.common.errors import UserError, Violation, refuse_option

app = typer.Typer(no_args_is_help=True, help="Prepare and inspect tokens.")


@app.command("prepare")
def prepare_data(
    sources: Annotated[
        list[str],
        opt.argument(
            "Read these files, folders, patterns, or hf:NAME:CONFIG:SPLIT datasets",
            metavar="SOURCES",
        ),
    ],
    out: Annotated[
        Path, opt.option("Write the tokens to this new folder", default=..., metavar="DIR")
    ],
    tokenizer: str | None = opt.option(
        "Use byte, a tokenizer.json, a .model, their folder, or a name on the hub",
        metavar="TOKENIZER",
    ),
    train_tokenizer: bool = opt.flag("Train a byte-level BPE on the sources", "--train-tokenizer"),
    vocab_size: int = opt.option(
        "Limit the vocabulary of --train-tokenizer", default=32768, min=257
    ),
    eos: str | None = opt.option(
        "End each document with this token", metavar="TOKEN", shown="the tokenizer's own"
    ),
    field: str | None = opt.option(
        "Read the text, or the messages, from this key or column",
        metavar="NAME",
        shown="text; messages with --chat",
    ),
    chat: bool = opt.flag(
        "Read records as chats (lists of messages), and train on their answers", "--chat"
    ),
    pairs: bool = opt.flag(
        "Read records as pairs of chats, with the answers `chosen` and `rejected`", "--pairs"
    ),
    rated: bool = opt.flag(
        "Read records as chats with a `label`: true for good answers, false for bad ones", "--rated"
    ),
    labels: str | None = opt.option(
        "Read texts, each with a `label` of this number of classes", metavar="N|auto"
    ),
    chat_template: Path | None = opt.option(
        "Make text of chats with this Jinja template", metavar="FILE", shown="the tokenizer's own"
    ),
    separator: str | None = opt.option(
        "Split a .txt or .md into documents at this text; \\n is the end of a line",
        metavar="TEXT",
        shown="each file is one",
    ),
    validation: float = opt.option(
        "Hold out this share of the documents", default=0.0, min=0, max=0.9
    ),
    bad: Literal["refuse", "skip"] = opt.option(
        "Refuse or skip records that are not text", default="refuse"
    ),
    workers: int | None = opt.option(
        "Start this number of processes", shown="one for each core", min=1
    ),
    as_json: opt.AsJson = False,
) -> int:
    """Tokenize text into a folder to train on: data=megatron data.path=DIR.

    SOURCES are files, folders and patterns of .txt, .md, .jsonl, .json, .csv, .tar (all also .gz and .zst) and
    .parquet, and Hugging Face datasets as hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT, with NAME from the
    hub or a folder; `-` is standard input. The same command continues after an interruption, and writes the
    same bytes with any number of workers.
    """
    from nanoscale.data.prepare import PreparationRequest, prepare
    from nanoscale.processes.pool import LostProcessError
    from nanoscale.view.data_text import PreparationScreen, print_prepared

    opt.refuse_unused((pairs, "reads `prompt`, `chosen` and `rejected`", {"--field": field}))
    opt.refuse_unused((pairs, "is for single answers, and these are pairs", {"--rated": rated}))
    kinds = ("pairs", pairs), ("rated", rated), ("chat", chat), ("labels", labels)
    kind: Any = next((name for name, asked in kinds if asked), "text")
    chat = chat or pairs or rated
    opt.refuse_unused((chat, "is for texts, and these records are chats", {"--labels": labels}))
    opt.refuse_unused((not chat, "is for chats; add --chat", {"--chat-template": chat_template}))
    request = PreparationRequest(
        sources=tuple(sources), out=out, vocab_size=vocab_size, eos=eos, validation=validation,
        tokenizer=_one_tokenizer(tokenizer, train_tokenizer, eos, chat),
        field=field or ("messages" if chat else "text"), separator=_unescaped(separator),
        skip_bad=bad == "skip", kind=kind, chat_template=chat_template,
        workers=workers or cores(), labels=_labels(labels),
    )  # fmt: skip
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
    document = {"path": str(out.expanduser().absolute()), **manifest}
    answer(as_json, document, print_prepared, out, manifest)
    return DONE


@app.command("inspect")
def inspect_data(
    path: Annotated[
        str, opt.argument("Name a prepared folder, the stem of a .bin and .idx, a .ds or an .npy")
    ],
    overrides: opt.Overrides = None,
    tokenizer: str | None = opt.option(
        "Decode with this tokenizer, in the form that prepare accepts",
        metavar="TOKENIZER",
        shown="the folder's",
    ),
    samples: int = opt.option("Show this number of documents", default=3, min=0),
    as_json: opt.AsJson = False,
) -> int:
    """Show what token files hold, and with overrides whether a model fits them.

    The exit code is 1 if the files, the tokenizer or the model's vocabulary do not match.
    """
    from nanoscale.config.composing.compose import compose
    from nanoscale.data.inspect import inspect
    from nanoscale.data.prepare.sources import KINDS, ending
    from nanoscale.view.data_text import print_inspected

    if ending(Path(path))[0] in KINDS and Path(path).is_file():
        prepare = f"nanoscale data prepare {shlex.quote(path)} --tokenizer byte --out tokens"
        refuse_option("PATH", path, "holds texts, and this command reads tokens", prepare)
    config = compose(overrides).config if overrides else None
    vocab, eos = (config.model.vocab, config.data.eos) if config else (None, None)
    init_from = config.model.init_from if config else None
    document = inspect(path, tokenizer, vocab, samples, eos, init_from)
    answer(as_json, document, print_inspected)
    return FAILED if document["problems"] else DONE


def _one_tokenizer(tokenizer: str | None, train: bool, eos: str | None, chat: bool) -> str | None:
    if chat and train:
        what = "chats need the tokenizer of the model that is trained on them, not a new one"
        violation = Violation("--train-tokenizer", True, "command line", what, ("--tokenizer DIR",))
        raise UserError("usage", what, [violation])
    if (tokenizer is None) is not train:
        what = "give --tokenizer or --train-tokenizer, which says how text becomes tokens"
        instead = ("--tokenizer byte", "--tokenizer PATH/tokenizer.json", "--train-tokenizer")
        violation = Violation("--tokenizer", tokenizer, "command line", what, instead)
        raise UserError("usage", what, [violation])
    if eos is not None and tokenizer in (None, "byte"):
        what = (
            "--eos names a token of a tokenizer.json; bytes and a BPE trained here have their own"
        )
        raise UserError("usage", what)
    return tokenizer


def _labels(asked: str | None) -> int | None:
    if asked in (None, "auto"):
        return None
    if not asked.isdecimal() or not 2 <= int(asked) <= 65536:
        message = "is neither auto nor the number of classes, from 2 to 65536"
        refuse_option("--labels", asked, message, "--labels auto")
    return int(asked)


def _unescaped(separator: str | None) -> str | None:
    if separator is None:
        return None
    plain = separator.replace(r"\n", "\n").replace(r"\t", "\t").replace(r"\r", "\r")
    if not plain:
        raise UserError("usage", "--separator is empty; leave it out where each file is a document")
    return plain
