"""The evaluation losses that decide which checkpoints are kept and when a training ends."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from nanoscale.checkpoint import store
from nanoscale.config.schema import StopWhen


@dataclass
class Evaluations:
    """A record of the evaluation losses of a run, which every rank has and every checkpoint holds."""

    best: list[tuple[float, int]] = field(default_factory=list)
    """The lowest ranks with their steps, the lowest first; of equal ones the earliest. A rank is the loss, or
    `checkpoint.best_metric`, negative if it is better if higher."""
    last: tuple[float, int] | None = None
    """The loss and the step of the last evaluation with a finite loss."""
    lowest: float | None = None
    """The loss that the next one must be below, by `min_delta`, to count as lower."""
    without_improvement: int = 0
    """Evaluations in a row without a lower loss."""

    def add(self, step: int, loss: float, keep: int, min_delta: float, rank: float) -> bool:
        """Add the loss of a step; True if its rank is one of the `keep` lowest. One that is not finite is
        none."""
        if not math.isfinite(loss):
            self.without_improvement += 1
            return False
        self.last = (loss, step)
        if self.lowest is None or loss < self.lowest - min_delta:
            self.lowest, self.without_improvement = loss, 0
        else:
            self.without_improvement += 1
        others = [entry for entry in self.best if entry[1] != step]
        self.best = sorted([*others, (rank, step)])[:keep]
        return (rank, step) in self.best

    def reason_to_stop(self, limits: StopWhen) -> str | None:
        """Return why the training ends after the last evaluation; None: it continues."""
        if self.last is None:
            return None
        loss = self.last[0]
        if limits.eval_loss is not None and loss <= limits.eval_loss:
            limit = f"train.stop_when.eval_loss={limits.eval_loss:g}"
            return f"the evaluation loss of {loss:.4f} is at most {limit}"
        if limits.patience and self.without_improvement >= limits.patience:
            return (
                f"{self.without_improvement} evaluations in a row were not below {self.lowest:.4f} "
                f"(train.stop_when.patience={limits.patience})"
            )
        return None

    def in_manifest(self, step: int) -> dict[str, Any]:
        """Return the record as the manifest of this step's checkpoint holds it; empty before the first one."""
        if self.last is None:
            return {}
        this_step = {store.EVAL_LOSS: self.last[0]} if self.last[1] == step else {}
        return {
            **this_step,
            store.BEST: self.best,
            "evaluations": {
                "last": self.last,
                "lowest": self.lowest,
                "in_vain": self.without_improvement,
            },
        }

    @classmethod
    def from_manifest(cls, manifest: dict[str, Any]) -> Evaluations:
        """Return the record at the step of a checkpoint."""
        if "evaluations" not in manifest:
            return cls()
        stored = manifest["evaluations"]
        best = [(loss, step) for loss, step in manifest[store.BEST]]
        return cls(best, tuple(stored["last"]), stored["lowest"], stored["in_vain"])
