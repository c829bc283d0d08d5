"""`nanoscale checkpoints`: what a run has saved, and whether it is still whole. Reads files, loads nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanoscale.cli.output import FAILED, AsJson, console, print_json

if TYPE_CHECKING:
    from nanoscale.checkpoint.store import StoredCheckpoint
    from nanoscale.runs.directory import RunDirectory

app = typer.Typer(no_args_is_help=True, help="Look at the checkpoints of a run, and verify them.")

Run = Annotated[str, typer.Argument(help="The run directory, or the run's name in runs/.")]
Step = Annotated[
    int | None, typer.Option(help="The checkpoint of this step.", show_default="the newest")
]


@app.command("ls")
def list_checkpoints(run: Run, as_json: AsJson = False) -> None:
    """List the checkpoints of a run, the oldest first."""
    from nanoscale.checkpoint.store import list_checkpoints

    directory = _open(run)
    rows = [_summary(stored) for stored in list_checkpoints(directory.checkpoints)]
    if as_json:
        print_json(rows)
        return
    if not rows:
        typer.echo(f"no checkpoints in {directory.checkpoints}")
    for row in rows:
        typer.echo(_line(row))


@app.command("inspect")
def inspect_checkpoint(run: Run, step: Step = None, as_json: AsJson = False) -> None:
    """Show what a checkpoint holds: its progress, every tensor's shape and type, every file."""
    from nanoscale.checkpoint.store import find_checkpoint

    stored = find_checkpoint(_open(run).checkpoints, step)
    document = {"path": str(stored.path), **_manifest(stored)}
    if as_json:
        print_json(document)
        return
    for name in ("path", "step", "consumed_samples", "tokens", "world_size"):
        typer.echo(f"{name:<17} {document[name]}")
    typer.echo(f"{'saved':<17} {_when(document['time'])}")
    _print_tensors(document["tensors"])
    _print_files(document["files"])


@app.command("verify")
def verify_checkpoints(run: Run, step: Step = None, as_json: AsJson = False) -> None:
    """Read every byte of a run's checkpoints, or of one, and hold it against the recorded sums.

    Exit code 1 if one is damaged; the files that are not what was written are named.
    """
    from nanoscale.checkpoint.store import find_checkpoint, find_damage, list_checkpoints

    folder = _open(run).checkpoints
    newest = find_checkpoint(folder, step)
    chosen = [newest] if step is not None else list_checkpoints(folder)
    damage = {stored.path.name: find_damage(stored.path) for stored in chosen}
    if as_json:
        rows = [
            {"name": name, "whole": not found, "damage": found} for name, found in damage.items()
        ]
        print_json(rows)
    else:
        for name, found in damage.items():
            typer.echo(f"{name}  {'damaged' if found else 'whole'}")
            for sentence in found:
                typer.echo(f"  {sentence}")
    if any(damage.values()):
        raise typer.Exit(FAILED)


def _open(run: str) -> RunDirectory:
    from nanoscale.runs.directory import RunDirectory

    return RunDirectory.open(run)


def _manifest(stored: StoredCheckpoint) -> dict[str, Any]:
    from nanoscale.checkpoint.store import DamagedCheckpointError
    from nanoscale.errors import UserError

    try:
        return stored.manifest
    except DamagedCheckpointError as error:
        raise UserError("checkpoint", f"{stored.path} is damaged: {error}") from error


def _summary(stored: StoredCheckpoint) -> dict[str, Any]:
    from nanoscale.checkpoint.store import DamagedCheckpointError

    row: dict[str, Any] = {"name": stored.path.name, "path": str(stored.path), "step": stored.step}
    try:
        manifest = stored.manifest
    except DamagedCheckpointError as error:
        return row | {"error": str(error)}
    size = sum(file["bytes"] for file in manifest["files"].values())
    kept = {name: manifest[name] for name in ("consumed_samples", "tokens", "world_size", "time")}
    return row | kept | {"bytes": size, "files": len(manifest["files"])}


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['name']}  damaged: {row['error']}"
    size = f"{row['bytes'] / 2**20:.1f} MiB in {row['files']} files"
    return f"{row['name']}  {_when(row['time'])}  {row['tokens']:,} tokens  {size}"


def _print_tensors(tensors: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("tensor", "shape", "type", box=None)
    for name, tensor in tensors.items():
        table.add_row(name, " × ".join(map(str, tensor["shape"])) or "scalar", tensor["dtype"])
    console().print(table)


def _print_files(files: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table("file", "bytes", "XXH3-128", box=None)
    for name, file in files.items():
        table.add_row(name, f"{file['bytes']:,}", file["xxh3_128"])
    console().print(table)


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
