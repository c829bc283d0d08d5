"""The evaluations of a model while it trains, and their record, which decides when the training ends.

All ranks compute scores of lm-eval's tasks, and sample a text, in the layout of the training.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from nanoscale.backends.base import Engine
from nanoscale.checkpoint import store
from nanoscale.common.errors import UserError
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import StopWhen
from nanoscale.data.batch import Batch
from nanoscale.data.dataset import Validation
from nanoscale.data.tokens.tokenizer import Tokenizer
from nanoscale.data.vocabulary import tokenizer_of_run
from nanoscale.generate.harness import Answers, Scored, ScoringBatch, evaluate_tasks
from nanoscale.generate.weights import Opened
from nanoscale.models.kv_cache import without_cudnn_attention
from nanoscale.parallel import process_group
from nanoscale.runs.metrics import known_metrics

TEMPERATURE = 0.7


def uncompiled() -> AbstractContextManager[Any]:
    """Run compiled blocks as they were written: a compilation takes longer than the sample."""
    return torch.compiler.set_stance("force_eager")


class NextToken(Protocol):
    def next_token_logits(self, tokens: list[int]) -> Tensor: ...


def sample(
    engine: NextToken, tokenizer: Tokenizer, prompt: str, length: int, context: int, seed: int
) -> str:
    """Return the prompt and its continuation: `length` tokens, fewer if a document ends.

    Every rank must call this at the same time; all draw the same tokens. `context` is the longest sequence
    that the model was trained on.
    """
    generator = torch.Generator().manual_seed(seed)
    prompt_tokens = tokenizer.encode(prompt)
    tokens = [tokenizer.eos, *prompt_tokens]
    # No early exit at a document's end: ranks that disagreed would wait for each other forever.
    for _ in range(length):
        with without_cudnn_attention(), uncompiled():
            logits = engine.next_token_logits(tokens[-context:])
        probability = torch.softmax(logits.cpu()[: tokenizer.vocab_size] / TEMPERATURE, dim=0)
        tokens.append(int(torch.multinomial(probability, 1, generator=generator)))
    generated = tokens[1:]
    return tokenizer.decode(
        generated[: generated.index(tokenizer.eos)] if tokenizer.eos in generated else generated
    )


class TaskScores:
    """The tasks of `train.eval_tasks`. Rank 0 runs lm-eval; all ranks compute the batches that it sends."""

    def __init__(self, engine: Engine, config: ResolvedConfig) -> None:
        """Find the tokenizer. Raises a UserError if none is known."""
        self._engine, self._train, self._dp = engine, config.train, config.parallel.dp
        tokenizer = tokenizer_of_run(config)
        if tokenizer is None:
            raise UserError("data", "train.eval_tasks needs a tokenizer: set data.tokenizer")
        model, end = next(iter(engine.stages.values())), tokenizer.eos
        name, ends = config.run.name or "run", frozenset([end])
        self._opened = Opened(model, tokenizer, engine.device, name, (end,), ends, end)

    def compute(self) -> tuple[dict[str, float], list[str]]:
        """Return the metrics, and the names of metrics that are better if higher. Every rank calls it."""
        results: dict[str, Any] = {}
        if process_group.rank() == 0:
            answers = Answers(self._opened, run_all=self._run_all)
            folder = self._train.eval_tasks_dir
            with redirect_stdout(sys.stderr):  # the library prints lines of its own
                results = evaluate_tasks(
                    answers,
                    self._train.eval_tasks,
                    self._train.eval_tasks_limit,
                    None,
                    Path(folder) if folder else None,
                    errors=False,
                )
            self._score([])  # the other ranks stop waiting
        else:
            while self._score([]):
                pass
        return process_group.broadcast(lambda: _metrics(results))

    def _run_all(self, batches: Iterable[Any]) -> Iterator[list[Scored]]:
        small = self._cut(batches)
        while chunk := list(islice(small, self._dp)):
            yield from self._score(chunk)

    def _cut(self, batches: Iterable[ScoringBatch]) -> Iterator[ScoringBatch]:
        """Yield batches that have no more tokens than a micro batch."""
        most = self._train.micro_batch * self._train.seq_len
        for batch in batches:
            count = max(1, most // max(len(row) for row, _ in batch.rows(self._opened.context)))
            for start in range(0, len(batch.pairs), count):
                yield ScoringBatch(batch.pairs[start : start + count])

    def _score(self, chunk: Sequence[ScoringBatch]) -> list[list[Scored]]:
        """Score the batches of rank 0, at most one for each replica; none ends the evaluation."""
        chunk, dp_rank = process_group.broadcast(lambda: chunk), self._engine.coordinates.dp
        if not chunk:
            return []
        rows = [batch.rows(self._opened.context) for batch in chunk]
        with without_cudnn_attention(), uncompiled():
            # A replica without a batch computes another's: its shards of the parameters are needed.
            figures = self._engine.score_tokens(rows[dp_rank % len(rows)])
        every = process_group.gather((dp_rank, figures))
        return [
            _scores([it for at, it in every if at == number and it is not None], its_rows)
            for number, its_rows in enumerate(rows)
        ]


def _scores(shards: list[Tensor], rows: list[tuple[list[int], int]]) -> list[Scored]:
    """Return the score of each row from all shards' figures of its tokens (`Engine.score_tokens`)."""
    log_sums, largest, hits, own = torch.stack(shards, dim=1)
    log_probabilities = own.amax(dim=0) - log_sums.logsumexp(dim=0)
    likely = hits.gather(0, largest.argmax(dim=0, keepdim=True))[0] == 1
    counts = [count for _, count in rows]
    split = zip(log_probabilities.split(counts), likely.split(counts), strict=True)
    return [(numbers.sum().item(), bool(are_likely.all())) for numbers, are_likely in split]


