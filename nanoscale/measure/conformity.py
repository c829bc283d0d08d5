"""The comparison of a layout with one process: the job of the ranks of `nanoscale conform`.

Ranks of the layout write the losses, gradients and updates of each step, and train the last steps once more
from their checkpoint. Then one process trains the same steps, resumes from this checkpoint, and compares all
of them.
"""

import gc
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from nanoscale.backends.native import NativeEngine
from nanoscale.common.errors import UserError
from nanoscale.common.json_text import Json
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.translation.miniature import SAVED, STEPS
from nanoscale.config.values.hooks import function
from nanoscale.data.batch import IGNORED, Batch
from nanoscale.data.dataset import Dataset, Validation, open_data
from nanoscale.data.loader import Loader
from nanoscale.data.samples import ENDLESS, AnswerSamples, Masked, RandomSamples, Samples
from nanoscale.metrics.meter import Meter
from nanoscale.parallel import ddp, process_group
from nanoscale.runs import fence
from nanoscale.runs.directory import RunDirectory, read_json, write_json
from nanoscale.runs.rank_context import RankContext, StopFlag
from nanoscale.train.checkpointing import Progress, make_callbacks
from nanoscale.train.job import restore
from nanoscale.train.loop import Training

NamedTensors = dict[str, Tensor]
"""Whole tensors, by the name of the parameter."""
_LIMITS = dict.fromkeys(("loss", "gradient", "grad_norm", "metric"), 1e-9) | {"update": 1e-6}
"""The largest relative differences of rounding. An update divides by roots of tiny squares."""
_METRICS = ("loss", "grad_norm", "lr", "tokens")
"""Metrics that are equal in each layout, in addition to the metrics of evaluations."""
_COMPILED = dict.fromkeys(_LIMITS, 1e-5) | {"update": math.inf}
"""The limits in fp32. An update is a difference of weights, of which rounding leaves little."""
_PARALLEL = 1e-6
"""Tensors count as parallel if what is not along the other is a smaller share: 1 - cosine < 1e-12."""
_SMALL = 1e-5
"""Gradients below this share of the whole gradient's norm are compared with this share; in fp32 with 0.1."""
_BUCKET = 1 << 16
"""Bytes of the first gradients that are sent without sharding: the small job has a second bucket."""
_NOISE = 1e-10
"""A gradient below this share of the whole gradient's norm may be rounding alone, and its update too."""


@dataclass
class StepRecord:
    """The figures of one step; tensors are whole, by the parameter's name."""

    loss: float
    grad_norm: float
    gradients: NamedTensors = field(default_factory=dict)
    """Before clipping."""
    updates: NamedTensors = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    """The metrics that callbacks get."""


def run(context: RankContext) -> str:
    """Train the steps of the task; one process also compares, and writes the result.

    The task holds `folder`, the run directory of the comparison, and `compares`: True in the one process.
    """
    task = read_json(context.run.task)
    folder = RunDirectory(Path(task["folder"]))
    # One process has a group too, in which a user's collectives are right.
    process_group.join(context.world_size, torch.device("cpu"), 120.0, even_alone=True)
    work = compare_with_layout if task["compares"] else record_layout
    if context.config.precision.compute == "fp32":
        work = record_in_fp32
    result = work(context.config, folder, context.rank)
    if context.rank == 0:
        write_json(context.run.result, result)
    process_group.leave()
    return "completed"


def record_layout(config: ResolvedConfig, folder: RunDirectory, rank: int) -> Json:
    """Train the steps in a layout, and those after the checkpoint once more from there; return what was found.

    Ranks write their records and the checkpoint into a run directory.
    """
    if rank == 0:
        fence.begin(folder, 1)
    process_group.gather(None)
    recorder = RecordedTraining(config, folder, rank)
    recorder.saves = True
    recorder.write("records", STEPS)
    recorder.training.checkpoints.finish()
    findings = [*recorder.findings, *_sample_findings(recorder.engine, recorder.numbers)]
    state = recorder.saved
    del recorder
    gc.collect()
    try:
        restored = RecordedTraining(config, folder, rank, restores=True)
    except UserError as error:
        findings.append(f"this layout cannot resume from its checkpoint: {error}")
        return {"findings": findings}
    restored.write("restored", STEPS - SAVED)
    if name := _first_of_all(_changed(state, restored.saved)):
        findings.append(f"a run that is resumed in its layout after step {SAVED} begins the next step with "
            f"another {name} than the run that was saved")  # fmt: skip
    return {"findings": findings}


