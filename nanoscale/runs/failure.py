"""The diagnosis of a failure: the first cause among many failed ranks, and its meaning.

Everything here is pure except the writing and reading at the end.
"""

from __future__ import annotations

import json
import re
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from nanoscale.common.errors import UserError, Violation
from nanoscale.common.json_text import Json
from nanoscale.common.units import GIB, byte_size, listed, numbered
from nanoscale.config.values import yaml_file
from nanoscale.runs.directory import RunDirectory, write_json
from nanoscale.runs.documents import damaged, read_record
from nanoscale.runs.memory_order import LESS_SHARED_MEMORY
from nanoscale.runs.position import Position, late_for, of_error, waits, where
from nanoscale.runs.tail import read_end

_MESSAGE_LENGTH, _TRACEBACK_LENGTH = 1 << 12, 1 << 14
"""Characters; all ranks of a host may fail, and the agent reports them in one message."""
_STACKS_LENGTH = 1 << 17
"""Bytes of the end of a log, for the stacks of all threads of an aborted rank and the message before them."""

Kind = Literal[
    "raised", "lost", "mismatched", "rendezvous", "ended", "stopped", "absent", "forced", "agent"
]
"""The event, as the place that noticed it knows it: the rank raised an exception of its own, or one that says
that another rank did not answer, or that it called another collective (an abort may say so too); it missed
another host in the rendezvous; its process ended without a report, or was stopped by a signal; others waited
for it; the launcher ended it by force; the agent failed."""


@dataclass(frozen=True)
class RankFailure:
    """The failure of one rank: its own report, and its agent's observation."""

    kind: Kind
    rank: int | None
    """None: the agent of the host failed, not a rank."""
    local_rank: int | None
    host: str
    time: float = field(default_factory=time.time)
    """UNIX seconds of the exception, otherwise of the noticed end."""
    type: str = ""
    """The exception's name with its module; "" if the rank died without a report."""
    message: str = ""
    traceback: str = ""
    user_error: Json | None = None
    """The UserError as a document, if it was one."""
    exit_code: int | None = None
    """The exit code of its process; negative: the signal that ended it; None: still running or unknown."""
    position: Json | None = None
    """The `Position` of a rank that lost another one, or differs from it."""
    diagnosis: str = ""
    """The diagnosis, if it is known already; "" leaves it to `diagnose`."""
    remedy: str = ""

    @classmethod
    def of(
        cls,
        error: BaseException,
        *,
        host: str,
        rank: int | None = None,
        local_rank: int | None = None,
        kind: Kind = "raised",
    ) -> RankFailure:
        """Return the failure of a rank that raised `error` now."""
        if kind == "raised" and is_of_another_rank(error):
            kind = "lost"
        elif kind == "raised" and _MISMATCH.search(str(error)):
            kind = "mismatched"
        return cls(
            *(kind, rank, local_rank, host),
            type=_qualified_name(type(error)),
            message=_shortened(str(error), _MESSAGE_LENGTH),
            traceback=_shortened("".join(traceback.format_exception(error)), _TRACEBACK_LENGTH),
            user_error=_plain(asdict(error)) if isinstance(error, UserError) else None,
            position=asdict(of_error(error)) if kind in ("lost", "mismatched") else None,
        )

    @property
    def source(self) -> str:
        return "the agent" if self.rank is None else f"rank {self.rank}"


@dataclass(frozen=True)
class Evidence:
    """The agent's observations of the machine, which distinguish similar failures."""

    oom_kills: int = 0
    """Processes that the kernel's out-of-memory killer ended during the attempt."""
    available_gib: float | None = None
    """Host memory available to programs when the failure was noticed."""


@dataclass(frozen=True)
class Failure:
    """The content of failure.json: the first cause of an attempt's end, and the remedy."""

    attempt: int
    host: str
    rank: int | None
    """None: the agent of the host failed, not a rank."""
    local_rank: int | None
    time: float
    exit_code: int | None
    signal: str | None
    exception: str
    message: str
    traceback: str
    diagnosis: str
    remedy: str
    log: str
    """The log to read next, relative to the run directory."""
    user_error: Json | None = None
    also_failed: tuple[int, ...] = ()
    """Other ranks that failed, as a consequence or later."""

    @property
    def who(self) -> str:
        return f"agent of {self.host}" if self.rank is None else f"rank {self.rank} on {self.host}"

    @property
    def sentence(self) -> str:
        return f"{self.who}: {self.diagnosis}"


