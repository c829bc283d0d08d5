"""The position of a rank: its step, the collectives that it has issued in each group, and its stack.

Process groups count their collectives themselves, with gloo and NCCL alike, so that a step pays nothing for it.
A thread of the rank answers while the rank's main thread waits or hangs.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

from nanoscale.common.errors import UserError
from nanoscale.common.units import byte_size, numbered
from nanoscale.runs.directory import write_json
from nanoscale.runs.documents import read_document, read_record

_PACKAGE = Path(__file__).parent.parent
_COMMUNICATING = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/rendezvous.py",
)
"""The ends of torch's files whose functions wait for other ranks."""
_CALLING = (
    "torch/_ops.py",
    "torch/distributed/c10d_logger.py",
    "torch/_library/autograd.py",
    "nanoscale/metrics/waits.py",
)
"""The ends of files whose functions only call a collective, or a wait, for others."""
_WRITING = "torch/distributed/checkpoint/filesystem.py"
_MOST_FRAMES = 40
ASK, ANSWER = ".ask", ".position"
"""Endings of the rank's files for the agent's question and for the answer."""


@dataclass
class Now:
    """The rank's step, for the answer."""

    step: int = 0
    begun: dict[str, int] = field(default_factory=dict)
    """The number of collectives of each group, by its name, that the rank had issued before the step."""
    program: Path | None = None
    """The file of the run's rehearsal, which tells what a step does; None if there was none."""

    def begin(self, step: int) -> None:
        self.step = step
        if self.program is not None:
            self.begun = {group.group_name: _issued(group) for group in _process_groups()}


NOW = Now()


@dataclass(frozen=True)
class Position:
    """The position of a rank when it was asked, or when it lost another one."""

    step: int
    """The step that it trains; 0: it has not begun."""
    groups: dict[str, dict[str, Any]]
    """The groups by name: `axis`, `ranks`, the number of collectives `issued` by this rank, and in `next` what
    the next one is, if a rehearsal tells it; empty before it joined."""
    waits: bool
    """True if it waited for another rank."""
    line: str
    """The innermost lines of nanoscale's own code, as `train/loop.py:120 in log`."""
    path: str = ""
    """The file that it was writing or reading."""
    stack: str = ""
    call: str = ""
    """The collective that it called, as `all_gather of 24 B`; "" if its frames do not tell it."""


def of_frames(frames: list[tuple[FrameType, int]]) -> Position:
    """Return the position of a thread with these frames and line numbers, the outermost first."""
    own = [(frame, line) for frame, line in frames if _is_own(frame)]
    begin = next((n for n, (frame, _) in enumerate(frames) if _is_own(frame)), 0)
    shown = frames[begin:][-_MOST_FRAMES:]
    texts = [
        traceback.FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in shown
    ]
    return Position(
        step=NOW.step,
        groups=_groups(),
        waits=waits(frames, also_begins=True),
        line=" < ".join(_place(frame, line) for frame, line in reversed(own[-2:])),
        path=next((path for frame, _ in reversed(frames[-12:]) if (path := _path(frame))), ""),
        stack="".join(traceback.format_list(texts)),
        call=next((call for frame, _ in reversed(frames[-4:]) if (call := _call(frame))), ""),
    )


def of_thread(thread: int) -> Position:
    """Return the position of a running thread."""
    frame: FrameType | None = sys._current_frames().get(thread)
    frames: list[tuple[FrameType, int]] = []
    while frame is not None:
        frames.insert(0, (frame, frame.f_lineno))
        frame = frame.f_back
    return of_frames(frames)


def of_error(error: BaseException) -> Position:
    """Return the position where an exception, or the one that it was raised from, was raised."""
    while error.__cause__ is not None:
        error = error.__cause__
    return of_frames(list(traceback.walk_tb(error.__traceback__)))


def _process_groups() -> list[Any]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        return []
    return list(torch.distributed.distributed_c10d._world.pg_map)


def _issued(group: Any) -> int:
    return int(group._get_sequence_number_for_group())


def _ranks_of(group: Any) -> list[int]:
    import torch.distributed as dist

    return dist.get_process_group_ranks(group)


def _groups() -> dict[str, dict[str, Any]]:
    found = {}
    for group in _process_groups():
        with suppress(Exception):  # a group that is being destroyed
            name, ranks, issued = str(group.group_name), _ranks_of(group), _issued(group)
            about = {
                "axis": group.group_desc.removeprefix("mesh_"),
                "ranks": ranks,
                "issued": issued,
            }
            if NOW.program is not None and name in NOW.begun:
                number = issued - NOW.begun[name] + 1
                about["next"] = next_call(NOW.program, ranks[group.rank()], ranks, number)
            found[name] = about
    return found


