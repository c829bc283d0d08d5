"""Tensors between stages: counted in the order, and in a stage of torch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nanoscale.plan.pipeline import Boundary, boundaries, order
from tests.plan.schedules import SCHEDULES, batches


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_split_backward_passes_leave_the_gradients_of_their_inputs(schedule, virtual, pp):
    for micro_batches in batches(schedule, pp):
        for rank, actions in enumerate(order(schedule, pp, virtual, micro_batches)):
            stages = sorted({action.stage for action in actions})
            split = [
                sum(1 for a in actions if a.kind == "I" and a.stage == stage > 0)
                for stage in stages
            ]
            kept = boundaries(schedule, pp, virtual, micro_batches)[rank]
            assert [stage.input_gradients for stage in kept] == split


def test_ends_of_the_pipeline_have_one_neighbour():
    first, middle, last = boundaries("1f1b", 3, 1, 5)
    assert first == (Boundary(0, 5, 0),)
    assert middle == (Boundary(5, 5, 0),)
    assert last == (Boundary(5, 0, 0),)
    assert boundaries("zbv", 2, 2, 6)[0] == (Boundary(0, 6, 0), Boundary(6, 0, 6))
    assert boundaries("1f1b", 1, 1, 5) == ((Boundary(0, 0, 0),),)


@pytest.fixture
def pretended_group() -> Iterator[Any]:
    """A process group of two ranks whose other rank does nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_torch_makes_a_buffer_for_every_micro_batch(pretended_group):
    import torch
    from torch.distributed.pipelining import PipelineStage

    kept = boundaries("1f1b", 2, 1, 7)
    for number in range(2):
        hidden = torch.empty(2, 3, 4, device="meta", requires_grad=True)
        stage = PipelineStage(
            torch.nn.Identity(), number, 2, torch.device("cpu"), input_args=hidden, output_args=hidden,
            group=pretended_group,
        )  # fmt: skip
        stage._stage_meta.inputs = stage._user_meta.inputs
        stage._stage_meta.outputs = stage._user_meta.outputs
        stage._stage_meta.output_grads = stage._user_meta.outputs
        stage._setup_forward_recv_info(7, True)
        stage._setup_forward_send_info()
        inputs = {
            info.buffer.data_ptr()
            for infos in stage.args_recv_info.values() for info in infos if info.buffer is not None
        }  # fmt: skip
        gradients = [
            info.buffer
            for _ in range(7) for info in stage._create_grad_recv_info(stage.act_send_info)
        ]  # fmt: skip
        made = {buffer.data_ptr() for buffer in gradients if buffer is not None}
        assert (len(inputs), len(made)) == (
            kept[number][0].inputs,
            kept[number][0].output_gradients,
        )
