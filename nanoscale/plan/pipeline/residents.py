"""The number of in-flight micro batches of a pipeline rank, and of tensors between stages that it holds. Both
follow from the order of actions, not from times.

The activations of a micro batch are held from its forward pass to the end of its full backward pass. If the
backward pass is split, torch keeps the stage's whole graph until the gradients of weights are computed
(`stage_backward_input` retains the graph), and the gradients of the results of products with weights.

A received tensor has a buffer from the time at which its sender has computed it. An output is held until its
gradient is used; a sent gradient until an input arrives that the stage before has sent later
(`parallel.pipeline`). Between two stages of one rank, the output of the first stage is the buffer of the
second.
Each tensor is `[micro_batch, seq, hidden]`, divided by cp and, with sequence parallelism, by tp.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from nanoscale.config.layout import rank_of, takes
from nanoscale.plan.pipeline.orders import Action, Kind, order, round_length, warmup


@lru_cache(maxsize=1024)
def at_peak(schedule: str, pp: int, virtual_stages: int, micro_batches: int) -> tuple[int, ...]:
    """Return the number of tensors of each rank while most micro batches are in flight.

    1F1B waits for each tensor, and has one gradient of its output and two of its input at a time.
    """
    if pp == 1:
        return (0,)
    if schedule == "1f1b":
        last = pp - 1
        return tuple(
            (min(micro_batches, pp - rank) + 1) * (rank < last) + 2 * (rank > 0)
            for rank in range(pp)
        )
    few = min(micro_batches, 2 * pp)  # the middle of a step repeats itself
    return tuple(max(counts)[1] for counts in by_action(schedule, pp, virtual_stages, few))


@lru_cache(maxsize=1024)
def by_action(
    schedule: str, pp: int, virtual_stages: int, micro_batches: int
) -> tuple[list[tuple[int, int]], ...]:
    """Return the numbers of in-flight micro batches and of tensors during each action of each rank."""
    transfers = _Transfers(
        [rank_of(schedule, pp, stage) for stage in range(pp * virtual_stages)], pp
    )
    ranks = order(schedule, pp, virtual_stages, micro_batches)
    waiting = [list(reversed(actions)) for actions in ranks]
    while any(waiting):
        for actions in waiting:
            if actions and transfers.can_run(actions[-1]):
                transfers.run(actions.pop())
    return transfers.counts


class _Transfers:
    """The tensors between stages that each rank holds while all ranks run their actions in turn."""

    def __init__(self, rank_of_stage: Sequence[int], pp: int) -> None:
        self.counts: tuple[list[tuple[int, int]], ...] = tuple([] for _ in range(pp))
        self._ranks = rank_of_stage
        self._last = len(rank_of_stage) - 1
        self._done: set[tuple[bool, int, int]] = set()
        """Passes that have ended: True if forward, stage, micro batch."""
        self._used: dict[tuple[int, int], int] = {}
        """The number of gradients that a stage had used when it sent the output of a micro batch."""
        self._backward, self._sent = Counter[int](), Counter[int]()
        """Micro batches that have gone backward, and gradients that may still be under way, by stage."""
        self._flying, self._held = Counter[int](), Counter[int]()
        """In-flight micro batches and tensors, by rank."""

    def can_run(self, action: Action) -> bool:
        kind, stage, micro_batch, _ = action
        if kind == "F":
            return stage == 0 or (True, stage - 1, micro_batch) in self._done
        return kind == "W" or stage == self._last or (False, stage + 1, micro_batch) in self._done

    def run(self, action: Action) -> None:
        """Count what a pass receives, and what it sends."""
        kind, stage, micro_batch, _ = action
        rank, held = self._ranks[stage], self._held
        receives = stage > 0 and self._ranks[stage - 1] != rank
        sends = stage < self._last and self._ranks[stage + 1] != rank
        if kind == "F":
            self._flying[rank] += 1
            self._used[stage, micro_batch] = self._backward[stage]
            if receives:
                arrived = self._used[stage - 1, micro_batch] - self._backward[stage]
                held[rank] -= 1 + self._sent[stage] + arrived  # the input is in flight now
                self._sent[stage] = -arrived
        self.counts[rank].append((self._flying[rank], held[rank]))
        if kind == "F":
            if sends:
                held[rank] += 1
                held[self._ranks[stage + 1]] += 1
        elif kind != "W":
            self._backward[stage] += 1
            if receives:
                self._sent[stage] += 1
                held[rank] += 1
                held[self._ranks[stage - 1]] += 1
        if kind in ("B", "W"):
            self._flying[rank] -= 1
            held[rank] -= 2 * sends  # the output and its gradient
        if kind != "W":
            self._done.add((kind == "F", stage, micro_batch))


@dataclass(frozen=True, slots=True)
class Residents:
    """The in-flight micro batches of a rank at its peak, by the rank's stages in the model's order."""

    held: list[int]
    """Micro batches whose activations are held."""
    awaiting_weights: list[int]
    """Held micro batches whose gradients of inputs are computed and whose gradients of weights are not."""


def residents(actions: Sequence[Action], sizes: Sequence[float] | None = None) -> Residents:
    """Return the in-flight micro batches of a rank when its activations first reach their peak.

    Args:
        sizes: the size of one micro batch's activations in each stage of the rank; None: all are equal.
    """
    stages = sorted({action.stage for action in actions})
    indices = {stage: index for index, stage in enumerate(stages)}
    size = sizes or [1.0] * len(stages)
    held, awaiting_weights = [0] * len(stages), [0] * len(stages)
    now, most = 0.0, -1.0
    peak = Residents([], [])
    for action in actions:
        index = indices[action.stage]
        if action.kind == "F":
            held[index] += 1
            now += size[index]
            if now > most:
                most, peak = now, Residents(held.copy(), awaiting_weights.copy())
        elif action.kind == "I":
            awaiting_weights[index] += 1
        else:
            held[index] -= 1
            awaiting_weights[index] -= action.kind == "W"
            now -= size[index]
    return peak


@dataclass(frozen=True, slots=True)
class Moment:
    """The micro batches of a rank during one pass, by the rank's stages in the model's order."""

    held: tuple[int, ...]
    """Micro batches whose activations are held."""
    awaiting_weights: tuple[int, ...]
    """Held micro batches whose gradients of weights are not computed, without the micro batch of a pass W."""
    boundaries: int
    """Tensors between stages, without the inputs of in-flight micro batches."""
    kind: Kind
    """The kind of the pass."""
    stage_index: int
    """The index of the pass's stage among the rank's stages."""


@lru_cache(maxsize=1024)
def moments(
    schedule: str, pp: int, virtual_stages: int, micro_batches: int, rank: int
) -> tuple[Moment, ...]:
    """Return the moments at which a rank's memory may peak.

    A moment is left out if another moment, in a pass of the same kind and stage, holds at least as much. The
    middle of a step repeats itself after 2·pp micro batches, so only 2·pp are counted. Moments are compared by
    sums over the rank's stages, which have about equal sizes.
    """
    few = min(micro_batches, 2 * pp)
    actions = order(schedule, pp, virtual_stages, few)[rank]
    stages = sorted({action.stage for action in actions})
    indices = {stage: index for index, stage in enumerate(stages)}
    held = awaiting_weights = 0
    fronts: dict[tuple[Kind, int], list[tuple[int, int, int]]] = {}
    for number, action in enumerate(actions):
        held += action.kind == "F"
        awaiting_weights -= action.kind == "W"
        front = fronts.setdefault((action.kind, indices[action.stage]), [])
        front[:] = [one for one in front if one[0] > held or one[1] > awaiting_weights]
        if not any(one[0] >= held and one[1] >= awaiting_weights for one in front):
            front.append((held, awaiting_weights, number))
        awaiting_weights += action.kind == "I"
        held -= action.kind in ("B", "W")
    chosen = [number for front in fronts.values() for _, _, number in front]
    tensors = [count for _, count in by_action(schedule, pp, virtual_stages, few)[rank]]
    by_number = dict(_moments(actions, indices, set(chosen), tensors))
    return tuple(by_number[number] for number in chosen)


def _moments(
    actions: Sequence[Action], indices: dict[int, int], wanted: set[int], tensors: Sequence[int]
) -> Iterator[tuple[int, Moment]]:
    """Yield the numbers of the wanted actions, each with its moment."""
    held, awaiting_weights = ([0] * len(indices) for _ in range(2))
    for number, action in enumerate(actions):
        index = indices[action.stage]
        held[index] += action.kind == "F"
        awaiting_weights[index] -= action.kind == "W"
        if number in wanted:
            now = tuple(held), tuple(awaiting_weights), tensors[number]
            yield number, Moment(*now, action.kind, index)
        awaiting_weights[index] += action.kind == "I"
        held[index] -= action.kind in ("B", "W")


@lru_cache(maxsize=4096)
def in_flight(
    schedule: str, pp: int, virtual_stages: int, micro_batches: int
) -> tuple[tuple[int, ...], ...]:
    """Return the numbers at a rank's peak, by rank and by its stages from the model's first to its last.

    GPipe (Huang et al. 2019, 2.3) and looped BFS hold all micro batches, 1F1B pp - rank (Narayanan et al. 2021,
    2.2.1), interleaved 1F1B warm-up + 1, ZB-H1 pp (Qi et al. 2023, table 1), ZB-V 2·pp half stages (section 6),
    DualPipe 2·pp + 1 (DeepSeek-V3, table 2). With split backward passes, a micro batch is held until its
    gradients of weights are computed (`residents`).
    """
    assert takes(schedule, pp, micro_batches), "config.rules refuses it"
    if pp == 1:
        return ((1,),)
    if schedule in ("gpipe", "looped-bfs"):
        return ((micro_batches,) * virtual_stages,) * pp
    if schedule == "dualpipev":
        return tuple((2 * pp - rank, rank + 1) for rank in range(pp))
    if schedule != "zbv":
        return tuple(
            _first_of_rounds(schedule, pp, virtual_stages, micro_batches, rank)
            for rank in range(pp)
        )
    if micro_batches >= 2 * pp - 1:
        return tuple((2 * pp - 1 - rank, rank + 1) for rank in range(pp))
    # With fewer micro batches there is no simple formula, but few actions to count.
    ranks = order(schedule, pp, virtual_stages, micro_batches)
    return tuple(tuple(residents(actions).held) for actions in ranks)


def _first_of_rounds(
    schedule: str, pp: int, virtual_stages: int, micro_batches: int, rank: int
) -> tuple[int, ...]:
    """Return the micro batches in each stage of a rank before the first full backward pass has ended."""
    passes = warmup(schedule, pp, virtual_stages, micro_batches, rank) + 1
    if schedule == "zero-bubble":
        passes += rank
    passes = min(passes, virtual_stages * micro_batches)
    length = round_length(pp, micro_batches)
    full, rest = divmod(passes, virtual_stages * length)
    return tuple(
        full * length + min(max(0, rest - turn * length), length) for turn in range(virtual_stages)
    )
