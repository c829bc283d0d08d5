"""The loss of distillation from the k most likely tokens of a teacher.

Sources: Hinton et al. 2015, arXiv:1503.02531, section 2, for the temperature and its square. The teacher's
probabilities are divided by their sum over the k tokens, and the student's are of the whole vocabulary: the
Top-K distillation of Anshumann et al. 2025, arXiv:2503.16870, who also measure its bias.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoscale.data.batch import IGNORED


@dataclass(frozen=True)
class Distillation:
    """The sum of (1 - w) · cross-entropy + w · T² · KL(teacher ‖ student) of all tokens."""

    weight: float
    temperature: float

    def loss(
        self,
        cross_entropy: Callable[..., Tensor],
        inputs: Tensor,
        targets: Tensor,
        references: Tensor,
    ) -> Tensor:
        """Return the loss of the head's inputs, or of logits.

        `cross_entropy` takes inputs, targets `[..., n]`, `token_weights` of this shape, and the `temperature`
        of its softmax. `references` are the references of a `Batch`.
        """
        log_probability, ids = references.unbind(-1)
        log_probability = (log_probability / self.temperature).log_softmax(-1)
        counts = (targets != IGNORED).unsqueeze(-1)
        weights = self.weight * self.temperature**2 * log_probability.exp() * counts
        teacher_entropy = -(weights * log_probability).sum()
        ids, hard = ids.long().where(counts, IGNORED), targets.unsqueeze(-1)
        hard_weights = torch.full_like(weights[..., :1], 1 - self.weight)
        if self.temperature == 1:  # one softmax serves both
            ids, weights = torch.cat([hard, ids], -1), torch.cat([hard_weights, weights], -1)
            return cross_entropy(inputs, targets=ids, token_weights=weights) - teacher_entropy
        soft = cross_entropy(
            inputs, targets=ids, token_weights=weights, temperature=self.temperature
        )
        return cross_entropy(inputs, targets=hard, token_weights=hard_weights) + (
            soft - teacher_entropy
        )
