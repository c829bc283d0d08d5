"""The order of actions of every pipeline rank: the schedules of torch.distributed.pipelining.

A schedule is its order alone. A rank's waiting time follows from the inputs of its next action (see
`simulation`), so the idle steps that torch writes between actions carry no information and are left out here.

Sources: GPipe, arXiv:1811.06965; 1F1B and its interleaving, arXiv:2104.04473; looped BFS, arXiv:2211.05953;
zero bubble (ZB-H1) and ZB-V, arXiv:2401.10241; DualPipe, arXiv:2412.19437, cut in half to a V. torch 2.11
to 2.13 runs these orders, which sometimes differ from the papers.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from nanoscale.config.layout import ONE_STAGE, V_SHAPED, stages_of, takes, usual_virtual_stages

Kind = Literal["F", "B", "I", "W"]
"""Forward · full backward · gradients of inputs only · gradients of weights only; torch's letters."""


class Action(NamedTuple):
    """A pass of one micro batch through one stage."""

    kind: Kind
    stage: int
    micro_batch: int
    joined: bool = False
    """True if the action and the next action run as a pair: both send when both have ended."""


Order = Sequence[Sequence[Action]]
"""The actions of each pipeline rank."""


@lru_cache(maxsize=32)
def order(schedule: str, pp: int, virtual_stages: int, micro_batches: int) -> Order:
    """Return the actions of all ranks in one optimizer step.

    `virtual_stages` are the stages of a rank. With pp = 1 there is no schedule: each micro batch goes forward
    and backward before the next.
    """
    assert takes(schedule, pp, micro_batches), "config.rules refuses it"
    if pp == 1:
        rounds = _InRounds([0], _places(micro_batches, 1, micro_batches))
        return [list(_alternate(0, micro_batches, rounds))]
    fixed = schedule in ONE_STAGE or schedule in V_SHAPED
    assert not fixed or virtual_stages == usual_virtual_stages(schedule)
    ranks = range(pp)
    if schedule == "zbv":
        return [_zbv(pp, rank, micro_batches) for rank in ranks]
    if schedule == "dualpipev":
        return [_dualpipev(pp, rank, micro_batches) for rank in ranks]
    own = [stages_of(schedule, pp, virtual_stages, rank) for rank in ranks]
    if schedule == "gpipe":
        return [_all_forward_first(stages, micro_batches, last_first=False) for stages in own]
    if schedule == "looped-bfs":
        return [_all_forward_first(stages, micro_batches, last_first=True) for stages in own]
    total = virtual_stages * micro_batches
    places = _places(round_length(pp, micro_batches), virtual_stages, total)
    each = [_InRounds(stages, places) for stages in own]
    warmups = [warmup(schedule, pp, virtual_stages, micro_batches, rank) for rank in ranks]
    is_split = schedule == "zero-bubble"
    return [
        list(_alternate(warmups[rank], total, each[rank], rank if is_split else None))
        for rank in ranks
    ]


# --- forward first: gpipe, looped-bfs -------------------------------------------------------------


def _all_forward_first(stages: list[int], micro_batches: int, last_first: bool) -> list[Action]:
    """List all forward passes, stage by stage, then all backward passes, beginning with the last stage."""
    back = range(micro_batches - 1, -1, -1) if last_first else range(micro_batches)
    forward = [Action("F", stage, batch) for stage in stages for batch in range(micro_batches)]
    return forward + [Action("B", stage, batch) for stage in reversed(stages) for batch in back]


# --- one forward, one backward: 1f1b, interleaved-1f1b, zero-bubble -------------------------------


def round_length(pp: int, micro_batches: int) -> int:
    """Return the micro batches that pass through a stage before the rank continues with its next stage."""
    return micro_batches // max(1, micro_batches // pp)


def warmup(schedule: str, pp: int, virtual_stages: int, micro_batches: int, rank: int) -> int:
    """Return the forward passes before a rank begins to alternate between forward and backward."""
    hops = pp - 1 - rank
    earlier_stages = (virtual_stages - 1) * round_length(pp, micro_batches)
    most = virtual_stages * micro_batches
    return min(most, earlier_stages + (2 * hops if schedule == "interleaved-1f1b" else hops))


@dataclass(frozen=True)
class _InRounds:
    """Rounds: a group of micro batches through the first stage of a rank, through the second, ..., the next
    group."""

    stages: list[int]
    places: Sequence[tuple[int, int]]

    def forward(self, count: int) -> tuple[int, int]:
        """Return stage and micro batch of the rank's forward pass number `count`."""
        turn, batch = self.places[count]
        return self.stages[turn], batch

    def backward(self, count: int) -> tuple[int, int]:
        """Return stage and micro batch of the rank's backward pass number `count`, last stage first."""
        turn, batch = self.places[count]
        return self.stages[-1 - turn], batch


def _places(length: int, stages: int, total: int) -> list[tuple[int, int]]:
    """Return the index of the stage and the micro batch of each pass, by the number of the pass."""
    places = []
    for count in range(total):
        rounds, rest = divmod(count, length * stages)
        turn, batch = divmod(rest, length)
        places.append((turn, rounds * length + batch))
    return places