def _is_own(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(f"{_PACKAGE}{os.sep}") and not file.endswith(_CALLING)


def _place(frame: FrameType, line: int) -> str:
    file = Path(frame.f_code.co_filename).relative_to(_PACKAGE)
    return f"{file}:{line} in {frame.f_code.co_name}"


def waits(frames: Sequence[tuple[FrameType, int]], *, also_begins: bool = False) -> bool:
    """True if a thread waits for the end of a collective, or `also_begins` one, in its innermost frame."""
    calls = [it for it in frames if not it[0].f_code.co_filename.endswith(_CALLING)]
    if not calls:
        return False
    frame, line = calls[-1]
    text = linecache.getline(frame.f_code.co_filename, line)
    is_inside = also_begins and frame.f_code.co_filename.endswith(_COMMUNICATING)
    return is_inside or ".wait(" in text or "wait_tensor(" in text


def _call(frame: FrameType) -> str:
    """Return the collective of a frame of torch, with the size of this rank's tensor."""
    if not frame.f_code.co_filename.endswith(_COMMUNICATING[0]):
        return ""
    tensors = (frame.f_locals.get(name) for name in ("tensor", "input_tensor", "input"))
    sizes = (size for it in tensors if (size := getattr(it, "nbytes", None)) is not None)
    return " of ".join([frame.f_code.co_name, *(byte_size(size) for size in [*sizes][:1])])


def _path(frame: FrameType) -> str:
    """Return the file that a function of checkpoints or of run directories has in its hands."""
    file = Path(frame.f_code.co_filename)
    rooms = file.relative_to(_PACKAGE).parts[:1] if _is_own(frame) else ()
    if rooms not in (("checkpoint",), ("runs",)) and not str(file).endswith(_WRITING):
        return ""
    found = [frame.f_locals.get(name) for name in ("file_name", "path", "staging")]
    return next((str(it) for it in found if isinstance(it, str | Path)), "")


# --- the words of a rehearsal ---------------------------------------------------------------------


def next_call(file: Path, rank: int, members: Sequence[int], number: int) -> str:
    """Return the kind, size, block and place of a collective of a step; "" if no rehearsal tells it.

    Args:
        rank: this rank, or one of the same stage of the pipeline stands for it.
        members: the ranks of the group.
        number: the collective's number in the step, among the group's collectives, from 1 on.
    """
    with suppress(OSError, ValueError, LookupError, TypeError, UserError):
        document = read_document(file)
        calls = list(_calls(document, rank, members))
        kind, size, block = calls[number - 1] if number > 0 else ("", 0, "")
        if kind:
            where = f" of {block}" if block else ""
            return f"{kind.strip('_')}{where}, {byte_size(size)}, {number:,} of {len(calls):,} of the step"
    return ""


def _calls(
    document: dict[str, Any], rank: int, members: Sequence[int]
) -> Iterator[tuple[str, int, str]]:
    """Yield kind, bytes and block of the collectives of the last played step in groups like this one."""
    stage_ranks = document["world_size"] // document["degrees"]["pp"]
    played = sorted(map(int, document["program"]))
    like = [it for it in played if it // stage_ranks == rank // stage_ranks]
    program = document["program"][str(rank if rank in played else like[0])]
    shape = [member - members[0] for member in members]
    groups = {
        at
        for at, group in enumerate(program["groups"])
        if [member - group[0] for member in group] == shape
    }
    columns = zip(*(program[name] for name in _COLUMNS), strict=True)
    last = f"step {document['steps']}"
    # Equal micro batches are played once.
    for repeat, several in groupby(columns, key=lambda call: call[-1]):
        found = [
            (kind, size, block)
            for kind, group, size, phase, block, _ in several
            if group in groups and phase == last and kind not in ("send", "recv_")
        ]
        yield from found * repeat


_COLUMNS = ("kind", "group", "bytes", "phase", "block", "repeat")


# --- question and answer --------------------------------------------------------------------------


def answer_questions(failure_file: Path) -> None:
    """Answer the agent's questions from a thread, as long as this rank lives."""
    ask = failure_file.with_suffix(ASK)
    with suppress(OSError):
        os.mkfifo(ask)
        # Open for writing as well, so that reading never ends.
        descriptor = os.open(ask, os.O_RDWR | os.O_CLOEXEC)
        main = threading.main_thread().ident
        assert main is not None

        def answer() -> None:
            while os.read(descriptor, 1):
                with suppress(OSError):
                    write_json(failure_file.with_suffix(ANSWER), asdict(of_thread(main)))

        threading.Thread(target=answer, name="position", daemon=True).start()


def ask(failure_file: Path) -> None:
    """Ask a rank of this host; its answer is in a file soon, unless no thread of it runs."""
    failure_file.with_suffix(ANSWER).unlink(missing_ok=True)
    with suppress(OSError):  # it has not begun, or is gone
        descriptor = os.open(failure_file.with_suffix(ASK), os.O_WRONLY | os.O_NONBLOCK)
        os.write(descriptor, b"?")
        os.close(descriptor)


def answered(failure_file: Path) -> Position | None:
    """Return a rank's answer; None if there is none yet."""
    with suppress(OSError, ValueError):
        return read_record(Position, failure_file.with_suffix(ANSWER))
    return None


# --- comparison -----------------------------------------------------------------------------------


def suspects(known: Mapping[int, Position], silent: Collection[int]) -> list[int]:
    """Return the silent ranks, which reported no failure, without ranks that wait for others.

    A rank waits if it is in a collective, or has issued more collectives of a group than another rank of it. A
    rank that gave no answer waits for nobody: none of its threads runs.
    """
    return [
        rank
        for rank in silent
        if rank not in known or not (known[rank].waits or any(_behind(rank, known)))
    ]


def _behind(rank: int, known: Mapping[int, Position]) -> Iterator[int]:
    """Yield the ranks that have issued fewer collectives of a group than this one."""
    for name, group in known[rank].groups.items():
        for other in group["ranks"]:
            counters = known[other].groups.get(name) if other in known else None
            if counters is not None and counters["issued"] < group["issued"]:
                yield other


def where(position: Position | None) -> str:
    """Return in words where a rank was that the others waited for."""
    if position is None:
        return "it gave no answer, so none of its threads runs Python code"
    if not position.groups:
        return f"it was stuck before it joined them, at {position.line}"
    writing = f", with {position.path}" if position.path else ""
    step = f"in step {position.step}, " if position.step else ""
    return f"{step}at {position.line}{writing}"


def late_for(rank: int, known: Mapping[int, Position]) -> str:
    """Return which collective others have issued and this rank has not; "" if it is not known."""
    if rank not in known:
        return ""
    for name, group in known[rank].groups.items():
        ahead = [
            other
            for other in group["ranks"]
            if other in known and known[other].groups.get(name, group)["issued"] > group["issued"]
        ]
        if ahead:
            of = "all ranks" if group["axis"] == "default_pg" else f"group {group['axis']}"
            what = f" ({group['next']})" if group.get("next") else ""
            return f"collective {group['issued'] + 1:,} of {of}{what}, where {_ranks(sorted(ahead))} waited"
    return ""


def different_collectives(
    known: Mapping[int, Position], aborted: Sequence[int] = ()
) -> tuple[int, str] | None:
    """Return the rank that differs from most, and in which collectives the ranks are; None if it is the same.

    Without a majority it is the rank in the latest step: it has left out what the others wait in.

    Args:
        aborted: ranks without a position whose peer sent data of another size than they expected.
    """
    places: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(known):
        places.setdefault((known[rank].line, known[rank].call), []).append(rank)
    if not places or len(places) + bool(aborted) < 2:
        return None
    groups = sorted(places.items(), key=lambda it: (len(it[1]), -known[it[1][0]].step))
    parts = [
        f"{_ranks(ranks)} at {line}{f' ({call})' if call else ''}" for (line, call), ranks in groups
    ]
    if aborted:
        parts.append(f"{_ranks(aborted)} got data of another size than expected, and aborted")
    # An aborted rank is the victim of the rank that differs, unless all others agree.
    odd = groups[0][1][0] if len(places) > 1 else aborted[0]
    sizes = [len(ranks) for _, ranks in groups] + ([len(aborted)] if len(places) < 2 else [])
    if sizes[0] == sizes[1]:
        parts.append("without a majority it is not known which of them is wrong")
    return odd, f"ranks wait in different collectives: {'; '.join(parts)}"


def explained(known: Mapping[int, Position], hosts: Mapping[int, str]) -> str:
    """Return in words for whom the ranks of a running job wait; `hosts` has all of its ranks."""
    waited_for = suspects(known, hosts)
    lines = []
    if len(waited_for) < len(hosts):
        for rank in waited_for:
            late = late_for(rank, known)
            lines += [f"rank {rank} on {hosts[rank]}: {where(known.get(rank))}"]
            lines += [f"  it is before {late}"] if late else []
            lines += [known[rank].stack.rstrip()] if rank in known else []
        if not waited_for:
            lines = ["every rank waits for another one"]
    else:
        lines = ["no rank waits for another one"]
    places: dict[str, list[int]] = {}
    for rank in sorted(known.keys() - set(waited_for)):
        places.setdefault(f"in step {known[rank].step}, at {known[rank].line}", []).append(rank)
    for place, ranks in places.items():
        lines.append(f"{_ranks(ranks)}: {'waits' if len(ranks) == 1 else 'wait'} {place}")
    return "\n".join(lines)


def _ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or at most four of several ranks."""
    return numbered("rank", [*ranks[:4], *(["…"] if len(ranks) > 4 else [])])
