"""A resolved configuration: its degrees, batch and steps are integers, and the sizes that follow from them are
attributes.

`rules.check` makes it of a request, and `composing.frozen.load` of a run's config.yaml.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from nanoscale.common.errors import UserError, Violation
from nanoscale.config.reference import flat, value_of
from nanoscale.config.schema import Checkpoint, Config, Parallel, Train
from nanoscale.config.violations import shown

_OPEN = ("parallel.dp", "parallel.virtual_stages", "train.micro_batch", "train.steps",
    "checkpoint.memory_every")  # fmt: skip
"""The keys that a request may leave open."""


@dataclass(frozen=True)
class ResolvedParallel(Parallel):
    """The layout, with every degree known."""

    dp: int = field(kw_only=True)
    virtual_stages: int = field(kw_only=True)


@dataclass(frozen=True)
class ResolvedTrain(Train):
    """The training, with its micro batch and its length known."""

    micro_batch: int = field(kw_only=True)
    steps: int = field(kw_only=True)


@dataclass(frozen=True)
class ResolvedCheckpoint(Checkpoint):
    """The checkpoints, with the steps between those in memory known."""

    memory_every: int = field(kw_only=True)


@dataclass(frozen=True)
class ResolvedConfig(Config):
    """A whole job with nothing left open that decides its layout, its batch or its length."""

    parallel: ResolvedParallel = field(kw_only=True)
    train: ResolvedTrain = field(kw_only=True)
    checkpoint: ResolvedCheckpoint = field(kw_only=True)

    @property
    def world_size(self) -> int:
        layout = self.parallel
        return layout.dp * layout.tp * layout.pp * layout.cp

    @property
    def offloads(self) -> bool:
        """True if FSDP2 keeps parameters, gradients and optimizer states in host memory."""
        return self.backend.name == "native" and self.zero.offload_param == "cpu"

    @property
    def ties_ends(self) -> bool:
        """True if the first and the last stage of a pipeline train the same embedding."""
        return self.model.tie_embeddings and self.parallel.pp > 1 and not self.lora.rank

    @property
    def accumulation(self) -> int:
        """A rank's forward passes in an optimizer step."""
        return self.train.global_batch // (self.train.micro_batch * self.parallel.dp)

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch * self.train.seq_len

    @property
    def every_token_counts(self) -> bool:
        """True if each token of a step has a loss."""
        data = self.data
        has_marks = data.document_mask or data.loss_on == "answers" or data.source == "hooks"
        return not (has_marks or self.train.has_whole_documents or self.train.is_masked)


def resolved(config: Config) -> ResolvedConfig:
    """Return the configuration as a resolved one.

    Raises:
        UserError: the configuration is not one that `rules.check` has resolved: a run's file was changed.
    """
    for key in _OPEN:
        value = value_of(config, key)
        if not isinstance(value, int):
            why = "is not resolved, and the configuration of a run needs a number"
            raise UserError("run", f"{key}={shown(value)} {why}", [Violation(key, value, "", why)])
    sections = dict(vars(config))
    sections["parallel"] = ResolvedParallel(**vars(config.parallel))
    sections["train"] = ResolvedTrain(**vars(config.train))
    sections["checkpoint"] = ResolvedCheckpoint(**vars(config.checkpoint))
    return ResolvedConfig(**sections)


def differences(old: ResolvedConfig, new: ResolvedConfig) -> dict[str, tuple[Any, Any]]:
    """Return the keys whose values differ, with the old and the new one."""
    before, after = flat(asdict(old)), flat(asdict(new))
    keys = [*before, *(key for key in after if key not in before)]
    changed = ((key, before.get(key), after.get(key)) for key in keys)
    return {key: (was, now) for key, was, now in changed if was != now}