def compare_with_layout(config: ResolvedConfig, folder: RunDirectory, rank: int = 0) -> Json:
    """Train the steps in one process, and compare with the records of a layout."""
    recorder = RecordedTraining(config, folder, rank)
    single = [recorder.step() for _ in range(STEPS)]
    result = compare(read_records(folder.path, "records"), single, limits(config))
    if result["first_difference"] is None:
        later, first = single[SAVED:], SAVED + 1
        if restored := read_records(folder.path, "restored"):
            result["restored"] = compare(restored, later, limits(config), first)
        try:
            recorder = RecordedTraining(config, folder, rank, restores=True)
        except UserError as error:
            what = f"one process cannot resume from the checkpoint of this layout: {error}"
            return result | {"findings": [what]}
        result["resumed"] = compare([recorder.step() for _ in later], later, limits(config), first)
    return result


def limits(config: ResolvedConfig) -> dict[str, float]:
    """Return the largest relative differences of rounding; code of others may compute parts in fp32."""
    is_ours = config.model.source == "own" and config.train.objective != "hooks"
    return {what: limit if is_ours else 1e4 * limit for what, limit in _LIMITS.items()}


def record_in_fp32(config: ResolvedConfig, folder: RunDirectory, rank: int) -> Json:
    """Train the steps in a layout; with compiled blocks, compare them with the steps without."""
    name = f"compile-{config.backend.compile}"
    RecordedTraining(config, folder, rank).write(name, STEPS)
    if config.backend.compile == "off":
        return {"findings": []}
    layout, eager = (read_records(folder.path, it) for it in (name, "compile-off"))
    return compare(layout, eager, _COMPILED, least=0.1)


def _restored(context: RankContext, engine: NativeEngine, data: Dataset) -> Progress:
    """Restore; an error that some ranks alone raise, since their data differ, is raised on every rank."""
    refused, progress = None, Progress()
    try:
        progress = restore(context, engine, data)
    except UserError as error:
        refused = str(error)
    if refused := _first_of_all(refused):
        raise UserError("checkpoint", refused)
    return progress


def _changed(before: NamedTensors, after: NamedTensors) -> str | None:
    """Return the name of the first tensor of this rank that differs by more than rounding."""
    for name in dict.fromkeys([*before, *after]):
        a, b = before.get(name), after.get(name)
        if a is None or b is None or a.shape != b.shape or not (a - b).norm() <= 1e-12 * a.norm():
            return name
    return None


def _first_of_all(name: str | None) -> str | None:
    """Return the first rank's name that is not None, on every rank."""
    return next(filter(None, process_group.gather(name)), None)


def _sample_findings(engine: NativeEngine, numbers: list[int]) -> list[str]:
    """Return a sentence if an epoch repeats samples or leaves some out; each rank has read these numbers."""
    shares = sorted(dict(process_group.gather((engine.coordinates.dp, numbers))).items())
    order = np.concatenate([np.reshape(read, (STEPS, -1)) for _, read in shares], 1).flatten()
    size = _epoch(engine.config)
    for epoch in (1, 2) if len(order) else ():
        if left := {*range(size)} - {*order[(epoch - 1) * size : epoch * size].tolist()}:
            return [f"epoch {epoch} of the samples leaves out {len(left)} of {size} samples, such as number "
                f"{min(left)}, and repeats others: look at the order of the samples and at the share of each "
                "data-parallel rank"]  # fmt: skip
    return []


def read_records(folder: Path, name: str) -> list[StepRecord]:
    """Return the records of all stages as records of the whole model."""
    files = sorted(folder.glob(f"{name}-*.pt"))
    stages = [
        [StepRecord(**record) for record in torch.load(file, weights_only=True)] for file in files
    ]
    for records in stages[1:]:
        for whole, stage in zip(stages[0], records, strict=True):
            whole.gradients.update(stage.gradients)
            whole.updates.update(stage.updates)
    return stages[0] if stages else []


