"""`nanoscale checkpoints`: what a run has saved, whether it is still whole, and a way out of it."""

import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from nanoscale.checkpoint import store
from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import FAILED, answer
from nanoscale.cli.inspect.run_changes import prune_checkpoints
from nanoscale.common import display
from nanoscale.common.errors import UserError, refuse_option
from nanoscale.runs.directory import RunDirectory
from nanoscale.view.run import checkpoint_text

app = typer.Typer(no_args_is_help=True, help="Show, verify, export and prune a run's checkpoints.")
app.command("prune")(prune_checkpoints)


@app.command("ls")
def list_saved(run: opt.Run, as_json: opt.AsJson = False) -> None:
    """List the checkpoints of a run, the oldest first."""
    directory = RunDirectory.open(run)
    rows = [
        checkpoint_text.summary(stored) for stored in store.list_checkpoints(directory.checkpoints)
    ]
    rows += checkpoint_text.set_aside(directory.checkpoints).values()
    lines = [*map(checkpoint_text.line, rows)] or [f"no checkpoints in {directory.checkpoints}"]
    answer(as_json, rows, display.show, "\n".join(lines))


@app.command("inspect")
def inspect_checkpoint(run: opt.Run, step: opt.Step = None, as_json: opt.AsJson = False) -> None:
    """Show a checkpoint's progress, the shape and dtype of each tensor, and each file."""
    stored = store.find_checkpoint(RunDirectory.open(run).checkpoints, step)
    try:
        document = {"path": str(stored.path), **stored.manifest}
    except store.DamagedCheckpointError as error:
        raise UserError("checkpoint", f"{stored.path} is damaged: {error}") from error
    document["damage"] = store.find_damage(stored.path, sums=False)
    answer(as_json, document, checkpoint_text.print_manifest)


@app.command("verify")
def verify_checkpoints(run: opt.Run, step: opt.Step = None, as_json: opt.AsJson = False) -> None:
    """Compare every byte of a run's checkpoints, or of one, with the checksums.

    The exit code is 1 if a checkpoint is damaged; its damaged files are named. Checkpoints that a run has set
    aside as damaged are read too, and do not change the exit code.
    """
    folder = RunDirectory.open(run).checkpoints
    aside = checkpoint_text.set_aside(folder) if step is None else {}
    chosen = (
        [] if aside else [store.find_checkpoint(folder, step)]
    )  # which refuses a folder without any
    if step is None:
        chosen = store.list_checkpoints(folder)
    damage = {stored.path: store.find_damage(stored.path) for stored in chosen}
    damage |= {path: store.find_damage(path) for path in aside}
    rows: list[dict[str, Any]] = [
        {"name": path.name, "whole": not found, "damage": found, **aside.get(path, {})}
        for path, found in damage.items()
    ]
    answer(as_json, rows, checkpoint_text.print_damage, damage, aside)
    if any(found for path, found in damage.items() if path not in aside):
        raise typer.Exit(FAILED)


@app.command("export")
def export_checkpoint(
    run: opt.Run,
    to: Annotated[
        Literal["hf", "peft"],
        opt.option(
            "Choose the format: hf for `from_pretrained`, peft for adapters alone",
            "--format",
            default=...,
        ),
    ],
    out: Path | None = opt.option(
        "Write to this folder, which must not exist yet", metavar="DIR", shown="RUN/hf/step-…"
    ),
    step: opt.Step = None,
    dtype: opt.DtypeName | None = opt.option(
        "Write the weights in this dtype", shown="what the run computed in"
    ),
    base: Path | None = opt.option(
        "Find the model that the run began from here, if it has moved",
        metavar="DIR",
        shown="model.init_from",
    ),
    max_shard_size: str = opt.option(
        "Limit the size of a file, in bytes or as in 500MB, 5GB", default="5GB", metavar="SIZE"
    ),
    drop_bias: bool = opt.flag(
        "Leave out the bias that model.balance=bias adds to the choice of experts", "--drop-bias"
    ),
    as_json: opt.AsJson = False,
) -> None:
    """Export a checkpoint as a Hugging Face model: weights, config.json and tokenizer.

    Any layout and backend may have saved it. One tensor at a time is in memory, and the folder is complete or
    absent. Adapters (lora) are merged into the weights of their model; `--format peft` writes them alone.
    """
    from nanoscale.checkpoint.configuration import require_model
    from nanoscale.checkpoint.hf.export import export
    from nanoscale.checkpoint.hf.peft_adapters import export_adapters
    from nanoscale.checkpoint.sharded import require_whole
    from nanoscale.config.composing.frozen import load

    directory, largest = RunDirectory.open(run), _bytes(max_shard_size)
    stored, config = store.find_checkpoint(directory.checkpoints, step), load(directory.config)
    folder = (out or directory.path / to / stored.path.name).expanduser().absolute()
    if base is not None:
        if not (config.lora.rank or config.model.kept_tensors):
            what = "--base is for runs with lora; the checkpoints of this run hold the whole model"
            raise UserError("usage", what)
        init_from = str(base.expanduser().absolute())
        config = replace(config, model=replace(config.model, init_from=init_from))
    if to == "peft" and not config.lora.rank:
        message = "writes adapters, and this run trained the whole model (lora.rank=0)"
        refuse_option("--format", to, message, "--format hf")
    require_whole(stored)
    require_model(directory, stored)
    kind = dtype or config.precision.compute
    if to == "peft":
        exported = export_adapters(stored, config, folder, kind)
    else:
        exported = export(stored, config, folder, kind, largest, _progress(as_json), drop_bias)
    written = asdict(exported) | {"folder": str(folder)}
    answer(as_json, written, checkpoint_text.print_exported, stored.path.name, written)


_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([kKMGT]?)(i?)B?")


def _bytes(text: str) -> int:
    """Parse `5GB` and the like; KB are 1000 bytes, KiB 1024."""
    parts = _SIZE.fullmatch(text.strip())
    size = 0
    if parts is not None:
        base = 1024 if parts[3] else 1000
        size = int(float(parts[1]) * base ** " KMGT".index(parts[2].upper() or " "))
    if size < 1:
        what = "must be a size, as in 500MB, 5GB or 4GiB"
        raise UserError("usage", f"--max-shard-size {text}: {what}")
    return size


def _progress(as_json: bool) -> Any:
    """Return a function that counts the tensors in one line, on a terminal."""
    shown = sys.stderr.isatty() and not as_json

    def note(name: str, number: int, count: int) -> None:
        if shown:
            end = "\n" if number == count else ""
            display.progress(f"{number} of {count}  {name}", end=end)

    return note
