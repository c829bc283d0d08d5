"""`checkpoints export --format peft`: PEFT itself computes what the merged model computes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanoscale.checkpoint import store
from nanoscale.checkpoint.hf.export import export
from nanoscale.checkpoint.hf.peft_adapters import export_adapters
from nanoscale.cli.main import run as nanoscale
from nanoscale.config.hf.shape import read_shape
from nanoscale.config.schema import Lora
from tests.checkpoint.test_export import from_pretrained, quiet
from tests.cli import Capsys
from tests.support.hf_families import logits, save
from tests.support.jobs import make_config, make_run, run_of_bytes, train, write_tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "targets", "ranks"),
    [
        ("llama", None, {}),
        ("mixtral", None, {}),
        ("gpt2", None, {"attn.c_attn": 9}),
        ("phi3", ["wq", "wv", "gate", "up"], {"self_attn.qkv_proj": 6, "mlp.gate_up_proj": 6}),
    ],
)
def test_peft_computes_what_the_merged_model_computes(
    tmp_path: Path, family: str, targets: list[str] | None, ranks: dict[str, int]
) -> None:
    from peft import PeftModel

    write_tokens(tmp_path)
    base = save(family, tmp_path / "base")
    model = replace(read_shape(tmp_path / "base"), init_from=str(tmp_path / "base"))
    lora = Lora(rank=3, alpha=5.0, targets=targets, rslora=family in ("gpt2", "mixtral"))
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


def test_a_whole_model_has_no_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    run_of_bytes(tmp_path / "runs", name="first")
    words = ["checkpoints", "export", "first"]
    assert nanoscale([*words, "--format", "peft"]) == 2
    assert "type instead: --format hf" in capsys.readouterr().err
    assert nanoscale([*words, "--format", "hf"]) == 0
