"""The interface of a backend: an engine that trains one model, evaluates it and returns its state."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanoscale.backends.balance import Balance
from nanoscale.backends.qk_clip import QKClip
from nanoscale.backends.scaling import LossScale
from nanoscale.checkpoint.hf import adapters, load_any_model
from nanoscale.checkpoint.staging import State
from nanoscale.config.layout import Coordinates, stage_layers
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.rules.layout import row_step
from nanoscale.config.values.hooks import function
from nanoscale.data.batch import IGNORED, Batch
from nanoscale.models import hf_attention, lora
from nanoscale.models.attention import CausalAttention, DocumentEnds
from nanoscale.models.distillation import Distillation
from nanoscale.models.hf_model import HFModel, LossHead, saved_buffers
from nanoscale.models.own_model import OwnModel
from nanoscale.models.preferences import Objective
from nanoscale.models.transformer import Transformer


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step, still on the device."""

    loss_sum: Tensor
    """This rank's share of the global batch: the sum of its tokens' losses, fp64, scalar; over all ranks each
    token counts once."""
    tokens: Tensor | int
    """The number of tokens of the global batch that have a loss, but at least 1; the same on every rank."""
    grad_norm: Tensor
    """The gradient norm of the whole model before clipping; the same on every rank, scalar."""
    skipped: bool = False
    """True if the host knows that the step was skipped: with fp16, and where the optimizer cannot skip."""