def _alternate(
    ahead: int, total: int, rounds: _InRounds, delay: int | None = None
) -> Iterator[Action]:
    """Yield forward passes `ahead` of backward ones until none are left. With `delay`, backward passes are
    split: weights that many passes after inputs."""
    for count in range(ahead):
        yield Action("F", *rounds.forward(count))
    for count in range(total):
        if ahead + count < total:
            yield Action("F", *rounds.forward(ahead + count))
        yield Action("B" if delay is None else "I", *rounds.backward(count))
        if delay is not None and count >= delay:
            yield Action("W", *rounds.backward(count - delay))
    for count in range(max(0, total - (delay or 0)), total):
        yield Action("W", *rounds.backward(count))


# --- two stages a rank in a V: zbv, dualpipev -----------------------------------------------------


class _Sequence:
    """The actions of a rank so far; each stage processes its micro batches in order."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._seen: Counter[tuple[str, int]] = Counter()
        self._pending: list[tuple[int, int]] = []

    def forward(self, stage: int, joined: bool = False) -> None:
        self.actions.append(Action("F", stage, self._next("F", stage), joined))

    def backward(self, stage: int) -> None:
        self.actions.append(Action("B", stage, self._next("B", stage)))

    def inputs(self, stage: int) -> None:
        batch = self._next("B", stage)
        self.actions.append(Action("I", stage, batch))
        self._pending.append((stage, batch))

    def weights(self, stage: int | None = None) -> None:
        """Append the gradients of weights that have waited longest, of one stage or of either. Without waiting
        ones, do nothing."""
        for place, (pending, batch) in enumerate(self._pending):
            if stage in (None, pending):
                self.actions.append(Action("W", pending, batch))
                del self._pending[place]
                return

    def count(self, kind: Literal["F", "B"], stage: int) -> int:
        """Count passes so far; gradients of inputs count as backward."""
        return self._seen[kind, stage]

    def _next(self, kind: Literal["F", "B"], stage: int) -> int:
        self._seen[kind, stage] += 1
        return self._seen[kind, stage] - 1


def _zbv(pp: int, rank: int, micro_batches: int) -> list[Action]:
    """Return the order of arXiv:2401.10241, section 6.

    `down` and `up` are the rank's stages on the two arms of the V. The order is made for at least 2·pp - 1
    micro batches. If there are fewer, the actions of the missing micro batches are removed.
    """
    down, up = rank, 2 * pp - 1 - rank
    sequence, most = _Sequence(), max(2 * pp - 1, micro_batches)
    for _ in range(2 * (pp - rank) - 1):
        sequence.forward(down)
    for _ in range(rank):
        sequence.forward(up)
        sequence.forward(down)
    for _ in range(pp - rank):
        _forward_and_split(sequence, up)
    while sequence.count("F", up) < most:
        if sequence.count("F", down) < most:
            sequence.forward(down)
        sequence.inputs(down)
        sequence.weights(down)
        _forward_and_split(sequence, up)
    for _ in range(rank):
        sequence.inputs(down)
        sequence.inputs(up)
    for _ in range(pp - rank):
        sequence.inputs(down)
        sequence.weights(down)
    for stage in (up, down):
        for _ in range(rank):
            sequence.weights(stage)
    return [action for action in sequence.actions if action.micro_batch < micro_batches]


def _forward_and_split(sequence: _Sequence, stage: int) -> None:
    sequence.forward(stage)
    sequence.inputs(stage)
    sequence.weights(stage)


def _dualpipev(pp: int, rank: int, micro_batches: int) -> list[Action]:
    """Return the order of DualPipe, whose two directions are the two arms of the V; names are as in `_zbv`."""
    down, up = rank, 2 * pp - 1 - rank
    hops = pp - 1 - rank
    sequence = _Sequence()
    for _ in range(2 * hops):
        sequence.forward(down)
    for _ in range(rank + 1):
        sequence.forward(down)
        sequence.forward(up)
    for _ in range(hops):
        sequence.inputs(up)
        sequence.weights()
        sequence.forward(up)
    for turn in range(micro_batches - 2 * pp + rank + 1):
        # The last rank starts the backward pass of the first micro batch at once, because no rank waits for
        # its forward pass.
        sequence.forward(down, joined=not (turn == 0 and hops == 0))
        sequence.backward(up)
        sequence.forward(up, joined=True)
        sequence.backward(down)
    for _ in range(hops):
        sequence.backward(up)
        sequence.forward(up, joined=True)
        sequence.backward(down)
    # About half of the last backward passes postpone the gradients of weights to fill waiting time.
    last = down + 1
    for count in range(2 * last):
        if count >= last // 2 * 2 + (1 - down % 2):
            sequence.inputs(down if count % 2 else up)
        else:
            sequence.backward(down if count % 2 else up)
    for _ in range(hops):
        sequence.weights()
        sequence.inputs(down)
    for _ in range(last):
        sequence.weights()
    return sequence.actions
