"""`model.init_from` and `checkpoints export` from the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from nanoscale.cli.main import run as nanoscale
from nanoscale.config.hf import pretrained
from nanoscale.config.hf.shape import family_of, read_shape
from nanoscale.config.schema import Model
from nanoscale.launch.preflight import by_library as weights
from tests.cli import Capsys
from tests.support import hf_families
from tests.support.hf_families import COMMON, FAMILIES

pytestmark = pytest.mark.usefixtures("forked_ranks")

WORDS = ["recipe=debug", "train.steps=2", "train.seq_len=32", "launcher.threads=1", "parallel.dp=1"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Llama whose vocabulary fits bytes, in this folder."""
    monkeypatch.chdir(tmp_path)
    settings = COMMON | {"vocab_size": 257, "max_position_embeddings": 64}
    monkeypatch.setitem(FAMILIES, "llama", ("Llama", settings))
    hf_families.save("llama", tmp_path / "small", shard="40KB")
    return tmp_path


def shown(capsys: Capsys, *words: str) -> dict[str, Any]:
    assert nanoscale(["config", "show", *words]) == 0
    found: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)["model"]
    return found


def refused(capsys: Capsys, *words: str) -> str:
    capsys.readouterr()
    assert nanoscale(["train", *WORDS, *words]) == 2
    assert not Path("runs").exists(), "nothing was written"
    return capsys.readouterr().err


def test_the_shape_is_the_folders(folder: Path, capsys: Capsys) -> None:
    model = shown(capsys, *WORDS, "model.init_from=small")
    assert (model["layers"], model["hidden"], model["kv_heads"]) == (2, 32, 4)
    assert (model["name"], model["vocab"]) == ("small", 257)
    assert nanoscale(["config", "explain", "model.layers", *WORDS, "model.init_from=small"]) == 0
    assert "small/config.json" in capsys.readouterr().out


def test_what_is_said_otherwise_is_refused(folder: Path, capsys: Capsys) -> None:
    text = refused(capsys, "model.init_from=small", "model.layers=4", "model.rope_theta=1e4")
    assert "model.layers=4: is 2 in" in text and "small/config.json" in text
    assert "type instead: model.layers=2" in text and "rope_theta" not in text
    text = refused(capsys, "model.init_from=small", "model=tiny")
    assert "model.hidden=192: is 32 in" in text and "~model" in text
    Path("mine.yaml").write_text("model: {init_from: small, layers: 3}")
    text = refused(capsys, "recipe=./mine.yaml")
    assert "model.layers=3: is 2 in" in text and "mine.yaml:1" in text
    kept = shown(
        capsys, *WORDS, "model.init_from=small", "model.name=mine", "model.max_seq_len=128",
        "model.layers=2",
    )  # fmt: skip
    assert (kept["name"], kept["max_seq_len"], kept["layers"]) == ("mine", 128, 2)
    assert shown(capsys, *WORDS, "model=tiny", "~model", "model.init_from=small")["layers"] == 2


