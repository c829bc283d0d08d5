"""The weights of a Hugging Face folder in every rank's shards: the same model, and no more read than held."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from nanoscale.backends.construction import build_stages
from nanoscale.backends.gradients import local_tensor
from nanoscale.checkpoint.flat import FlatShard
from nanoscale.checkpoint.hf import load
from nanoscale.checkpoint.hf.names import BIASES, hf_positions, shapes
from nanoscale.config.hf.safetensors_headers import BadFileError
from nanoscale.config.hf.shape import read_shape
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Backend, Model
from nanoscale.models.initialization import initialize
from nanoscale.models.transformer import Transformer
from nanoscale.parallel import process_group
from nanoscale.parallel.mesh import make_layout
from nanoscale.train.job import make_engine
from tests.support.hf_families import logits, save
from tests.support.jobs import make_config
from tests.support.live_memory import peak_bytes
from tests.support.ranks import run_ranks
from tests.support.rows import exhaustive

CPU = torch.device("cpu")
PROMPT = list(range(3, 19))


def config_for(
    folder: Path, deepspeed: bool = False, stage: int = 0, **degrees: Any
) -> ResolvedConfig:
    shape = replace(read_shape(folder), init_from=str(folder))
    config = make_config(
        folder,
        dp=degrees.get("dp", 1),
        stage=stage,
        model=shape,
        precision="fp32",
        micro_batch=1,
        parallel=degrees,
    )
    return replace(config, backend=Backend(name="deepspeed")) if deepspeed else config


def begin_and_look(_rank: int, config: ResolvedConfig) -> tuple[list[float], int, int]:
    """Return the logits of the token after PROMPT, and the counts of numbers read and held."""
    process_group.join(config.world_size, CPU, 120.0)
    engine, read = make_engine(config, CPU), []
    plain = load.read_part

    def counting(*arguments: Any) -> torch.Tensor:
        part = plain(*arguments)
        read.append(part.numel())
        return part

    load.read_part = counting
    engine.load_pretrained(Path(str(config.model.init_from)))
    held = sum(
        local_numbers(t) for n, t in engine.state().items() if n.startswith(("model.", BIASES))
    )
    return engine.next_token_logits(PROMPT).tolist(), sum(read), held


def local_numbers(tensor: torch.Tensor) -> int:
    if isinstance(tensor, FlatShard):
        return tensor.local.numel()
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).numel()


WHOLE = {"sequence_parallel": False}
LAYOUTS: list[Any] = [
    ("llama", {"pp": 2, "cp": 2, "stage": 2}),
    ("gpt2", {"dp": 2, "tp": 2, "stage": 3}),
    ("gpt2", {"deepspeed": True, "tp": 2, "stage": 1, **WHOLE}),
    ("mixtral, merged", {"dp": 2, "tp": 2, "ep": 2, "stage": 3}),
    exhaustive("qwen3_moe", {"dp": 4, "ep": 2, "stage": 1}),
    exhaustive("glm4_moe", {"dp": 2, "tp": 2, "ep": 2, "stage": 3}),
    exhaustive("deepseek_v3", {"dp": 2, "tp": 2, "ep": 2, "stage": 3}),
    exhaustive("qwen3_moe", {"deepspeed": True, "dp": 2, "stage": 3}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout"), LAYOUTS, ids=str)
def test_every_layout_begins_with_the_same_model(
    family: str, layout: dict[str, Any], tmp_path: Path
) -> None:
    family, comma, _ = family.partition(", merged")
    theirs = save(family, tmp_path, shard="20KB", merged=bool(comma))
    expected = logits(theirs, torch.tensor([PROMPT]))[0, -1]
    config = config_for(tmp_path, **layout)
    for found, read, held in run_ranks(begin_and_look, config.world_size, config):
        difference = (torch.tensor(found) - expected).abs().max()
        assert difference <= 1e-5 * expected.abs().max()
        assert 0 < read == held, "each number that a rank holds is read once, and no other"


@pytest.mark.parametrize(
    ("experts", "degrees"), [(0, {"tp": 2}), (8, {"tp": 2, "ep": 2})], ids=["dense", "experts"]
)
def test_reading_needs_the_shards_and_a_part_of_a_tensor(
    experts: int, degrees: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large model's first rank of 8, without the other 7."""
    shape = Model(
        layers=2, hidden=512, heads=8, kv_heads=8, head_dim=64, ffn=1792 // (experts or 1), experts=experts,
        vocab=8192, max_seq_len=64,
    )  # fmt: skip
    whole = Transformer(shape)
    initialize(whole, shape, seed=0)
    save_file(
        {
            place.name: p.detach() if place.expert is None else p.detach()[place.expert].clone()
            for name, p in whole.named_parameters()
            for place in hf_positions(shape, "mixtral" if experts else "llama")[name]
        },
        tmp_path / "model.safetensors",
    )
    config = make_config(tmp_path, dp=4, stage=3, precision="fp32", parallel=degrees)
    config = replace(config, model=replace(shape, init_from=str(tmp_path)))
    parts: list[int] = []
    plain = load.read_part

    def weighing(*arguments: Any) -> torch.Tensor:
        part = plain(*arguments)
        parts.append(part.nbytes)
        return part

    monkeypatch.setattr(load, "read_part", weighing)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        layout = make_layout(config, "cpu")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            (part,) = build_stages(config, layout, CPU).values()
            state = {f"model.{name}": p for name, p in part.named_parameters()}
            load.load(tmp_path, shape, state)
    finally:
        dist.destroy_process_group()
    share = sum(local_tensor(p).nbytes for p in part.parameters())
    largest = max(local_tensor(p).nbytes for p in part.parameters())
    assert sum(parts) == share and max(parts) == largest
    mapped = (
        (tmp_path / "model.safetensors").stat().st_size
    )  # not in memory, though torch counts it
    assert peak_bytes(recorded) <= 1.01 * (share + largest) + mapped
    mlp, expected = part.layers["0"].mlp, whole.layers["0"].mlp
    first, expected = (
        (mlp.experts.down, expected.experts.down)
        if experts
        else (mlp.down.weight, expected.down.weight)
    )
    local = first.to_local()
    assert torch.equal(local, expected[tuple(map(slice, local.shape))])
    assert local.shape[-1] == shape.ffn // 2 and 8 * local.numel() == expected.numel()


