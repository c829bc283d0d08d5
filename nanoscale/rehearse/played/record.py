"""The record of one rehearsed rank: its memory, its collectives and its waits for the device. Torch-free."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Self


class Call(NamedTuple):
    """A collective, or a message to one other rank, in the order in which the rank asked for it."""

    kind: str
    """PyTorch's name of it, such as `_allgather_base_`."""
    group: int
    """Its group, as an index of `RankRecord.groups`."""
    bytes: int
    """Bytes of the larger of this rank's input and output."""
    dtype: str
    peer: int | None
    """The other rank of a message, or the root of a broadcast: its rank in the group."""
    phase: str
    """The phase of the rank's life, such as `step 2`."""
    repeat: int
    """The times that it happens: equal micro batches are played once."""
    block: str
    """The block of the model that asked, as far as it is known."""
    line: str
    """The line of code that asked."""

    @property
    def signature(self) -> tuple[str, int, str, int | None]:
        """The properties that the members of a group must have in common."""
        return self.kind, self.bytes, self.dtype, self.peer


class Wait(NamedTuple):
    """A place where the host waits for the device."""

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
    """These bytes by their purpose."""


@dataclass
class RankRecord:
    """The memory, the collectives and the waits of one rank."""

    rank: int
    groups: list[list[int]] = field(default_factory=list)
    """The members of each group that it used."""
    calls: list[Call] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)
    phases: dict[str, PhaseMemory] = field(default_factory=dict)
    reserved: int = 0
    """Bytes that the caching allocator reserves."""
    host_peak: int = 0
    """Bytes of tensors in host memory."""
    after: list[int] = field(default_factory=list)
    """Bytes that tensors hold on the device after each step."""
    checkpoint: dict[str, int] = field(default_factory=dict)
    """Tensors, and bytes of this rank's shards, that a checkpoint would hold."""
    timeline: list[int] = field(default_factory=list)
    """Bytes held on the device in the course of the last step, at evenly spaced changes."""
    findings: list[str] = field(default_factory=list)
    """Mistakes of the code that this rank alone shows."""
    notes: list[str] = field(default_factory=list)
    """Facts that were made up, or played otherwise than on a device."""
    error: str = ""
    """The traceback, if the code failed."""
    seconds: float = 0.0
    rss: int = 0
    """Bytes that the process that played it had resident at most."""

    @property
    def peak(self) -> int:
        """Bytes of tensors on the device at the highest point of its life."""
        return max((phase.peak for phase in self.phases.values()), default=0)

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda name: self.phases[name].peak, default="")

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_json(cls, document: dict[str, Any]) -> Self:
        record = cls(**document)
        record.calls = [Call(*call) for call in record.calls]
        record.waits = [Wait(*wait) for wait in record.waits]
        record.phases = {
            name: PhaseMemory(**phase)  # type: ignore[arg-type]
            for name, phase in record.phases.items()
        }
        return record
