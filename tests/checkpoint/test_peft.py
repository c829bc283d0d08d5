"""`checkpoints export --format peft`: PEFT itself computes what the merged model computes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nanoscale.checkpoint import store
from nanoscale.checkpoint.hf.adapters import find_adapters
from nanoscale.checkpoint.hf.export import export
from nanoscale.checkpoint.hf.peft_adapters import export_adapters
from nanoscale.cli.main import run as nanoscale
from nanoscale.config.composing.compose import compose
from nanoscale.config.hf.shape import read_shape
from nanoscale.config.schema import Backend, Lora
from tests.checkpoint.test_adapters import loss_of
from tests.checkpoint.test_export import from_pretrained, quiet
from tests.cli import Capsys
from tests.support import hf_models
from tests.support.hf_families import logits, save
from tests.support.jobs import (
    make_config,
    make_run,
    read_metrics,
    run_of_bytes,
    train,
    write_tokens,
)
from tests.support.rows import exhaustive
from tests.support.wrappers import assert_rest_is_equal, save_wrapper, wrapper_from

PHI3 = ["wq", "wv", "gate", "up"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dora", "targets", "ranks"),
    [
        ("llama", False, None, {}),
        ("mixtral", False, None, {}),
        ("gpt2", True, None, {"attn.c_attn": 9}),
        exhaustive("phi3", False, PHI3, {"self_attn.qkv_proj": 6, "mlp.gate_up_proj": 6}),
        ("phi3", True, PHI3, {"self_attn.qkv_proj": 6, "mlp.gate_up_proj": 6}),
    ],
)
def test_peft_computes_what_the_merged_model_computes(
    tmp_path: Path, family: str, dora: bool, targets: list[str] | None, ranks: dict[str, int]
) -> None:
    from peft import PeftModel

    write_tokens(tmp_path)
    base = save(family, tmp_path / "base")
    model = replace(read_shape(tmp_path / "base"), init_from=str(tmp_path / "base"))
    lora = Lora(rank=3, alpha=5.0, targets=targets, rslora=family in ("gpt2", "mixtral"), dora=dora)
    config = make_config(tmp_path, model=model, precision="fp32", lora=lora)
    config = replace(
        config,
        train=replace(config.train, steps=3),
        checkpoint=replace(config.checkpoint, at_end=True),
    )
    run = make_run(config)
    train(run, config)
    stored = store.find_checkpoint(run.checkpoints, None)
    export(stored, config, tmp_path / "merged", "fp32", 1 << 30, quiet)
    written = export_adapters(stored, config, tmp_path / "adapters", "fp32")
    assert written.files == ["adapter_model.safetensors"]
    settings = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert settings["rank_pattern"] == ranks

    tokens = torch.arange(1, 13).unsqueeze(0)
    merged = logits(from_pretrained(tmp_path / "merged"), tokens)
    found = PeftModel.from_pretrained(from_pretrained(tmp_path / "base"), tmp_path / "adapters")
    torch.testing.assert_close(logits(found, tokens), merged, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(base, tokens), merged, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "targets", "changed"),
    [
        ("gemma3", ["wq"], ["0.self_attn.q_proj", "1.self_attn.q_proj"]),
        (
            "qwen3_5_moe",
            ["in_proj_qkv", "o_proj"],
            ["0.linear_attn.in_proj_qkv", "1.self_attn.o_proj"],
        ),
    ],
)
def test_adapters_of_a_wrapper_have_the_names_of_its_modules(
    tmp_path: Path, family: str, targets: list[str], changed: list[str]
) -> None:
    """Towers have modules of the same names; of the merged export, only the adapted matrices differ. The second
    is trained with transformers' code, and has its experts in the files in another form."""
    from peft import PeftModel

    write_tokens(tmp_path)
    base, out = tmp_path / "base", tmp_path / "merged"
    theirs = save_wrapper(family, base)
    is_own = family == "gemma3"
    model = read_shape(base) if is_own else hf_models.shape_of(base)
    model = replace(model, init_from=str(base), kept_tensors=1)
    config = make_config(
        tmp_path, model=model, precision="fp32", lora=Lora(rank=3, targets=targets)
    )
    checkpoint = replace(config.checkpoint, at_end=True)
    config = replace(config, train=replace(config.train, steps=2), checkpoint=checkpoint)
    run = make_run(config)
    train(run, config)
    stored = store.find_checkpoint(run.checkpoints, None)
    export(stored, config, out, "fp32", 1 << 30, quiet)
    begin = "language_model.model.layers" if is_own else "model.language_model.layers"
    assert_rest_is_equal(base, out, {f"{begin}.{module}.weight" for module in changed})
    export_adapters(stored, config, tmp_path / "adapters", "fp32")
    tokens = torch.arange(1, 13).unsqueeze(0)
    merged, before = logits(wrapper_from(out), tokens), logits(theirs, tokens)
    found = PeftModel.from_pretrained(theirs, tmp_path / "adapters")
    with torch.no_grad():
        torch.testing.assert_close(found(input_ids=tokens).logits, merged, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(before, merged, atol=1e-3)
    adapted = [name for name, _ in found.named_parameters() if "lora_" in name]
    assert len(adapted) == 4 and not any("vis" in name for name in adapted)
    assert not is_own or len(find_adapters(tmp_path / "adapters", config)) == 4


def test_a_whole_model_has_no_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    run_of_bytes(tmp_path / "runs", name="first")
    words = ["checkpoints", "export", "first"]
    assert nanoscale([*words, "--format", "peft"]) == 2
    assert "type instead: --format hf" in capsys.readouterr().err
    assert nanoscale([*words, "--format", "hf"]) == 0


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"dp": 2, "stage": 3},
    {"parallel": {"tp": 2}},
    {"dp": 2, "stage": 2, "backend": Backend("deepspeed")},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "dora"),
    [
        (LAYOUTS[0], True),
        (LAYOUTS[1], False),
        *(exhaustive(layout, False) for layout in LAYOUTS[2:]),
    ],
    ids=str,
)
def test_a_job_begins_with_adapters_of_peft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: dict[str, Any], dora: bool
) -> None:
    """Its first loss equals PEFT's, and a resume reads the checkpoint's adapters and not these."""
    from peft import LoraConfig, get_peft_model

    monkeypatch.chdir(tmp_path)
    tokens = write_tokens(tmp_path)
    save("qwen3", tmp_path / "base")
    targets = ["q_proj", "up_proj", "down_proj"]
    settings = LoraConfig(r=4, lora_alpha=6, target_modules=targets, use_rslora=True, use_dora=dora)
    theirs = get_peft_model(from_pretrained(tmp_path / "base"), settings)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter += 0.2 * torch.randn(parameter.shape)
    theirs.save_pretrained(tmp_path / "adapters")

    composed = compose(["recipe=lora", "model.init_from=adapters"]).config
    assert composed.model.init_from == str(tmp_path / "base")
    assert (composed.lora.rank, composed.lora.alpha, composed.lora.rslora) == (4, 6.0, True)
    assert composed.lora.targets == ["wq", "up", "down"] and composed.lora.dora == dora
    model = replace(composed.model, init_from=composed.model.init_from)
    config = make_config(tmp_path, model=model, lora=composed.lora, precision="fp32", **layout)
    config = replace(
        config,
        train=replace(config.train, steps=2),
        checkpoint=replace(config.checkpoint, every=1, keep_last=None),
    )
    run = make_run(config)
    train(run, config)
    losses = [record["loss"] for record in read_metrics(run)]
    assert losses[0] == pytest.approx(loss_of(theirs, tokens), rel=1e-5)
    again = make_run(config, "again")
    shutil.copytree(run.checkpoint(1), again.checkpoint(1))
    train(again, config)
    assert read_metrics(again)[-1]["loss"] == losses[1]


