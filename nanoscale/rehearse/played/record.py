"""The record of one rehearsed rank: its memory, its collectives and its waits for the device. Torch-free."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

from nanoscale.common.json_text import Json

MESSAGES = ("send", "recv_")
PLAYED_BATCHES = 3
"""The most micro batches of a step that are played without a pipeline."""
PLAYED_IN_PIPELINES = 2
"""The most micro batches of a step that are played in a pipeline whose other passes are repeated."""
HOST = -1
"""The stream of events for which the host waits, in `StreamEvent.stream`."""
PACKAGE = str(Path(__file__).parents[2])
_REHEARSE = str(Path(__file__).parents[1])


def is_own(file: str) -> bool:
    """True for a file of nanoscale outside of this room."""
    return file.startswith(PACKAGE) and not file.startswith(_REHEARSE)


def calling_frames() -> Iterator[FrameType]:
    """Yield the running frames outside of this room, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_REHEARSE):
            yield frame
        frame = frame.f_back


def calling_line() -> str:
    """Return the running line of nanoscale's code, or else of the first caller outside of PyTorch."""
    caller = ""
    for frame in calling_frames():
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            return f"{file.removeprefix(PACKAGE).lstrip('/')}:{frame.f_lineno}"
        if not caller and "/torch/" not in file and not file.startswith("<"):
            caller = f"{Path(file).name}:{frame.f_lineno}"
    return caller


class Call(NamedTuple):
    """A collective, or a message to one other rank, in the order in which the rank asked for it."""

    kind: str
    """PyTorch's name of the operation, such as `_allgather_base_`."""
    group: int
    """The index of the process group in `RankRecord.groups`."""
    bytes: int
    """Bytes of the larger of this rank's input and output."""
    dtype: str
    peer: int | None
    """The other rank of a message, or the root of a broadcast, numbered within the group; None for others."""
    phase: str
    """The section of the rank's life, such as `step 2`."""
    repeat: int
    """The number of calls for which this one stands, since equal micro batches are played once."""
    block: str
    """The block of the model whose forward pass, or recomputation, began last in the phase; else empty."""
    line: str
    """The line of code that called it, as `file:line`."""
    reduction: str = ""
    """The operation of a reduction, such as `sum`; empty for others."""
    sent: Sequence[int] = ()
    """Bytes for each member of the group, of an all-to-all; empty for others."""
    received: Sequence[int] = ()
    """Bytes from each member of the group, of an all-to-all; empty for others."""

    @property
    def signature(self) -> tuple[str, int, str, int | None, str]:
        """The properties that must be equal on all members of the group."""
        size = 0 if self.sent else self.bytes  # of an all-to-all, each pair of ranks has a size
        return self.kind, size, self.dtype, self.peer, self.reduction


class StreamEvent(NamedTuple):
    """A step of a stream on its way through collectives and messages. The host of a CPU is one stream."""

    stream: int
    what: str
    """`call` begins one, `wait` waits until one has ended, and `after` until another event has passed. In the
    last step, `work` computes a segment, and `batch` begins a micro batch."""
    of: int
    """The index in `RankRecord.calls`, of an event, or in `RankRecord.segments`; for `batch`, the number of
    micro batches for which it stands."""


class Wait(NamedTuple):
    """A line of code at which the host waits for the device."""

    phase: str
    what: str
    """The operation, such as `item`."""
    line: str
    times: int


@dataclass
class PhaseMemory:
    """The device's memory at the peak of one phase."""

    peak: int = 0
    """Bytes of all tensors."""
    kinds: dict[str, int] = field(default_factory=dict)
    """The bytes of the peak, by kind of tensor."""


@dataclass
class RankRecord:
    """The memory, the collectives and the waits of one rank."""

    rank: int
    groups: list[list[int]] = field(default_factory=list)
    """The members of each process group that the rank used."""
    calls: list[Call] = field(default_factory=list)
    events: list[StreamEvent] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    phases: dict[str, PhaseMemory] = field(default_factory=dict)
    reserved: int = 0
    """Bytes that the caching allocator reserves."""
    works: list[Any] = field(default_factory=list)
    """The works of the operations of the last step (`played.work`), each once."""
    segments: list[list[int]] = field(default_factory=list)
    """Sequences of operations in `works` without an event between them, each once."""
    step_events: tuple[int, int] = (0, 0)
    """The range of `events` of the last step."""
    operations: int = 0
    """The number of operations on tensors in the last step, with activation checkpointing."""
    repeated: int = 0
    """The number of micro batches of a step whose passes are repeated."""
    host_peak: int = 0
    """Peak bytes of tensors in host memory, for a job on GPUs."""
    after: list[int] = field(default_factory=list)
    """Bytes of tensors on the device after each step."""
    host_after: list[int] = field(default_factory=list)
    """Bytes of tensors in host memory after each step, for a job on GPUs."""
    checkpoint: dict[str, int] = field(default_factory=dict)
    """The number of tensors in a checkpoint, and the bytes of this rank's shards."""
    timeline: list[int] = field(default_factory=list)
    """Bytes of tensors on the device in the last step: maxima of at most 1,500 equal intervals."""
    findings: list[str] = field(default_factory=list)
    """Mistakes of the code that one rank shows without the others."""
    compiler: list[str] = field(default_factory=list)
    """Findings of the compiler: breaks of what it traces, and what it compiled again."""
    kernels: list[Json] = field(default_factory=list)
    """The compiled kernels of the last step, and their machine code (`played.compiled.machine_code`)."""
    target: str = ""
    """The GPU for which Triton compiles, such as `cuda 90 32` or `hip gfx942 64`; empty without one."""
    notes: list[str] = field(default_factory=list)
    """Facts about the rank's shards that users should know."""
    error: str = ""
    """The traceback if the code failed; else empty."""
    seconds: float = 0.0
    """Processor time of the rehearsal."""

    @property
    def peak(self) -> int:
        """The peak of the bytes of tensors on the device."""
        return max((phase.peak for phase in self.phases.values()), default=0)

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda name: self.phases[name].peak, default="")

    def as_json(self) -> Json:
        return vars(self) | {"phases": {name: vars(it) for name, it in self.phases.items()}}

    @classmethod
    def of_json(cls, document: Json) -> Self:
        record = cls(**document)
        record.calls = [Call(*call) for call in record.calls]
        record.events = [StreamEvent(*event) for event in record.events]
        record.waits = [Wait(*wait) for wait in record.waits]
        record.phases = {
            name: PhaseMemory(**phase)  # type: ignore[arg-type]
            for name, phase in record.phases.items()
        }
        return record
