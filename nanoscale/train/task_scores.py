"""Scores of lm-eval's tasks while a model trains, computed by all ranks in the layout of the training."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoscale.backends.base import Engine
from nanoscale.common.errors import UserError
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.data.vocabulary import tokenizer_of_run
from nanoscale.generate.harness import Answers, Scored, ScoringBatch, evaluate_tasks
from nanoscale.generate.weights import Opened
from nanoscale.models.kv_cache import without_cudnn_attention
from nanoscale.parallel import process_group
from nanoscale.train.sample import uncompiled


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
        chunk, dp_rank = process_group.broadcast(lambda: chunk), self._engine.dp_rank
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
