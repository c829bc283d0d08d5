"""All legal layouts of a job, the fastest that fit first, and the reasons for the first.

The fastest schedule is searched last, among the shapes that are best with 1F1B: a schedule fills the bubble of
a shape, and the other costs of a shape are the same with all of them. Before it, the best shapes try selective
recomputation that keeps fewer products. The largest degree of ep comes first;
other degrees are tried with the best shapes.
"""

import gc
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import islice

from nanoscale.common.units import GIB
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.rules.backends import honored
from nanoscale.plan.hardware.hardware import Hardware
from nanoscale.plan.memory.peak import RankMemory
from nanoscale.plan.predict import (
    ENOUGH,
    Memory,
    Prediction,
    capacity,
    estimate_memory,
    filled_share,
    fits_host,
    fits_probability,
    highest,
    is_simulated,
    predict,
    spread,
    with_time,
)
from nanoscale.plan.search import candidates
from nanoscale.plan.time.step import StepTime, step_time

_GAIN = 0.999
"""The share of the last time that a larger micro batch must reach for a still larger one to be tried."""
REFINED = 48
"""The number of shapes for which other schedules are tried."""
SIMULATED = 12
"""The number of layouts whose pipelines are simulated at the end."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search."""

    ranked: tuple[Prediction, ...]
    """The fitting layouts: first the layouts that may be chosen, then all others, each group by speed."""
    nearest: Prediction | None
    """If no layout fits, the layout that is closest to fitting."""
    considered: int

    @property
    def left_out(self) -> list[Prediction]:
        """Return the layouts that are faster than the best one and may not be chosen."""
        best = self.best
        if best is None or not best.may_be_chosen:
            return []
        unsure = (plan for plan in self.ranked if not plan.may_be_chosen)
        return [plan for plan in unsure if plan.time.seconds < best.time.seconds]

    @property
    def best(self) -> Prediction | None:
        return self.ranked[0] if self.ranked else None

    def front(self) -> list[Prediction]:
        """Return the Pareto front: no layout is faster than a returned one with as little memory, as shown."""
        front: list[Prediction] = []
        for plan in sorted(
            self.ranked, key=lambda p: (float(f"{p.worst.total / GIB:.3g}"), p.time.seconds)
        ):
            if not front or plan.time.seconds < front[-1].time.seconds:
                front.append(plan)
        return front


