"""Sizes that miss the multiples of 64 and 128, and what they cost."""

from __future__ import annotations

from dataclasses import replace

from nanoscale.config.schema import Cluster
from nanoscale.plan.hardware.hardware import hardware_of
from nanoscale.plan.predict import predict
from nanoscale.plan.time.step import paddings
from nanoscale.view.plan.prediction import document, outcome
from tests.plan.machines import job, model


def found(config):
    return list(paddings(config, hardware_of(config)))


def test_a_vocabulary_whose_rows_are_not_aligned_names_the_next_multiple_and_its_cost():
    config = job("gpt2", seq_len=1024, micro_batch=8, global_batch=64)
    (vocab,) = found(config)
    assert (vocab.key, vocab.size, vocab.padded) == ("model.vocab", 50257, 50304)
    plan = predict(config)
    padded = replace(config, model=replace(config.model, vocab=50304))
    gain = 1 - predict(padded).time.seconds / plan.time.seconds
    assert 0.05 < vocab.gain == gain
    assert document(plan)["paddings"][0]["padded"] == 50304
    longer = plan.time.seconds / predict(padded).time.seconds - 1
    said = f"model.vocab=50257 makes a step {longer:.1%} longer than model.vocab=50304"
    assert said in "\n".join(outcome(plan))
    assert found(padded) == []


def test_each_rank_of_tp_needs_its_multiple():
    (vocab,) = found(
        job("gpt2", seq_len=1024, tp=4, dp=2, model=replace(model("gpt2"), vocab=50260))
    )
    assert vocab.padded % (4 * 64) == 0


def test_sizes_that_cost_nothing_and_models_that_cannot_change_are_not_named():
    assert found(job("llama-8b")) == []
    config = job("gpt2", seq_len=1024)
    assert found(replace(config, model=replace(config.model, init_from="folder"))) == []
    assert found(replace(config, cluster=Cluster(device="cpu"))) == []
