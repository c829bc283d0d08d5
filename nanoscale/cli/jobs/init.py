"""`nanoscale init`: a first recipe of one's own, and the commands to type next."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import print_json
from nanoscale.common import display
from nanoscale.config.violations import override

Task = Literal["pretrain", "finetune", "lora", "chat", "chat-lora"]

_STDLIB = "stdlib"
_ABOUT: dict[Task, str] = {
    "pretrain": "Train a model from random weights",
    "finetune": "Fine-tune all weights of a model on texts",
    "lora": "Fine-tune a model on texts with low-rank adapters",
    "chat": "Fine-tune all weights of a model on the answers of conversations",
    "chat-lora": "Fine-tune a model on the answers of conversations with low-rank adapters",
}
_LEARNING_RATE: dict[Task, str] = {
    "pretrain": "4e-4",
    "finetune": "1e-5",
    "lora": "2e-4",
    "chat": "1e-5",
    "chat-lora": "2e-4",
}
_CHATS: tuple[Task, ...] = ("chat", "chat-lora")
_ADAPTERS: tuple[Task, ...] = ("lora", "chat-lora")
_LONGEST = 2048
_NAME = re.compile(r"\w[\w.-]*")
_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(frozen=True)
class _Choice:
    """The answers, checked."""

    task: Task
    model: str
    vocab: int
    seq_len: int
    data: Path | None
    """Texts or conversations, or tokens; None: the embedded corpus."""
    prepared: bool
    """True if `data` holds tokens already."""


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Write the recipe to this folder")
    ] = Path(),
    task: Annotated[
        Task | None, typer.Option(help="Choose what to do", show_default="pretrain")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|DIR",
            help="Name a model of `config ls model`, or the folder of one to fine-tune",
            show_default="tiny",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Read texts, conversations or tokens here",
            show_default="Python's source code",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name the recipe", show_default="the task")
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Write a first recipe, and show the commands to type next.

    On a terminal, the command asks for what the options leave open.
    """
    task = _asked_task() if task is None else task
    tunes = task != "pretrain"
    model = _asked("model", None if tunes else "tiny") if model is None else model
    data = _asked("data", None if tunes else _STDLIB) if data is None else data
    name = _asked("name", task) if name is None else name
    if not _NAME.fullmatch(name):
        _refuse(
            "--name", name, "must begin with a letter or digit, and have only these, -, _ and ."
        )
    choice = _checked(task, model, data)
    target = folder / f"{name}.yaml"
    if target.exists():
        _refuse("--name", name, f"{target} already exists", f"--name {shlex.quote(_free(target))}")
    commands = _commands(choice, target)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with target.open("x", encoding="utf-8") as stream:
            stream.write(_recipe(choice, target, commands))
    except OSError as error:
        _refuse("DIR", str(folder), f"{target} cannot be written: {error.strerror}")
    if as_json:
        print_json({"recipe": str(target), "commands": commands})
    else:
        display.show("\n".join([str(target), *(f"  {line}" for line in commands)]))


def _asked_task() -> Task:
    """Return the task that a person at a terminal chooses; elsewhere `pretrain`."""
    if not sys.stdin.isatty():
        return "pretrain"
    for word, about in _ABOUT.items():
        display.note(f"  {word:<9} {about}")
    while (answer := _asked("task", "pretrain")) not in _ABOUT:
        display.note(f"type one of {', '.join(_ABOUT)}")
    return next(task for task in _ABOUT if task == answer)


def _asked(option: str, default: str | None) -> str:
    """Return the answer of a person at a terminal; elsewhere the default.

    Raises:
        UserError: there is no default, and nobody to ask.
    """
    if sys.stdin.isatty():
        return str(typer.prompt(option, default=default, err=True))
    if default is None:
        _refuse(f"--{option}", None, "is needed by this task", f"--{option} PATH")
    return default


def _checked(task: Task, model: str, data: str) -> _Choice:
    """Return the answers.

    Raises:
        UserError: the model or the data does not exist.
    """
    from nanoscale.config.data.prepared_folder import folder_of

    if task == "pretrain":
        shape = _own_shape(model)
        vocab, longest = shape["vocab"], shape["max_seq_len"]
    else:
        vocab, (model, longest) = 0, _pretrained(model)
    seq_len = min(_LONGEST, longest)
    if task == "pretrain" and data == _STDLIB:
        return _Choice(task, model, vocab, seq_len, None, prepared=True)
    path = Path(data).expanduser().absolute()
    prepared = folder_of(path) is not None or Path(f"{path}.idx").is_file()
    if not prepared and not path.exists():
        _refuse("--data", data, "does not exist")
    return _Choice(task, model, vocab, seq_len, path, prepared)