@contextmanager
def _keeping_all() -> Iterator[None]:
    """Disable garbage collection, which takes a quarter of a search's time and frees almost nothing."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.freeze()  # nor does a later collection have to scan it
            gc.enable()


@_keeping_all()
def search(
    space: candidates.SearchSpace, hardware: Hardware, slowest: float = math.inf
) -> SearchResult:
    """Search the whole space in closed form, and simulate the pipelines of the best layouts.

    Args:
        slowest: leave out layouts that no schedule or recomputation makes as fast as this many times the step
            of another layout that may be chosen.
    """
    tried = _Tried(hardware, slowest)
    for shape in candidates.shapes(space):
        tried.add_all(space, shape)
    if space.base.model.experts:
        for plan in tried.best_of_shapes(1):
            for shared in islice(candidates.expert_degrees(space, plan.config), 1, None):
                tried.add_all(space, shared)
    for plan in tried.best_of_shapes(1):
        for kept in candidates.kept_products(space, plan.config):
            tried.add(space, kept)
    for plan in list(tried.best_of_shapes(2)):
        tried.is_last = True
        for scheduled in candidates.schedules(space, plan.config):
            tried.add_all(space, scheduled)
    ranked = _simulate_first(sorted(tried.fitting, key=_rank))
    return SearchResult(tuple(ranked), tried.nearest, tried.considered)


def search_other_backend(space: candidates.SearchSpace, hardware: Hardware) -> SearchResult | None:
    """Search the same job on the backend that it does not use.

    There is no result if that backend cannot train the job, or DeepSpeed is not installed.
    """
    base = space.base
    if base.lora.rank:  # not predicted with DeepSpeed
        return None
    if base.backend.name == "deepspeed":
        other = replace(base, backend=replace(base.backend, name="native"))
    elif find_spec("deepspeed") is None:
        return None
    else:
        other = replace(base, backend=replace(base.backend, name="deepspeed", compile="off"))
    result = search(replace(space, base=other), hardware)
    some = result.best or result.nearest
    return result if some is not None and honored(some.config) else None


def _simulate_first(ranked: list[Prediction]) -> list[Prediction]:
    """Simulate the pipelines of the fastest layouts, until the first layouts are all simulated."""
    while any(map(_is_estimate, ranked[:SIMULATED])):
        exact = [
            predict(p.config, p.hardware) if _is_estimate(p) else p for p in ranked[:SIMULATED]
        ]
        fitting = [
            plan
            for plan in exact
            if plan.fits and _is_bounded(plan.config, plan.memory, plan.capacity)
        ]
        ranked = sorted([*fitting, *ranked[SIMULATED:]], key=_rank)
    return ranked


def _is_bounded(config: ResolvedConfig, memory: Memory, room: int) -> bool:
    """True if stored activations stay within `parallel.activation_memory` of a device of `room` bytes."""
    share = config.parallel.activation_memory
    return share is None or filled_share(memory, room) <= share


def _is_estimate(plan: Prediction) -> bool:
    return is_simulated(plan.config) and plan.timeline is None


class _Tried:
    def __init__(self, hardware: Hardware, slowest: float) -> None:
        self._hardware = hardware
        self._slowest, self._limit_s = slowest, math.inf
        self.fitting: list[Prediction] = []
        self.considered = 0
        self.is_last = False
        """True in the last stage of the search, whose layouts are not changed any more."""
        self._least = sys.maxsize
        self._nearest: tuple[ResolvedConfig, Memory] | None = None
        self._in_pipelines: dict[str, Memory] = {}

    def add_all(self, space: candidates.SearchSpace, shape: ResolvedConfig) -> None:
        """Add a shape with each kind of recomputation, and with the last resorts if nothing fits."""
        fits, fixed = False, 0
        for config in candidates.recomputations(space, shape):
            fixed = self.add(space, config, fixed)
            fits = fits or not fixed
        if not fits:
            for config in candidates.last_resorts(space, shape):
                fixed = self.add(space, config, fixed if config.zero == shape.zero else 0)

    def add(self, space: candidates.SearchSpace, recomputed: ResolvedConfig, fixed: int = 0) -> int:
        """Add micro batches of rising size until one is too large or no faster.

        Args:
            fixed: bytes that a rank needs with any recomputation; 0 if they are unknown.

        Returns:
            0 if a micro batch fits, otherwise `fixed` for other recomputations.
        """
        fastest, room = math.inf, capacity(self._hardware)
        for config in candidates.micro_batches(space, recomputed):
            self.considered += 1
            limit = max(room, self._least)
            if fixed > limit:
                break
            time = step_time(config, self._hardware)
            if self._is_slow(time):  # a larger micro batch may not be
                if time.seconds > _GAIN * fastest:
                    break
                fastest = time.seconds
                continue
            memory = self._memory(config, limit)
            needed = highest(memory).total
            is_enough = fits_host(config, self._hardware, memory) and _is_bounded(
                config, memory, room
            )
            if not is_enough or fits_probability(needed, room, spread(config)) < ENOUGH:
                if needed < self._least:
                    self._least, self._nearest = needed, (config, memory)
                fixed = _without_activations(memory[0])
                break
            plan = Prediction(config, self._hardware, memory, time, None)
            self.fitting.append(plan)
            if plan.may_be_chosen:
                self._limit_s = min(self._limit_s, self._slowest * time.seconds)
            if plan.time.seconds > _GAIN * fastest:
                break
            fastest = plan.time.seconds
        return fixed if fastest == math.inf else 0

    def _is_slow(self, time: StepTime) -> bool:
        """True if a layout is too slow; before the last stage, even without what later stages change."""
        parts = time.parts
        changes = 0.0 if self.is_last else parts.bubble + parts.pp + parts.recomputed + parts.ep
        return time.seconds - changes > self._limit_s

    def best_of_shapes(self, least_pp: int) -> Iterator[Prediction]:
        """Yield the fastest layout of each of the first `REFINED` shapes that have at least this pp.

        Plans that are added meanwhile are not considered.
        """
        seen: set[tuple[int, ...]] = set()
        for plan in sorted(self.fitting, key=_rank):
            layout = plan.config.parallel
            shape = (
                *(layout.tp, layout.pp, layout.cp, layout.ep, layout.ep_over_tp),
                *(plan.config.zero.stage, layout.dp_replicate),
            )
            if layout.pp >= least_pp and shape not in seen and not self._is_slow(plan.time):
                seen.add(shape)
                yield plan
            if len(seen) == REFINED:
                return

    def _memory(self, config: ResolvedConfig, limit: int) -> Memory:
        """Return the estimated memory. In a pipeline, FSDP2's is the same in ZeRO stages 1 and 2."""
        zero = config.zero
        if config.parallel.pp == 1 or config.backend.name != "native" or not zero.stage:
            return estimate_memory(config, self._hardware, limit)
        others = zero.offload_optimizer, zero.offload_param, config.backend.compile
        key = str((*vars(config.parallel).values(), config.train.micro_batch, *others))
        if key not in self._in_pipelines:
            self._in_pipelines[key] = estimate_memory(config, self._hardware, limit)
        return self._in_pipelines[key]

    @property
    def nearest(self) -> Prediction | None:
        if self._nearest is None:
            return None
        config, memory = self._nearest
        return with_time(config, self._hardware, memory)


def _without_activations(memory: RankMemory) -> int:
    """Return the most bytes in use in a phase without activations."""
    phases = (it.allocated for it in memory.phases.phases if not it.parts["activations"])
    return max(phases, default=0) + memory.context


def _rank(plan: Prediction) -> tuple[bool, float, int, int]:
    """Return a sort key: layouts that may be chosen come first, then the fastest.

    Among layouts equally fast to four digits, fewest axes and least memory come first.
    """
    return not plan.may_be_chosen, float(f"{plan.time.seconds:.4g}"), axes(plan), plan.worst.total


def axes(plan: Prediction) -> int:
    """Return the number of axes of a layout other than dp."""
    layout = plan.config.parallel
    return sum(
        degree > 1 for degree in (layout.tp, layout.pp, layout.cp, layout.ep, layout.dp_replicate)
    )