def _metrics(results: dict[str, Any]) -> tuple[dict[str, float], list[str]]:
    """Return the metrics of lm-eval's results without their standard errors, and the names to maximize."""
    metrics, rising = dict[str, float](), list[str]()
    for task, figures in (results["results"] | results.get("groups", {})).items():
        for key, value in figures.items():
            metric, _, chosen_by = key.partition(",")
            if not chosen_by or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            name = f"eval_tasks/{task}/{metric if chosen_by == 'none' else key}"
            metrics[name] = float(value)
            if results["higher_is_better"].get(task, {}).get(metric):
                rising.append(name)
    return metrics, rising


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

    def add(self, record: dict[str, Any], config: ResolvedConfig, rising: set[str]) -> bool:
        """Add a logged step's evaluation; True if its checkpoint is one of the best. A loss that is not finite
        is none; metrics in `rising` are better if higher. Raises a UserError if the record lacks
        `checkpoint.best_metric`."""
        step, loss, metric = record["step"], record["eval_loss"], config.checkpoint.best_metric
        if metric not in record:
            why = "lm_eval has not computed it"
            raise UserError("config", f"checkpoint.best_metric={metric}: {why}")
        rank = -record[metric] if metric in rising else record[metric]
        if not math.isfinite(loss):
            self.without_improvement += 1
            return False
        self.last = (loss, step)
        if self.lowest is None or loss < self.lowest - config.train.stop_when.min_delta:
            self.lowest, self.without_improvement = loss, 0
        else:
            self.without_improvement += 1
        others = [entry for entry in self.best if entry[1] != step]
        self.best = sorted([*others, (rank, step)])[: config.checkpoint.keep_best]
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


class Evaluator:
    """The held-out samples of a training and its tasks."""

    def __init__(self, engine: Engine, splits: Iterable[Validation]) -> None:
        """Find the tokenizer of the tasks, if there are any. Raises a UserError if none is known."""
        self._engine, self._splits = engine, splits
        self._tasks = TaskScores(engine, engine.config) if engine.config.train.eval_tasks else None
        self.rising = {name for name, metric in known_metrics().items() if metric.rises}
        """The names of metrics that are better if higher."""

    def evaluate(self) -> dict[str, float]:
        """Return the mean loss of the validation samples, of each source if there are several, and the metrics
        of tasks. Every rank calls it."""
        with self._engine.averaged():
            tasks, rising = self._tasks.compute() if self._tasks is not None else ({}, [])
            losses = {split.name: self._loss(split) for split in self._splits}
        self.rising.update(rising)
        figures = {f"eval_{name}": value for name, value in self._engine.preferences().items()}
        mean = sum(split.share * losses[split.name] for split in self._splits)
        by_source = {f"eval_loss/{name}": loss for name, loss in losses.items() if name}
        return {"eval_loss": mean, **by_source, **figures, **tasks}

    def _loss(self, split: Validation) -> float:
        train, dp = self._engine.config.train, self._engine.config.parallel.dp
        samples, rank = split.samples_of(train.eval_samples), self._engine.coordinates.dp
        batches = split.loader.valid_batches(samples, rank, dp, train.micro_batch)
        loss_sum, tokens = validate(self._engine, batches)
        return loss_sum / tokens if tokens else math.nan  # which counts as no loss at all


def validate(engine: Engine, batches: Iterable[tuple[Batch, int]]) -> tuple[float, int]:
    """Return the sum of losses of all ranks' batches and the number of tokens, as in `Engine.evaluate`."""
    total = process_group.gather_numbers(list(engine.evaluate(batches))).sum(dim=0)
    return total[0].item(), int(total[1].item())
