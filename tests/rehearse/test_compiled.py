"""Blocks that Inductor compiles for a device that is not there: what they keep, and what the compiler finds."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_iter

from nanoscale.config.model_math import parameters
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Model
from nanoscale.models import transformer as module
from nanoscale.models.transformer import Block
from nanoscale.rehearse import life
from nanoscale.rehearse.document import _streams
from nanoscale.rehearse.played import compiled as compiler
from nanoscale.rehearse.played.cuda import Gpu
from nanoscale.rehearse.played.device_memory import TensorKind
from nanoscale.rehearse.played.record import RankRecord
from nanoscale.rehearse.played.work import _product
from nanoscale.rehearse.rehearsed_job import shortened, training_of
from nanoscale.runs.rank_context import StopFlag
from nanoscale.train.agreement import Agreement
from nanoscale.train.job import make_engine
from tests.support.measured_memory import MIXTURE, SHAPE, Row, config_of, recomputed
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


def kept_in_rehearsal(_rank: int, config: ResolvedConfig) -> int:
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
    """Gate, up, their product; norms and what they divide by; q, k, v, attention, its projection, log-sums."""
    config = compiled(MODES["none"])
    (played,) = run_ranks(kept_in_rehearsal, 1, config)
    model, tokens = config.model, config.train.micro_batch * config.train.seq_len
    numbers = 3 * model.ffn + 5 * model.hidden + 2 * model.kv_heads * model.head_dim
    assert played == 4 * tokens * (numbers + model.heads + 2)
    eager = replace(config, backend=replace(config.backend, compile="off"))
    (unfused,) = run_ranks(kept_in_rehearsal, 1, eager)
    assert unfused > 1.3 * played


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(map(exhaustive, MODES)))
def test_a_compiled_block_keeps_what_inductor_keeps(mode: str) -> None:
    config = compiled(MODES[mode])
    (real,), (played,) = (run_ranks(each, 1, config) for each in (kept_really, kept_in_rehearsal))
    assert played == pytest.approx(real, rel=0.001)


plain = Block.forward
H100 = Gpu("NVIDIA H100", 80 << 30, 8)


def branches(block: Any, hidden: Any, *args: Any) -> Any:
    return plain(block, hidden * 2 if hidden.sum() > 0 else hidden, *args)


def prints(block: Any, hidden: Any, *args: Any) -> Any:
    print(hidden.shape)
    return plain(block, hidden, *args)


def reads(block: Any, hidden: Any, *args: Any) -> Any:
    return plain(block, hidden * hidden.amax().item(), *args)


def counts(block: Any, hidden: Any, *args: Any) -> Any:
    block.count += 1
    for _ in range(block.count):  # else the compiler lets the number vary
        hidden = hidden * 0.5
    return plain(block, hidden, *args)


def spills(block: Any, hidden: Any, *args: Any) -> Any:
    """Let each thread of a kernel hold 60 values of eight numbers at once."""
    values = [(hidden.detach() * (it + 1)).exp() for it in range(60)]
    largest = reduce(torch.maximum, values)
    return plain(block, hidden + sum(it * (largest - it) for it in values), *args)


def found(_rank: int, forward: Any, shape: Model) -> RankRecord:
    degrees = {} if forward is counts else recomputed("selective")
    config = compiled(Row("", degrees, 3, precision="bf16", shape=shape))
    config = replace(config, train=replace(config.train, eval_every=2))
    vars(module)["Block"].count = 0
    torch._dynamo.config.recompile_limit = 4  # eight take half a minute
    Block.forward = forward  # type: ignore[method-assign]
    return life.play(config, 0, 2, H100)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("forward", "said", "shape"),
    [
        (plain, None, replace(MIXTURE, layers=2)),  # also in an evaluation
        exhaustive(plain, None, SMALL),
        (branches, "breaks a block in two at ", SMALL),
        exhaustive(prints, "breaks a block in two at ", SMALL),
        exhaustive(reads, "item", SMALL),
        exhaustive(spills, "spilled", SMALL),
        (counts, "compiles blocks again in step 2: ", SMALL),
    ],
)
def test_what_the_compiler_cannot_do_is_named(forward: Any, said: str | None, shape: Model) -> None:
    pytest.importorskip("triton")
    (record,) = run_ranks(found, 1, forward, shape)
    assert not record.error, record.error[-2500:]
    assert {it["name"] for it in record.kernels} <= {work[1] for work in record.works}
    assert all(it["registers"] > 0 for it in record.kernels)
    assert any(it["spilled"] for it in record.kernels) == (said == "spilled")
    if said in (None, "item", "spilled"):
        assert record.compiler == []
        assert (said in {wait.what for wait in record.waits}) == (said == "item")
    else:
        assert said in record.compiler[0]
        assert f"{Path(__file__).name}:" in record.compiler[0] or "breaks" not in said


def test_a_function_that_the_compiler_gives_up_is_named_also_in_the_first_step() -> None:
    torch._dynamo.reset()
    run = torch.compile(lambda it, text: it + len(text), backend="eager")
    compiler.recompilations(1)
    with torch._dynamo.config.patch(recompile_limit=2):
        for text in ("a", "bb", "ccc", "dddd"):
            run(torch.ones(2), text)
    (said,) = compiler.recompilations(1)
    assert "gives up" in said and "text ==" in said


def scaled(block: Any, hidden: Any, *args: Any) -> Any:
    return plain(block, hidden.cosh(), *args)


def played_with_lines(_rank: int) -> RankRecord:
    Block.forward = scaled  # type: ignore[method-assign]
    return life.play(compiled(Row("", precision="bf16", shape=SMALL)), 0, 2, H100)


@pytest.mark.slow
def test_a_kernel_has_the_lines_that_it_computes_also_with_a_warm_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    cold, warm = (run_ranks(played_with_lines, 1)[0] for _ in range(2))
    assert not cold.error, cold.error[-2500:]
    assert cold.target == "cuda 90 32"
    lines = {it["name"]: it["lines"] for it in cold.kernels}
    assert lines and all(lines.values())
    outside = ("/torch/", "rehearse/played/", "local_parameters.py")
    assert not [it for each in lines.values() for it in each if any(name in it for name in outside)]
    assert lines == {it["name"]: it["lines"] for it in warm.kernels}
    for function, code, file in (
        ("silu", "self.activate(", Path(module.__file__)),
        ("cosh", ".cosh()", Path(__file__)),
    ):
        code_lines = file.read_text().splitlines()
        shown = [line.rsplit(":", 1) for name in lines if function in name for line in lines[name]]
        numbers = [int(number) for name, number in shown if Path(name).name == file.name]
        assert any(code in code_lines[number - 1] for number in numbers), lines


def divided(_rank: int) -> RankRecord:
    degrees = {"tp": 2} | recomputed("full")
    return life.play(compiled(Row("", degrees, precision="bf16", shape=SMALL)), 0, 2, H100)


def test_gradients_of_weights_are_computed_while_gradients_of_inputs_are_scattered() -> None:
    pytest.importorskip("triton")
    (record,) = run_ranks(divided, 1)
    assert not record.error, record.error[-2500:]
    streams, order = _streams(record), []
    for stream, what, of in streams["events"]:
        if what == "call":
            order.append(streams["calls"][of]["kind"])
        elif what == "work" and stream == 0:
            order += [streams["works"][it][0] for it in streams["segments"][of]]
    after = [order[at + 1] for at, it in enumerate(order) if it.startswith("reduce_scatter_tensor")]
    assert after.count("product") == 3 * 2 * SMALL.layers, after  # of three micro batches
    # Forward, again, and backward: the compiler wraps what it repeats and what might draw numbers.
    assert order.count("attention") == 3 * 3 * SMALL.layers
    # Nothing but the tokens is left of a step: the wrapped operations kept a block's memory once.
    assert record.phases["between steps"].kinds[TensorKind.ACTIVATIONS] < 10_000


def updated(_rank: int) -> tuple[RankRecord, int]:
    config = compiled(Row("", precision="bf16-pure", shape=SMALL))
    return life.play(config, 0, 2, H100), parameters(config.model)


@pytest.mark.slow
def test_one_kernel_for_tensors_of_all_sizes_moves_the_bytes_of_each() -> None:
    pytest.importorskip("triton")
    ((record, count),) = run_ranks(updated, 1)
    assert not record.error, record.error[-2500:]
    (update,) = (it for it in record.kernels if "bitwise_xor" in it["name"])
    assert any(line.startswith("backends/adamw.py:") for line in update["lines"])
    # Weights and both moments are read and written, and gradients are read.
    moved = update["times"] * update["bytes"]
    assert moved == pytest.approx(2 * 7 * count, rel=0.01)
    works = [work[2] for work in record.works if work[1] == update["name"]]
    assert len(set(works)) > 3


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_products_in_8_bits_are_fast_on_all_makers_gpus(dtype: torch.dtype) -> None:
    a, b = (torch.empty(32, 32, dtype=dtype, device="meta") for _ in range(2))
    assert _product("_scaled_mm", [a, b])[2] == "fp8"


def test_gradients_of_experts_in_8_bits_have_a_group_for_each_expert() -> None:
    """Their scales, one for each column of an expert's rows, come before the ends of the rows."""
    grad, rows = (
        torch.empty(96, width, dtype=torch.float8_e4m3fn, device="meta") for width in (32, 64)
    )
    of_grad, of_rows, ends = (torch.empty(size, device="meta") for size in (3 * 32, 3 * 64, 3))
    tensors = [grad.T.contiguous(), rows.T.contiguous().T, of_grad, of_rows, ends]
    assert _product("_scaled_grouped_mm", tensors)[2:-1] == ("fp8", 32, 64, 32, 3)
