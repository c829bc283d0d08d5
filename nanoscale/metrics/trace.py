"""The breakdown of training steps by time, from the events of torch.profiler.

Host and device have one clock. The host's activity when it starts an operation tells which part of the step
that is: autograd's engine marks each function of a backward pass, every torch.optim optimizer its update, and
the loop the step and its data. So it works for every backend and layout, also when passes alternate, and the
measured code needs no changes.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch.autograd import DeviceType

Interval = tuple[int, int]
"""The beginning and the end, in any unit."""
Intervals = list[Interval]


def united(times: Iterable[Interval]) -> Intervals:
    """Return the union of intervals, which may overlap and come in any order."""
    union: Intervals = []
    for start, end in sorted(times):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        elif end > start:
            union.append((start, end))
    return union


def without(times: Intervals, others: Intervals) -> Intervals:
    """Return the difference of two sets: `times` minus `others`."""
    difference: Intervals = []
    remaining = iter(others)
    other = next(remaining, None)
    for start, end in times:
        while other is not None and other[1] <= start:
            other = next(remaining, None)
        while other is not None and other[0] < end:
            if other[0] > start:
                difference.append((start, other[0]))
            start = other[1]
            if start >= end:
                break  # it may reach into the next one
            other = next(remaining, None)
        if start < end:
            difference.append((start, end))
    return difference


def within(times: Intervals, others: Intervals) -> Intervals:
    """Return the intersection of two sets."""
    return without(times, without(times, others))


def length(times: Intervals) -> int:
    """Return the total length."""
    return sum(end - start for start, end in times)


STEP, DATA = "nanoscale: step", "nanoscale: data"
"""The loop's names for an optimizer step and for reading its batch."""

_BACKWARD = ("autograd::engine::evaluate_function", "FSDP::root_post_backward")
_OPTIMIZER = "Optimizer."
_COLLECTIVE = ("c10d::", "_c10d_functional::")
_IN_PROGRESS = ("gloo:", "nccl:", "mpi:")
"""Collectives from their start to their end, whoever waits for them."""
_DEVICE_COLLECTIVE = re.compile("nccl|rccl", re.IGNORECASE)
_KERNEL_ROWS = 20
_RUNTIME = re.compile(r"(cuda|hip|cu)[A-Z]")
_WAIT = re.compile(r"(cuda|hip|cu)((Stream|Device|Event|Ctx)Synchronize|Memcpy)")
"""Calls in which the host waits for the device; asynchronous copies are not among them."""


@dataclass(frozen=True)
class Event:
    """An event of the profiler; times in ns."""

    name: str
    start: int
    end: int
    thread: int = 0
    on_device: bool = False
    asynchronous: bool = False
    """True if one call began it and another ended it."""
    annotation: bool = False
    """True for a named time span that is not an operation."""
    correlation: int = 0
    """Equal for a call of the device's runtime and the work that it starts on the device."""

    @property
    def time(self) -> Interval:
        return self.start, self.end


@dataclass(frozen=True)
class StepParts:
    """The mean step of a recorded series. Times in s; the parts add up to the step, but for rounding."""

    where: str
    """`host`: its time, since it computes on a CPU · `device`: the device's."""
    steps: int
    step_s: float
    data_s: float
    """Host: reading the batch; on a device, where that is hidden, 0."""
    forward_s: float
    """The forward pass with the loss, and everything else before the last backward pass."""
    backward_s: float
    """The backward pass with recomputation."""
    gradients_s: float
    """Between the last backward pass and the update: gradient norm, clipping."""
    optimizer_s: float
    other_s: float
    """After the update."""
    communication_s: float
    """Exposed communication, with waiting for other ranks; no other part contains it."""
    idle_s: float
    """Device: without work. 0 in a host's time."""
    communication_in_all_s: float
    """Exposed or hidden."""
    data_on_host_s: float
    waits: dict[str, int] = field(default_factory=dict)
    """Device: how often the host waited for it within all recorded steps, by call."""
    waits_between: dict[str, int] = field(default_factory=dict)
    """The same between steps: logging, evaluation, checkpoints."""
    kernels: dict[str, float] = field(default_factory=dict)
    """Device: the seconds per step of its most expensive kernels and copies, by name."""


def events_of(profiler: Any) -> list[Event]:
    """Return the recorded events of a torch.profiler.profile that has stopped."""
    events = [
        Event(
            event.name(),
            event.start_ns(),
            event.end_ns(),
            event.start_thread_id(),
            event.device_type() != DeviceType.CPU,
            event.is_async(),
            event.is_user_annotation(),
            event.correlation_id(),
        )
        for event in profiler.profiler.kineto_results.events()
    ]
    # The host's marks are drawn again next to the kernels.
    return [event for event in events if not (event.on_device and event.annotation)]


def parts_of(events: Sequence[Event]) -> StepParts | None:
    """Break the steps down into parts; None if no step was recorded from its start to its end."""
    host = [event for event in events if not event.on_device]
    steps = [event.time for event in host if event.name == STEP]
    if not steps:
        return None
    # Marks of one step do not overlap the next step's, so all steps are analyzed as one.
    phases = _phases(host, sorted(steps))
    device = [event for event in events if event.on_device]
    data = length(phases["data"])
    if device:
        begin = min(start for start, _ in steps)
        end = max(max(event.end for event in device), max(end for _, end in steps))
        times, communication = _device_parts(host, device, phases)
        times["idle"] = end - begin - sum(times.values())
        duration = end - begin
    else:
        times, communication = _host_parts(host, united(steps), phases)
        times["idle"] = 0
        duration = length(united(steps))
    work: Counter[str] = Counter()
    for event in device:
        work[event.name] += event.end - event.start
    count = len(steps)
    mean = {f"{name}_s": ns / count / 1e9 for name, ns in times.items()}
    return StepParts(
        where="device" if device else "host",
        steps=count,
        step_s=duration / count / 1e9,
        communication_in_all_s=communication / count / 1e9,
        data_on_host_s=data / count / 1e9,
        waits=_waits(host, united(steps), inside=True),
        waits_between=_waits(host, united(steps), inside=False),
        kernels={name: ns / count / 1e9 for name, ns in work.most_common(_KERNEL_ROWS)},
        **mean,
    )