class Engine(ABC):
    """A model, its layout and its optimizer on one rank."""

    config: ResolvedConfig
    device: torch.device
    coordinates: Coordinates
    stages: dict[int, Transformer]
    """This rank's stages of the model by number."""
    scaling: LossScale | None
    """The loss scale with fp16; None otherwise."""
    balance: Balance | None = None
    """The balancing of experts; None without experts."""
    qk_clip: QKClip | None = None
    logged: bool = False
    """True in a step whose metrics are due: `figures` may then need what only this step's passes compute."""
    _tokens: Tensor | int = 1
    """The result of `_count_tokens` for the current step."""

    def __init__(self, config: ResolvedConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        fp16 = config.precision.compute == "fp16"
        self.scaling = LossScale(config.precision) if fp16 else None
        self._row_step = row_step(config)
        self.before_norm: Callable[[], None] = lambda: None
        """A function that each rank calls in every step before the gradients' norm, which all ranks compute."""

    @abstractmethod
    def train_step(self, micro_batches: list[Batch], lr: float, logged: bool = False) -> StepResult:
        """Update once from this rank's micro batches, each of `[micro_batch, seq]` token ids.

        The loss is the mean over all tokens of the global batch that have one; if none has, it is 0.
        """

    @abstractmethod
    def state(self) -> State:
        """Return every tensor that training resumes from, by name; moments only after the first step.

        They are `model.<parameter>`, `optimizer.<parameter>.<moment>`, `loss_scale.<…>` and `balance.<layer>`,
        the former two in fp32 or fp64 and with the shapes of the whole model, in any shards, so that every
        layout of either backend can resume from them.
        """

    def before_update(self, hook: Callable[[], None]) -> None:
        """Call `hook` each time before weights and moments change."""
        self._torch_optimizer().register_step_pre_hook(lambda *_: hook())

    @abstractmethod
    def _torch_optimizer(self) -> torch.optim.Optimizer:
        """Return PyTorch's optimizer, whose step changes them."""

    @abstractmethod
    def frozen_state(self) -> State:
        """Return, with lora, `model.<parameter>` of all frozen weights, which no checkpoint holds; otherwise
        nothing."""

    @abstractmethod
    def replicated(self) -> Iterator[tuple[str, tuple[int, ...], list[Tensor]]]:
        """Yield parameters that the layout may replicate: the name, the ranks that hold the same elements, and
        this rank's plain tensors that are equal on all of them between two steps."""

    @abstractmethod
    def empty_state(self) -> State:
        """Return `state()` before the first update, with memory for everything that a checkpoint holds."""

    def load_pretrained(self, folder: Path) -> None:
        """Load the weights of a Hugging Face model of the same shape.

        Raises:
            BadFileError: they are incomplete, or of another shape.
        """
        state = self.state() | self.frozen_state()
        load_any_model.load(folder, self.config.model, state)
        lora.fill_magnitudes(state)
        self.load_state(state)

    def load_adapters(self, folder: Path) -> None:
        """Load the adapters of a PEFT folder. Raises BadFileError if they are others."""
        state = self.state()
        adapters.load_adapters(folder, self.config, state)
        self.load_state(state)

    @abstractmethod
    def load_state(self, state: State) -> None:
        """Resume from the tensors of `empty_state` after they were loaded."""

    def averaged(self) -> AbstractContextManager[None]:
        """Compute with the average of the weights, if the job has one, until the context ends."""
        return nullcontext()

    def figures(self) -> dict[str, float]:
        """Return metrics that are logged with the loss: with fp16 the loss scale, with experts their loads,
        with qk_clip the largest score, with answers how clearly the model prefers the better ones. Every rank
        calls it."""
        sources = (self.scaling, self.balance, self.qk_clip)
        figures = [source.figures() for source in sources if source is not None]
        return {
            name: value for each in [*figures, self.preferences()] for name, value in each.items()
        }

    def preferences(self) -> dict[str, float]:
        """Return the share of the samples of answers since the last call with a positive margin, and the mean
        margin; of labels the share that is predicted. With other objectives nothing. Every rank calls it."""
        has_classes = self.config.train.objective == "classify"
        if not has_classes and not self.config.train.is_of_answers:
            return {}
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        for stage in self.stages.values():
            if stage.objective is not None:
                sums += stage.objective.read().to(self.device)
            elif isinstance(stage, HFModel) and stage.hits is not None:
                sums[:2], stage.hits = stage.hits, None
        if dist.is_initialized():
            dist.all_reduce(sums)  # ranks of tp and cp have the same samples, all equally often
        samples, right, margins = sums.tolist()
        if not samples:
            return {}
        if has_classes:
            return {"accuracy": right / samples}
        return {"preferred": right / samples, "margin": margins / samples}

    def _small_state(self) -> State:
        """Return the state in addition to parameters and moments."""
        state = {"loss_scale": self.scaling, "balance": self.balance}
        return {
            f"{name}.{key}": value
            for name, source in state.items()
            if source is not None
            for key, value in source.state().items()
        } | {
            f"model.{name}": value
            for stage in self.stages.values()
            if stage.shape.source == "hf"
            for name, value in saved_buffers(stage)
        }

    @abstractmethod
    def _forward(self, inputs: Tensor, *others: Any) -> Tensor | None:
        """Return the logits of `[batch, seq / cp]` token ids, or the sum of the losses of targets of this
        shape; the others are documents, targets and references, as in `Transformer.forward`.

        Return None if another rank has the last stage. With a vocabulary divided by tp, they are the logits of
        this rank's shard.
        """

    def _after_forward(self) -> None:  # noqa: B027
        """Free tensors that forward passes without a backward pass have left."""

    @torch.no_grad()
    def evaluate(self, batches: Iterable[tuple[Batch, int]]) -> tuple[float, int]:
        """Return the sum of the losses and the number of this rank's validation tokens that have one, or of its
        samples of answers.

        Each batch comes with the number of its rows that count.
        """
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        count = torch.zeros((), dtype=torch.int64, device=self.device)
        if self.config.train.objective == "kto":
            batches = list(batches)
            self._set_baseline(batches)
        for batch, rows in batches:
            inputs, targets, documents, references = self._local_batch(batch)
            row = torch.arange(len(targets), device=self.device)
            targets = targets.where(row.unsqueeze(1) < rows, IGNORED)
            loss = self._forward(inputs, documents, targets, references)
            if loss is None or not self._counts_losses:
                continue
            loss_sum += loss
            if references is None:
                count += (targets != IGNORED).sum()
            elif self.coordinates.cp == 0:
                count += rows // self.config.train.rows_of_sample
        self._after_forward()
        return loss_sum.item(), int(count.item())

    @torch.no_grad()
    def log_likelihoods(self, batches: Iterable[Batch]) -> Tensor:
        """Return the log-likelihood of the answer of each row of this rank: fp64 `[rows]` on the host.

        In a pipeline the last stage's ranks return them, and the others zeros.
        """
        return torch.cat([rows.cpu() for rows in self._likelihoods(batches)])

    def _likelihoods(self, batches: Iterable[Batch]) -> Iterator[Tensor]:
        """Yield the log-likelihoods of each batch, on the device."""
        objectives = [it.objective for it in self.stages.values() if it.objective is not None]
        for objective in objectives:
            objective.returns_likelihoods = True
        for batch in batches:
            inputs, targets, documents, references = self._local_batch(batch)
            rows = self._forward(inputs, documents, targets, references)
            yield inputs.new_zeros(len(batch)).double() if rows is None else rows.double()
        for objective in objectives:
            objective.returns_likelihoods = False
        self._after_forward()

    @torch.no_grad()
    def _set_baseline(self, batches: Sequence[tuple[Batch, int]]) -> None:
        """Compare the model with its reference on answers to other questions, over the batches of all ranks,
        each with the number of its rows that count."""
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        unmatched = [batch.unmatched for batch, _ in batches if batch.unmatched is not None]
        found = self._likelihoods(unmatched)
        for likelihoods, other, (_, rows) in zip(found, unmatched, batches, strict=True):
            assert other.references is not None
            counted = torch.tensor([other.references[:rows, 0].sum(), rows], dtype=torch.float64)
            sums[0] += likelihoods[:rows].sum()
            sums[1:] += self._to_device(counted) * (self.coordinates.pp == 0)
        if self.coordinates.tp or self.coordinates.cp:
            sums.zero_()  # another rank has the same rows
        if dist.is_initialized():
            dist.all_reduce(sums)
        baseline = ((sums[0] - sums[1]) / sums[2]).clamp(min=0)
        for stage in self.stages.values():
            if stage.objective is not None:
                stage.objective.baseline = baseline

    @torch.no_grad()
    def top_tokens(self, batch: Batch, k: int) -> Tensor:
        """Return log-probabilities and ids of the k most likely next tokens of this rank's rows: fp64
        `[rows, seq, k, 2]`, without tp, cp and pp."""
        inputs, _, documents, _ = self._local_batch(batch)
        logits = self._forward(inputs, documents)
        self._after_forward()
        assert logits is not None
        found = []
        for chunk in logits.flatten(0, 1).split(1024):  # in fp32 at once
            wide = chunk.to(torch.promote_types(chunk.dtype, torch.float32))
            values, ids = wide.topk(k)
            found.append(torch.stack([values - wide.logsumexp(-1, keepdim=True), ids], -1).double())
        return torch.cat(found).unflatten(0, inputs.shape)

    @torch.no_grad()
    def next_token_logits(self, tokens: list[int]) -> Tensor:
        """Return the logits `[vocab]` of the token after these. Every rank calls it with the same tokens."""
        inputs = torch.tensor([tokens + [0] * self._padding(len(tokens))], device=self.device)
        positions = self._positions(inputs.shape[1], self.device)
        logits = self._forward(inputs[:, positions])
        self._after_forward()
        next_logits = torch.zeros(self.config.model.vocab, device=self.device)
        local_index = (positions == len(tokens) - 1).nonzero()
        if logits is not None and len(local_index) and self.coordinates.dp == 0:
            shard = logits[0, int(local_index[0])]
            first = self.coordinates.tp * len(shard)
            if first < len(next_logits):  # else the first rank has whole logits
                next_logits[first : first + len(shard)] = shard
        if dist.is_initialized():
            dist.all_reduce(next_logits)
        return next_logits

    @torch.no_grad()
    def score_tokens(self, rows: Sequence[tuple[list[int], int]]) -> Tensor | None:
        """Return this rank's figures of the last tokens of each row, fp64 `[4, scored]` on the host; None: it
        has none. Every rank calls it; ranks of tp, cp and pp with the same rows.

        Rows are `(tokens, scored)`. The figures are the logarithm of the sum of exponentials of this rank's
        logits, the largest logit, 1 if that is the token's own, and the token's own logit; -inf where another
        rank has the position or the token.
        """
        parallel, vocab = self.config.parallel, self.config.model.vocab
        length = max(len(tokens) for tokens, _ in rows) - 1
        length += -length % (2 * parallel.cp * parallel.tp if parallel.cp * parallel.tp > 1 else 1)
        tokens, scored = torch.zeros(2, len(rows), length + 1, dtype=torch.long)
        for number, (row, count) in enumerate(rows):
            tokens[number, : len(row)] = torch.tensor(row)
            scored[number, len(row) - count : len(row)] = 1
        positions, chosen = self._positions(length, torch.device("cpu")), scored[:, 1:].bool()
        logits = self._forward(self._to_device(tokens[:, positions]))
        self._after_forward()
        if logits is None or (self.coordinates.tp and logits.shape[-1] == vocab):
            return None
        local = chosen[:, positions]
        logits = logits[local.to(logits.device)]
        targets = tokens[:, positions + 1][local] - self.coordinates.tp * logits.shape[-1]
        figures = torch.full((4, *chosen.shape), -torch.inf, dtype=torch.float64)
        at = torch.zeros_like(chosen)
        at[:, positions] = local
        figures[:, at] = _token_figures(logits, self._to_device(targets)).cpu()
        return figures[:, chosen]

    def _make_balance(self) -> Balance | None:
        """Create the balancing; call it once all stages exist."""
        shape = self.config.model
        return Balance(shape, list(self.stages.values()), self.device) if shape.experts else None

    @property
    def _counts_losses(self) -> bool:
        """True if this rank's losses count: all ranks of tp compute the losses of the same tokens."""
        return self.coordinates.tp == 0

    def _mean(self, loss_sum: Tensor, weight: float) -> Tensor:
        """Return a loss sum's addend to `weight` times the mean over the step's tokens, `self._tokens`."""
        factor = weight / self._tokens
        return loss_sum * (factor.to(loss_sum.dtype) if isinstance(factor, Tensor) else factor)

    def _begin_step(self, micro_batches: list[Batch], logged: bool) -> None:
        """Set what the losses of all micro batches have in common."""
        self.logged = logged
        if self.config.train.objective == "kto":
            self._set_baseline([(batch, len(batch)) for batch in micro_batches])
        self._tokens = self._count_tokens(micro_batches)

    def _count_tokens(self, micro_batches: list[Batch]) -> Tensor | int:
        """Count the tokens of the global batch that have a loss, with communication only if the number is not
        known."""
        if self.config.every_token_counts:
            rows = sum(batch.inputs.size for batch in micro_batches)
            return rows * self.config.parallel.dp
        parallel = self.config.parallel
        rows_each = self.config.train.rows_of_sample
        count = sum(batch.counted(rows_each) for batch in micro_batches)
        # A sum of fp64 is exact far beyond any number of tokens, and divides without rounding to fp32.
        total = self._to_device(torch.tensor(count, dtype=torch.float64))
        if dist.is_initialized():
            dist.all_reduce(total)  # over all ranks; tp · pp · cp of them have the same rows
            total /= parallel.tp * parallel.pp * parallel.cp
        return total.clamp(min=1)

    def _local_batch(
        self, batch: Batch
    ) -> tuple[Tensor, Tensor, DocumentEnds | None, Tensor | None]:
        """Return, on the device, inputs and targets of this rank's part of the sequence, `[batch, seq / cp]`.

        Rows that end with padding are as long as the longest of the micro batch. References, or None, are
        int64.
        """
        batch = batch if self._row_step is None else batch.trimmed(self._row_step)
        inputs, targets = torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)
        references = None if batch.references is None else torch.from_numpy(batch.references)
        if self.config.parallel.cp > 1:
            positions = self._positions(inputs.shape[1], inputs.device)
            inputs, targets = inputs[:, positions], targets[:, positions]
            if references is not None and references.ndim > 2:
                references = references[:, positions]
        documents, ends = None, batch.ends()
        if ends is not None:
            documents = DocumentEnds.of(ends)
            documents = documents._replace(ends=self._to_device(documents.ends))
        if references is not None:
            references = self._to_device(references.view(torch.int64))
        return self._to_device(inputs), self._to_device(targets), documents, references

    def _positions(self, seq: int, device: torch.device) -> Tensor:
        """Return the positions `[seq / cp]` of a sequence that this rank has."""
        stage = next(iter(self.stages.values()))
        return stage.token_positions(seq // self.config.parallel.cp, device)

    def _padding(self, length: int) -> int:
        """Return the number of tokens to add so that every axis divides the sequence."""
        parallel = self.config.parallel
        multiple = 2 * parallel.cp * parallel.tp
        padded = min(-(-length // multiple) * multiple, self.config.train.seq_len)
        return padded - length if multiple > 2 else 0

    def _to_device(self, host: Tensor) -> Tensor:
        if self.device.type == "cuda":  # from pinned memory the copy does not block the host
            return host.contiguous().pin_memory().to(self.device, non_blocking=True)
        return host


def make_stage(config: ResolvedConfig, stage: int, *, real: bool = False) -> Transformer:
    """Create a pipeline stage, or the whole of a transformers model; `real` as in `HFModel`."""
    objective = None
    train, distillation = config.train, None
    if train.is_of_answers:
        objective = Objective(train)
    if train.is_distilled:
        distillation = Distillation(train.distill_weight, train.distill_temperature)
    token_losses = function(config, "loss") if config.train.objective == "hooks" else None
    parallel = config.parallel
    stages = parallel.pp * parallel.virtual_stages
    counts = stage_layers(config.model, stages, parallel.layers_per_stage)
    before = sum(counts[:stage])
    blocks = range(before, before + counts[stage])
    if config.model.source == "hf":
        hf_model = HFModel(config.model, real=real, layers=blocks if stages > 1 else None)
    elif config.model.source == "hooks":
        make = function(config, "model")
        assert make is not None, "the rules require it"
        hf_model = OwnModel(config.model, make, real=real)
    else:
        hf_model = None
    if hf_model is not None:
        owners: list[HFModel | LossHead] = [hf_model, *filter(None, (hf_model.head,))]
        for it in owners:
            it.objective, it.token_losses, it.distillation = objective, token_losses, distillation
        if config.data.document_mask or hf_attention.mixes_faster(hf_model.hf):
            hf_model.attend_with(CausalAttention(config.model))
        return hf_model
    model = Transformer(config.model, blocks, first=stage == 0, last=stage == stages - 1)
    if model.last:
        model.head.z_loss = config.train.z_loss
        model.objective = model.head.objective = objective
        model.head.token_losses, model.head.distillation = token_losses, distillation
    return model


def _token_figures(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the figures of `Engine.score_tokens` `[4, tokens]` of logits `[tokens, vocab]`; a target outside
    of the vocabulary is another rank's."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    is_local = (targets >= 0) & (targets < wide.shape[-1])
    own = wide.gather(1, targets.where(is_local, 0)[:, None])[:, 0].where(is_local, -torch.inf)
    largest, index = wide.max(dim=-1)
    return torch.stack([wide.logsumexp(dim=-1), largest, index == targets, own]).double()
