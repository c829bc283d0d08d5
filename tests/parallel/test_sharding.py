"""A rank's shards, measured: state, logits, and the memory of initializing."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from nanoscale.backends.construction import build_stages
from nanoscale.backends.gradients import local_tensor
from nanoscale.backends.native import NativeEngine
from nanoscale.config.layout import is_replicated
from nanoscale.config.parameters import named
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Launcher, Model, Parallel, Precision, Train, Zero
from nanoscale.data.batch import Batch
from nanoscale.parallel import fsdp as data_parallel
from nanoscale.parallel import process_group
from nanoscale.parallel.local_parameters import distribute
from nanoscale.parallel.mesh import make_layout
from tests.support.live_memory import memory_changes, peak_bytes
from tests.support.ranks import run_ranks
from tests.support.recipes import complete
from tests.support.rows import exhaustive

SHAPE = Model(
    layers=4, hidden=128, heads=4, kv_heads=4, head_dim=32, ffn=384, vocab=512, max_seq_len=64
)
CPU = torch.device("cpu")


def make_config(
    stage: int, seq_len: int = 8, shape: Model = SHAPE, **degrees: int
) -> ResolvedConfig:
    """Return a job of two micro batches of one sample a step, in fp32."""
    dp = degrees.get("dp", 1)
    return complete(
        model=shape,
        parallel=Parallel(**{"dp": 1, "virtual_stages": 1} | degrees),
        precision=Precision("fp32", "fp32", "fp32"),
        zero=Zero(stage),  # type: ignore[arg-type]
        launcher=Launcher(device="cpu"),
        train=Train(steps=2, global_batch=2 * dp, micro_batch=1, seq_len=seq_len),
    )


# --- parameters, gradients, optimizer -------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """fp32 numbers that a rank holds, in multiples of the parameters of its stage after tp."""

    between_micro_batches: float
    """The value after the first micro batch of a step has gone backward; zero if not measured."""
    before_update: float
    after_update: float


def share_of(config: ResolvedConfig, stage: int) -> tuple[int, int]:
    """Return the parameters of a pipeline stage on one rank of tp, and the number of shards of its state."""
    shape, layout = config.model, config.parallel
    assert isinstance(layout.dp, int)
    width = shape.heads * 32
    matrices = 4 * shape.hidden * width + 3 * shape.hidden * shape.ffn
    blocks = shape.layers // layout.pp * (matrices // layout.tp + 2 * shape.hidden)
    rows = shape.vocab // layout.tp * shape.hidden
    first, last = stage == 0, stage == layout.pp - 1
    whole = blocks + first * rows + last * (rows + shape.hidden)
    return whole, layout.dp * layout.cp // layout.dp_replicate if config.zero.stage else 1


def expected(config: ResolvedConfig, pp_rank: int) -> Held:
    """Return the table of parallel/data.py, as arithmetic; 2 is AdamW's moments."""
    whole, parts = share_of(config, pp_rank)
    kept = whole / parts
    # FSDP frees the gradients that it scattered last, the embedding's, when it scatters again.
    bucket = config.model.vocab // config.parallel.tp * config.model.hidden
    between = {
        0: (0 if is_replicated(config) else whole) + whole + whole + 2 * whole,
        1: kept + whole + whole + 2 * kept,
        2: kept + whole + kept + bucket + 2 * kept,
        3: kept + kept + bucket + 2 * kept,
    }[config.zero.stage]
    if config.parallel.pp > 1:
        between = 0
    return Held(between, kept + kept + 2 * kept, kept + 2 * kept)


def live_numbers() -> float:
    """fp32 numbers in all tensors of this process, each storage once."""
    gc.collect()
    found: dict[int, int] = {}
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    for tensor in [*tensors, *(t.grad for t in tensors if t.is_leaf and t.grad is not None)]:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.dtype == torch.float32 and local.device.type == "cpu":
            storage = local.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes() // 4
    return sum(found.values())


