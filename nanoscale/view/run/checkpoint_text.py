"""The output of `nanoscale checkpoints`."""

from pathlib import Path

from nanoscale.checkpoint import store
from nanoscale.checkpoint.store import DamagedCheckpointError, StoredCheckpoint
from nanoscale.common import display
from nanoscale.common.json_text import Json
from nanoscale.common.units import byte_size, clock, counted
from nanoscale.view.blocks import Table, show_table


def summary(stored: StoredCheckpoint) -> Json:
    """Return a row for a checkpoint: its progress and its size, or its damage."""
    row: Json = {"name": stored.path.name, "path": str(stored.path), "step": stored.step}
    try:
        manifest = stored.manifest
    except DamagedCheckpointError as error:
        return row | {"error": str(error)}
    size = sum(file["bytes"] for file in manifest["files"].values())
    names = ("consumed_samples", "tokens", "world_size", "time", "eval_loss")
    kept = {name: manifest.get(name) for name in names}
    return row | kept | {"bytes": size, "files": len(manifest["files"])}


def set_aside(folder: Path) -> dict[Path, Json]:
    """Return a row for each checkpoint that a run set aside as damaged, by its path."""
    return {
        it.path: {
            "name": it.path.name,
            "path": str(it.path),
            "step": it.step,
            "set_aside": True,
            "undo": store.undo(it.path),
        }
        for it in store.list_set_aside(folder)
    }


def line(row: Json) -> str:
    """Return a checkpoint of `checkpoints ls` in one line."""
    if "set_aside" in row:
        return f"{row['name']}  {_how_to_undo(row)}"
    if "error" in row:
        return f"{row['name']}  damaged: {row['error']}"
    size = f"{byte_size(row['bytes'])} in {counted(row['files'], 'file')}"
    loss = "" if row["eval_loss"] is None else f"  eval loss {row['eval_loss']:.4f}"
    return f"{row['name']}  {clock(row['time'])}  {row['tokens'] or 0:,} tokens  {size}{loss}"


def print_damage(damage: dict[Path, list[str]], aside: dict[Path, Json]) -> None:
    """Print whether each checkpoint is whole, and how to undo that one was set aside."""
    for path, sentences in damage.items():
        display.show(f"{path.name}  {'damaged' if sentences else 'whole'}")
        for sentence in [*sentences, *([_how_to_undo(aside[path])] if path in aside else [])]:
            display.show(f"  {sentence}")


def print_manifest(document: Json) -> None:
    """Print what `checkpoints inspect` shows of one checkpoint."""
    for name in ("path", "step", "consumed_samples", "tokens", "world_size"):
        display.show(f"{name:<17} {document.get(name, 'not recorded')}")
    saved = document.get("time")
    display.show(f"{'saved':<17} {clock(saved) if saved else 'not recorded'}")
    for sentence in document["damage"]:
        display.show(f"{'damaged':<17} {sentence}")
    tensors = [
        (name, " × ".join(map(str, tensor["shape"])) or "scalar", tensor["dtype"])
        for name, tensor in document["tensors"].items()
    ]
    files = [(name, f"{it['bytes']:,}", it["xxh3_128"]) for name, it in document["files"].items()]
    header = ("tensor", "shape", "type")
    show_table(display.console(), Table(header, tensors, texts=header))
    show_table(display.console(), Table(("file", "bytes", "XXH3-128"), files))


def print_exported(name: str, written: Json) -> None:
    """Print what `checkpoints export` has written of the checkpoint of this name."""
    size = f"{byte_size(written['bytes'])} in {written['dtype']}"
    files = counted(len(written["files"]), "file")
    display.show(f"{name} is now {written['folder']}: {size}, {files} of weights")
    if written["dropped_bias"]:
        most = f"up to {written['dropped_bias']:.3g} of a router's scores"
        display.show(f"  without the routing bias ({most}): it chooses other experts than this run")
    if not written["tokenizer"]:
        display.show("  without a tokenizer: data.tokenizer is not set for the tokens of this run")


def _how_to_undo(row: Json) -> str:
    return f"set aside as damaged when the run was resumed; to undo that: {row['undo']}"
