"""`model=hf` from the command line."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from nanoscale.checkpoint.hf.load_any_model import judge
from nanoscale.cli.main import run as nanoscale
from tests.cli import Capsys
from tests.support import hf_models

pytestmark = pytest.mark.usefixtures("forked_ranks")

WORDS = ["recipe=debug", "train.steps=2", "train.seq_len=32", "launcher.threads=1", "parallel.dp=1"]
HF = ["model=hf", "model.name=small"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GPT-NeoX whose vocabulary fits bytes, in this folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hf_models.save("gpt_neox", tmp_path / "small", vocab_size=257)
    return tmp_path


def refused(capsys: Capsys, *words: str) -> str:
    capsys.readouterr()
    assert nanoscale(["train", *WORDS, *words]) == 2
    assert not Path("runs").exists(), "nothing was written"
    return " ".join(capsys.readouterr().err.split())


def changed(**keys: Any) -> None:
    file = Path("small/config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


@pytest.mark.slow
def test_the_shape_is_the_folders(folder: Path, capsys: Capsys) -> None:
    """Whatever the recipe's own model has; and a frozen configuration has all of it."""
    assert nanoscale(["config", "show", *WORDS, *HF]) == 0
    model = yaml.safe_load(capsys.readouterr().out)["model"]
    assert (model["source"], model["layers"], model["vocab"]) == ("hf", 2, 257)
    assert model["init_from"] == "small" and model["norm_eps"] == 1e-5
    assert model["hf_config"] == json.loads(Path("small/config.json").read_text())
    words = [*HF, "model.init_from=null", "model.hf_config.num_hidden_layers=3"]
    assert nanoscale(["config", "show", *WORDS, *words]) == 0
    model = yaml.safe_load(capsys.readouterr().out)["model"]
    assert (model["layers"], model["init_from"]) == (3, None)


@pytest.mark.slow
def test_what_it_cannot_do_is_refused(folder: Path, capsys: Capsys) -> None:
    text = refused(
        capsys, *HF, "parallel.tp=2", "parallel.pp=2", "parallel.ep=2", "backend=deepspeed"
    )
    assert all(f"type instead: parallel.{axis}=1" in text for axis in ("pp", "ep"))
    assert "precision=bf16" in refused(capsys, *HF, "precision=fp8")
    text = refused(capsys, *HF, "model.layers=4", "model.norm=layernorm")
    assert "model.layers=4: is 2 in" in text and "model.hf_config.num_hidden_layers=4" in text
    assert "model.norm=layernorm: shapes nanoscale's own" in text
    text = refused(capsys, *HF, "data=stdlib-bpe", "data.bpe_vocab=300")
    assert "data.bpe_vocab=257" in text and "model.vocab=3" not in text
    assert "model=hf needs a folder" in refused(capsys, "model=hf")
    assert "is neither a folder nor a possible name" in refused(
        capsys, "model=hf", "model.name=./nowhere"
    )
    assert "model=hf" in refused(capsys, "model.trust_remote_code=true")


