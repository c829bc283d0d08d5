"""Weights as published, which transformers converts on loading: read by shard, and written in that form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nanoscale.checkpoint.flat import FlatShard
from nanoscale.checkpoint.hf import conversions, load, load_any_model
from nanoscale.checkpoint.hf.conversions import RecordedTensor, box_slices, reverted
from nanoscale.config.hf.safetensors_headers import BadFileError
from nanoscale.models.hf_model import build, named_tensors
from tests.support import hf_models


def held(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


@pytest.mark.parametrize(
    ("family", "published"),
    [
        ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w3.weight"),
        ("minimax_m2", "model.layers.0.block_sparse_moe.e_score_correction_bias"),
        ("glm4_moe", "model.layers.1.mlp.experts.3.up_proj.weight"),
        ("qwen3_next", "model.layers.0.mlp.experts.3.up_proj.weight"),
        ("nemotron_h", "backbone.layers.2.mixer.experts.3.up_proj.weight"),
        ("hrm_text", "model.L_module.layers.0.attn.gqkv_proj.weight"),
        ("gemma4_text", "model.layers.0.layer_scalar"),
    ],
)
def test_two_ranks_read_what_transformers_loads_and_write_what_they_read(
    family: str, published: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    saved = hf_models.save(family, tmp_path)
    files, shape = held(tmp_path), hf_models.shape_of(tmp_path)
    assert published in files
    expected = dict(named_tensors(AutoModelForCausalLM.from_pretrained(tmp_path)))
    read: list[int] = []
    monkeypatch.setattr(conversions, "read_part", counted(read))
    model = build(shape)
    load_any_model.find(tmp_path, model)
    assert read == [], "the launcher reads headers only"
    results = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
    for rank in range(2):
        state: dict[str, Any] = {}
        for name, whole in results.items():
            middle = whole.numel() // 2
            local = whole.detach().view(-1)[middle * rank : whole.numel() if rank else middle]
            state[f"model.hf.{name}"] = FlatShard(local, tuple(whole.shape), middle * rank)
        load_any_model.load(tmp_path, shape, state)
    assert sum(read) == sum(tensor.numel() for tensor in expected.values()), "each element once"
    assert all(torch.equal(results[name], tensor) for name, tensor in expected.items())
    assert expected.keys() == dict(named_tensors(saved)).keys()
    recorded = {name: in_memory(tensor.detach()) for name, tensor in results.items()}
    written = reverted(recorded, model)
    assert written.keys() == files.keys()
    for name, tensor in written.items():
        memory = torch.empty(tensor.shape)
        tensor.fill(memory, (0,) * memory.ndim)
        assert torch.equal(memory, files[name]), name


def counted(read: list[int]) -> Any:
    original = load.read_part

    def read_part(*arguments: Any) -> Tensor:
        values = original(*arguments)
        read.append(values.numel())
        return values

    return read_part


def in_memory(value: Tensor) -> RecordedTensor:
    def fill(memory: Tensor, offsets: tuple[int, ...]) -> None:
        memory.copy_(value[box_slices(memory, offsets)])

    return RecordedTensor(tuple(value.shape), fill)


def test_what_cannot_be_computed_is_refused_by_name(tmp_path: Path) -> None:
    """An operation that is not computed by shard; an expert that is missing, and one of another size."""
    hf_models.save("inkling2_text", tmp_path / "inkling")
    with pytest.raises(BadFileError, match="by Interleave, and only Chunk, Concatenate, Merge"):
        load_any_model.find(tmp_path / "inkling", build(hf_models.shape_of(tmp_path / "inkling")))
    hf_models.save("mixtral", tmp_path / "mixtral")
    shape = hf_models.shape_of(tmp_path / "mixtral")
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    for change, problem in (
        (None, r"model.layers.1.mlp.experts.down_proj is 3 × 32 × 48, and the shape needs 4 × 32"),
        ([32, 47], "down_proj cannot be made of the tensors of the files: its parts have differe"),
    ):
        tensors = held(tmp_path / "mixtral") | {name: torch.zeros(change or [0])}
        rewrite(tmp_path / "mixtral", {it: v for it, v in tensors.items() if v.numel()})
        with pytest.raises(BadFileError, match=problem):
            load_any_model.find(tmp_path / "mixtral", build(shape))


def rewrite(folder: Path, tensors: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors")


def test_numbers_that_json_lacks_are_read(tmp_path: Path) -> None:
    hf_models.save("nemotron_h", tmp_path)
    shape = hf_models.shape_of(tmp_path)
    assert shape.hf_config["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert json.loads((tmp_path / "config.json").read_text()) == shape.hf_config
    assert build(shape).config.time_step_limit[1] == float("inf")
