"""Losses of answers: of pairs of a chosen and a rejected one to the same question, and of good and bad ones.

Sources: DPO, Rafailov et al. 2023, arXiv:2305.18290, eq. 7; ORPO, Hong et al. 2024, arXiv:2403.07691, eq. 6 and
7; KTO, Ethayarajh et al. 2024, arXiv:2402.01306, section 4.1.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from nanoscale.config.schema import Train
from nanoscale.data.batch import IGNORED


@dataclass(frozen=True)
class AnswerRows:
    """The rows of a batch, an answer each; all but the baseline `[rows]`."""

    likelihoods: Tensor
    """The logarithms of the answers' probabilities."""
    tokens: Tensor
    """The numbers of their tokens."""
    references: Tensor
    """The log-likelihoods by the reference."""
    signs: Tensor
    """1 for a chosen or good answer, -1 for a rejected or bad one. In pairs they alternate."""
    baseline: Tensor
    """See `Objective.baseline`."""


AnswerLoss = Callable[[AnswerRows, Train], tuple[Tensor, Tensor]]
"""A function to the loss and the margin of each sample, a pair or a single answer, `[samples]`."""


def dpo(answers: AnswerRows, train: Train) -> tuple[Tensor, Tensor]:
    """Compute -log σ(margin) of the rewards, β times the logarithm of policy over reference."""
    rewards = train.preference_beta * (answers.likelihoods - answers.references)
    margins = rewards[0::2] - rewards[1::2]
    return -F.logsigmoid(margins), margins


def orpo(answers: AnswerRows, train: Train) -> tuple[Tensor, Tensor]:
    """Compute the mean loss of the chosen answer's tokens, and β times -log σ(margin) of the odds."""
    tokens = answers.tokens
    means = torch.where(tokens > 0, answers.likelihoods / tokens.clamp(min=1), -1.0)
    means = means.clamp(
        max=-torch.finfo(means.dtype).eps
    )  # odds of a certain answer are not finite
    log_odds = means - (-torch.expm1(means)).log()
    margins = log_odds[0::2] - log_odds[1::2]
    return -means[0::2] - train.preference_beta * F.logsigmoid(margins), margins


def kto(answers: AnswerRows, train: Train) -> tuple[Tensor, Tensor]:
    """Compute 1 - σ(margin), where the margin is how far a reward is on the right side of the baseline."""
    ratios = answers.likelihoods - answers.references - answers.baseline
    margins = train.preference_beta * ratios * answers.signs
    weights = torch.where(answers.signs > 0, train.desirable_weight, train.undesirable_weight)
    return weights * torch.sigmoid(-margins), margins


OBJECTIVES: dict[str, AnswerLoss] = {"dpo": dpo, "orpo": orpo, "kto": kto}
"""The losses by `train.objective`."""


class Objective:
    """The loss of answers on one rank, with sums for its metrics."""

    def __init__(self, train: Train) -> None:
        self._loss, self._train = OBJECTIVES[train.objective], train
        self._rows = train.rows_of_sample
        self.returns_likelihoods = False
        """True while the log-likelihood of each row is computed, in place of the loss."""
        self.baseline: Tensor | float = 0.0
        """kto: the mean logarithm of policy over reference of answers to other questions, over the rows of all
        ranks; at least 0. It is computed before the first backward pass, and is a constant in it."""
        self.sum_over_sequence: Callable[[Tensor], Tensor] = lambda local: local
        """A function from a sum over this rank's part of the sequence to that over the whole sequence."""
        self.counts_values = True
        """False if another rank has the same answers, and counts their losses."""
        self.sums: Tensor | None = None
        """Sums over the samples since the last `read`: their number, samples with a positive margin, and the
        margins; fp64 `[3]`."""

    def value_and_weights(
        self, losses: Tensor, targets: Tensor, references: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss of a batch and its derivatives.

        Args:
            losses: the sum of the losses of each row's tokens on this rank, `[rows]`.
            targets: `[rows, seq]` of this rank.
            references: the reference's log-likelihoods and the signs, `[rows, 2]`.

        Returns:
            the sum of the losses of the samples, which have a token with a loss in each row, and its derivative
            by the loss of each row, `[rows]`. While `returns_likelihoods`, the log-likelihoods in place of it.
        """
        with torch.enable_grad():
            whole = self.sum_over_sequence(losses.detach()).requires_grad_()
            tokens = self.sum_over_sequence((targets != IGNORED).sum(1).to(losses.dtype))
            if self.returns_likelihoods:
                return -whole.detach(), torch.zeros_like(whole)
            baseline = torch.as_tensor(self.baseline, dtype=whole.dtype, device=whole.device)
            references, signs = references.to(whole.dtype).unbind(1)
            answers = AnswerRows(-whole, tokens, references, signs, baseline)
            sample_losses, margins = self._loss(answers, self._train)
            counted = (tokens > 0).view(-1, self._rows).all(1)
            value = torch.where(counted, sample_losses, 0.0).sum()
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
