"""What the steps of a training spend their time on, read from the events of torch.profiler.

Host and device have one clock. What the host does when it starts an operation says which part of the step that
is: autograd's engine marks each function of a backward pass, every torch.optim optimizer its update, and the
loop the step and its data. So it is told of every backend and layout, also where passes alternate, and nothing
is asked of the code that is measured.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.autograd import DeviceType

from nanoscale.metrics.intervals import Interval, Intervals, length, united, within, without

STEP, DATA = "nanoscale: step", "nanoscale: data"
"""what the loop calls an optimizer step, and the reading of its batch"""

_BACKWARD = ("autograd::engine::evaluate_function", "FSDP::root_post_backward")
_OPTIMIZER = "Optimizer."
_COLLECTIVE = ("c10d::", "_c10d_functional::")
_UNDER_WAY = ("gloo:", "nccl:", "mpi:")
"""collectives from their start to their end, whoever waits for them"""
_DEVICE_COLLECTIVE = re.compile("nccl|rccl", re.IGNORECASE)
_DEAREST = 20
_RUNTIME = re.compile(r"(cuda|hip|cu)[A-Z]")
_WAIT = re.compile(r"(cuda|hip|cu)((Stream|Device|Event|Ctx)Synchronize|Memcpy)")
"""calls in which the host waits for the device; the copies among them are those that are not asynchronous"""


@dataclass(frozen=True)
class Event:
    """Something that the profiler has seen; times in ns."""

    name: str
    start: int
    end: int
    thread: int = 0
    on_device: bool = False
    asynchronous: bool = False
    """begun by one call and ended by another"""
    annotation: bool = False
    """what somebody has called a time, and no operation"""
    correlation: int = 0
    """the same of a call of the device's runtime and of what the device then does"""

    @property
    def time(self) -> Interval:
        return self.start, self.end


@dataclass(frozen=True)
class Parts:
    """The mean step of a recorded series. Times in s; the parts add up to the step, but for rounding."""

    where: str
    """`host`: its time, as computing on a CPU is done · `device`: the device's"""
    steps: int
    step_s: float
    data_s: float
    """host: reading the batch; on a device, where that is hidden, 0"""
    forward_s: float
    """with the loss, and what else comes before the last backward pass"""
    backward_s: float
    """with what is computed again"""
    gradients_s: float
    """between the last backward pass and the update: their norm, clipping"""
    optimizer_s: float
    other_s: float
    """after the update"""
    communication_s: float
    """that nothing hides, with waiting for other ranks; it is in no other part"""
    idle_s: float
    """device: nothing to do. In a host's time there is none"""
    communication_in_all_s: float
    """hidden or not"""
    data_on_host_s: float
    waits: dict[str, int] = field(default_factory=dict)
    """device: how often the host waited for it within all recorded steps, by call"""
    waits_between: dict[str, int] = field(default_factory=dict)
    """the same from a step to the next: logging, evaluation, checkpoints"""
    kernels: dict[str, float] = field(default_factory=dict)
    """device: the seconds of a step that the dearest of its kernels and copies take, by name"""


def events_of(profiler: Any) -> list[Event]:
    """What a torch.profiler.profile that has stopped has recorded."""
    found = []
    for event in profiler.profiler.kineto_results.events():
        on_device = event.device_type() != DeviceType.CPU
        if (
            on_device and event.is_user_annotation()
        ):  # the host's marks, drawn again beside the kernels
            continue
        found.append(
            Event(
                event.name(),
                event.start_ns(),
                event.end_ns(),
                event.start_thread_id(),
                on_device,
                event.is_async(),
                event.is_user_annotation(),
                event.correlation_id(),
            )
        )
    return found


def parts_of(events: Sequence[Event]) -> Parts | None:
    """Take the steps apart; None where none was recorded from its start to its end."""
    host = [event for event in events if not event.on_device]
    steps = [event.time for event in host if event.name == STEP]
    if not steps:
        return None
    # Marks of one step do not overlap those of the next: all steps are looked at as one.
    phases = _phases(host, sorted(steps))
    device = [event for event in events if event.on_device]
    data = length(phases["data"])
    if device:
        begin = min(start for start, _ in steps)
        end = max(max(event.end for event in device), max(end for _, end in steps))
        times, hidden = _of_device(host, device, phases)
        times["idle"] = end - begin - sum(times.values())
        whole = end - begin
    else:
        times, hidden = _of_host(host, united(steps), phases)
        times["idle"] = 0
        whole = length(united(steps))
    count = len(steps)
    mean = {f"{name}_s": ns / count / 1e9 for name, ns in times.items()}
    return Parts(
        where="device" if device else "host",
        steps=count,
        step_s=whole / count / 1e9,
        communication_in_all_s=hidden / count / 1e9,
        data_on_host_s=data / count / 1e9,
        waits=_waits(host, united(steps), inside=True),
        waits_between=_waits(host, united(steps), inside=False),
        kernels={name: ns / count / 1e9 for name, ns in _by_name(device).most_common(_DEAREST)},
        **mean,
    )


