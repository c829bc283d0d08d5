"""Losses of preferences: of pairs of rows, a chosen answer and after it a rejected one to the same question.

Sources: DPO, Rafailov et al. 2023, arXiv:2305.18290, eq. 7; ORPO, Hong et al. 2024, arXiv:2403.07691, eq. 6 and
7.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from nanoscale.data.batch import IGNORED

PairLoss = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""A function of the log-likelihoods of answers, their numbers of tokens and the log-likelihoods by the
reference, all `[rows]`, and of `train.preference_beta`: to the loss and the margin of pairs, `[rows / 2]`."""


def dpo(
    likelihoods: Tensor, tokens: Tensor, references: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """Compute -log σ(margin) of the rewards, β times the logarithm of policy over reference."""
    rewards = beta * (likelihoods - references)
    margins = rewards[0::2] - rewards[1::2]
    return -F.logsigmoid(margins), margins


def orpo(
    likelihoods: Tensor, tokens: Tensor, references: Tensor, beta: float
) -> tuple[Tensor, Tensor]:
    """Compute the mean loss of the chosen answer's tokens, and β times -log σ(margin) of the odds."""
    means = torch.where(tokens > 0, likelihoods / tokens.clamp(min=1), -1.0)
    means = means.clamp(
        max=-torch.finfo(means.dtype).eps
    )  # odds of a certain answer are not finite
    log_odds = means - (-torch.expm1(means)).log()
    margins = log_odds[0::2] - log_odds[1::2]
    return -means[0::2] - beta * F.logsigmoid(margins), margins


OBJECTIVES: dict[str, PairLoss] = {"dpo": dpo, "orpo": orpo}
"""The losses by `train.objective`."""


class Objective:
    """The loss of pairs on one rank, with sums for its metrics."""

    def __init__(self, name: str, beta: float) -> None:
        self._loss, self._beta = OBJECTIVES[name], beta
        self.returns_likelihoods = False
        """True while the log-likelihood of each row is computed, in place of the loss."""
        self.sum_over_sequence: Callable[[Tensor], Tensor] = _same
        """A function from a sum over this rank's part of the sequence to that over the whole sequence."""
        self.counts_values = True
        """False if another rank has the same pairs, and counts their losses."""
        self.sums: Tensor | None = None
        """Sums over the pairs since the last `read`: their number, pairs with a positive margin, and the
        margins; fp64 `[3]`."""

    def value_and_weights(
        self, losses: Tensor, targets: Tensor, references: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss of a batch and its derivatives.

        Args:
            losses: the sum of the losses of each row's tokens on this rank, `[rows]`.
            targets: `[rows, seq]` of this rank.
            references: the reference's log-likelihoods, `[rows]`.

        Returns:
            the sum of the losses of the pairs, which have a token with a loss in each row, and its derivative
            by the loss of each row, `[rows]`. While `returns_likelihoods`, the log-likelihoods in place of it.
        """
        with torch.enable_grad():
            whole = self.sum_over_sequence(losses.detach()).requires_grad_()
            tokens = self.sum_over_sequence((targets != IGNORED).sum(1).to(losses.dtype))
            if self.returns_likelihoods:
                return -whole.detach(), torch.zeros_like(whole)
            pair_losses, margins = self._loss(
                -whole, tokens, references.to(whole.dtype), self._beta
            )
            counted = (tokens[0::2] > 0) & (tokens[1::2] > 0)
            value = torch.where(counted, pair_losses, 0.0).sum()
            (weights,) = torch.autograd.grad(value, whole)
        self._add(margins.detach(), counted)
        return value.detach() * self.counts_values, weights

    def _add(self, margins: Tensor, counted: Tensor) -> None:
        margins = torch.where(counted, margins, 0.0).double()
        new = torch.stack([counted.sum().double(), (margins > 0).sum().double(), margins.sum()])
        self.sums = new if self.sums is None else self.sums + new

    def read(self) -> Tensor:
        """Return the sums, and begin new ones."""
        sums, self.sums = self.sums, None
        return torch.zeros(3, dtype=torch.float64) if sums is None else sums


def _same(local: Tensor) -> Tensor:
    return local
