"""The comparison of a layout with one process: the job of the ranks of `nanoscale conform`.

Ranks of the layout write the losses, gradients and updates of each step. Then one process trains the same
steps, resumes from the layout's checkpoint, and compares all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from nanoscale.backends.native import NativeEngine
from nanoscale.checkpoint import sharded
from nanoscale.checkpoint.store import list_checkpoints
from nanoscale.config.objectives import is_distilled, is_masked, is_paired
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.translation.miniature import STEPS
from nanoscale.config.values.hooks import function
from nanoscale.data.batch import IGNORED, Batch
from nanoscale.data.dataset import Dataset, open_data
from nanoscale.data.loader import Loader
from nanoscale.data.samples import ENDLESS, Masked, Pairs, RandomSamples, Samples
from nanoscale.metrics.meter import Meter
from nanoscale.parallel import process_group
from nanoscale.runs import fence
from nanoscale.runs.directory import RunDirectory, read_json, write_json
from nanoscale.train.callbacks import make_callbacks
from nanoscale.train.checkpointing import Progress
from nanoscale.train.loop import Training

if TYPE_CHECKING:
    from nanoscale.runs.rank_context import RankContext

_SAVED = 2
"""The step of the checkpoint from which the other layout resumes."""
_LIMITS = {"loss": 1e-9, "gradient": 1e-9, "grad_norm": 1e-9, "update": 1e-6}
"""The largest relative differences of rounding. An update divides by roots of tiny squares."""
_PARALLEL = 1e-6
"""Tensors count as parallel if what is not along the other is a smaller share: 1 - cosine < 1e-12."""
_SMALL = 1e-5
"""Gradients below this share of the whole gradient's norm are compared with this share."""
_NOISE = 1e-10
"""A gradient below this share of the whole gradient's norm may be rounding alone, and its update too."""