def adapters(folder: Path, **changes: Any) -> Path:
    """Write a folder of adapters of a base model in its parent."""
    folder.mkdir()
    settings = {
        "peft_type": "LORA", "base_model_name_or_path": str(folder.parent / "base"), "r": 4, "lora_alpha": 6,
        "target_modules": ["q_proj"],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings | changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"bias": "all"}, "bias=all is not supported"),
        ({"target_modules": ["q_proj", "embed"]}, "not all of them are known"),
        ({"target_modules": "all-linear"}, "not all of them are known"),
        ({"r": None, "base_model_name_or_path": None}, "names no base_model_name_or_path"),
        ({"rank_pattern": {"q_proj": 9}}, "rank_pattern"),
    ],
)
def test_other_adapters_are_refused(
    tmp_path: Path, capsys: Capsys, changes: Any, text: str
) -> None:
    folder = adapters(tmp_path / "adapters", **changes)
    words = ["train", "recipe=lora", f"model.init_from={folder}", "--dry-run"]
    assert nanoscale(words) == 2
    assert text in " ".join(capsys.readouterr().err.split())


def test_adapters_that_do_not_fit_are_refused_before_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    save("qwen3", tmp_path / "base")
    folder = adapters(tmp_path / "adapters")
    words = [
        "train",
        "recipe=lora",
        f"model.init_from={folder}",
        "data=random",
        "train.seq_len=32",
        "train.sample_tokens=0",
        "train.steps=30",
        "--dry-run",
    ]
    assert nanoscale([*words, "lora.rank=5"]) == 2
    assert "type instead: lora.rank=4" in capsys.readouterr().err
    save_file({"other": torch.zeros(3)}, folder / "adapter_model.safetensors")
    assert nanoscale(words) == 2
    assert (
        "adapter_model.safetensors has no base_model.model.model.layers.0"
        in capsys.readouterr().err
    )
