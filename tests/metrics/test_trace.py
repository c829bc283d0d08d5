"""Parts of a step, of events whose times are known."""

from __future__ import annotations

import pytest

from nanoscale.metrics.trace import DATA, STEP, Event, StepParts, parts_of

NODE = "autograd::engine::evaluate_function: MmBackward0"
UPDATE = "Optimizer.step#AdamW.step"
MS = 1_000_000


def at(name: str, start: int, end: int, thread: int = 1, **about: object) -> Event:
    """Times in ms."""
    return Event(name, start * MS, end * MS, thread, **about)  # type: ignore[arg-type]


def found(events: list[Event]) -> dict[str, float]:
    """Return the parts in ms, without parts of 0."""
    parts = parts_of(events)
    assert parts is not None
    return {
        name: round(1e3 * value, 9)
        for name, value in vars(parts).items()
        if isinstance(value, float) and value
    }


def host_step(begin: int) -> list[Event]:
    """100 ms: two micro batches, whose gradients are reduced while the second backward pass computes."""
    return [
        at(name, begin + start, begin + end, thread, **about)  # type: ignore[arg-type]
        for name, start, end, thread, about in [
            (STEP, 0, 100, 1, {"annotation": True}),
            (DATA, 0, 5, 1, {"annotation": True}),
            ("PP:0B0", 20, 40, 1, {"annotation": True}),  # as schedules of pipelines call it
            ("aten::mm", 5, 20, 1, {}),
            (NODE, 20, 30, 1, {}),
            ("aten::mm", 21, 29, 1, {}),
            (NODE, 32, 40, 1, {}),  # nothing begins in between: it is one backward pass
            ("aten::mm", 32, 40, 1, {}),
            ("aten::mm", 41, 50, 1, {}),
            (NODE, 50, 70, 1, {}),
            ("c10d::allreduce_", 50, 51, 1, {}),
            ("aten::mm", 51, 70, 1, {}),
            ("gloo:all_reduce", 50, 75, 2, {"asynchronous": True}),
            ("aten::add", 60, 62, 2, {}),  # the thread that communicates adds up
            ("aten::_foreach_norm", 75, 80, 1, {}),
            (UPDATE, 80, 95, 1, {}),
            ("aten::_fused_adamw_", 80, 95, 1, {}),
        ]
    ]


def test_the_host_of_a_cpu() -> None:
    two = [*host_step(0), at("aten::item", 100, 150), *host_step(150)]
    assert found(two) == {
        "step_s": 100,
        "data_s": 5,
        # 5 to 20, 40 to 50
        "forward_s": 25,
        # 20 to 40, 50 to 70, without the call that sends
        "backward_s": 39,
        # after 70, of which 5 ms wait for others
        "gradients_s": 5,
        "optimizer_s": 15,
        "other_s": 5,
        "communication_s": 6,
        "communication_in_all_s": 25,
        "data_on_host_s": 5,
    }
    assert parts_of([at("aten::mm", 0, 1)]) is None


def kernel(name: str, start: int, end: int, number: int) -> Event:
    return at(name, start, end, 7, on_device=True, correlation=number)


def launch(start: int, number: int) -> Event:
    return at("cudaLaunchKernel", start, start + 1, 9, correlation=number)


def device_step() -> list[Event]:
    """Return the events of a step: the host is done after 60 ms, the device after 100."""
    return [
        at(STEP, 0, 60, annotation=True),
        at(DATA, 0, 5, annotation=True),
        at("aten::mm", 5, 10, correlation=1),  # numbers of calls are not numbers of operations
        launch(6, 11),
        at(NODE, 20, 30, thread=2),
        launch(21, 12),
        launch(22, 13),
        at("aten::_foreach_norm", 40, 42),
        launch(41, 14),
        at(UPDATE, 50, 55),
        launch(51, 15),
        at("cudaStreamSynchronize", 45, 47, 9, correlation=16),
        at("cudaMemcpyAsync", 44, 45, 9, correlation=17),
        kernel("gemm", 10, 40, 11),
        kernel("gemm", 40, 70, 12),
        kernel("ncclDevKernel_AllReduce", 60, 80, 13),
        kernel("norm", 80, 85, 14),
        kernel("Memcpy DtoH", 85, 86, 17),
        kernel("adamw", 90, 100, 15),
    ]


def test_a_device() -> None:
    assert found(device_step()) == {
        "step_s": 100,
        "forward_s": 30,
        "backward_s": 30,
        "gradients_s": 6,
        "optimizer_s": 10,
        "communication_s": 10,
        "idle_s": 14,
        "communication_in_all_s": 20,
        "data_on_host_s": 5,
    }


def test_waiting_for_a_device() -> None:
    """Within the steps, and between them; what comes after the last one is not a step's."""
    later = [
        at("cudaDeviceSynchronize", 65, 70, 9, correlation=18),
        at(STEP, 110, 160, annotation=True),
        at("cudaStreamSynchronize", 120, 121, 9, correlation=19),
        at("cudaDeviceSynchronize", 165, 170, 9, correlation=20),
    ]
    parts = parts_of([*device_step(), *later])
    assert isinstance(parts, StepParts) and parts.where == "device" and parts.steps == 2
    assert parts.waits == {"cudaStreamSynchronize": 2}
    assert parts.kernels["gemm"] == pytest.approx(0.030)  # a step of two
    assert list(parts.kernels) == sorted(parts.kernels, key=lambda name: -parts.kernels[name])
    assert parts.waits_between == {"cudaDeviceSynchronize": 1}
    parts = parts_of(host_step(0))
    assert parts is not None and parts.where == "host" and not parts.waits and not parts.kernels
    assert parts.step_s == pytest.approx(0.1)