@pytest.mark.slow
def test_what_is_no_model_is_refused(
    folder: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "is neither a folder nor a possible name" in refused(capsys, "model.init_from=./nowhere")
    (folder / "empty").mkdir()
    assert "config.json cannot be read" in refused(capsys, "model.init_from=empty")
    shutil.copytree("small", "bert")
    Path("bert/config.json").write_text('{"model_type": "bert"}')
    assert "model_type=bert is not one of" in refused(capsys, "model.init_from=bert")
    shutil.copytree("small", "lost")
    lost = sorted(Path("lost").glob("model-*"))[1]
    lost.unlink()
    assert f"{lost.name}, which does not exist" in refused(capsys, "model.init_from=lost")
    text = refused(capsys, "model.init_from=small", "parallel.tp=2")
    assert "model.vocab=257: must be a multiple" in text and "keeps its number of rows" in text
    assert "type instead: parallel.tp=1\n" in text


@pytest.mark.slow
def test_it_is_trained_exported_and_read(folder: Path, capsys: Capsys) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words = [*WORDS, "model.init_from=small", "run.name=tuned", "optimizer.lr=0", "--json"]
    assert nanoscale(["train", *words]) == 0
    frozen = yaml.safe_load(Path("runs/tuned/config.yaml").read_text())["model"]
    assert frozen["init_from"] == str(folder / "small") and frozen["hidden"] == 32
    capsys.readouterr()
    words = ["checkpoints", "export", "tuned", "--format", "hf", "--max-shard-size", "50KB"]
    assert nanoscale([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    out = Path("runs/tuned/hf/step-00000002")
    assert document["folder"] == str(out.absolute()) and len(document["files"]) > 1
    theirs = AutoModelForCausalLM.from_pretrained(out)
    before = AutoModelForCausalLM.from_pretrained("small")
    for name, value in before.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name]), "a rate of 0 moves nothing"
    assert AutoTokenizer.from_pretrained(out).encode("ab") == [97, 98]
    # The initial folder is not needed: the frozen configuration is complete.
    shutil.move("small", "away")
    assert nanoscale(["resume", "tuned", "train.steps=3", "--json"]) == 0
    assert nanoscale(words) == 0
    assert AutoTokenizer.from_pretrained("runs/tuned/hf/step-00000003").encode("ab") == [97, 98]
    assert nanoscale(words) == 2
    assert "already exists" in capsys.readouterr().err
    assert nanoscale([*words, "--out", "other", "--max-shard-size", "5 apples"]) == 2


def head_of_its_own(folder: Path) -> None:
    """Make config.json tie the head, and the files hold another one than the embedding."""
    document = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(document))


@pytest.mark.slow
def test_a_head_that_differs_is_trained_and_exported_as_one(folder: Path, capsys: Capsys) -> None:
    """transformers 5 does not tie it, in spite of config.json."""
    from transformers import AutoModelForCausalLM

    head_of_its_own(Path("small"))
    text = refused(capsys, "model.init_from=small", "model.tie_embeddings=true")
    assert "the head (lm_head.weight) have different values" in text
    assert "type instead: model.tie_embeddings=false" in text
    words = [*WORDS, "model.init_from=small", "optimizer.lr=0", "train.steps=1", "run.name=tuned"]
    assert nanoscale(["train", *words, "--json"]) == 0
    assert nanoscale(["checkpoints", "export", "tuned", "--format", "hf", "--dtype", "fp32"]) == 0
    before = AutoModelForCausalLM.from_pretrained("small").state_dict()
    after = AutoModelForCausalLM.from_pretrained("runs/tuned/hf/step-00000001").state_dict()
    assert not torch.equal(before["lm_head.weight"], before["model.embed_tokens.weight"])
    for name, value in before.items():
        assert torch.equal(value, after[name]), name