def _own_shape(model: str) -> dict[str, Any]:
    from nanoscale.config.composing.library import Library
    from nanoscale.config.suggest import nearest
    from nanoscale.config.values.yaml_file import read

    known = {name: it for name, it in Library().options("model").items() if name != "hf"}
    if model not in known:
        near = tuple(f"--model {each}" for each in nearest(model, known))
        _refuse("--model", model, "unknown model; there are " + ", ".join(known), *near)
    return read(known[model].path).content


def _pretrained(model: str) -> tuple[str, int]:
    """Return a model to fine-tune by its folder or its name at Hugging Face, and its context."""
    config = Path(model).expanduser() / "config.json"
    if config.is_file():
        try:
            shape = json.loads(config.read_bytes())
        except ValueError:
            _refuse("--model", model, f"{config} is not JSON")
        longest = shape.get("max_position_embeddings") or shape.get("n_positions") or _LONGEST
        return str(config.parent.absolute()), longest
    if not _HUB_NAME.fullmatch(model) or Path(model).exists():
        message = "is neither a folder with a config.json nor a name at Hugging Face"
        _refuse("--model", model, message)
    return model, _LONGEST


def _commands(choice: _Choice, target: Path) -> list[str]:
    """Return the commands to type, in this order."""
    path = str(target) if target.is_absolute() else f"./{target}"
    train = f"nanoscale train {override('recipe', path)}"
    run = f"{train} {override('run.name', target.stem)}"
    commands = [f"{train} --dry-run", run, f"nanoscale generate {shlex.quote(target.stem)}"]
    if choice.prepared:
        return commands
    words = ["nanoscale", "data", "prepare", str(choice.data), "--out", str(_tokens(target))]
    if choice.task == "pretrain":
        words += ["--train-tokenizer", "--vocab-size", str(max(257, min(32768, choice.vocab)))]
    else:
        words += ["--tokenizer", choice.model]
    return [shlex.join([*words, *(["--chat"] if choice.task in _CHATS else [])]), *commands]


def _tokens(target: Path) -> Path:
    return target.with_name(f"{target.stem}-tokens").absolute()


def _recipe(choice: _Choice, target: Path, commands: list[str]) -> str:
    """Return the text of the recipe."""
    tunes = choice.task != "pretrain"
    embedded = "stdlib-bpe" if choice.vocab >= 4096 else "stdlib"
    lines = [
        f"# {_ABOUT[choice.task]}.",
        *(f"#   {line}" for line in commands),
        "# `nanoscale config explain KEY` explains a key; `nanoscale config ls` lists all of them.",
        "defaults:",
        *([] if tunes else [f"  - override /model: {choice.model}"]),
        f"  - override /data: {'megatron' if choice.data else embedded}",
        "  - override /checkpoint: periodic # every 15 minutes and at the end",
    ]
    if tunes:
        lines += ["model:", f"  init_from: {json.dumps(choice.model)} # its shape and weights"]
    if choice.task in _ADAPTERS:
        lines += ["lora:", "  rank: 16 # more learns more and needs more memory", "  alpha: 32"]
    if choice.data is not None:
        path = choice.data if choice.prepared else _tokens(target)
        lines += ["data:", f"  path: {json.dumps(str(path))}"]
        lines += ["  packing: whole # whole conversations"] if choice.task in _CHATS else []
    lines += [
        "optimizer:",
        f"  lr: {_LEARNING_RATE[choice.task]}",
        "scheduler:",
        "  warmup_steps: 20",
        "train:",
        "  steps: 500 # the dry run says how often the data is seen, and how long it takes",
        "  global_batch: 32 # samples of a step, on all devices together",
        f"  seq_len: {choice.seq_len} # tokens of a sample",
        "  log_every: 10",
        "",
    ]
    return "\n".join(lines)


def _free(target: Path) -> str:
    """Return the name of a recipe that does not exist yet."""
    number = 2
    while target.with_stem(f"{target.stem}-{number}").exists():
        number += 1
    return f"{target.stem}-{number}"


def _refuse(option: str, value: str | None, message: str, *advice: str) -> NoReturn:
    from nanoscale.common.errors import UserError, Violation

    violation = Violation(option, value, "command line", message, advice)
    shown = option if value is None else f"{option} {value}"
    raise UserError("usage", f"{shown}: {message}", [violation])
