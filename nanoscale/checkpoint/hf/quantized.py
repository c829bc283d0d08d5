"""Reading boxes of quantized matrices: numbers times scales, in fp32.

`config.hf.quantized_files` describes the formats.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nanoscale.config.hf.quantized_files import GROUP, MXFP4, WORD
from nanoscale.config.hf.safetensors_headers import Stored

Box = tuple[slice, ...]
Read = Callable[[Stored, Box], Tensor]
"""A function that reads a box of a file's tensor, as it is stored."""
_FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""The numbers of 4 bits without a sign."""


def read_quantized(read: Read, stored: Stored, box: Box) -> Tensor:
    """Return a box of a quantized matrix; of the files, only what it needs is read."""
    if stored.dtype == MXFP4:
        return _read_mxfp4(read, stored, box)
    rows, columns = box[-2:]
    grid = (*box[:-2], _blocks(rows, stored.block[0]), _blocks(columns, stored.block[1]))
    if stored.bits:
        words = read(stored, (rows, _blocks(columns, WORD // stored.bits)))
        values = _unpacked(words, stored.bits, columns)
    else:
        values = read(stored, box).float()
    if stored.zero_points is not None:
        points = _read_zero_points(read, stored.zero_points, grid)
        values -= _of_numbers(points, rows, columns, stored.block)
    elif stored.bits:
        values -= 1 << stored.bits - 1
    assert stored.scales is not None
    if len(stored.scales.shape) < 2:
        whole = read(stored.scales, tuple(map(slice, stored.scales.shape)))
        scales = whole.reshape(-1, 1)[grid[-2]]
    else:
        scales = read(stored.scales, grid)
    return values * _of_numbers(_factors(scales), rows, columns, stored.block)


def _blocks(wanted: slice, size: int) -> slice:
    """Return the blocks that hold these numbers."""
    return slice(wanted.start // size, -(-wanted.stop // size))


def _of_numbers(of_blocks: Tensor, rows: slice, columns: slice, block: tuple[int, int]) -> Tensor:
    """Return the value of each number's block."""
    for dim, wanted, size in ((-2, rows, block[0]), (-1, columns, block[1])):
        repeated = of_blocks.repeat_interleave(size, dim)
        of_blocks = repeated.narrow(dim, wanted.start % size, wanted.stop - wanted.start)
    return of_blocks


def _factors(scales: Tensor) -> Tensor:
    """Return scales in fp32; bytes are exponents of 2."""
    return (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()


def _unpacked(words: Tensor, bits: int, wanted: slice) -> Tensor:
    """Return numbers of words `[…, words]`, of which the first holds the first wanted number."""
    numbers = words.unsqueeze(-1) >> torch.arange(0, WORD, bits) & (1 << bits) - 1
    first = wanted.start % (WORD // bits)
    return numbers.flatten(-2).narrow(-1, first, wanted.stop - wanted.start).float()


def _read_zero_points(read: Read, stored: Stored, grid: Box) -> Tensor:
    if not stored.bits:
        return read(stored, grid).float()
    words = read(stored, (_blocks(grid[0], WORD // stored.bits), grid[1]))
    return _unpacked(words.mT, stored.bits, grid[0]).mT


def _read_mxfp4(read: Read, stored: Stored, box: Box) -> Tensor:
    """Return a box `[experts, in, out]` in bf16, which holds it exactly, made of one expert after another."""
    assert stored.scales is not None
    experts, inputs, outputs = box
    numbers, found = torch.tensor(_FP4 + [-number for number in _FP4]), []
    for expert in range(experts.start, experts.stop):
        where = (slice(expert, expert + 1), outputs, _blocks(inputs, GROUP))
        pairs = read(stored, where)[0].int()
        values = numbers[torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)]
        scaled = (values * _factors(read(stored.scales, where)[0]).unsqueeze(-1)).flatten(-2)
        wanted = scaled.narrow(-1, inputs.start % GROUP, inputs.stop - inputs.start)
        found.append(wanted.mT.to(torch.bfloat16))
    return torch.stack(found)
