"""Quantized weights as published: any box of them, and models that begin with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoscale.checkpoint.hf import load, load_any_model
from nanoscale.config.hf.families import UnsupportedError
from nanoscale.config.hf.safetensors_headers import BadFileError
from nanoscale.config.hf.shape import read_shape, require_causal
from nanoscale.config.hf.text_part import folder_tensors
from nanoscale.models.hf_model import build
from nanoscale.models.transformer import Transformer
from tests.support import hf_models
from tests.support.hf_families import save

ROWS, COLUMNS = 24, 48
Parts = tuple[dict[str, Tensor], Tensor, dict[str, Any]]


def fp8(block: tuple[int, int] | None, grid: tuple[int, ...], name: str = "weight_scale") -> Parts:
    numbers = torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn)
    scales = torch.rand(grid) + 0.5
    settings = {"weight_block_size": block} if block else {}
    expected = numbers.float() * naive(scales, block or (ROWS // (*grid, 1)[0], COLUMNS))
    return {"x.weight": numbers, f"x.{name}": scales}, expected, settings


def naive(scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the scale of each number, which is the scale of its block."""
    grid = scales.reshape(len(scales) if scales.ndim else 1, -1)
    found = torch.empty(ROWS, COLUMNS)
    for row in range(ROWS):
        for column in range(COLUMNS):
            found[row, column] = grid[row // block[0], column // block[1]]
    return found


def packed(bits: int, *, zero_points: bool) -> Parts:
    groups, low = 3, -(1 << bits - 1)
    numbers = torch.randint(low, -low, (ROWS, COLUMNS))
    points = torch.randint(low, -low, (ROWS, groups)) if zero_points else torch.zeros(ROWS, groups)
    scales = torch.rand(ROWS, groups) + 0.5
    width = (1, COLUMNS // groups)
    expected = (numbers - naive(points, width)) * naive(scales, width)
    parts = {
        "x.weight_packed": words(numbers - low, bits),
        "x.weight_scale": scales,
        "x.weight_shape": torch.tensor([ROWS, COLUMNS]),
    }
    if zero_points:
        parts["x.weight_zero_point"] = words((points - low).T, bits).T.contiguous()
    return parts, expected.float(), {}


def words(numbers: Tensor, bits: int) -> Tensor:
    """Return rows of 32-bit words that hold the numbers, the first one in the lowest bits."""
    per_word, result = 32 // bits, []
    for row in numbers.long().tolist():
        whole = [row[at : at + per_word] for at in range(0, len(row), per_word)]
        result.append([sum(n << bits * i for i, n in enumerate(each)) for each in whole])
    return torch.tensor(result).to(torch.int32)


def int8_with_zero_points() -> Parts:
    numbers = torch.randint(-128, 128, (ROWS, COLUMNS))
    scales, points = torch.rand(ROWS, 1) + 0.5, torch.randint(-128, 128, (ROWS, 1))
    expected = (numbers - points) * scales
    parts = {"x.weight": numbers.char(), "x.weight_scale": scales}
    return parts | {"x.weight_zero_point": points.char()}, expected, {}


FORMATS: dict[str, Any] = {
    "fp8, blocks that do not divide it": lambda: fp8((16, 32), (2, 2), "weight_scale_inv"),
    "fp8, a scale for each row": lambda: fp8(None, (ROWS, 1)),
    "fp8, a list of scales": lambda: fp8(None, (ROWS,)),
    "fp8, one scale": lambda: fp8(None, ()),
    "int8 with zero points": int8_with_zero_points,
    "4 bits": lambda: packed(4, zero_points=False),
    "4 bits with zero points": lambda: packed(4, zero_points=True),
    "8 bits": lambda: packed(8, zero_points=False),
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_box_is_read(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    parts, expected, settings = FORMATS[name]()
    plain = {"x.bias": torch.zeros(3), "x.input_scale": torch.ones(())}
    save_file(parts | plain, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    found = folder_tensors(tmp_path)
    assert found.keys() == {"x.weight", "x.bias"}
    matrix = found["x.weight"]
    assert matrix.shape == (ROWS, COLUMNS)
    for rows, columns in (
        ((0, ROWS), (0, COLUMNS)),
        ((5, 21), (3, 47)),
        ((17, 18), (31, 34)),
        ((16, 24), (32, 33)),
    ):
        box = slice(*rows, 1), slice(*columns, 1)
        values = load.read_part(opened, matrix, box)
        assert (values - expected[box]).abs().max() <= 1e-5, (rows, columns)


def opened(file: Path) -> Any:
    from safetensors import safe_open

    return safe_open(file, "pt").__enter__()


def quantize(folder: Path, names: str, drop: str = "") -> None:
    """Store matrices of a folder in fp8 with scales of blocks, except for scales that are dropped."""
    held = {
        name: it for file in folder.glob("*.safetensors") for name, it in load_file(file).items()
    }
    for name, value in [*held.items()]:
        if names in name and value.ndim == 2:
            scales = value.abs().max() / 448 * torch.ones([-(-n // 16) for n in value.shape])
            held[name] = (value / scales[0, 0]).to(torch.float8_e4m3fn)
            held[f"{name}_scale_inv"] = scales * (1 + torch.rand(scales.shape))
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file({name: it for name, it in held.items() if name != drop}, folder / "model.safetensors")
    document = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (folder / "config.json").write_text(json.dumps(document | {"quantization_config": settings}))


def of_transformers(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    settings = FineGrainedFP8Config(dequantize=True, weight_block_size=(16, 16))
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=settings, dtype=torch.float32
    )


def test_a_model_in_fp8_begins_as_in_transformers(tmp_path: Path) -> None:
    save("llama", tmp_path)
    quantize(tmp_path, "_proj")
    shape, theirs = read_shape(tmp_path), of_transformers(tmp_path)
    ours = Transformer(shape)
    load.load(tmp_path, shape, {f"model.{name}": it for name, it in ours.named_parameters()})
    expected = theirs.get_parameter("model.layers.1.mlp.down_proj.weight")
    assert torch.allclose(ours.get_parameter("layers.1.mlp.down.weight"), expected, rtol=1e-6)


def test_experts_in_fp8_are_read_one_by_one_into_a_matrix_of_all(tmp_path: Path) -> None:
    hf_models.save("glm4_moe", tmp_path)
    quantize(tmp_path, "_proj")
    shape = hf_models.shape_of(tmp_path)
    state = {
        f"model.hf.{name}": torch.empty(it.shape) for name, it in build(shape).named_parameters()
    }
    load_any_model.load(tmp_path, shape, state)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    held = load_file(tmp_path / "model.safetensors")
    first = "model.layers.1.mlp.experts.2.up_proj.weight"
    scales = held[f"{first}_scale_inv"].repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert torch.allclose(
        state[f"model.hf.{name}"][2, 16:], held[first].float() * scales, rtol=1e-6
    )


def test_a_missing_scale_and_another_method_are_errors(tmp_path: Path) -> None:
    hf_models.save("glm4_moe", tmp_path)
    name = "model.layers.1.self_attn.o_proj.weight"
    quantize(tmp_path, "o_proj", drop=f"{name}_scale_inv")
    shape = hf_models.shape_of(tmp_path)
    with pytest.raises(
        BadFileError, match=f"{name} is F8_E4M3, and only .* without scales that fit"
    ):
        load_any_model.find(tmp_path, build(shape))
    with pytest.raises(
        UnsupportedError, match="weights quantized by gptq are not read, only by mxfp4"
    ):
        require_causal({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}})