@dataclass
class StepRecord:
    """The figures of one step; tensors are whole, by the parameter's name."""

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Before clipping."""
    updates: dict[str, Tensor] = field(default_factory=dict)


def run(context: RankContext) -> str:
    """Train the steps of the task; one process also compares, and writes the result.

    The task holds `folder`, the run directory of the comparison, and `compares`: True in the one process.
    """
    task = read_json(context.run.task)
    folder = RunDirectory(Path(task["folder"]))
    # One process has a group too, in which a user's collectives are right.
    process_group.join(context.world_size, torch.device("cpu"), 120.0, even_alone=True)
    result: dict[str, Any] = {}
    if task["compares"]:
        result = compare_with_layout(context.config, folder)
    else:
        record_layout(context.config, folder, context.rank)
    if context.rank == 0:
        write_json(context.run.result, result)
    process_group.leave()
    return "completed"


def record_layout(config: ResolvedConfig, folder: RunDirectory, rank: int) -> None:
    """Train the steps in a layout; ranks write their records and a checkpoint into a run directory."""
    recorder = RecordedTraining(config, folder, rank)
    records = [recorder.step() for _ in range(_SAVED)]
    if rank == 0:
        fence.begin(folder, 1)
    process_group.gather(None)
    sharded.save(folder.workspace(1), recorder.engine.state(), {"step": _SAVED})
    records += [recorder.step() for _ in range(STEPS - _SAVED)]
    at = recorder.engine.coordinates
    if at.dp == at.cp == at.tp == 0:  # all others have the same whole tensors
        torch.save([vars(record) for record in records], folder.path / f"records-{at.pp:03d}.pt")
    process_group.gather(None)


def compare_with_layout(config: ResolvedConfig, folder: RunDirectory) -> dict[str, Any]:
    """Train the steps in one process, and compare with the records of a layout."""
    layout = read_records(folder.path)
    recorder = RecordedTraining(config, folder, 0)
    single = [recorder.step() for _ in range(STEPS)]
    limits = _LIMITS
    if config.model.source != "own" or config.train.objective == "hooks":
        limits = {what: 1e4 * limit for what, limit in _LIMITS.items()}  # may compute parts in fp32
    result = compare(layout, single, limits)
    if result["first_difference"] is None:
        (stored,) = list_checkpoints(folder.checkpoints)
        recorder = RecordedTraining(config, folder, 0, _SAVED)
        state = recorder.engine.empty_state()
        sharded.load(stored, state)
        recorder.engine.load_state(state)
        later = single[_SAVED:]
        steps = [recorder.step() for _ in later]
        result["resumed"] = compare(steps, later, limits, _SAVED + 1)
    return result


def read_records(folder: Path) -> list[StepRecord]:
    """Return the records of all stages as records of the whole model."""
    files = sorted(folder.glob("records-*.pt"))
    stages = [[StepRecord(**record) for record in torch.load(file)] for file in files]
    for records in stages[1:]:
        for whole, stage in zip(stages[0], records, strict=True):
            whole.gradients.update(stage.gradients)
            whole.updates.update(stage.updates)
    return stages[0]


class RecordedTraining:
    """A training of one rank that returns the record of each step."""

    def __init__(
        self, config: ResolvedConfig, folder: RunDirectory, rank: int, step: int = 0
    ) -> None:
        self.engine = NativeEngine(config, torch.device("cpu"))
        self._clip = config.optimizer.clip_norm
        self._progress = Progress(step, step * config.train.global_batch)
        self._training = Training(
            workspace=folder.workspace(1),
            config=config,
            engine=self.engine,
            data=small_data(config),
            progress=self._progress,
            rank=rank,
            meter=Meter(config, config.world_size, torch.device("cpu")),
            sinks=[],
            note=lambda *_, **__: None,
            callbacks=make_callbacks(config, folder.path, rank, self.engine),
        )
        self._gradients: dict[str, Tensor] = {}
        self.engine.before_update(self._read_gradients)

    def step(self) -> StepRecord:
        """Train a step."""
        before = self._weights()
        result = self._training.advance()
        after, norm = self._weights(), result.grad_norm.item()
        loss = sum(process_group.gather(result.loss_sum.item())) / float(result.tokens)
        factor = 1.0 if self._clip is None else min(1.0, self._clip / (norm + 1e-6))
        # Undone before they are gathered: a wrong norm clips each rank's shards differently.
        gradients = {name: whole(value / factor) for name, value in self._gradients.items()}
        updates = {name: after[name] - value for name, value in before.items()}
        self._training.callbacks.call("on_step_end", self._progress.step, metrics=None)
        return StepRecord(loss, norm, gradients, updates)

    def _weights(self) -> dict[str, Tensor]:
        return {name: whole(value) for name, value in self.engine.parameters()}

    def _read_gradients(self) -> None:
        named = self.engine.parameters()
        self._gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Return a copy of a whole tensor; all ranks that hold a shard call it."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


# --- the data -------------------------------------------------------------------------------------


def small_data(config: ResolvedConfig) -> Dataset:
    """Return random samples of the job's kind, or the user's own."""
    if config.data.source == "hooks":
        own = function(config, "data")
        return open_data(config.data, config.train, config.model.vocab, own)
    kind = SmallPairs if is_paired(config.train) else SmallSamples
    return Dataset(None, Loader(kind(config), config.train.seed), (), "", "random samples")


class SmallSamples:
    """Random rows with documents, uneven numbers of tokens that have a loss, and a teacher's tokens."""

    rows = 1

    def __init__(self, config: ResolvedConfig) -> None:
        train, vocab = config.train, config.model.vocab
        self._config = config
        self._rows: Samples = RandomSamples(
            0, ENDLESS, train.seq_len, train.seed, vocab, train.labels
        )
        if is_masked(train):
            self._rows = Masked(self._rows, train, vocab)

    def __len__(self) -> int:
        return len(self._rows) // 2

    def batch(self, numbers: list[int]) -> Batch:
        """Return samples by number."""
        config, train = self._config, self._config.train
        numbers = [self.rows * number + i for number in numbers for i in range(self.rows)]
        batch, documents, references = self._rows.batch(numbers), None, None
        inputs, targets = batch.inputs, batch.targets.copy()
        dice = [np.random.default_rng([train.seed, number]) for number in numbers]
        if not config.every_token_counts and train.labels is None and not is_masked(train):
            position = np.arange(train.seq_len)
            if config.data.document_mask or config.data.packing == "whole":
                borders = [each.integers(2, train.seq_len - 1, 2) for each in dice]
                documents = np.array([(position >= it[:, None]).sum(0) for it in borders])
                targets[:, :-1][documents[:, 1:] != documents[:, :-1]] = IGNORED
            lengths = np.array([each.integers(3, train.seq_len + 1) for each in dice])
            targets[position >= lengths[:, None]] = IGNORED
        if is_paired(train):
            references = np.array([-10 * each.random() for each in dice])
        elif is_distilled(train):
            likely = [_likely_tokens(each, inputs.shape[1], config) for each in dice]
            references = np.array(likely)
        return Batch(inputs, targets, documents, references)


