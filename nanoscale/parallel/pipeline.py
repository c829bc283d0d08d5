"""Pipeline parallelism: the blocks of a rank, and the schedule in which micro batches pass through them.

The schedules are torch.distributed.pipelining's. Sources: GPipe, Huang et al. 2019, arXiv:1811.06965; 1F1B and
its interleaving, Narayanan et al. 2021, arXiv:2104.04473; looped BFS, Lamy-Poirier 2022, arXiv:2211.05953;
zero bubble and ZB-V, Qi et al. 2023, arXiv:2401.10241; DualPipe, DeepSeek-V3 2024, arXiv:2412.19437, cut in
half to a V.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    BACKWARD_INPUT,
    FORWARD,
    FULL_BACKWARD,
    RESHARD,
    UNSHARD,
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    _batch_p2p,
)
from torch.utils.checkpoint import GraphExecGroup

from nanoscale.common.errors import UserError
from nanoscale.config import layout as config_layout
from nanoscale.config.resolved import ResolvedParallel
from nanoscale.models.attention import DocumentEnds
from nanoscale.models.transformer import Transformer

SINGLE: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI: dict[str, type[PipelineScheduleMulti]] = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "looped-bfs": ScheduleLoopedBFS,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}

Operations = list[dist.P2POp]
Loss = Callable[[Tensor], Tensor]
"""A function from the sum of the losses of a micro batch to the loss of the backward pass."""


def stages_of(parallel: ResolvedParallel, rank: int) -> list[int]:
    """Return the stages of a pipeline rank, in the order in which tokens pass through them."""
    return config_layout.stages_of(parallel.schedule, parallel.pp, parallel.virtual_stages, rank)


class Pipeline:
    """The stages of this rank and their neighbors on others."""

    def __init__(
        self,
        stages_by_number: dict[int, Transformer],
        parallel: ResolvedParallel,
        group: ProcessGroup,
        stream: Tensor,
        loss: Loss,
    ) -> None:
        """Create the pipeline of the rank's stages by number; `stream` is an empty part of what they send, `[0,
        hidden]`."""
        self._stages = stages_by_number
        self._parallel = parallel
        self._group = group
        self._stream = stream
        self._has_last = any(stage.last for stage in stages_by_number.values())
        self._loss = lambda loss_sum, _targets: loss(loss_sum)
        self._schedules: dict[tuple[int, ...], Any] = {}
        """The schedules by micro batches, and by rows and length of one, which phases of a training change."""

    def step(
        self,
        inputs: Tensor,
        targets: Tensor,
        documents: DocumentEnds | None,
        references: Tensor | None,
        accumulation: int,
    ) -> None:
        """Run forward and backward of all micro batches, `[accumulation · micro_batch, seq]` of token ids."""
        shards = next(iter(self._stages.values())).sequence_shards
        rows, seq = inputs.shape[0] // accumulation, inputs.shape[1] // shards
        key = (accumulation, rows, seq)
        if key not in self._schedules:
            self._schedules[key] = self._make_schedule(accumulation, rows, seq)
        schedule = self._schedules[key]
        first_stage_inputs = [inputs] if 0 in self._stages else []
        target = targets if self._has_last else None
        # Keyword arguments go to every stage, cut into micro batches like the tokens.
        every = {"targets": targets, "documents": documents, "references": references}
        keywords = {name: value for name, value in every.items() if value is not None}
        schedule.step(*first_stage_inputs, target=target, return_outputs=False, **keywords)
        for stage in getattr(schedule, "_stages", ()):
            stage.finish_sending()

    def forward(self, tokens: Tensor, *others: Any) -> Tensor | None:
        """Run a forward pass of `[batch, seq]`; the last stage's rank gets its output, the others None."""
        hidden = tokens
        for number, stage in sorted(self._stages.items()):
            if number > 0 and self._peer(number - 1) != self._group.rank():
                hidden = self._receive(number - 1, tokens)
            hidden = stage(hidden, *others)
            if not stage.last and self._peer(number + 1) != self._group.rank():
                dist.send(hidden.contiguous(), group=self._group, group_dst=self._peer(number + 1))
        return hidden if self._has_last else None

    def _receive(self, stage: int, tokens: Tensor) -> Tensor:
        seq = tokens.shape[1] // next(iter(self._stages.values())).sequence_shards
        hidden = self._stream.new_empty(tokens.shape[0], seq, self._stream.shape[1])
        dist.recv(hidden, group=self._group, group_src=self._peer(stage))
        return hidden

    def _peer(self, stage: int) -> int:
        return config_layout.rank_of(self._parallel.schedule, self._parallel.pp, stage)

    def _make_schedule(self, accumulation: int, rows: int, seq: int) -> Any:
        name, loss = self._parallel.schedule, self._loss
        _require_torch(name)
        pipeline_stages = [self._make_stage(number, rows, seq) for number in sorted(self._stages)]
        if name in SINGLE:
            return SINGLE[name](pipeline_stages[0], accumulation, loss, scale_grads=False)
        schedule = MULTI[name](pipeline_stages, accumulation, loss, scale_grads=False)  # type: ignore[arg-type]
        orders: dict[int, list[Any]] = getattr(schedule, "pipeline_order_with_comms", {})
        for rank, actions in orders.items():
            orders[rank] = gathered_once(actions)
        for stage in pipeline_stages:
            stage.arrived = arrived_gradients(schedule.pipeline_order, stage.stage_index)
        return schedule

    def _make_stage(self, number: int, rows: int, seq: int) -> _Stage:
        stage, stream = self._stages[number], self._stream.to("meta")
        hidden = stream.new_empty(rows, seq, stream.shape[1]).requires_grad_()
        loss = stream.new_empty((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        # The shape of the first stage's input is not needed: it is not sent.
        return _Stage(
            stage,
            number,
            self._parallel.pp * self._parallel.virtual_stages,
            self._stream.device,
            input_args=torch.empty(0, dtype=torch.long, device="meta") if stage.first else hidden,
            output_args=loss if stage.last else hidden,
            group=self._group,
        )


def _require_torch(schedule: str) -> None:
    """Refuse torch before 2.13, which cannot split a backward pass through an autograd.Function, such as the
    loss."""
    if schedule in config_layout.SPLIT_BACKWARD and torch.__version__ < "2.13":
        text = f"needs torch 2.13 or newer, and this is {torch.__version__}"
        others = "1f1b and interleaved-1f1b do not"
        raise UserError("layout", f"parallel.schedule={schedule} {text}: {others}")


class _Stage(PipelineStage):
    """A stage with buffers for its in-flight micro batches alone, which recomputes a block once.

    torch allocates buffers for the inputs and gradients of all micro batches of a step, and most schedules wait
    at the end of the step for the tensors that they sent. This class allocates a buffer just before it receives
    it, and frees it with its micro batch. It frees a sent tensor when the order of the schedule shows that the
    tensor has arrived.
    """

    arrived: dict[int, list[int]] | None = None
    """The result of `arrived_gradients`; None if the schedule itself soon waits for what it sends."""

    @cached_property
    def _sent(self) -> dict[tuple[str, int], list[dist.Work]]:
        """The sends that may still be under way, by direction and micro batch."""
        return {}

    # Buffers: torch describes those of one micro batch, and each micro batch gets memory when it receives.

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **options: Any) -> Any:
        result = super()._prepare_forward_infra(1, *args, **options)
        _describe_all(self.args_recv_info, num_microbatches)
        return result

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **options: Any) -> Any:
        result = super()._prepare_backward_infra(1, *args, **options)
        self.chunks = num_microbatches
        _describe_all(self.grad_recv_info, num_microbatches)
        return result

    # From torch 2.14 on, the last argument is the group of a direction.
    def _get_recv_ops(self, recv_infos: Any, *group: Any) -> Operations:
        for info in recv_infos:
            empty = info.empty
            memory = torch.empty(empty.shape, dtype=empty.dtype, device=empty.device)
            info.buffer = memory.requires_grad_(empty.requires_grad)
        return super()._get_recv_ops(recv_infos, *group)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Operations:
        return [] if self.is_first else super().get_fwd_recv_ops(fwd_chunk_id)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
        for micro_batch in (self.arrived or {}).get(fwd_chunk_id, ()):
            self._wait("gradient", micro_batch)
        return _handed_over(super()._retrieve_recv_activations, self.args_recv_info, fwd_chunk_id)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
        self._wait("output", bwd_chunk_id)  # it has arrived, since its gradient has
        return _handed_over(super()._retrieve_recv_grads, self.grad_recv_info, bwd_chunk_id)

    # What is sent

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> Operations:
        return self._send("output", fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> Operations:
        return self._send("gradient", bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    def _send(self, what: str, micro_batch: int, operations: Operations) -> Operations:
        """Start to send; return the operations that are left to the schedule."""
        if self.arrived is None:
            return operations
        self._sent[what, micro_batch] = _batch_p2p(operations)
        return []

    def _wait(self, what: str, micro_batch: int) -> None:
        for work in self._sent.pop((what, micro_batch), ()):
            work.wait()

    def finish_sending(self) -> None:
        """Wait until all that was sent has arrived."""
        for key in list(self._sent):
            self._wait(*key)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if loss is not None:
            loss.detach_()  # the schedule keeps it, and its graph would keep the input of the stage

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        # torch requests every matrix's gradient from autograd separately. Without a common group, recomputed
        # tensors would belong to one such call, and stay until the last.
        with GraphExecGroup():
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)


def _describe_all(infos: dict[int, Any], micro_batches: int) -> None:
    """Give each micro batch the descriptions of the first, with buffers of the memory of one number."""
    for info in infos[0]:
        if (buffer := getattr(info, "buffer", None)) is not None:
            number = torch.empty((), dtype=buffer.dtype, device=buffer.device)
            info.empty = number.expand(buffer.shape).requires_grad_(buffer.requires_grad)
            info.buffer = info.empty
    for micro_batch in range(1, micro_batches):
        infos[micro_batch] = tuple(map(copy, infos[0]))


def _handed_over(retrieve: Callable[[int], Any], infos: dict[int, Any], micro_batch: int) -> Any:
    """Return the received tensors of a micro batch, to which its buffers refer no longer."""
    tensors = retrieve(micro_batch)
    for info in infos[micro_batch]:
        info.buffer = info.empty
    return tensors


def gathered_once(actions: list[Any]) -> list[Any]:
    """Return the actions of a step in which each stage's parameters are whole from its first use to its last.

    torch gathers them again whenever a stage is not among the next three, and frees them in between.
    """
    numbered = [*enumerate(actions)]
    last = {it.stage_index: at for at, it in numbered if it.computation_type == RESHARD}
    first = {it.stage_index: at for at, it in reversed(numbered) if it.computation_type == UNSHARD}
    kept = {*first.values(), *last.values()}
    return [
        it for at, it in numbered if at in kept or it.computation_type not in (UNSHARD, RESHARD)
    ]


def arrived_gradients(order: dict[int, list[Any]], stage: int) -> dict[int, list[int]]:
    """Return the gradients that a stage knows to have arrived when it receives an input, by micro batches.

    The stage before waits for gradient i to compute its backward pass i. So the inputs that it sends later show
    that gradient i has arrived.
    """
    actions = (
        part for rank in order.values() for it in rank if it for part in it.sub_actions or [it]
    )
    arrived: dict[int, list[int]] = {}
    backward: list[int] = []
    for action in actions:
        if action.stage_index != stage - 1:
            continue
        if action.computation_type in (FULL_BACKWARD, BACKWARD_INPUT):
            backward.append(action.microbatch_index)
        elif action.computation_type == FORWARD:
            arrived[action.microbatch_index], backward = backward, []
    return arrived
