"""Quantized matrices in safetensors files: which tensors belong to one, and the shape that it has. No torch.

| format | numbers | scales |
|---|---|---|
| fp8 (DeepSeek, Qwen, GLM) | `weight`, F8_E4M3 | `weight_scale_inv` of blocks of rows and columns |
| compressed-tensors, float and int | `weight`, F8_E4M3 or I8 | `weight_scale` of rows, groups, blocks or all |
| compressed-tensors, packed | `weight_packed` of 4 or 8 bits, `weight_shape` | `weight_scale` of groups |
| mxfp4 (gpt-oss) | `_blocks`, two numbers in a byte | `_scales` of 32 numbers |

A number, less its `weight_zero_point` if there are any, times its scale is the weight, also where the name of
the scale says "inv".
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from nanoscale.common.json_text import Json
from nanoscale.config.hf.safetensors_headers import Stored

METHODS = ("mxfp4", "fp8", "compressed-tensors")
"""The values of `quant_method` whose files are read."""
MXFP4, _PACKED = "MXFP4", "packed"
"""The dtypes of matrices whose numbers are parts of bytes and words."""
GROUP, WORD = 32, 32
"""Numbers that share a scale in MXFP4; bits of a word of packed numbers."""
_NUMBERS = ("F8_E4M3", "I8")
_OF_ACTIVATIONS = re.compile(r"\.(input_\w+|output_\w+|[kqv]_scale|[kqv]_zero_point)$")
"""The ends of names of tensors that quantize what a layer computes, and no weights."""


def joined(tensors: dict[str, Stored], settings: Json) -> dict[str, Stored]:
    """Return the tensors, with each quantized matrix in place of its parts.

    Args:
        settings: `quantization_config` of config.json; it may be empty.
    """
    found = dict(_matrices(tensors, _block(settings)))
    if not found:
        return tensors
    parts = {f"{name}_shape" for name in found}
    for matrix in found.values():
        parts.update(it.name for it in (matrix, matrix.scales, matrix.zero_points) if it)
    rest = {
        name: stored
        for name, stored in tensors.items()
        if name not in parts and not _OF_ACTIVATIONS.search(name)
    }
    return rest | found


def _block(settings: Json) -> tuple[int, int] | None:
    """Return the rows and columns of a block with one scale, if the settings say so."""
    block = settings.get("weight_block_size")
    for group in (settings.get("config_groups") or {}).values():
        block = block or (group.get("weights") or {}).get("block_structure")
    return (int(block[0]), int(block[1])) if block else None


def _matrices(
    tensors: dict[str, Stored], block: tuple[int, int] | None
) -> Iterator[tuple[str, Stored]]:
    for name, numbers in tensors.items():
        stem = name.removesuffix("_packed").removesuffix("_blocks")
        scales = tensors.get(f"{stem}_scale_inv") or tensors.get(f"{stem}_scale")
        if name.endswith("_blocks"):
            matrix = _mxfp4(numbers, tensors.get(f"{stem}_scales"))
        elif scales is None or f"{stem}_g_idx" in tensors:
            matrix = None
        elif stem != name:
            matrix = _packed(numbers, scales, tensors, stem)
        else:
            matrix = _scaled(numbers, scales, block)
        if matrix is not None:
            points = tensors.get(f"{stem}_zero_point")
            points = points and replace(points, bits=matrix.bits)
            yield stem, replace(matrix, zero_points=points)


def _mxfp4(blocks: Stored, scales: Stored | None) -> Stored | None:
    """Return a matrix `[experts, in, out]`.

    The blocks are `[experts, out, in / 32, 16]` bytes of two numbers, the scales `[experts, out, in / 32]`
    (Open Compute Project, Microscaling Formats, version 1.0, section 6.3).
    """
    if scales is None or {blocks.dtype, scales.dtype} != {"U8"}:
        return None
    if len(blocks.shape) != 4 or blocks.shape[:3] != scales.shape or blocks.shape[3] != 16:
        return None
    experts, rows, groups, _ = blocks.shape
    return replace(blocks, dtype=MXFP4, shape=(experts, 32 * groups, rows), scales=scales)


def _packed(words: Stored, scales: Stored, tensors: dict[str, Stored], stem: str) -> Stored | None:
    """Return a matrix `[out, in]` of numbers with an offset, the first one in the lowest bits of a word."""
    named = tensors.get(f"{stem}_shape")
    if named is None or words.dtype != "I32" or len(words.shape) != 2 or len(scales.shape) != 2:
        return None
    content, width = b"".join(named.content()), named.bytes // 2
    rows, columns = (int.from_bytes(content[at : at + width], "little") for at in (0, width))
    bits, groups = WORD * words.shape[1] // max(columns, 1), scales.shape[1]
    if bits not in (4, 8) or columns % groups or not words.shape[0] == scales.shape[0] == rows:
        return None
    found = replace(words, dtype=_PACKED, shape=(rows, columns), bits=bits)
    return replace(found, scales=scales, block=(1, columns // groups))


def _scaled(numbers: Stored, scales: Stored, block: tuple[int, int] | None) -> Stored | None:
    """Return a matrix `[…, out, in]` with scales `[…, rows, columns]` of blocks, `[rows]` or `[1]`."""
    if numbers.dtype not in _NUMBERS or len(numbers.shape) < 2:
        return None
    sizes = numbers.shape[-2:]
    grid = scales.shape[-2:] if len(scales.shape) > 1 else (*(scales.shape or (1,)), 1)
    if block is None or grid != tuple(-(-n // b) for n, b in zip(sizes, block, strict=True)):
        if sizes[0] % grid[0] or sizes[1] % grid[1]:
            return None
        block = (sizes[0] // grid[0], sizes[1] // grid[1])
    return replace(numbers, scales=scales, block=block)