class SmallPairs(SmallSamples, Pairs):
    """Random pairs of a chosen and a rejected answer."""

    rows = 2


def _likely_tokens(dice: np.random.Generator, positions: int, config: ResolvedConfig) -> np.ndarray:
    """Return log-probabilities and ids of a teacher's most likely tokens `[positions, k, 2]`."""
    k, vocab = config.train.distill_top_k, config.model.vocab
    shares = dice.dirichlet(np.ones(k + 1), positions)[:, :k]
    ids = dice.permuted(np.tile(np.arange(vocab), (positions, 1)), axis=1)[:, :k]
    return np.stack([np.log(shares), ids], -1)


# --- the comparison -------------------------------------------------------------------------------


def compare(
    layout: list[StepRecord],
    single: list[StepRecord],
    limits: dict[str, float],
    first_step: int = 1,
) -> dict[str, Any]:
    """Return the largest relative difference of records, and the first that is more than rounding.

    Losses come first, since they show a wrong forward pass; then gradients by the order of the model.
    """
    largest = 0.0
    for step, (ours, reference) in enumerate(zip(layout, single, strict=True), first_step):
        differences = list(_differences(ours, reference))
        wrong = [it for it in differences if not it["relative"] <= limits[it["what"]]]
        if wrong:
            first = {"step": step, "begin": first_step, **wrong[0]}
            if first["what"] == "loss":  # the parameter shows where it comes from
                gradients = (it for it in wrong if it["what"] == "gradient")
                first["then"] = next(gradients, None)
            return {"largest": None, "first_difference": first}
        exact = [it["relative"] for it in differences if it["what"] != "update"]
        largest = max(largest, *exact)
    return {"largest": largest, "first_difference": None}


def _differences(ours: StepRecord, reference: StepRecord) -> Iterator[dict[str, Any]]:
    yield _numbers("loss", ours.loss, reference.loss)
    names = list(reference.gradients)
    norm = torch.stack([it.norm() for it in reference.gradients.values()]).norm().item()
    for name in names:
        yield _tensors("gradient", name, ours.gradients, reference.gradients, _SMALL * norm)
    yield _numbers("grad_norm", ours.grad_norm, reference.grad_norm)
    for name in names:
        if reference.gradients[name].norm() > _NOISE * norm:
            yield _tensors("update", name, ours.updates, reference.updates, 0.0)


def _numbers(what: str, ours: float, reference: float) -> dict[str, Any]:
    relative = abs(ours - reference) / max(abs(reference), 1e-300)
    factor = ours / reference if reference else None
    return {"what": what, "parameter": None, "relative": relative, "factor": factor}


def _tensors(
    what: str, name: str, ours: dict[str, Tensor], reference: dict[str, Tensor], least: float
) -> dict[str, Any]:
    """Return the relative difference of a parameter's tensors, and their ratio if they are parallel."""
    b = reference[name].double().flatten()
    a = ours[name].double().flatten() if name in ours else torch.zeros_like(b)
    norm = b.norm().item()
    relative = (a - b).norm().item() / max(norm, least, 1e-300)
    scale = (a @ b).item() / norm**2 if norm else 0.0
    rest = (a - scale * b).norm().item()
    is_parallel = norm > 0 and rest <= _PARALLEL * max(abs(scale), 1e-3) * norm
    return {
        "what": what,
        "parameter": name,
        "relative": relative,
        "factor": scale if is_parallel else None,
    }
