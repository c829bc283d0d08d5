"""The messages about a job's ranks between the launcher and the agent of a host: their content, typed.

The launcher sends a `LaunchOrder` to each host. Its agent answers with `Failing` whenever further ranks have
failed, with `Answered` to a question for positions, and at last with `Ended`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from nanoscale.processes.messages import TRAINING, Message
from nanoscale.runs.failure import Evidence, RankFailure
from nanoscale.runs.position import Position

RENDEZVOUS_S = 600.0


@dataclass(frozen=True)
class HostRanks:
    """One host's ranks in an attempt."""

    name: str
    node_rank: int
    nodes: int
    ranks: tuple[int, ...]
    """Global ranks, by local rank."""
    world_size: int
    master_addr: str
    master_port: int
    attempt: int


@dataclass(frozen=True)
class LaunchOrder:
    """The order to start the ranks of a host."""

    kind: ClassVar[str] = "launch"
    host: HostRanks
    run: str | None
    """The run's directory; None for a job without a run, whose directory only the host sees."""
    lost_after_s: float
    meet_s: float = RENDEZVOUS_S
    """Seconds for which the hosts wait for each other at first."""
    writes_logs: bool = False
    """True if the ranks write their logs into the run's directory; otherwise the agent sends them."""
    job: str = TRAINING
    """A name in worker.JOBS."""
    config: str = ""
    """The resolved configuration of a job without a run, as YAML."""
    task: dict[str, Any] | None = None
    """The task of a job without a run."""

    @classmethod
    def read(cls, message: Message) -> LaunchOrder:
        content = _content(message)
        host = content.pop("host")
        return cls(host=HostRanks(**{**host, "ranks": tuple(host["ranks"])}), **content)


@dataclass(frozen=True)
class Failing:
    """The ranks of a host that have failed so far, while others may still run."""

    kind: ClassVar[str] = "failing"
    attempt: int
    failures: tuple[RankFailure, ...]

    @classmethod
    def read(cls, message: Message) -> Failing:
        content = _content(message)
        return cls(content["attempt"], _failures(content))


@dataclass(frozen=True)
class Ended:
    """The end of all ranks of a host."""

    kind: ClassVar[str] = "ended"
    attempt: int
    outcome: str
    """`completed`, `stopped`, `failed` or `killed`."""
    failures: tuple[RankFailure, ...] = ()
    evidence: Evidence = field(default_factory=Evidence)
    result: Any = None
    """The result that the first rank left; None if it left none."""
    positions: dict[int, Position] = field(default_factory=dict)
    """The positions of ranks before they were ended, if the launcher asked."""

    @classmethod
    def read(cls, message: Message) -> Ended:
        content = _content(message)
        content["evidence"] = Evidence(**content["evidence"])
        return cls(**{**content, "failures": _failures(content), "positions": _positions(content)})


@dataclass(frozen=True)
class Answered:
    """The positions of the ranks of a host, for which the launcher asked."""

    kind: ClassVar[str] = "answered"
    attempt: int
    positions: dict[int, Position]

    @classmethod
    def read(cls, message: Message) -> Answered:
        content = _content(message)
        return cls(content["attempt"], _positions(content))


def message_of(content: LaunchOrder | Failing | Answered | Ended) -> Message:
    """Return the message that `read` of the same class understands."""
    return {"kind": content.kind, **asdict(content)}


def _content(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != "kind"}


def _failures(content: Message) -> tuple[RankFailure, ...]:
    return tuple(RankFailure(**failure) for failure in content["failures"])


def _positions(content: Message) -> dict[int, Position]:
    return {int(rank): Position(**position) for rank, position in content["positions"].items()}