_OF_CAUSE = (
    "host", "rank", "local_rank", "time", "exit_code", "message", "traceback", "user_error",
)  # fmt: skip
"""The fields that a `Failure` copies from its cause."""


def first_cause(failures: Sequence[RankFailure]) -> RankFailure:
    """Return the failure that the others follow from: a cause before consequences, then the earliest."""
    return min(failures, key=lambda failure: (_distance_from_cause(failure), failure.time))


def is_consequence(failure: RankFailure) -> bool:
    """True if the rank only noticed that another one was lost."""
    return _distance_from_cause(failure) > 0


def digest(
    run: RunDirectory,
    attempt: int,
    failures: Sequence[RankFailure],
    evidence: Mapping[str, Evidence],
    log: str | None = None,
) -> Failure:
    """Combine all failures into one document.

    Args:
        evidence: by name of the host.
        log: the agents' common log, if they have no separate logs.
    """
    cause = first_cause(failures)
    diagnosis, remedy = diagnose(cause, evidence.get(cause.host, Evidence()))
    failed = {failure.rank for failure in failures if failure.rank is not None}
    if cause.rank is None:
        log_file = run.agent_log(attempt, log or cause.host)
    else:
        log_file = run.log(attempt, cause.host, cause.rank, "err")
    return Failure(
        **{name: getattr(cause, name) for name in _OF_CAUSE},
        attempt=attempt,
        signal=signal_name(cause.exit_code),
        exception=cause.type,
        diagnosis=diagnosis,
        remedy=remedy.replace(f" {_RUN}/", f" {run.path}/"),
        log=str(log_file.relative_to(run.path)),
        also_failed=tuple(sorted(failed - {cause.rank})),
    )


def agent_failure(
    host: str, diagnosis: str, remedy: str = "", exit_code: int | None = None
) -> RankFailure:
    return RankFailure(
        "agent", None, None, host, exit_code=exit_code, diagnosis=diagnosis, remedy=remedy
    )


def ended_rank(rank: int, local_rank: int, host: str, code: int | None, log: Path) -> RankFailure:
    """Return the failure of a rank that ended without a report. `log`: the file of its standard error."""
    failure = RankFailure("ended", rank, local_rank, host, exit_code=code)
    if code != -signal.SIGABRT or not log.is_file():
        return failure
    message = abort_message(read_end(log, _STACKS_LENGTH).decode(errors="replace"))
    is_mismatch = _MISMATCH.search(message)
    return replace(failure, kind="mismatched" if is_mismatch else "ended", message=message)


def stopped_rank(rank: int, local_rank: int, host: str) -> RankFailure:
    """Return the failure of a rank that was stopped by a signal and not continued."""
    return RankFailure(
        *("stopped", rank, local_rank, host),
        diagnosis="it was stopped by a signal (SIGSTOP or SIGTSTP) and did not continue",
        remedy="find out who stopped it; launcher.lost_after_s sets how long a stopped rank is tolerated",
    )


def absent_ranks(
    silent: Sequence[RankFailure], known: Mapping[int, Position], waited: str
) -> RankFailure:
    """Return the failure of the first of the ranks for which the others waited, with its stack.

    Args:
        silent: all of them, each with its rank and host.
        known: the positions of ranks, also of ranks that waited.
        waited: how long the others waited, and by which limit.
    """
    first = silent[0]
    assert first.rank is not None
    ranks = numbered("rank", [failure.rank for failure in silent])
    position = known.get(first.rank)
    missed = late_for(first.rank, known) or "a collective operation"
    return replace(
        first,
        traceback=position.stack if position else "",
        diagnosis=f"{ranks} did not arrive at {missed}; {waited}. "
        f"Rank {first.rank}: {where(position)}",
        remedy="the stack shows where it was; on GPUs, flight-recorder.rank-N next to the "
        "log shows the last calls of each rank; if it only needed more time, set a larger "
        "launcher.collective_timeout_s",
    )