def test_a_head_that_differs_is_seen_when_it_has_been_fetched(
    folder: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name at the hub is planned by its config.json alone."""
    head_of_its_own(Path("small"))
    Path("described").mkdir()
    shutil.copy("small/config.json", "described")
    locate = {True: folder / "small", False: folder / "described"}
    for module in (pretrained, weights):
        monkeypatch.setattr(module, "locate", lambda _, *, weights: locate[weights])
    text = refused(capsys, "model.init_from=our/small")
    assert "model.tie_embeddings=true: must be false" in text
    assert "type instead: model.tie_embeddings=false" in text
    words = ["model.init_from=our/small", "model.tie_embeddings=false", "--dry-run"]
    assert nanoscale(["train", *WORDS, *words]) == 0


@pytest.mark.slow
def test_adapters_are_trained_resumed_and_merged(folder: Path, capsys: Capsys) -> None:
    from transformers import AutoModelForCausalLM

    words = [*WORDS, "model.init_from=small", "lora.rank=4", "lora.targets=[wq,down]"]
    assert nanoscale(["train", *words, "run.name=tuned"]) == 0
    assert "training 1,152 parameters of adapters (wq, down)" in capsys.readouterr().out
    Path("small").rename("away")
    shutil.copytree("away", "other")
    file = sorted(Path("other").glob("model-*"))[0]
    raw = file.read_bytes()
    first = 8 + int.from_bytes(raw[:8], "little")  # of its numbers, behind the header
    file.write_bytes(raw[:first] + b"\0\0\0\1" + raw[first + 4 :])
    resume = ["resume", "tuned", "train.steps=3"]
    for more, said in (
        ([], "small: does not exist"),
        (["model.init_from=other"], "does not have the weights that the adapters"),
        (["model.init_from=away", "lora.rank=8"], "lora.rank=8: cannot be changed by resume"),
    ):
        assert nanoscale([*resume, *more]) == 2
        assert said in capsys.readouterr().err
    assert nanoscale([*resume, "model.init_from=away"]) == 0
    Path("away").rename("small")
    export = ["checkpoints", "export", "tuned", "--format", "hf", "--dtype", "fp32"]
    assert nanoscale(export) == 2
    assert "type instead: --base" in capsys.readouterr().err
    assert nanoscale([*export, "--base", "small"]) == 0
    merged = AutoModelForCausalLM.from_pretrained("runs/tuned/hf/step-00000003").state_dict()
    before = AutoModelForCausalLM.from_pretrained("small").state_dict()
    changed = {name for name, value in before.items() if not torch.equal(value, merged[name])}
    assert changed == {
        f"model.layers.{n}.{name}.weight"
        for n in (0, 1)
        for name in ("self_attn.q_proj", "mlp.down_proj")
    }


@pytest.mark.slow
def test_experts_are_trained_as_said_here_and_exported_without_their_bias(
    folder: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = COMMON | {"vocab_size": 257, "max_position_embeddings": 64, "num_local_experts": 4}
    monkeypatch.setitem(FAMILIES, "mixtral", ("Mixtral", settings))
    hf_families.save("mixtral", folder / "mixture")
    words = [*WORDS, "model.init_from=mixture", "model.balance=bias", "model.balance_rate=0.01"]
    assert nanoscale(["train", *words, "train.steps=1", "run.name=moved", "--json"]) == 0
    frozen = yaml.safe_load(Path("runs/moved/config.yaml").read_text())["model"]
    assert (frozen["experts"], frozen["balance"]) == (4, "bias")
    words = ["checkpoints", "export", "moved", "--format", "hf"]
    assert nanoscale(words) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "up to 0.01, where" in error
    assert nanoscale([*words, "--drop-bias"]) == 0
    said = capsys.readouterr().out
    assert "without the routing bias (up to 0.01 of" in said


def test_a_name_is_looked_up_in_the_cache(
    folder: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    commit = "0" * 40
    cached = folder / "hub" / "models--our--small"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    (cached / "snapshots").mkdir()
    Path("small").rename(cached / "snapshots" / commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = shown(capsys, *WORDS, "model.init_from=our/small")
    assert (model["hidden"], model["name"]) == (32, "small")
    assert "the hub cannot provide it" in refused(capsys, "model.init_from=our/large")
    words = ["train", *WORDS, "model.init_from=our/small", "--dry-run", "--json"]
    assert nanoscale(words) == 0
    assert json.loads(capsys.readouterr().out)["derived"]["parameters"] > 0


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_a_model_without_dense_layers_has_no_width_of_them(family: str, tmp_path: Path) -> None:
    """The width in config.json is the one of no layer, and model.dense_ffn is refused without dense layers."""
    sizes = {"hidden_size": 64, "vocab_size": 300, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "n_group": 1,
    }
    document = (
        sizes | experts | {"topk_group": 1, "intermediate_size": 96, "first_k_dense_replace": 0}
    )
    (tmp_path / "config.json").write_text(json.dumps(document | {"model_type": family}))
    model = read_shape(tmp_path)
    assert (model.dense_layers, model.dense_ffn) == (0, Model().dense_ffn)
    assert family_of(model) == family