def measure_rank(_rank: int, config: ResolvedConfig) -> tuple[int, Held]:
    process_group.join(config.world_size, CPU, 120.0)
    before = live_numbers()
    engine = NativeEngine(config, CPU)
    batches = [Batch.of_rows(np.zeros((1, config.train.seq_len + 1), dtype=np.int64))] * 2
    engine.train_step(batches, 1e-3)
    between = [0.0]
    begin = data_parallel.begin_micro_batch

    def look(model: Any, stage: int, last: bool) -> None:
        if last:
            between[0] = live_numbers() - before
        begin(model, stage, last)

    data_parallel.begin_micro_batch = look
    at_update = at_call(engine, "_finish_gradients", lambda: live_numbers() - before)
    engine.train_step(batches, 1e-3)
    held = Held(between[0], at_update[0], live_numbers() - before)
    return engine.layout.coordinates.pp, held


def at_call(engine: Any, method: str, look: Callable[[], float]) -> list[float]:
    """Return the results of `look` whenever a method of the engine is called."""
    found: list[float] = []
    call = getattr(engine, method)

    def looking() -> Any:
        found.append(look())
        return call()

    setattr(engine, method, looking)
    return found


LAYOUTS = [
    *((stage, {"dp": 2}) for stage in (0, 1, 2, 3)),
    (2, {"dp": 4, "dp_replicate": 2}),
    (0, {"tp": 2}),
    (0, {"pp": 2}),
    (3, {"tp": 2, "dp": 2}),
    exhaustive(1, {"tp": 2, "pp": 2}),
    exhaustive(3, {"cp": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "degrees"), LAYOUTS, ids=str)
def test_a_rank_holds_its_share_of_the_state(stage: int, degrees: dict[str, int]) -> None:
    config = make_config(stage, **degrees)
    for pp_rank, held in run_ranks(measure_rank, config.world_size, config):
        form = expected(config, pp_rank)
        assert held.between_micro_batches == pytest.approx(form.between_micro_batches, rel=0.01)
        assert held.before_update == pytest.approx(form.before_update, rel=0.01)
        assert held.after_update == pytest.approx(form.after_update, rel=0.01)


# --- logits ---------------------------------------------------------------------------------------


TOKENS = 128
WIDE = replace(SHAPE, hidden=32, heads=4, head_dim=8, ffn=48, vocab=4096)
"""A model whose logits are larger than everything else of a step together."""


def largest_allocation(_rank: int, config: ResolvedConfig) -> tuple[bool, int]:
    """Return True if this rank has logits, and the fp32 numbers of the largest tensor of a training step."""
    process_group.join(config.world_size, CPU, 120.0)
    engine = NativeEngine(config, CPU)
    batches = [Batch.of_rows(np.zeros((1, TOKENS + 1), dtype=np.int64))] * 2
    engine.train_step(batches, 1e-3)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        engine.train_step(batches, 1e-3)
    last = any(part.last for part in engine.stages.values())
    return last, max(size for _, size in memory_changes(recorded)) // 4


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"dp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_no_rank_ever_holds_whole_logits(degrees: dict[str, int]) -> None:
    config = make_config(0, TOKENS, WIDE, **degrees)
    for has_logits, largest in run_ranks(largest_allocation, config.world_size, config):
        share = TOKENS * WIDE.vocab // degrees.get("tp", 1)
        assert (largest == share) if has_logits else (largest < share)


# --- the table of parameters ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "degrees"),
    [
        (replace(SHAPE, position="learned", bias=True, norm="layernorm", mlp="gelu"), {"tp": 2}),
        (replace(SHAPE, kv_heads=2, qkv_bias=True, qk_norm=True), {"tp": 2}),
        (replace(SHAPE, experts=4, qk_norm=True), {"tp": 2, "ep": 2, "dp": 2}),
    ],
    ids=["gpt2", "qwen", "experts"],
)
def test_the_table_divides_as_tp_and_ep_do(shape: Model, degrees: dict[str, int]) -> None:
    config = make_config(0, shape=shape, **degrees)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=config.world_size)
    try:
        parts = build_stages(config, make_layout(config, "cpu"), CPU)
    finally:
        dist.destroy_process_group()
    local = {name: tuple(local_tensor(value).shape) for name, value in parts[0].named_parameters()}
    table = named(shape).items()
    assert local == {
        name: value.local(degrees["tp"], degrees.get("ep", 1)) for name, value in table
    }