class RecordedTraining:
    """A training of one rank that returns the record of each step."""

    def __init__(
        self, config: ResolvedConfig, folder: RunDirectory, rank: int, *, restores: bool = False
    ) -> None:
        ddp.FIRST_BUCKET = _BUCKET
        context = RankContext(folder, config, rank, 0, config.world_size, "", 1, StopFlag())
        self.engine = NativeEngine(config, torch.device("cpu"))
        data = small_data(config)
        self._clip = config.optimizer.clip_norm
        self.training = Training(
            workspace=context.workspace,
            config=config,
            engine=self.engine,
            data=data,
            progress=_restored(context, self.engine, data) if restores else Progress(),
            rank=rank,
            meter=Meter(config, config.world_size, torch.device("cpu")),
            sinks=[],
            note=lambda *_, **__: None,
            callbacks=make_callbacks(config, folder.path, rank, self.engine),
        )
        self._gradients: NamedTensors = {}
        samples = getattr(data.train, "_samples", None)
        self.numbers: list[int] = samples.read if isinstance(samples, SmallSamples) else []
        """The numbers of the random samples that this rank has read."""
        self.saved: NamedTensors = {}
        """This rank's state before the first update after the checkpoint."""
        self.findings: list[str] = []
        self.saves = False
        """True in the layout, which writes the checkpoint."""
        self.engine.before_update(self._read_gradients)

    def write(self, name: str, steps: int) -> None:
        """Train steps; the ranks that hold a stage's tensors first write their records."""
        records = [self.step() for _ in range(steps)]
        at = self.engine.coordinates
        if at.dp == at.cp == at.tp == 0:  # all others have the same whole tensors
            folder = self.training.workspace.parents[1]
            torch.save([vars(record) for record in records], folder / f"{name}-{at.pp:03d}.pt")
        process_group.gather(None)

    def step(self) -> StepRecord:
        """Train a step as `Training.run` does: log, evaluate, call the user's functions, save."""
        training, before = self.training, self._weights()
        training.meter.begin()
        result = training.advance()
        step = training.progress.step
        training.meter.end(step)
        after, norm = self._weights(), result.grad_norm.item()
        loss = sum(process_group.gather(result.loss_sum.item())) / float(result.tokens)
        factor = 1.0 if self._clip is None else min(1.0, self._clip / (norm + 1e-6))
        # Undone before they are gathered: a wrong norm clips each rank's shards differently.
        gradients = {name: whole(value / factor) for name, value in self._gradients.items()}
        updates = {name: after[name] - value for name, value in before.items()}
        metrics = training.step_log.gather(result, training.learning_rate(step))
        # The second evaluation shows the averages of the weights after a resume.
        evaluates = step in (SAVED, SAVED + 1) and bool(training.data.valid)
        if evaluates:
            metrics |= self._evaluate()
        names = [name for name in metrics if name in _METRICS or name.startswith("eval_")]
        figures = {name: float(metrics[name]) for name in names}
        training.callbacks.call("on_step_end", step, metrics=metrics if step < STEPS else None)
        if evaluates:
            training.callbacks.call("on_evaluation", step, metrics=metrics)
        if step == SAVED and self.saves:
            training.save(waits=False)
        return StepRecord(loss, norm, gradients, updates, figures)

    def _evaluate(self) -> dict[str, float]:
        """Evaluate; what changes by it is a finding."""
        before = self._state()
        result = self.training.evaluator.evaluate()
        name = _first_of_all(_changed(before, self._state()))
        finding = f"the evaluation changes {name}"
        if name and finding not in self.findings:
            self.findings.append(finding)
        return result

    def _state(self) -> NamedTensors:
        """Return copies of this rank's weights, buffers and modes, and of all numbers of its optimizer."""
        optimizer = self.engine._torch_optimizer()
        values: Json = {"number of consumed samples": self.training.progress.consumed_samples}
        for name, parameter in self.engine.parameters():
            moments = optimizer.state.get(parameter, {}).items()
            values |= {name: parameter} | {f"{key} of {name}": value for key, value in moments}
        for stage in self.engine.stages.values():
            modes = (
                (name or "the model", module.training) for name, module in stage.named_modules()
            )
            values |= {f"buffer {name}": value for name, value in stage.named_buffers()}
            values |= {f"mode of {name}": mode for name, mode in modes}
        for number, group in enumerate(optimizer.param_groups):
            named = ((name, value) for name, value in group.items() if name != "params")
            values |= {f"{name} in optimizer group {number}": value for name, value in named}
        copies = {name: _copy(value) for name, value in values.items()}
        return {name: copy for name, copy in copies.items() if copy is not None}

    def _weights(self) -> NamedTensors:
        return {name: whole(value) for name, value in self.engine.parameters()}

    def _read_gradients(self) -> None:
        named = self.engine.parameters()
        self._gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
        if self.training.progress.step == SAVED:
            self.saved = self._state()


def _copy(value: Any) -> Tensor | None:
    """Return a copy of a number, or of this rank's part of a tensor, in fp64; None for other values."""
    local = value._local_tensor if isinstance(value, DTensor) else value
    with suppress(TypeError, ValueError, RuntimeError):
        return torch.as_tensor(local).detach().double().clone()
    return None


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
    kind = SmallAnswers if config.train.is_of_answers else SmallSamples
    train, valid = (Loader(kind(config, split), config.train.seed) for split in (0, 1))
    return Dataset(None, train, (Validation("", 1.0, valid),), "", "random samples")