def lose_a_file(folder: Path) -> str:
    (folder / "model-00002-of-00005.safetensors").unlink()
    return "model-00002-of-00005.safetensors, which does not exist"


def cut_a_file(folder: Path) -> str:
    file = folder / "model-00003-of-00005.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    return "model-00003-of-00005.safetensors is cut off"


def garble_a_header(folder: Path) -> str:
    file = folder / "model-00001-of-00005.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[:20] + b"\x00" + raw[21:])
    return "model-00001-of-00005.safetensors is damaged"


def empty_a_file(folder: Path) -> str:
    (folder / "model-00001-of-00005.safetensors").write_bytes(b"")
    return "no whole header"


def lose_a_tensor(folder: Path) -> str:
    change_tensors(folder, lambda held: held.pop("model.norm.weight"))
    return "model.norm.weight is missing"


def change_a_shape(folder: Path) -> str:
    change_tensors(folder, lambda held: held.update({"model.norm.weight": torch.ones(31)}))
    return "model.norm.weight is 31, and the shape needs 32"


def add_a_tensor(folder: Path) -> str:
    name = "model.layers.0.self_attn.q_proj.bias"
    change_tensors(folder, lambda held: held.update({name: torch.ones(32)}))
    return f"{name} is not a parameter of this shape"


def change_a_type(folder: Path) -> str:
    change_tensors(
        folder, lambda held: held.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)})
    )
    return "model.norm.weight is I8"


def leave_a_pickle(folder: Path) -> str:
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").touch()
    return "pytorch_model.bin and no safetensors"


def change_tensors(folder: Path, change: Any) -> None:
    """Leave one file, without an index."""
    files = sorted(folder.glob("*.safetensors"))
    held = {name: value for file in files for name, value in load_file(file).items()}
    change(held)
    for file in [*files, folder / "model.safetensors.index.json"]:
        file.unlink()
    save_file(held, folder / "model.safetensors")


BREAKS = [lose_a_file, cut_a_file, garble_a_header, empty_a_file, lose_a_tensor, change_a_shape,
          add_a_tensor, change_a_type, leave_a_pickle]  # fmt: skip


@pytest.mark.parametrize("act", BREAKS, ids=lambda act: act.__name__)
def test_what_is_wrong_with_a_folder_is_said_from_its_headers(act: Any, tmp_path: Path) -> None:
    save("llama", tmp_path, shard="20KB")
    shape = read_shape(tmp_path)
    assert set(load.find(tmp_path, shape)) == set(shapes(shape))
    said = act(tmp_path)
    with pytest.raises(BadFileError) as raised:
        load.find(tmp_path, shape)
    assert said in str(raised.value)


def test_an_index_that_is_wrong(tmp_path: Path) -> None:
    save("llama", tmp_path, shard="20KB")
    index = tmp_path / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    files = document["weight_map"]
    files["model.norm.weight"] = next(f for f in files.values() if f != files["model.norm.weight"])
    index.write_text(json.dumps(document))
    with pytest.raises(BadFileError, match=r"model.norm.weight is not in model-0"):
        load.find(tmp_path, read_shape(tmp_path))
    index.write_text("{}")
    with pytest.raises(BadFileError, match="no readable weight_map"):
        load.find(tmp_path, read_shape(tmp_path))