# --- which part of a step it is -------------------------------------------------------------------


def _phases(host: Sequence[Event], steps: Sequence[Interval]) -> dict[str, Intervals]:
    """When the host was at what: data, forward, backward, gradients, optimizer, other. They do not overlap."""
    optimizer = united(event.time for event in host if event.name.startswith(_OPTIMIZER))
    backward = without(united(_backward_passes(host)), optimizer)
    found: dict[str, Intervals] = {
        "data": united(event.time for event in host if event.name == DATA),
        "backward": backward,
        "gradients": [],
        "optimizer": optimizer,
        "other": [],
    }
    for step in steps:
        last = max((end for _, end in within(backward, [step])), default=step[0])
        updates = within(found["optimizer"], [step])
        first = min((start for start, _ in updates if start >= last), default=step[1])
        if last > step[0]:
            found["gradients"] += _span(last, first)
        if updates:
            found["other"] += without(_span(first, step[1]), found["optimizer"])
    known = united(time for times in found.values() for time in times)
    found["forward"] = without(united(steps), known)
    return found


def _span(start: int, end: int) -> Intervals:
    return [(start, end)] if start < end else []


def _backward_passes(host: Iterable[Event]) -> Iterator[Interval]:
    """Autograd's functions, and the moments from one to the next where nothing else begins between them."""
    ends: dict[int, int] = {}
    run: Interval | None = None
    for event in sorted(host, key=lambda event: (event.start, -event.end)):
        ours = event.name.startswith(_BACKWARD)
        if event.asynchronous or _RUNTIME.match(event.name) or (event.annotation and not ours):
            continue
        if event.start < ends.get(event.thread, event.start):
            continue  # a part of the one before
        ends[event.thread] = event.end
        if ours:
            run = (run[0], max(run[1], event.end)) if run is not None else event.time
        elif run is not None and event.start >= run[1]:
            yield run
            run = None
    if run is not None:
        yield run


# --- whose time it is -----------------------------------------------------------------------------


def _of_host(
    host: Sequence[Event], steps: Intervals, phases: dict[str, Intervals]
) -> tuple[dict[str, int], int]:
    """The host's time by phase, without what is communication; and all communication, hidden or not."""
    thread = next(event.thread for event in host if event.name == STEP)
    own = [event for event in host if event.thread == thread and not event.asynchronous]
    calls = united(event.time for event in own if event.name.startswith(_COLLECTIVE))
    under_way = united(event.time for event in host if event.name.startswith(_UNDER_WAY))
    exposed = united([*calls, *without(under_way, united(_computing(own)))])
    times = {name: length(without(spent, exposed)) for name, spent in phases.items()}
    times["communication"] = length(within(exposed, steps))
    return times, length(within(united([*calls, *under_way]), steps))


def _computing(thread: Iterable[Event]) -> Iterator[Interval]:
    """Operations of one thread that have no others within; calls that communicate are among them."""
    last: Event | None = None
    for event in sorted(thread, key=lambda event: (event.start, -event.end)):
        if last is not None and last.end <= event.start:
            yield last.time
        last = event


def _of_device(
    host: Sequence[Event], device: Sequence[Event], phases: dict[str, Intervals]
) -> tuple[dict[str, int], int]:
    """The device's time by the phase in which the host has started what it does; and all communication."""
    starts = {event.correlation: event.start for event in host if _RUNTIME.match(event.name)}
    borders = sorted((start, end, name) for name, times in phases.items() for start, end in times)
    begins = [start for start, _, _ in borders]
    spent: dict[str, list[Interval]] = {name: [] for name in phases}
    communication = []
    for event in device:
        if _DEVICE_COLLECTIVE.search(event.name):
            communication.append(event.time)
            continue
        begun = starts.get(event.correlation, event.start)
        place = bisect_right(begins, begun) - 1
        name = borders[place][2] if place >= 0 and begun < borders[place][1] else "other"
        spent[name].append(event.time)
    times, seen = {}, Intervals()
    for name in ("forward", "backward", "gradients", "optimizer", "data", "other"):
        mine = united(spent[name])
        times[name] = length(without(mine, seen))  # at one time, only one is counted
        seen = united([*seen, *mine])
    sent = united(communication)
    times["communication"] = length(without(sent, seen))
    return times, length(sent)


def _by_name(device: Iterable[Event]) -> Counter[str]:
    """ns of all that the device has done, also what it has done at one time."""
    found: Counter[str] = Counter()
    for event in device:
        found[event.name] += event.end - event.start
    return found


def _waits(host: Iterable[Event], steps: Intervals, *, inside: bool) -> dict[str, int]:
    """How often the host waited for the device, by call, within the steps or between the first and the last."""
    first, last = steps[0][0], steps[-1][1]
    found: Counter[str] = Counter()
    for event in host:
        if _WAIT.fullmatch(event.name) and first <= event.start < last:
            found[event.name] += any(a <= event.start < b for a, b in steps) == inside
    return {name: count for name, count in sorted(found.items()) if count}