def absent_hosts(silent: Sequence[RankFailure], limit_s: float) -> RankFailure:
    """Return the failure of the first of the hosts that the others did not meet at the start."""
    hosts = listed(sorted({failure.host for failure in silent}))
    return replace(
        silent[0],
        rank=None,
        local_rank=None,
        diagnosis=f"{hosts} did not arrive at the rendezvous; the others waited for {limit_s:g} s",
        remedy="look at the log of its agent, and whether the hosts reach each other: `nanoscale doctor`",
    )


def signal_name(exit_code: int | None) -> str | None:
    """Return the signal, such as `SIGKILL` for -9; None if no signal ended the process."""
    if exit_code is None or exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:
        return f"signal {-exit_code}"


_OF_TRANSPORT = re.compile(r"\[\S*gloo/transport/|.*\[[\da-fA-F.:]+\]:\d+")
"""Beginnings of gloo's errors outside of a wait: the source file of its network code, or a peer's address."""
_SAYS_LOST = re.compile(
    r"timed? ?out|\bclos(ed|ure)\b|connection|reset by peer|broken pipe|unreachable|no route", re.I
)
"""Words of gloo's errors about a peer or a connection that was lost."""
_OWN_NCCL = re.compile(r"nccl(UnhandledCudaError|InvalidUsage|InvalidArgument)")
"""NCCL's results that are about this rank, not about a peer."""
_MISMATCH = re.compile(r"collective mismatch|mismatch between collectives")
"""Words of gloo and torch about a peer that called another collective, or the same with another size."""


def is_of_another_rank(error: BaseException | None) -> bool:
    """True if an exception, or one that it was raised from, says that another rank did not answer."""
    while error is not None:
        names, text = {kind.__name__ for kind in type(error).__mro__}, str(error)
        if names & {"LostPeerError", "DistNetworkError", "DistStoreError"}:
            return True
        if "DistBackendError" in names and not (_OWN_NCCL.search(text) or _MISMATCH.search(text)):
            return True
        frames = list(traceback.walk_tb(error.__traceback__))
        is_of_gloo = type(error) is RuntimeError and _SAYS_LOST.search(text)
        if is_of_gloo and (waits(frames) or _OF_TRANSPORT.match(text)):
            return True
        error = error.__cause__
    return False


def abort_message(log: str) -> str:
    """Return what native code wrote before it aborted, above the stacks of Python; "" if it wrote nothing."""
    before = log.rpartition("Fatal Python error: Aborted")[0].rstrip()
    _, is_cpp, message = before.rpartition("what():")
    return _shortened((message if is_cpp else before.rpartition("\n")[2]).strip(), _MESSAGE_LENGTH)


def _distance_from_cause(failure: RankFailure) -> int:
    """Return 0 for a cause of its own, 1 for an abort or a mismatch, which may follow from a peer, 2 for a lost
    peer."""
    is_abort = failure.exit_code == -signal.SIGABRT and failure.kind == "ended"
    if is_abort or failure.kind == "mismatched":
        return 1
    return 2 if failure.kind in ("lost", "rendezvous") else 0


TORCH_BUILDS = "see https://pytorch.org/get-started/locally"

_LESS_HOST_MEMORY = "fewer ranks on the host, a smaller train.micro_batch, or a higher zero.stage"
_RUN = "RUN"
"""The run directory in a remedy, which `digest` fills in."""
_TEST_DEVICES = (
    "test the devices of that host, or leave it out with --exclude; resume from a checkpoint"
)


@cache
def diagnoses() -> Any:
    """Return `diagnoses.yaml`. Call it before a job starts: a disk that hangs later would hide the cause."""
    return yaml_file.read(Path(__file__).with_name("diagnoses.yaml")).content


