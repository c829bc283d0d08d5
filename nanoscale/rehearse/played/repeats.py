"""Equal passes of a pipeline stage: two micro batches are played, and the second's record is repeated.

From the second micro batch on, every forward pass of a stage allocates, frees, computes and communicates the
same, and so does every backward pass. A repeated pass makes only the tensors that the schedule sends on.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import count, groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from nanoscale.parallel.pipeline import _Stage
from nanoscale.rehearse.played.record import PLAYED_IN_PIPELINES, Call
from nanoscale.rehearse.played.world import World

_BEFORE = "before"  # the block of the recorded pass's calls that come before its first block begins


def _received(stage: _Stage, batch: int, direction: str) -> tuple[Tensor, ...]:
    """Return the tensors that a pass of a stage receives, which live as long as they do in a real pass."""
    if direction == "forward":
        return () if stage.is_first else stage._retrieve_recv_activations(batch)
    return () if stage.is_last else stage._retrieve_recv_grads(batch)


def _of_block(calls: list[Call], block: str) -> list[Call]:
    return [call._replace(block=block) if call.block == _BEFORE else call for call in calls]


class Repeats:
    """The passes of this rank's stages in one step."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._actions: list[tuple[str, int, Callable[[], None]]] | None = None
        """The actions of the pass that is recorded, with phase and stream; None outside of one."""
        self._passes: dict[tuple[int, str], tuple[Any, ...]] = {}
        """The recorded passes, by stage and direction."""
        self._numbers: dict[int, int] = {}
        """The number of each storage that a recorded pass made, by its address."""
        self._count = count(1)
        self._batches: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """The addresses of each repeated micro batch's storages, by number; negative without a tensor."""
        self._addresses: dict[int, int] = {}
        """The addresses for the micro batch whose pass is repeated."""
        self._results: dict[int, Any] = {}
        """The results of this pass, by the number of the storage: size, strides and dtype, then the tensor."""
        self._start: dict[Any, int] = {}
        """The last event of each stream before the present pass, and the number of calls and events."""

    def patch(self) -> None:
        """Repeat the passes of all stages as long as the world lasts."""
        world, wrap = self._world, self._world.patches.wrap
        for direction in ("forward", "backward"):
            wrap(_Stage, f"{direction}_one_chunk", partial(self._played_once, direction))
        for name in ("add_work", "begin_block"):
            wrap(world, name, partial(partial, self._do))
        wrap(world, "add_event", partial(partial, self._add_event))
        wrap(world, "set_kind", partial(partial, self._set_kind))
        wrap(world, "_change", partial(partial, self._change))

    def _played_once(self, direction: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def one_chunk(stage: Any, batch: int, *args: Any, **options: Any) -> Any:
            world, record, name = self._world, self._world.record, (stage.stage_index, direction)
            before, waits, calls = record.operations, world.waits.copy(), len(record.calls)
            world.end_segment()
            self._start = {**world.last, "calls": calls, "events": len(record.events)}
            block = world._block[0] if world._block[1] == direction else ""
            if batch < PLAYED_IN_PIPELINES:
                before_pass, world._block = world._block, (_BEFORE, direction)
                self._actions = [] if batch == PLAYED_IN_PIPELINES - 1 else None
                output = plain(stage, batch, *args, **options)
                actions, self._actions = self._actions, None
                made = record.calls[calls:]
                record.calls[calls:] = _of_block(made, block)
                if world._block[0] == _BEFORE:
                    world._block = before_pass
                if actions is not None:
                    tensors = [output] if direction == "forward" else stage.bwd_cache[batch]
                    results = [each if each is None else self._described(each) for each in tensors]
                    counts = world.waits - waits, record.operations - before
                    parts = [(at, [*acts]) for at, acts in groupby(actions, itemgetter(0, 1))]
                    self._passes[name] = parts, results, made, *counts
                return output
            if options.get("loss") is not None:
                options["loss"].detach_()  # frees its graph
            actions, results, calls_again, waits_again, operations = self._passes[name]
            received = _received(stage, batch, direction)
            tensors = self._repeated(batch, actions, results)
            record.operations = before + operations
            record.calls += _of_block(calls_again, block)
            world.waits += waits_again
            if direction == "forward":
                stage.fwd_cache[batch] = tensors, received
                return tensors[0]
            del stage.fwd_cache[batch]
            stage.bwd_cache[batch] = tensors
            return None

        return one_chunk

    def _described(self, result: Tensor) -> tuple[Any, ...]:
        number = self._numbers[result.untyped_storage()._cdata]
        return number, result.shape, result.stride(), result.dtype

    def _repeated(self, batch: int, actions: Any, results: list[Any]) -> tuple[Any, ...]:
        """Repeat a pass for a micro batch; return the tensors that the schedule sends on."""
        world, stream = self._world, self._world.stream
        self._addresses = self._batches[batch]
        self._results = {each[0]: each[1:] for each in results if each is not None}
        for (phase, world.stream), acts in actions:
            with world.during(phase):
                for *_, act in acts:
                    act()
        world.stream, made, self._results = stream, self._results, {}
        return tuple(each if each is None else made[each[0]] for each in results)

    # The actions of a pass. Each is recorded, and does the same for the present micro batch if it is repeated.

    def _add(self, act: Callable[[], None]) -> None:
        if self._actions is not None:
            self._actions.append((self._world.phase, self._world.stream, act))

    def _do(self, plain: Callable[..., None], value: Any) -> None:
        self._add(partial(plain, value))
        plain(value)

    def _add_event(
        self, plain: Callable[..., None], what: str, of: int, stream: int | None = None
    ) -> None:
        plain(what, of, stream)
        start, base = self._start, "calls"
        # An event of this pass, the last one of a stream before it, or a fixed one.
        if what == "after":
            last = (each for each, at in start.items() if at == of and each != "calls")
            base = "events" if of >= start.get("events", 0) else next(last, "")
        offset = of - start.get(base, 0)
        if of >= 0:
            self._add(lambda: plain(what, offset + self._start.get(base, 0), stream))

    def _set_kind(self, plain: Callable[..., None], address: int, *kinds: Any) -> None:
        plain(address, *kinds)
        if number := self._numbers.get(address):
            self._add(lambda: plain(self._addresses[number], *kinds))

    def _change(self, plain: Callable[..., None], address: int, before: int, after: int) -> None:
        world, in_host = self._world, self._world._new_in_host
        is_new = address not in world._kinds
        if is_new:
            self._numbers.pop(address, None)
        if is_new and self._actions is not None:
            number = self._numbers[address] = next(self._count)
            self._add(lambda: self._make(number, after, in_host))
        elif number := self._numbers.get(address, 0):
            self._add(lambda: self._resize_made(number, after))
        elif (
            address in world._held
        ):  # gathered parameters; a freed tensor is freed by repeated passes, too
            self._add(lambda: self._resize(address, after))
        plain(address, before, after)

    # Storages of repeated micro batches

    def _make(self, number: int, size: int, in_host: bool) -> None:
        world = self._world
        world._new_in_host = in_host
        if number in self._results:
            shape, strides, dtype = self._results[number]
            made = torch.empty_strided(shape, strides, dtype=dtype, device=world.device)
            self._results[number] = made.requires_grad_(world.phase == "forward")
            self._addresses[number] = made.untyped_storage()._cdata
        else:
            self._addresses[number] = address = -next(self._count)
            world._held[address] = None, size  # type: ignore[assignment]
            world._change(address, 0, size)

    def _resize_made(self, number: int, after: int) -> None:
        if (address := self._addresses[number]) < 0 and address in self._world._held:
            self._resize(address, after)

    def _resize(self, address: int, after: int) -> None:
        held = self._world._held
        reference, before = held.pop(address)
        if after or address >= 0:
            held[address] = reference, after
        self._world._change(address, before, after)
