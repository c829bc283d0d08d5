"""The tensors that compiled blocks keep for the backward pass, by the rule and by the compiler."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_iter

from nanoscale.config.resolved import ResolvedConfig
from nanoscale.rehearse import life
from nanoscale.rehearse.played.record import RankRecord
from nanoscale.rehearse.rehearsed_job import shortened, training_of
from nanoscale.runs.rank_context import StopFlag
from nanoscale.train.agreement import Agreement
from nanoscale.train.job import make_engine
from tests.support.measured_memory import SHAPE, Row, config_of, recomputed
from tests.support.ranks import run_ranks
from tests.support.rows import exhaustive

SMALL = replace(SHAPE, layers=2)
MODES = {
    "none": Row("", shape=SMALL),
    "bf16": Row("", precision="bf16", shape=SMALL),
    "full": Row("", recomputed("full"), shape=SMALL),
    "selective": Row("", recomputed("selective"), shape=SMALL),
    "2nd block kept": Row("", recomputed("selective", checkpoint_every=2), shape=SMALL),
}


def compiled(row: Row) -> ResolvedConfig:
    config = config_of(row)
    never = replace(config.checkpoint, every=0, every_minutes=None, at_end=False)
    compiled = replace(config.backend, compile="on")
    return shortened(replace(config, backend=compiled, checkpoint=never), 2)


def kept_really(_rank: int, config: ResolvedConfig) -> int:
    """Return the bytes that autograd keeps of the last block, in addition to its input and to constants."""
    engine = make_engine(config, torch.device("cpu"))
    training, _ = training_of(config, engine, 0)
    (stage,) = engine.stages.values()
    block = list(stage.layers.values())[-1]
    weights = {parameter.untyped_storage()._cdata for parameter in stage.parameters()}
    inputs: set[int] = set()
    saved: dict[int, tuple[weakref.ref[Any], int]] = {}
    kept: list[int] = []

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights | inputs:
            saved[storage._cdata] = weakref.ref(storage), storage.nbytes()
        return tensor

    def begin(_block: Any, args: Any) -> None:
        inputs.clear()  # a later storage may have the address of a freed one
        inputs.update(it.untyped_storage()._cdata for it in tree_iter(args) if it is not None)
        saved.clear()

    block.register_forward_pre_hook(begin)
    block.register_forward_hook(lambda *_: kept.append(sum(size for _, size in saved.values())))
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        training.run(Agreement(StopFlag()))
    return kept[-1]


def kept_by_rule(_rank: int, config: ResolvedConfig) -> int:
    """Return the bytes that the rehearsed last block keeps in addition to its output."""
    with life.world_of(config, RankRecord(0), None) as world:
        engine = life.build(config, world)
        training, samples = training_of(config, engine, 0)
        life._watch_loop(training, samples, world)
        (stage,) = engine.stages.values()
        block = list(stage.layers.values())[-1]
        before: dict[int, Any] = {}
        kept: list[int] = []

        def end(_block: Any, _args: Any, output: Any) -> None:
            held = world._held.items()
            new = [entry[1] for key, entry in held if before.get(key) is not entry]
            kept.append(sum(new) - output.untyped_storage().nbytes())

        def begin(*_: Any) -> None:
            before.clear()
            before.update(world._held)

        block.register_forward_pre_hook(begin)
        block.register_forward_hook(end)
        training.run(Agreement(StopFlag()))
    return kept[-1]


@pytest.mark.slow
def test_a_block_keeps_products_norms_and_attention_and_nothing_else() -> None:
    """Gate, up and their product; both norms, q, attention and its projection; k and v; the log-sums."""
    config = compiled(MODES["none"])
    (played,) = run_ranks(kept_by_rule, 1, config)
    model, tokens = config.model, config.train.micro_batch * config.train.seq_len
    numbers = 3 * model.ffn + 5 * model.hidden + 2 * model.kv_heads * model.head_dim
    assert played == 4 * tokens * (numbers + model.heads)
    eager = replace(config, backend=replace(config.backend, compile="off"))
    (unfused,) = run_ranks(kept_by_rule, 1, eager)
    assert unfused > 1.3 * played


@pytest.mark.slow
@pytest.mark.parametrize("mode", map(exhaustive, MODES))
def test_a_compiled_block_keeps_what_inductor_keeps(mode: str) -> None:
    config = compiled(MODES[mode])
    (real,), (played,) = (run_ranks(each, 1, config) for each in (kept_really, kept_by_rule))
    assert played == pytest.approx(real, rel=0.02, abs=8192)
