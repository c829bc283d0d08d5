"""The numbers that follow from a resolved configuration."""

from __future__ import annotations

from dataclasses import dataclass

from nanoscale.common.errors import UserError, Violation
from nanoscale.config.schema import Config
from nanoscale.config.violations import shown


@dataclass(frozen=True)
class Derived:
    """The sizes of the layout and the batch."""

    world_size: int
    dp: int
    global_batch: int
    """Samples an optimizer step."""
    micro_batch: int
    """Samples of a rank's forward pass."""
    accumulation: int
    """A rank's forward passes in an optimizer step."""
    tokens_per_step: int
    every_token_counts: bool
    """True if each of these tokens has a loss."""
    steps: int


def derive(config: Config) -> Derived:
    """Compute the derived numbers.

    Raises:
        UserError: the configuration is not one that `rules.check` has resolved: a run's file was changed.
    """
    layout, train, data = config.parallel, config.train, config.data
    if not isinstance(layout.dp, int):
        raise _unresolved("parallel.dp", layout.dp)
    if not isinstance(train.micro_batch, int):
        raise _unresolved("train.micro_batch", train.micro_batch)
    if train.steps is None:
        raise _unresolved("train.steps", train.steps)
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


def _unresolved(key: str, value: object) -> UserError:
    why = "is not resolved, and the configuration of a run needs a number"
    return UserError("run", f"{key}={shown(value)} {why}", [Violation(key, value, "", why)])
