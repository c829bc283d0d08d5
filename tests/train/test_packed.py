"""Packed documents in evaluations, and batches in which nothing counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from nanoscale.config.resolved import ResolvedConfig
from nanoscale.data.batch import IGNORED, Batch
from nanoscale.data.dataset import open_data
from nanoscale.models.initialization import initialize
from nanoscale.models.transformer import Transformer
from nanoscale.parallel import process_group
from nanoscale.train.job import make_engine
from tests.support.jobs import (
    SAMPLES,
    SEQ_LEN,
    SHAPE,
    ZBV,
    make_config,
    packed_data,
    write_documents,
)
from tests.support.ranks import run_ranks

LAYOUTS: list[dict[str, Any]] = [ZBV, {"tp": 2, "cp": 2, "cp_method": "ulysses"}]


@pytest.mark.slow
@pytest.mark.parametrize("degrees", LAYOUTS, ids=lambda degrees: " ".join(degrees))
def test_an_evaluation_is_of_each_document_alone(tmp_path: Path, degrees: dict[str, Any]) -> None:
    documents, answers = write_documents(tmp_path)
    config = make_config(tmp_path, data=packed_data(tmp_path), parallel=degrees)
    found = run_ranks(evaluate, config.world_size, config)
    model = Transformer(SHAPE).double()
    initialize(model, SHAPE, seed=3)
    total, count = 0.0, 0
    for document, marks in zip(documents, answers, strict=True):
        for at in range(0, len(document) - 1, SEQ_LEN):
            tokens = torch.tensor(document[at : at + SEQ_LEN + 1])
            counted = torch.tensor(marks[at + 1 : at + SEQ_LEN + 1])
            with torch.no_grad():
                losses = F.cross_entropy(model(tokens[None, :-1])[0], tokens[1:], reduction="none")
            total += losses[counted].sum().item()
            count += int(counted.sum())
    assert sum(rank[0][1] for rank in found) == count
    assert sum(rank[0][0] for rank in found) == pytest.approx(total, rel=1e-12)
    for _, empty, (loss_sum, tokens_, norm) in found:
        assert empty == (0.0, 0)
        assert (loss_sum, tokens_, norm) == (0.0, 1.0, 0.0)


def evaluate(rank: int, config: ResolvedConfig) -> tuple[Any, Any, Any]:
    """Evaluate all samples, and one without a loss; and train a step of such ones."""
    process_group.join(config.world_size, torch.device("cpu"), 120.0)
    engine = make_engine(config, torch.device("cpu"))
    loader = open_data(config.data, config.train, SHAPE.vocab).train
    batches = loader.valid_batches(SAMPLES, 0, 1, engine.config.train.micro_batch)
    everything = engine.evaluate(batches)
    batch = loader.batch(range(engine.config.train.micro_batch))
    nothing = Batch(batch.inputs, np.full_like(batch.targets, IGNORED), batch.documents)
    empty = engine.evaluate([(nothing, len(nothing))])
    step = engine.train_step([nothing] * engine.config.accumulation, 1e-3)
    figures = step.loss_sum.item(), float(step.tokens), step.grad_norm.item()
    return everything, empty, figures
