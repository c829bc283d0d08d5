"""The order of every schedule against what torch.distributed.pipelining generates and runs."""

from __future__ import annotations

import contextlib
import io
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from nanoscale.config.layout import ONE_STAGE, V_SHAPED, stages_of
from nanoscale.plan.pipeline.orders import Action, order
from tests.plan.schedules import SCHEDULES, batches

MULTI = {
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
SINGLE = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}


class Stage(SimpleNamespace):
    """The interface of a stage for a schedule, which records the schedule's calls."""

    def __init__(self, index: int, stages: int, pp: int) -> None:
        import torch

        super().__init__(
            stage_index=index, num_stages=stages, group_size=pp, group_rank=index, submod=torch.nn.Identity(),
            is_first=index == 0, is_last=False, done=[], output_chunks=[],
        )  # fmt: skip

    def forward_one_chunk(self, batch: int, *args: Any, **more: Any) -> None:
        self.done.append(Action("F", self.stage_index, batch))

    def backward_one_chunk(self, batch: int, *args: Any, **more: Any) -> None:
        self.done.append(Action("B", self.stage_index, batch))

    def perform_reduce_grad(self, scale: int) -> None:
        pass

    def no_transfers(self, batch: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_transfers


def torch_runs(schedule: str, pp: int, micro_batches: int) -> list[list[Action]]:
    """Return the actions of torch's schedules with one stage a rank, rank by rank."""
    from torch.distributed.pipelining import schedules

    order_of_ranks = []
    for rank in range(pp):
        stage = Stage(rank, pp, pp)
        runner = getattr(schedules, SINGLE[schedule])(stage, micro_batches, loss_fn=max)
        runner._stage_forward_initialized = runner._stage_backward_initialized = True
        runner._initialize_stage = lambda *args: None
        inputs: list[Any] = [()] * micro_batches
        runner._step_microbatches(inputs, [{}] * micro_batches, None, None)
        order_of_ranks.append(stage.done)
    return order_of_ranks


def torch_plans(schedule: str, pp: int, virtual: int, micro_batches: int) -> list[list[Action]]:
    """Return the `pipeline_order` of torch's schedules with several stages, with pairs split."""
    from torch.distributed.pipelining import schedules

    own = stages_of(schedule, pp, virtual, 0)
    stages = [Stage(index, pp * virtual, pp) for index in own]
    with contextlib.redirect_stdout(io.StringIO()):
        planned = getattr(schedules, MULTI[schedule])(stages, micro_batches, loss_fn=max)
    return [
        [one for action in planned.pipeline_order[rank] if action for one in taken_apart(action)]
        for rank in range(pp)
    ]


def taken_apart(action: Any) -> list[Action]:
    parts = action.sub_actions or (action,)
    return [
        Action(
            part.computation_type.value,
            part.stage_index,
            part.microbatch_index,
            part is not parts[-1],
        )
        for part in parts
    ]


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4, 6])
def test_the_order_is_torchs(schedule, virtual, pp):
    for micro_batches in batches(schedule, pp):
        if schedule in ONE_STAGE:
            theirs = torch_runs(schedule, pp, micro_batches)
        else:
            theirs = torch_plans(schedule, pp, virtual, micro_batches)
        assert order(schedule, pp, virtual, micro_batches) == theirs, micro_batches


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4, 5, 8])
def test_every_micro_batch_goes_through_every_stage_once(schedule, virtual, pp):
    for micro_batches in batches(schedule, pp):
        ranks = order(schedule, pp, virtual, micro_batches)
        for rank, actions in enumerate(ranks):
            every = {
                (stage, batch)
                for stage in stages_of(schedule, pp, virtual, rank)
                for batch in range(micro_batches)
            }
            done = {kind: [a[1:3] for a in actions if a.kind == kind] for kind in "FBIW"}
            assert sorted(done["F"]) == sorted(every)
            assert sorted(done["B"] + done["I"]) == sorted(every)
            assert sorted(done["I"]) == sorted(done["W"])


def test_without_a_pipeline_each_micro_batch_goes_forward_and_back():
    assert order("1f1b", 1, 1, 2) == [
        [Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)]
    ]


def test_only_pairs_of_forward_and_backward_are_joined():
    for schedule, virtual in SCHEDULES:
        for actions in order(schedule, 4, virtual, 12):
            pairs = [(a, b) for a, b in pairwise(actions) if a.joined]
            assert all((a.kind, b.kind, b.joined) == ("F", "B", False) for a, b in pairs)
            assert bool(pairs) == (schedule == "dualpipev")
            assert schedule not in V_SHAPED or len({a.stage for a in actions}) == 2
