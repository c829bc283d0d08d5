"""The working memory of a feed-forward block's backward pass, compared with a list of its tensors by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nanoscale.config.schema import Model, Parallel
from nanoscale.plan.memory.activations import saved, shape_of, working_memory
from nanoscale.plan.memory.block_shape import Execution, Shape
from nanoscale.plan.memory.setting import setting_of
from tests.support.recipes import complete

MODEL = Model(layers=2, hidden=256, heads=8, kv_heads=8, head_dim=32, ffn=512, vocab=64)
TOKENS, HIDDEN, BYTES = 128, 256, 2


def block(tp: int, **changes: object) -> tuple[Shape, Execution]:
    shape = shape_of(MODEL, Parallel(tp=tp), 1, TOKENS)
    return shape, replace(Execution(compute=2, stream=2, tensor_parallel=tp > 1), **changes)


def highest(tp: int) -> int:
    """Return the bytes at the peak beyond the saved ones: every tensor from its creation to its end, one by
    one."""
    inner, whole = TOKENS * 512 // tp * BYTES, TOKENS * HIDDEN * BYTES
    stream = whole // tp
    live = {
        "stream": stream,
        "gate": 0,
        "up": 0,
        "activated": 0,
        "product": 0,
    }  # those beyond saved
    peak = 0

    def note(**tensors: int) -> None:
        nonlocal peak
        live.update(tensors)
        peak = max(peak, sum(live.values()))

    note(gathered=whole if tp > 1 else 0, d_product=inner)  # the last product
    live.update(gathered=0, product=-inner)
    note(d_activated=inner, d_up=inner)  # gate · up
    live.update(d_product=0, up=-inner, activated=-inner)
    note(d_gate=inner)  # silu
    live.update(d_activated=0, gate=-inner)
    note(d_in_gate=whole)
    live.update(d_gate=0)
    note(d_in_up=whole)
    return peak


@pytest.mark.parametrize("tp", [4, 8])
def test_with_tensor_parallelism_the_gathered_gradient_is_highest(tp: int) -> None:
    assert working_memory(*block(tp)) == highest(tp)


def test_without_it_the_activation_is() -> None:
    inner, stream = TOKENS * 512 * BYTES, TOKENS * HIDDEN * BYTES
    assert working_memory(*block(1)) == 2 * inner + stream


@pytest.mark.parametrize(("compiled", "of_result", "of_input"), [(True, 2, 1), (False, 3, 2)])
def test_products_in_eight_bits_have_copies(compiled: bool, of_result: int, of_input: int) -> None:
    shape, run = block(8, fused=compiled)
    inner, whole = TOKENS * 512 // 8 * BYTES, TOKENS * HIDDEN * BYTES
    last = inner + whole + TOKENS * (of_result * HIDDEN + of_input * 512 // 8)
    freed = 2 * inner + inner // BYTES if compiled else 4 * inner
    first = 2 * whole + inner - freed + TOKENS * (of_result * 512 // 8 + of_input * HIDDEN)
    narrow = replace(run, fp8=True)
    assert working_memory(shape, narrow) == max(last, first) + whole // 8
    names = ("normed", "normed middle", "product") if compiled else ()
    sizes = saved(shape, run)
    assert saved(shape, narrow) == sizes | {name: sizes[name] // BYTES for name in names}


@pytest.mark.parametrize("compiled", [True, False])
def test_products_in_mxfp8_keep_their_inputs_in_16_bits(compiled: bool) -> None:
    shape, run = block(8, fused=compiled)
    narrow = replace(run, fp8=True, mxfp8=True)
    assert saved(shape, narrow) == saved(shape, run)
    inner, whole = TOKENS * 512 // 8 * BYTES, TOKENS * HIDDEN * BYTES
    weight = 0 if compiled else HIDDEN * 512 // 8
    last = inner + whole + TOKENS * (2 * HIDDEN + 512 // 8) + weight
    first = 2 * whole - (2 if compiled else 3) * inner + TOKENS * (2 * 512 // 8 + HIDDEN) + weight
    assert working_memory(shape, narrow) == max(last, first) + whole // 8


@pytest.mark.parametrize("tile", [16, 32])
def test_rows_of_experts_fill_tiles_of_products_in_eight_bits(tile: int) -> None:
    model = replace(MODEL, experts=8, experts_per_token=2, mlp="swiglu", ffn=64)
    shape = shape_of(model, Parallel(), 1, TOKENS)
    run = Execution(compute=BYTES, stream=BYTES, fused=True, grouped=True)
    wide, narrow = saved(shape, run), saved(shape, replace(run, fp8=True, tile=tile))
    added = 8 * (tile - 1)
    sizes = {"dispatched": HIDDEN, "up": 64, "gate": 64, "product": 64}
    for name, width in sizes.items():
        assert narrow[name] == wide[name] + added * width * BYTES
    assert narrow["order of rows"] == wide["order of rows"] + 2 * 8 * added
    assert narrow.keys() == wide.keys()


def test_eight_bits_are_planned_with_them() -> None:
    base = complete(model=MODEL)
    base = replace(
        base,
        launcher=replace(base.launcher, device="cuda"),
        train=replace(base.train, steps=1, micro_batch=1, global_batch=1),
    )
    wide = replace(base, precision=replace(base.precision, compute="bf16"))
    assert not setting_of(wide).run.fp8
    assert setting_of(replace(wide, precision=replace(wide.precision, fp8=True))).run.fp8