@pytest.mark.slow
def test_it_is_planned_without_weights(folder: Path, capsys: Capsys) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    words = (*WORDS, *HF, "cluster=h100-sxm", "cluster.hosts=1")
    assert nanoscale(["plan", *words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["parameters"] > 0 and plan["step_time_s"] > 0
    assert nanoscale(["plan", *words, "parallel.dp=auto", "--search", "--json"]) == 0
    layouts = [it["layout"] for it in json.loads(capsys.readouterr().out)["layouts"]]
    assert {it["tp"] for it in layouts} == {it["pp"] for it in layouts} == {1}, "as they are set"


def test_what_it_is_not_is_refused(folder: Path, capsys: Capsys) -> None:
    for keys, text in (
        ({"is_encoder_decoder": True}, "only decoders"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"architectures": ["T5Model"]}, "no causal language model"),
        ({"architectures": ["BertForMaskedLM"]}, "train.objective=masked train.mask_token=103"),
        (
            {"architectures": ["BertForSequenceClassification"]},
            "train.objective=classify train.labels=2",
        ),
    ):
        kept = Path("small/config.json").read_text()
        changed(**keys)
        assert text in refused(capsys, *HF)
        Path("small/config.json").write_text(kept)


def test_labels_belong_to_their_objective(folder: Path, capsys: Capsys) -> None:
    records = [{"text": f"text {i}", "label": i % 3} for i in range(60)]
    Path("a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    prepare = ["data", "prepare", "a.jsonl", "--tokenizer", "byte"]
    assert nanoscale([*prepare, "--out", "labels", "--labels", "3", "--validation", "0.3"]) == 0
    assert nanoscale([*prepare, "--out", "texts", "--validation", "0.3"]) == 0
    assert nanoscale([*prepare, "--out", "wrong", "--labels", "3", "--chat"]) == 2
    labels = [*HF, "data=megatron", "data.path=labels"]
    text = refused(capsys, *labels)
    assert "learns every token" in text
    assert "type instead: train.objective=classify train.labels=3" in text
    classify = [*HF, "train.objective=classify"]
    assert "type instead: train.labels=2" in refused(capsys, *classify, "data=random")
    classify.append("train.labels=3")
    few = [*labels, "train.objective=classify", "train.labels=2"]
    assert "type instead: train.labels=3" in refused(capsys, *few)
    text = refused(capsys, *classify, "data=megatron", "data.path=texts")
    assert "needs labels" in text and '{"text": "…", "label": 0}' in text
    assert "prepare --labels" in text and "next-token" not in text
    assert "data.loss_on=auto" in refused(capsys, *labels, *classify, "data.loss_on=all")
    assert "data.source=random" in refused(capsys, *classify, "data=stdlib")
    assert "train.labels=3" in refused(capsys, *labels, "train.objective=classify", "train.label=3")
    phases = "train.phases={early: {until: 1, seq_len: 16}, late: {}}"
    assert "whole documents" in refused(capsys, *labels, *classify, phases)


def asked(*, folder: str | None = "small", tp: int = 1, **keys: Any) -> dict[str, Any]:
    """Return the judgement of a folder, with some keys of its config.json replaced."""
    document = json.loads(Path("small/config.json").read_text()) | keys
    shape = asdict(hf_models.shape_of(Path("small"))) | {"hf_config": document}
    return judge({"model": shape, "folder": folder, "tp": tp, "attention": "", "pp": 1, "ep": 1})


def test_transformers_is_asked(folder: Path) -> None:
    whole = asked()
    model = hf_models.save("gpt_neox", folder / "again", vocab_size=257)
    assert whole["problem"] is None
    assert whole["parameters"] == sum(p.numel() for p in model.parameters())
    assert asked(tp=2)["problem"] is None
    assert "3 ranks do not divide its heads (4)" in asked(tp=3)["problem"]
    no_plan = asked(model_type="falcon", folder=None, tp=2)
    assert no_plan["of"] == "tp" and "has no plan" in no_plan["problem"]
    assert "unknown to transformers" in asked(model_type="neoy")["problem"]
    assert "sees the tokens" in asked(model_type="bert", folder=None)["problem"]
    wide = asked(hidden_size=64)
    assert wide["of"] == "files" and "the shape needs" in wide["problem"]
    assert "is missing" in asked(num_hidden_layers=3)["problem"]
    assert "is not one of its parameters" in asked(num_hidden_layers=1)["problem"]
    next(Path("small").glob("model-00002*")).unlink()
    assert "which does not exist" in asked()["problem"]


def test_a_head_that_differs_from_its_embedding_is_not_left_out(folder: Path) -> None:
    """config.json ties the two; transformers does not tie tensors that differ."""
    from safetensors.torch import load_file, save_file

    Path("small/model.safetensors.index.json").unlink()
    held: dict[str, Any] = {}
    for file in sorted(Path("small").glob("*.safetensors")):
        held |= load_file(file)
        file.unlink()
    other = torch.randn_like(held["gpt_neox.embed_in.weight"])
    for head, problem in ((other, True), (held["gpt_neox.embed_in.weight"].clone(), False)):
        save_file(held | {"embed_out.weight": head}, "small/model.safetensors")
        said = asked(tie_word_embeddings=True)["problem"]
        assert bool(said) is problem
        assert not said or "model.hf_config.tie_word_embeddings=false trains both" in said
        assert asked(tie_word_embeddings=False)["problem"] is None


@pytest.mark.slow
def test_it_is_trained_exported_and_read(folder: Path, capsys: Capsys) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words = [*WORDS, *HF, "run.name=tuned", "optimizer.lr=0", "train.sample_tokens=2", "--json"]
    assert nanoscale(["train", *words]) == 0
    frozen = yaml.safe_load(Path("runs/tuned/config.yaml").read_text())["model"]
    assert frozen["name"] == frozen["init_from"] == str(folder / "small")
    assert frozen["parameters"] == asked()["parameters"]
    Path("small").rename("away")  # the frozen configuration is complete
    assert nanoscale(["checkpoints", "export", "tuned", "--format", "hf", "--json"]) == 0
    out = Path("runs/tuned/hf/step-00000002")
    theirs = AutoModelForCausalLM.from_pretrained(out).state_dict()
    for name, value in AutoModelForCausalLM.from_pretrained("away").state_dict().items():
        assert torch.equal(value, theirs[name]), "a rate of 0 moves nothing"
    assert AutoTokenizer.from_pretrained(out).encode("ab") == [97, 98]