def test_a_distributed_parameter_is_trained_if_it_was() -> None:
    """Else tp saves moments of a router's bias, of which a run in one process has none."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        layer = nn.Linear(4, 4)
        layer.bias.requires_grad_(False)
        mesh = init_device_mesh("cpu", (2,))
        distribute(layer, mesh, {"weight": Shard(0), "bias": Replicate()})
        assert layer.weight.requires_grad and not layer.bias.requires_grad
    finally:
        dist.destroy_process_group()


# --- initialization -------------------------------------------------------------------------------


def test_initializing_needs_a_share_and_one_parameter(tmp_path: Path) -> None:
    """A large model's first rank of 8, without the other 7: the peak is its share and one whole parameter."""
    shape = replace(SHAPE, layers=4, hidden=1024, heads=8, head_dim=128, ffn=3584, vocab=16384)
    config = make_config(3, shape=replace(shape, kv_heads=8), dp=4, tp=2)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        layout = make_layout(config, "cpu")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            parts = build_stages(config, layout, CPU)
    finally:
        dist.destroy_process_group()
    share = sum(local_tensor(p).nbytes for p in parts[0].parameters())
    whole = sum(p.nbytes for p in parts[0].parameters())
    largest = max(p.nbytes for p in parts[0].parameters())
    assert share == pytest.approx(whole / 8, rel=0.01)
    assert share < peak_bytes(recorded) <= 1.01 * (share + largest) < whole / 2


def gradients_of_many_micro_batches(rank: int, stage: int) -> list[list[Tensor]]:
    """Return the gradients of a step of 64 micro batches, reduced in fp32 and in bf16."""
    process_group.join(2, CPU, 120.0)
    found = []
    for reduce in ("fp32", "bf16"):
        precision = Precision("fp32", "bf16", reduce)  # type: ignore[arg-type]
        shape = replace(
            SHAPE, layers=1, hidden=32, heads=2, kv_heads=2, head_dim=16, ffn=32, vocab=64
        )
        config = make_config(stage, 16, shape, dp=2)
        train = replace(config.train, global_batch=128)
        engine = NativeEngine(replace(config, precision=precision, train=train), CPU)
        dice = np.random.default_rng(rank)
        rows = [Batch.of_rows(dice.integers(0, shape.vocab, (1, 17))) for _ in range(64)]
        (model,) = engine.stages.values()
        gradients: list[Tensor] = []
        engine.before_norm = partial(_gather_gradients, model, gradients)
        engine.train_step(rows, 0.0)
        found.append(gradients)
    process_group.leave()
    return found


def _gather_gradients(model: nn.Module, gradients: list[Tensor]) -> None:
    grads = (it.grad for it in model.parameters())
    gradients += [it.full_tensor().double() for it in grads if isinstance(it, DTensor)]


@pytest.mark.parametrize("stage", [exhaustive(1), 3])
def test_micro_batches_are_added_in_fp32_in_every_stage(stage: int) -> None:
    """Only what is sent is rounded: 0.8% of the gradient's norm, if sums are rounded too."""
    exact, rounded = run_ranks(gradients_of_many_micro_batches, 2, stage)[0]
    assert len(exact) == len(rounded) > 5
    error = sum((a - b).square().sum() for a, b in zip(exact, rounded, strict=True))
    assert 0 < (error / sum(it.square().sum() for it in exact)).sqrt() < 3e-3
