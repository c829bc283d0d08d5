"""Made-up loads of experts: tensors without numbers cannot be routed, so every expert gets as many tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from nanoscale.models import moe
from nanoscale.rehearse.played.patches import Patches


class EvenLoads:
    """The loads of the last routing, of which the host reads how many rows to send, receive and compute."""

    def __init__(self, rank: int, ranks: int, wait: Callable[[str], None]) -> None:
        """`rank` of `ranks` among which the experts are divided; `wait` is called if the host reads them."""
        self._rank, self._ranks, self._wait = rank, ranks, wait
        self._loads: list[int] = []
        """The choices of each expert by the tokens of one rank."""

    def patch(self, patches: Patches) -> None:
        """Let the host read them."""
        patches.wrap(moe, "count", self._counting)
        patches.wrap(FakeTensor, "tolist", self._answering)

    def _counting(self, count: Callable[..., Any]) -> Callable[..., Any]:
        def counted(chosen: Any, experts: int) -> Any:
            least, more = divmod(chosen.numel(), experts)
            self._loads = [least + (expert < more) for expert in range(experts)]
            return count(chosen, experts)

        return counted

    def _answering(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def tolist(tensor: Any) -> Any:
            share = len(self._loads) // self._ranks
            sums = [
                sum(self._loads[rank * share : (rank + 1) * share]) for rank in range(self._ranks)
            ]
            if tuple(tensor.shape) == (2, self._ranks):
                self._wait("tolist")
                return [sums, [sums[self._rank]] * self._ranks]
            if tensor.ndim == 1 and len(tensor) == share:
                self._wait("tolist")
                local = self._loads[self._rank * share : (self._rank + 1) * share]
                return [load * self._ranks for load in local]
            return plain(tensor)

        return tolist
