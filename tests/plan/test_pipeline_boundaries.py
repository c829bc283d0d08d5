"""Tensors between stages: counted in the order, and in a stage of torch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nanoscale.config.layout import stages_of
from nanoscale.plan.pipeline.boundaries import NONE, KeptBoundary, boundaries
from tests.plan.schedules import SCHEDULES


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_tensors_travel_between_neighbors_on_different_ranks(schedule, virtual, pp):
    for rank, kept in enumerate(boundaries(schedule, pp, virtual, 2 * pp)):
        for stage, boundary in zip(stages_of(schedule, pp, virtual, rank), kept, strict=True):
            here = set(stages_of(schedule, pp, virtual, rank))
            assert (boundary.inputs > 0) == (stage > 0)
            assert (boundary.output_gradients > 0) == (stage < pp * virtual - 1)
            sent = {
                stage + 1 if boundary.outputs else None,
                stage - 1 if boundary.input_gradients else None,
            }
            assert not sent & here


def test_what_was_sent_is_held_until_the_end_of_the_step():
    first, middle, last = boundaries("1f1b", 3, 1, 5)
    assert first == (KeptBoundary(0, 5, 0, 0, False),)
    assert middle == (KeptBoundary(5, 5, 0, 0, False),)
    assert last == (KeptBoundary(5, 0, 0, 0, True),)
    assert boundaries("zbv", 2, 2, 6)[0] == (
        KeptBoundary(0, 6, 6, 0, False),
        KeptBoundary(6, 0, 0, 6, True),
    )
    assert boundaries("1f1b", 1, 1, 5) == ((NONE,),)
    # Two in flight, whose inputs are counted with their activations; three of five have come back.
    assert boundaries("looped-bfs", 2, 2, 5)[1][0].tensors(2, 5, 3) == 3 + 5 + 5 + 3


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
