"""The output of `nanoscale eval`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from nanoscale.common import display
from nanoscale.common.units import counted

if TYPE_CHECKING:
    from nanoscale.config.resolved import ResolvedConfig


def document(
    config: ResolvedConfig, task: dict[str, Any], figures: dict[str, Any]
) -> dict[str, Any]:
    """Return the document of `eval --json`. Values that are not finite are null."""
    parts = [_part(part) for part in figures["parts"]]
    shares = [part["share"] for part in figures["parts"]]
    loss = sum(share * part["loss"] for share, part in zip(shares, parts, strict=True))
    alone = parts[0] if len(parts) == 1 else None
    return {
        "checkpoint": task["checkpoint"] or config.model.init_from,
        "step": task["step"],
        "loss": _finite(loss),
        "perplexity": _perplexity(loss),
        "bits_per_byte": alone and alone["bits_per_byte"],
        **{name: sum(part[name] for part in parts) for name in ("samples", "tokens", "seconds")},
        "bytes": alone and alone["bytes"],
        "sources": [] if alone else [part | {"loss": _finite(part["loss"])} for part in parts],
        "world_size": config.world_size,
        "data": figures["data"],
    }


def print_loss(document: dict[str, Any]) -> None:
    """Print the loss and what follows from it."""

    def shown(value: float | None, form: str) -> str:
        return "not finite" if value is None else format(value, form)

    display.show(document["checkpoint"])
    display.show(f"  loss           {shown(document['loss'], '.4f')}")
    display.show(f"  perplexity     {shown(document['perplexity'], ',.3f')}")
    if document["bytes"]:
        display.show(f"  bits per byte  {shown(document['bits_per_byte'], '.4f')}")
    for part in document["sources"]:
        words = f"{shown(part['loss'], '.4f')}, perplexity {shown(part['perplexity'], ',.3f')}"
        display.show(f"    {part['name']}: loss {words}, {part['samples']:,} samples")
    speed = document["tokens"] / document["seconds"]
    ranks = counted(document["world_size"], "rank")
    display.show(f"  samples        {document['samples']:,}, {document['tokens']:,} tokens")
    display.show(f"  speed          {speed:,.0f} tokens/s, {ranks}")
    display.show(f"  data           {document['data']}")


def plain_numbers(value: Any) -> Any:
    """Convert numpy's numbers to Python's; numbers that are not finite become null."""
    if isinstance(value, dict):
        return {str(key): plain_numbers(item) for key, item in value.items()}
    if isinstance(value, bool | str | int | None):
        return value
    try:
        return _finite(float(value))
    except (TypeError, ValueError):
        return str(value)


def _part(figures: dict[str, Any]) -> dict[str, Any]:
    """Return the same for one source."""
    loss, text_bytes = figures["loss_sum"] / figures["tokens"], figures["bytes"]
    bits = figures["loss_sum"] / math.log(2) / text_bytes if text_bytes else None
    named = {name: figures[name] for name in ("name", "samples", "tokens", "seconds", "bytes")}
    return {**named, "loss": loss, "perplexity": _perplexity(loss), "bits_per_byte": _finite(bits)}


def _perplexity(loss: float) -> float | None:
    return _finite(math.exp(loss)) if loss < 700 else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
