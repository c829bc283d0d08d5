"""The numbers that follow from a resolved configuration."""

from __future__ import annotations

from dataclasses import dataclass

from nanoscale.config.schema import Config


@dataclass(frozen=True)
class Derived:
    """What the layout and the batch come to."""

    world_size: int
    dp: int
    global_batch: int
    """samples an optimizer step"""
    micro_batch: int
    """samples a rank a forward pass"""
    accumulation: int
    """forward passes a rank an optimizer step"""
    tokens_per_step: int
    every_token_counts: bool
    """whether each of them has a loss"""
    steps: int


def derive(config: Config) -> Derived:
    """Compute them; the configuration is one that `rules.check` has resolved."""
    layout, train, data = config.parallel, config.train, config.data
    assert isinstance(layout.dp, int) and isinstance(train.micro_batch, int)
    assert train.steps is not None
    return Derived(
        world_size=layout.dp * layout.tp * layout.pp * layout.cp,
        dp=layout.dp,
        global_batch=train.global_batch,
        micro_batch=train.micro_batch,
        accumulation=train.global_batch // (train.micro_batch * layout.dp),
        tokens_per_step=train.global_batch * train.seq_len,
        every_token_counts=not data.document_mask and data.loss_on != "answers",
        steps=train.steps,
    )
