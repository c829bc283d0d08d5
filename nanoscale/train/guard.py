"""The comparison of replicas: sums over the bits of tensors that the layout keeps equal on several ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import cache

import torch
from torch import Tensor

from nanoscale.backends.base import Engine
from nanoscale.common.units import counted
from nanoscale.parallel import process_group

_SETS = 4
"""The most sets of ranks that a rank shares tensors with: divided by tp or not, of experts or not."""
_NO_SET = [-1, 0]
_CHUNK = 1 << 18
"""The integers that are summed at once, of which each needs 16 bytes for a moment."""
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


class ReplicaError(RuntimeError):
    """This rank has other bits than its replicas: a device, its memory or the code has made an error."""


@torch.no_grad()
def require_equal_replicas(engine: Engine, step: int) -> None:
    """Compare this rank's tensors with those of its replicas; every rank calls it after the same step.

    Raises:
        ReplicaError: this rank differs, or one of two replicas does.
        ConnectionError: another rank differs.
    """
    if process_group.world_size() == 1:
        return
    rank = process_group.rank()
    sets: dict[tuple[int, ...], dict[str, Tensor]] = defaultdict(dict)
    for name, ranks, tensors in engine.replicated():
        if len(ranks) > 1:
            sets[ranks][name] = _combined([_digest(tensor) for tensor in tensors])
    assert len(sets) <= _SETS
    digests = [_combined(list(by_name.values())) for by_name in sets.values()]
    totals = torch.stack(digests).tolist() if digests else []  # the only wait for the device
    # Ranks that share a set have the same parameters, so a set has the same index on all of its ranks.
    row = [value for ranks, total in zip(sets, totals, strict=True) for value in (ranks[0], total)]
    row += _NO_SET * (_SETS - len(sets))
    differing = _differing(process_group.gather_numbers(row, torch.int64).tolist())
    if differing is None:
        return
    index, wrong, members = differing
    local = list(sets.values())[index].items() if rank in members else ()
    by_rank = process_group.gather({name: digest.item() for name, digest in local})
    of_members = [by_rank[member] for member in members]
    first = next(name for name in of_members[0] if len({each[name] for each in of_members}) > 1)
    text = f"{_named(wrong, members)} at step {step}; the first parameter that differs is {first}"
    if rank in wrong:
        raise ReplicaError(text)
    raise ConnectionError(f"a peer was lost: {text}")


def _differing(rows: list[list[int]]) -> tuple[int, list[int], list[int]] | None:
    """Return the index of a set whose ranks do not agree, the ranks that differ from most, and all of its
    ranks; None if all agree.

    Without a majority, all of the set differ. `rows`: by rank, the first rank and the digest of each set.
    """
    for index in range(_SETS):
        sets: dict[int, dict[int, int]] = defaultdict(dict)
        for rank, row in enumerate(rows):
            first, digest = row[2 * index : 2 * index + 2]
            sets[first][rank] = digest
        for first, digests in sets.items():
            common, count = Counter(digests.values()).most_common(1)[0]
            if count < len(digests) and first != _NO_SET[0]:
                majority = 2 * count > len(digests)
                wrong = [r for r, digest in digests.items() if not majority or digest != common]
                return index, wrong, list(digests)
    return None


def _named(wrong: list[int], members: list[int]) -> str:
    names = " and ".join(map(str, wrong))
    if len(wrong) == len(members):
        return f"ranks {names} differ in tensors that must be equal"
    verb = f"rank {names} differs" if len(wrong) == 1 else f"ranks {names} differ"
    return (
        f"{verb} from the {counted(len(members) - len(wrong), 'other replica')} of the same tensors"
    )


def _digest(tensor: Tensor) -> Tensor:
    """Return 64 bits of a plain tensor, int64, a scalar on its device. One flipped bit always changes them."""
    bits = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = bits.numel() // 4 * 4
    if bits.storage_offset() % 4:
        bits = bits.clone()
    tail = bits[whole:]
    return _combined([_weighted_sum(bits[:whole].view(torch.int32)), _weighted_sum(tail)])


def _weighted_sum(words: Tensor) -> Tensor:
    """Return the sum, modulo 2 ** 64, of integers `[n]`, each times an odd number that follows from its
    position."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for chunk in words.split(_CHUNK):  # so that no large tensor is copied
        total = (
            total * _ODD + chunk.to(torch.int64).mul_(_weights(words.device)[: len(chunk)]).sum()
        )
    return total


def _combined(digests: list[Tensor]) -> Tensor:
    return _weighted_sum(torch.stack(digests))


@cache
def _weights(device: torch.device) -> Tensor:
    """Return odd numbers, int64 `[_CHUNK]`: a difference of less than 64 bits times one is never 0."""
    generator = torch.Generator().manual_seed(0)
    return (torch.randint(2**62, (_CHUNK,), generator=generator) * 2 + 1).to(device)
