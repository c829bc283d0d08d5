"""The messages about a job's ranks between the launcher and the agent of a host: their content, typed.

The launcher sends a `LaunchOrder` to each host. Its agent answers with `Failing` whenever further ranks have
failed, with `Answered` to a question for positions, and at last with `Ended`.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Self

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


_TYPED: dict[str, Callable[[Any], Any]] = {
    "host": lambda it: HostRanks(**{**it, "ranks": tuple(it["ranks"])}),
    "failures": lambda it: tuple(RankFailure(**failure) for failure in it),
    "evidence": lambda it: Evidence(**it),
    "positions": lambda it: {int(rank): Position(**position) for rank, position in it.items()},
}
"""The functions that return the value of a field from JSON; the other fields are JSON."""


class JobMessage:
    """The content of a message about a job's ranks; a subclass is a dataclass."""

    kind: ClassVar[str]

    @classmethod
    def read(cls, message: Message) -> Self:
        """Return the content of a message that `message_of` has made."""
        values = {name: value for name, value in message.items() if name != "kind"}
        return cls(
            **{name: _TYPED.get(name, lambda it: it)(value) for name, value in values.items()}
        )


@dataclass(frozen=True)
class LaunchOrder(JobMessage):
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
    notice: str | None = None
    """The source of a notice that the host will be taken away."""
    job: str = TRAINING
    """A name in worker.JOBS."""
    config: str = ""
    """The resolved configuration of a job without a run, as YAML."""
    task: dict[str, Any] | None = None
    """The task of a job without a run."""
    memory: dict[str, Any] | None = None
    """The `source` in memory to continue from, and the `peers` that keep hosts' copies; None: no such job."""


@dataclass(frozen=True)
class Failing(JobMessage):
    """The ranks of a host that have failed so far, while others may still run."""

    kind: ClassVar[str] = "failing"
    attempt: int
    failures: tuple[RankFailure, ...]


@dataclass(frozen=True)
class Ended(JobMessage):
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


@dataclass(frozen=True)
class Answered(JobMessage):
    """The positions of the ranks of a host, for which the launcher asked."""

    kind: ClassVar[str] = "answered"
    attempt: int
    positions: dict[int, Position]


def message_of(content: LaunchOrder | Failing | Answered | Ended) -> Message:
    """Return the message that `read` of the same class understands."""
    return {"kind": content.kind, **asdict(content)}