def _epoch(config: ResolvedConfig) -> int:
    """Return the number of random samples, of which the steps train two epochs and a few more."""
    return 2 * config.train.global_batch // config.train.rows_of_sample - 1


class SmallSamples:
    """Random rows with documents, uneven numbers of tokens that have a loss, and a teacher's tokens."""

    def __init__(self, config: ResolvedConfig, split: int) -> None:
        train, vocab = config.train, config.model.vocab
        self.rows = train.rows_of_sample
        self._config, self._split = config, split
        self.read: list[int] = []
        self._random: Samples = RandomSamples(
            split, ENDLESS, train.seq_len, train.seed, vocab, train.labels
        )
        if train.is_masked:
            self._random = Masked(self._random, train, vocab)

    def __len__(self) -> int:
        return _epoch(self._config)

    def batch(self, numbers: list[int]) -> Batch:
        """Return samples by number."""
        config, train = self._config, self._config.train
        self.read += numbers
        numbers = [self.rows * number + i for number in numbers for i in range(self.rows)]
        batch, documents, references = self._random.batch(numbers), None, None
        inputs, targets = batch.inputs, batch.targets.copy()
        dice = [np.random.default_rng([train.seed, number]) for number in numbers]
        if not config.every_token_counts and train.labels is None and not train.is_masked:
            position = np.arange(train.seq_len)
            if config.data.document_mask or config.data.packing == "whole":
                borders = [each.integers(2, train.seq_len - 1, 2) for each in dice]
                documents = np.array([(position >= it[:, None]).sum(0) for it in borders])
                targets[:, :-1][documents[:, 1:] != documents[:, :-1]] = IGNORED
            lengths = np.array([each.integers(3, train.seq_len + 1) for each in dice])
            targets[position >= lengths[:, None]] = IGNORED
        if train.is_of_answers:
            return self._answers(Batch(inputs, targets), dice)
        if train.is_distilled and self._split == 0:
            likely = [_likely_tokens(each, inputs.shape[1], config) for each in dice]
            references = np.array(likely)
        return Batch(inputs, targets, documents, references)

    def _answers(self, batch: Batch, dice: list[np.random.Generator]) -> Batch:
        """Return rows with likelihoods and signs, and for kto with others that have other likelihoods."""
        signs = [1 - 2 * (i % 2) for i in range(len(batch))]
        if self.rows == 1:
            signs = [1 - 2 * int(each.integers(2)) for each in dice]
        own, other = (
            np.array([[-10 * each.random(), sign] for each, sign in zip(dice, signs, strict=True)])
            for _ in (0, 1)
        )
        unmatched = replace(batch, references=other) if self.rows == 1 else None
        return replace(batch, references=own, unmatched=unmatched)


class SmallAnswers(SmallSamples, AnswerSamples):
    """Random pairs of answers, or good and bad ones."""


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
    least: float = _SMALL,
) -> Json:
    """Return the largest relative difference of records, and the first that is more than rounding.

    Losses come first, since they show a wrong forward pass; then gradients by the order of the model.
    """
    largest = 0.0
    for step, (ours, reference) in enumerate(zip(layout, single, strict=True), first_step):
        differences = list(_differences(ours, reference, least))
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


def _differences(ours: StepRecord, reference: StepRecord, least: float) -> Iterator[Json]:
    yield _numbers("loss", ours.loss, reference.loss)
    names = list(reference.gradients)
    norm = torch.stack([it.norm() for it in reference.gradients.values()]).norm().item()
    for name in names:
        yield _tensors("gradient", name, ours.gradients, reference.gradients, least * norm)
    yield _numbers("grad_norm", ours.grad_norm, reference.grad_norm)
    for name in names:
        if name in reference.updates and reference.gradients[name].norm() > _NOISE * norm:
            yield _tensors("update", name, ours.updates, reference.updates, 0.0)
    for name, value in reference.figures.items():
        yield _numbers("metric", ours.figures[name], value) | {"parameter": name}


def _numbers(what: str, ours: float, reference: float) -> Json:
    relative = abs(ours - reference) / max(abs(reference), 1e-300)
    factor = ours / reference if reference else None
    return {"what": what, "parameter": None, "relative": relative, "factor": factor}


def _tensors(
    what: str, name: str, ours: NamedTensors, reference: NamedTensors, least: float
) -> Json:
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
