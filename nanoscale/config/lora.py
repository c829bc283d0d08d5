"""The linear layers with adapters, by `lora.targets`, and their parameters. Imports no torch."""

from __future__ import annotations

from nanoscale.config.parameters import block
from nanoscale.config.schema import Config, Lora, Model

ATTENTION = ("wq", "wk", "wv", "wo")
FEED_FORWARD = ("gate", "up", "down")


def modules(model: Model, lora: Lora) -> dict[str, str]:
    """Return a block's layers with adapters: their names in the block by those in `lora.targets`."""
    if not lora.rank:
        return {}
    chosen = available(model) if lora.targets is None else lora.targets
    return {name: f"{'attention' if name in ATTENTION else 'mlp'}.{name}" for name in chosen}


def available(model: Model) -> tuple[str, ...]:
    """Return the linear layers of a block."""
    if model.experts:
        return ATTENTION
    return ATTENTION + (FEED_FORWARD if model.mlp == "swiglu" else FEED_FORWARD[1:])


def parameters(config: Config) -> int:
    """Count all parameters of the adapters."""
    model, lora = config.model, config.lora
    table = block(model)
    each = sum(sum(table[f"{module}.weight"].shape) for module in modules(model, lora).values())
    return model.layers * lora.rank * each
