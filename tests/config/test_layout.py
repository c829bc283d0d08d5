"""The coordinates of ranks, the division of blocks, and schedules' numbers of micro batches, compared with
torch itself."""

from __future__ import annotations

import contextlib
import io
import itertools
from types import SimpleNamespace

import pytest

from nanoscale.config.composing.compose import compose
from nanoscale.config.layout import (
    ONE_STAGE,
    V_SHAPED,
    Coordinates,
    axis_of,
    coordinates,
    stage_layers,
    takes,
    usual_virtual_stages,
)
from nanoscale.config.schema import Model, Parallel


def model(layers: int, vocab: int, **more: object) -> Model:
    return Model(layers=layers, hidden=8, heads=2, ffn=16, vocab=vocab, **more)


BLOCK = 4 * 8 * 8 + 3 * 8 * 16


def costs(layers: list[int], vocab: int) -> list[int]:
    return [count * BLOCK for count in layers[:-1]] + [layers[-1] * BLOCK + 8 * vocab]


def divisions(layers: int, stages: int) -> list[list[int]]:
    """Return every way to cut the blocks into stages of at least one."""
    cuts = itertools.combinations(range(1, layers), stages - 1)
    return [[b - a for a, b in itertools.pairwise((0, *cut, layers))] for cut in cuts]


@pytest.mark.parametrize("vocab", [2, 40, 80, 150, 300, 1000])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
def test_no_other_division_is_better(vocab, stages):
    for layers in range(stages, 11):
        chosen = stage_layers(model(layers, vocab), stages, None)
        assert (len(chosen), sum(chosen), min(chosen) >= 1) == (stages, layers, True)
        every = [costs(other, vocab) for other in divisions(layers, stages)]
        mine = costs(chosen, vocab)
        assert max(mine) == min(map(max, every))
        squares = [sum(x * x for x in other) for other in every if max(other) == max(mine)]
        assert sum(x * x for x in mine) == min(squares)


def test_a_users_division_is_taken():
    assert stage_layers(model(8, 2), 3, [1, 1, 6]) == [1, 1, 6]


def test_llama_405b_is_cut_as_its_authors_did():
    """One block less in the first and in the last of 16 stages (arXiv 2407.21783, 3.3.2)."""
    llama = compose(["model=llama-405b"]).config.model
    assert stage_layers(llama, 16, None) == [7, *[8] * 14, 7]


# --- torch's schedules ----------------------------------------------------------------------------

CLASSES = {
    "1f1b": "Schedule1F1B",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
    "gpipe": "ScheduleGPipe",
}


def stage(index: int, stages: int, pp: int) -> SimpleNamespace:
    import torch

    return SimpleNamespace(
        stage_index=index, num_stages=stages, group_size=pp, group_rank=0,
        is_first=index == 0, is_last=index == stages - 1, submod=torch.nn.Identity(),
    )  # fmt: skip


def torch_takes(schedule: str, pp: int, micro_batches: int, virtual: int) -> bool:
    from torch.distributed.pipelining import schedules

    kind = getattr(schedules, CLASSES[schedule])
    stages = pp * virtual
    own = [0, stages - 1] if schedule in V_SHAPED else list(range(0, stages, pp))
    parts = [stage(index, stages, pp) for index in own]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            kind(parts[0] if schedule in ONE_STAGE else parts, micro_batches, loss_fn=max)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("schedule", CLASSES)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_a_schedule_takes_what_torch_takes(schedule, pp):
    for virtual in {1, 2, 3} if schedule not in ONE_STAGE | V_SHAPED else {0}:
        each = virtual or usual_virtual_stages(schedule)
        for count in range(1, 4 * pp + 2):
            assert takes(schedule, pp, count) == torch_takes(schedule, pp, count, each), count


@pytest.mark.parametrize("schedule", sorted(V_SHAPED))
def test_v_shaped_schedules_have_two_stages_a_rank(schedule):
    assert torch_takes(schedule, 2, 8, 2)
    from torch.distributed.pipelining import schedules

    parts = [stage(index, 6, 2) for index in (0, 2, 4)]
    with pytest.raises(ValueError, match="exactly 2"), contextlib.redirect_stdout(io.StringIO()):
        getattr(schedules, CLASSES[schedule])(parts, 8, loss_fn=max)


def test_a_block_of_experts_costs_what_a_token_takes():
    """The head of the last stage then weighs as much as three blocks, and the stage has three blocks fewer."""
    taken = 4 * 8 * 8 + 4 * 8 + 2 * 3 * 8 * 16
    mixture = model(9, vocab=3 * taken // 8, experts=4, experts_per_token=2)
    assert stage_layers(mixture, 2, None) == [6, 3]


def test_tp_varies_fastest_then_cp_then_dp_then_pp():
    layout = Parallel(dp=3, tp=2, pp=2, cp=2)
    places = [coordinates(rank, layout) for rank in range(24)]
    assert places[:5] == [
        Coordinates(pp=0, dp=0, cp=0, tp=0),
        Coordinates(pp=0, dp=0, cp=0, tp=1),
        Coordinates(pp=0, dp=0, cp=1, tp=0),
        Coordinates(pp=0, dp=0, cp=1, tp=1),
        Coordinates(pp=0, dp=1, cp=0, tp=0),
    ]
    assert places[12] == Coordinates(pp=1, dp=0, cp=0, tp=0)
    assert len(set(places)) == 24


def test_axes_of_groups() -> None:
    degrees = {"pp": 2, "dp": 2, "cp": 1, "tp": 2}
    assert axis_of([0, 1], degrees) == "tp"
    assert axis_of([0, 2], degrees) == "dp"
    assert axis_of([0, 4], degrees) == "pp"
    assert axis_of(range(8), degrees) == "all ranks"
    assert axis_of([0, 2, 4, 6], degrees) == "pp·dp"