# --- parts of a step ------------------------------------------------------------------------------


def _phases(host: Sequence[Event], steps: Sequence[Interval]) -> dict[str, Intervals]:
    """Return the host's disjoint times: data, forward, backward, gradients, optimizer, other."""
    optimizer = united(event.time for event in host if event.name.startswith(_OPTIMIZER))
    backward = without(united(_backward_passes(host)), optimizer)
    phases: dict[str, Intervals] = {
        "data": united(event.time for event in host if event.name == DATA),
        "backward": backward,
        "gradients": [],
        "optimizer": optimizer,
        "other": [],
    }
    for step in steps:
        last = max((end for _, end in within(backward, [step])), default=step[0])
        updates = within(phases["optimizer"], [step])
        first = min((start for start, _ in updates if start >= last), default=step[1])
        if last > step[0]:
            phases["gradients"] += _span(last, first)
        if updates:
            phases["other"] += without(_span(first, step[1]), phases["optimizer"])
    assigned = united(time for times in phases.values() for time in times)
    phases["forward"] = without(united(steps), assigned)
    return phases


def _span(start: int, end: int) -> Intervals:
    return [(start, end)] if start < end else []


def _backward_passes(host: Iterable[Event]) -> Iterator[Interval]:
    """Yield autograd's functions, and the gaps between them in which nothing else begins."""
    ends: dict[int, int] = {}
    current: Interval | None = None
    for event in sorted(host, key=lambda event: (event.start, -event.end)):
        is_backward = event.name.startswith(_BACKWARD)
        if (
            event.asynchronous
            or _RUNTIME.match(event.name)
            or (event.annotation and not is_backward)
        ):
            continue
        if event.start < ends.get(event.thread, event.start):
            continue  # a part of the previous one
        ends[event.thread] = event.end
        if is_backward:
            current = (
                (current[0], max(current[1], event.end)) if current is not None else event.time
            )
        elif current is not None and event.start >= current[1]:
            yield current
            current = None
    if current is not None:
        yield current


# --- time of host and device ----------------------------------------------------------------------


def _host_parts(
    host: Sequence[Event], steps: Intervals, phases: dict[str, Intervals]
) -> tuple[dict[str, int], int]:
    """Return the host's time by phase, without communication; and all communication, hidden or not."""
    thread = next(event.thread for event in host if event.name == STEP)
    loop_events = [event for event in host if event.thread == thread and not event.asynchronous]
    calls = united(event.time for event in loop_events if event.name.startswith(_COLLECTIVE))
    in_progress = united(event.time for event in host if event.name.startswith(_IN_PROGRESS))
    in_order = sorted(loop_events, key=lambda event: (event.start, -event.end))
    # Operations that contain no others; communication calls are among them.
    leaves = (one.time for one, following in pairwise(in_order) if one.end <= following.start)
    exposed = united([*calls, *without(in_progress, united(leaves))])
    times = {name: length(without(phase_times, exposed)) for name, phase_times in phases.items()}
    times["communication"] = length(within(exposed, steps))
    return times, length(within(united([*calls, *in_progress]), steps))


def _device_parts(
    host: Sequence[Event], device: Sequence[Event], phases: dict[str, Intervals]
) -> tuple[dict[str, int], int]:
    """Return the device's time by the phase in which the host started the work; and all communication."""
    starts = {event.correlation: event.start for event in host if _RUNTIME.match(event.name)}
    phase_spans = sorted(
        (start, end, name) for name, times in phases.items() for start, end in times
    )
    phase_starts = [start for start, _, _ in phase_spans]
    work: dict[str, list[Interval]] = {name: [] for name in phases}
    communication = []
    for event in device:
        if _DEVICE_COLLECTIVE.search(event.name):
            communication.append(event.time)
            continue
        started = starts.get(event.correlation, event.start)
        index = bisect_right(phase_starts, started) - 1
        name = phase_spans[index][2] if index >= 0 and started < phase_spans[index][1] else "other"
        work[name].append(event.time)
    times, counted = {}, Intervals()
    for name in ("forward", "backward", "gradients", "optimizer", "data", "other"):
        phase_work = united(work[name])
        times[name] = length(without(phase_work, counted))  # overlapping times count only once
        counted = united([*counted, *phase_work])
    transfers = united(communication)
    times["communication"] = length(without(transfers, counted))
    return times, length(transfers)


def _waits(host: Iterable[Event], steps: Intervals, *, inside: bool) -> dict[str, int]:
    """Count the host's waits for the device, by call, within the steps or between the first and the last."""
    first, last = steps[0][0], steps[-1][1]
    counts: Counter[str] = Counter()
    for event in host:
        if _WAIT.fullmatch(event.name) and first <= event.start < last:
            counts[event.name] += any(start <= event.start < end for start, end in steps) == inside
    return {name: count for name, count in sorted(counts.items()) if count}
