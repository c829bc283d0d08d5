"""The comparison of replicas: sums over the bits of tensors that the layout keeps equal on several ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from nanoscale.backends.base import Engine
from nanoscale.common.errors import LostPeerError
from nanoscale.common.units import counted, numbered
from nanoscale.parallel import process_group

_SETS = 8
"""The most sets of ranks that a rank shares tensors with: divided by tp or not, of experts or not, replicas of
shards or all ranks with shards."""
_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 22}
"""The integers that are summed at once. Each needs 8 bytes for a moment; on a CPU all fit in the cache."""


class ReplicaError(RuntimeError):
    """This rank has other bits than its replicas: a device, its memory or the code has made an error."""


@torch.no_grad()
def require_equal_replicas(engine: Engine, step: int) -> None:
    """Compare this rank's tensors with its replicas' tensors; every rank calls it after the same step.

    Raises:
        ReplicaError: this rank differs, or one of two replicas does.
        LostPeerError: another rank differs.
    """
    if process_group.world_size() == 1:
        return
    sets: dict[tuple[int, ...], list[tuple[str, Tensor]]] = defaultdict(list)
    for name, ranks, tensors in _replicated(engine):
        if len(ranks) > 1:
            sets[ranks] += [(name, part) for tensor in tensors for part in _sums(tensor)]
    assert len(sets) <= _SETS
    digests = [_weighted_sum(torch.stack([part for _, part in sums])) for sums in sets.values()]
    totals = torch.stack(digests).tolist() if digests else []  # the only wait for the device
    # Ranks that share a set have the same parameters, so a set has the same index on all of its ranks.
    row = [value for ranks, total in zip(sets, totals, strict=True) for value in (ranks[0], total)]
    row += [-1, 0] * (_SETS - len(sets))
    differing = _differing(process_group.gather_numbers(row, torch.int64).tolist())
    if differing is None:
        return
    index, wrong, members = differing
    local = list(sets.values())[index] if process_group.rank() in members else []
    by_rank = process_group.gather([(name, part.item()) for name, part in local])
    compared = zip(*(by_rank[member] for member in members), strict=True)
    first = next(same[0][0] for same in compared if len(set(same)) > 1)
    text = f"{_named(wrong, members)} at step {step}; the first parameter that differs is {first}"
    if process_group.rank() in wrong:
        raise ReplicaError(text)
    raise LostPeerError(f"a peer was lost: {text}")


def _replicated(engine: Engine) -> Iterator[tuple[str, tuple[int, ...], list[Tensor]]]:
    """Yield what `Engine.replicated` does, and the biases of routers, which all ranks of a stage have."""
    yield from engine.replicated()
    if engine.balance is not None:
        peers = process_group.world_size() // engine.config.parallel.pp
        ranks = tuple(range(engine.coordinates.pp * peers, (engine.coordinates.pp + 1) * peers))
        for name, bias in engine.balance.state().items():
            yield f"balance.{name}", ranks, [bias]


def _differing(rows: list[list[int]]) -> tuple[int, list[int], list[int]] | None:
    """Return a set of ranks that do not agree: its index, the ranks that differ from the majority, and all its
    ranks. Return None if all sets agree. Without a majority, all ranks of the set differ.

    Args:
        rows: for each rank, the first rank of each of its sets, followed by the digest of that set.
    """
    for index in range(_SETS):
        sets: dict[int, dict[int, int]] = defaultdict(dict)
        for rank, row in enumerate(rows):
            sets[row[2 * index]][rank] = row[2 * index + 1]
        for digests in sets.values():  # the set of -1 has equal digests
            common, count = Counter(digests.values()).most_common(1)[0]
            if count < len(digests):
                majority = 2 * count > len(digests)
                wrong = [r for r, digest in digests.items() if not majority or digest != common]
                return index, wrong, list(digests)
    return None


def _named(wrong: list[int], members: list[int]) -> str:
    text = f"{numbered('rank', wrong)} differ" + "s" * (len(wrong) == 1)
    if others := len(members) - len(wrong):
        return f"{text} from the {counted(others, 'other replica')} of the same tensors"
    return f"{text} in tensors that must be equal"


def _sums(tensor: Tensor) -> Iterator[Tensor]:
    """Yield 64 bits of each chunk of a plain tensor. One flipped bit always changes them."""
    # A view of one element keeps a stride that is not 1, so it is set here.
    bits = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    if bits.storage_offset() % 4:
        bits = bits.clone()
    whole = bits.numel() // 4 * 4
    for words in (bits[:whole].view(torch.int32), bits[whole:]):
        chunks = words.split(_CHUNK[tensor.device.type])
        yield from (_weighted_sum(chunk) for chunk in chunks if len(chunk))


def _weighted_sum(integers: Tensor) -> Tensor:
    """Return the sum of the integers of a chunk, modulo 2 ** 64, each times an odd number of its position."""
    return (integers * _weights(integers.device)[: len(integers)]).sum()


@cache
def _weights(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    count = _CHUNK[device.type]
    return (torch.randint(2**62, (count,), generator=generator) * 2 + 1).to(device)