def _remedy(row: Json) -> str:
    """Fill in what several remedies, and other files, say in the same words."""
    text: str = row["remedy"]
    return text.format(
        run=_RUN,
        test_devices=_TEST_DEVICES,
        torch_builds=TORCH_BUILDS,
        less_host_memory=_LESS_HOST_MEMORY,
        less_shared_memory=LESS_SHARED_MEMORY,
    )


def diagnose(failure: RankFailure, evidence: Evidence) -> tuple[str, str]:
    """Return the probable cause and the remedy; each a phrase without a full stop."""
    if failure.diagnosis:
        return failure.diagnosis, failure.remedy
    if failure.user_error is not None:
        return failure.message, ""
    if own := diagnoses()["by_type"].get(failure.type.rpartition(".")[2]):
        return failure.message + own["ending"], _remedy(own)
    text = f"{failure.type}: {failure.message}"
    for row in diagnoses()["by_text"]:
        if re.search(row["pattern"], text, re.IGNORECASE):
            return row["diagnosis"], _remedy(row)
    name = signal_name(failure.exit_code)
    if name and failure.kind == "ended":
        if name == "SIGABRT" and failure.message:
            why = failure.message.partition("\n")[0]
            return (
                f"native code aborted: {why}",
                "its log has the whole message and the Python stack",
            )
        if name == "SIGKILL":
            return _diagnose_kill(evidence)
        if known := diagnoses()["by_signal"].get(name):
            return known["diagnosis"], _remedy(known)
        return f"it was killed by {name}, which nanoscale did not send", "find out who sent it"
    if is_consequence(failure):
        return (
            "the connection to another rank was lost, and no rank reported a cause",
            "look at the ends of all ranks' logs, and at the network between the hosts",
        )
    if failure.kind == "ended" and failure.exit_code is None:
        return _diagnose_kill(evidence, "the process that starts this host's ranks")
    if failure.kind == "ended":
        return f"it ended with code {failure.exit_code} without a message", "its log may show more"
    return "the program raised an exception", "the traceback shows where"


def _diagnose_kill(evidence: Evidence, who: str = "it") -> tuple[str, str]:
    free_memory = ""
    if (gib := evidence.available_gib) is not None:
        free_memory = f" ({byte_size(GIB * gib)} of host memory were free just after)"
    if evidence.oom_kills:
        return f"the kernel's out-of-memory killer ended {who}{free_memory}", _LESS_HOST_MEMORY
    return (
        f"{who} was killed from outside (SIGKILL){free_memory}",
        "if nobody killed it by hand, the out-of-memory killer did: look at `dmesg`, "
        "and ask for less host memory",
    )


def write_rank_failure(path: Path, failure: RankFailure) -> None:
    """Write a rank's report for the agent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(failure), durable=False)


def read_rank_failure(path: Path) -> RankFailure | None:
    """Read a rank's report; None if it left none."""
    try:
        return read_record(RankFailure, path)
    except (FileNotFoundError, UserError):
        return None


def write(run: RunDirectory, failure: Failure) -> None:
    write_json(run.failure, asdict(failure))


def read(run: RunDirectory) -> Failure | None:
    """Read failure.json; None if it does not exist.

    Raises:
        UserError: it is damaged.
    """
    try:
        failure = read_record(Failure, run.failure)
        user_error(failure)
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, AttributeError) as error:
        raise damaged(run.failure, "has a `user_error` of another form than expected") from error
    return failure


def user_error(failure: Failure | RankFailure) -> UserError | None:
    """Return the UserError that a rank raised; None if it was another failure."""
    content = failure.user_error
    if content is None:
        return None
    violations = [
        Violation(**{**entry, "suggestions": tuple(entry["suggestions"])})
        for entry in content["violations"]
    ]
    return UserError(content["kind"], content["message"], violations)


def _shortened(text: str, length: int) -> str:
    """Shorten a text that is too long; both ends are kept."""
    if len(text) <= length:
        return text
    omitted = len(text) - length
    return f"{text[: length // 2]}\n[{omitted:,} characters are omitted]\n{text[-length // 2 :]}"


def _plain(value: object) -> Any:
    """Return a value as JSON can represent it."""
    return json.loads(json.dumps(value, default=str))


def _qualified_name(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
