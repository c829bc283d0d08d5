"""A checkpoint as the folder of a Hugging Face model, as transformers reads it, and the way back."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoscale.checkpoint import sharded, store
from nanoscale.checkpoint.hf import export as export_module
from nanoscale.checkpoint.hf.export import export
from nanoscale.checkpoint.hf.load import count_kept, find, load
from nanoscale.checkpoint.staging import State
from nanoscale.common.errors import UserError
from nanoscale.config.hf.safetensors_headers import read_folder, read_header
from nanoscale.config.hf.shape import read_shape, write_shape
from nanoscale.config.hf.text_part import read_document, text_config
from nanoscale.config.schema import Backend, Checkpoint, Config, Data, Model, RopeScaling
from nanoscale.data import vocabulary
from nanoscale.data.tokens.tokenizer import ByteTokenizer, bytes_native
from nanoscale.generate.weights import state_of
from nanoscale.models.initialization import initialize
from nanoscale.models.moe import BIAS_UNIT
from nanoscale.models.transformer import Transformer
from nanoscale.runs import fence
from tests.support.hf_families import FAMILIES, logits, save, tokens
from tests.support.jobs import SEQ_LEN, make_config, make_run, read_metrics, train
from tests.support.rows import exhaustive
from tests.support.runs import create_run
from tests.support.token_files import write_indexed
from tests.support.wrappers import WRAPPERS, assert_rest_is_equal, save_wrapper, wrapper_from

ABOUT = {"step": 7, "consumed_samples": 0, "tokens": 0, "world_size": 1, "time": 1.0}
GPT2 = Model(
    layers=2, hidden=32, heads=4, kv_heads=4, head_dim=8, ffn=48, vocab=64, max_seq_len=32,
    norm="layernorm", mlp="gelu", position="learned", bias=True,
)  # fmt: skip


def quiet(_name: str, _number: int, _count: int) -> None: ...


def from_pretrained(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


def checkpoint_of(
    model: Transformer, folder: Path, others: State | None = None
) -> store.StoredCheckpoint:
    return save_state(dict(state_of(model)) | (others or {}), folder)


def save_state(state: State, folder: Path) -> store.StoredCheckpoint:
    run = create_run(folder, "run")
    fence.begin(run, 1)
    path = sharded.save(run.workspace(1), state, ABOUT)
    return store.StoredCheckpoint(path, 7)


def random_model(shape: Model) -> Transformer:
    model = Transformer(replace(shape, init_std=0.2))
    initialize(model, model.shape, seed=4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
        # Other routers' files hold no bias of the experts' choice.
        for buffer in model.buffers() if shape.router == "sigmoid" else ():
            buffer += (0.3 / BIAS_UNIT * torch.randn(buffer.shape)).long()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, "gpt2 untied"])
def test_from_pretrained_gives_our_logits(family: str, tmp_path: Path) -> None:
    if family == "gpt2 untied":
        shape = GPT2
    else:
        save(family, tmp_path / "origin")
        shape = read_shape(tmp_path / "origin")
    model = random_model(shape)
    stored = checkpoint_of(model, tmp_path)
    config = Config(model=replace(shape, init_from=None), data=Data(source="megatron"))
    written = export(stored, config, tmp_path / "out", "fp32", 20_000, quiet)
    assert len(written.files) > 2 and not written.tokenizer
    for file in (tmp_path / "out" / name for name in written.files):
        assert file.stat().st_size < 25_000 or len(read_header(file)) == 1, (
            "one tensor may be larger"
        )
    theirs = from_pretrained(tmp_path / "out")
    expected, found = model(tokens()), logits(theirs, tokens())
    assert expected.std() > 0.1
    assert (expected - found).abs().max() <= 1e-5 * expected.abs().max()
    again = Transformer(read_shape(tmp_path / "out"))
    load(tmp_path / "out", again.shape, dict(state_of(again)))
    for name, value in model.named_parameters():
        assert torch.equal(value, again.get_parameter(name)), name


EVEN, WIDE, UNEVEN = (32, 4, 8), (32, 4, 6), (36, 8, 4)
"""Hidden size, heads and their width."""
KINDS: list[dict[str, Any]] = [
    {}, {"bias": True}, {"qkv_bias": True}, {"qk_norm": True}, {"sliding_window": 24},
    {"experts": 4}, {"experts": 4, "qk_norm": True}, {"experts": 4, "sliding_window": 24},
    {"position": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True},
]  # fmt: skip
BESIDE: list[dict[str, Any]] = [
    {"tie_embeddings": True, "init_std": 1.5},
    {"rope_scaling": RopeScaling(8.0, 1.0, 4.0, 16), "kv_heads": 2},
]


@pytest.mark.parametrize("sizes", [EVEN, WIDE, UNEVEN], ids=["even", "wide", "uneven"])
def test_every_shape_that_is_exported_is_read_by_transformers(
    sizes: tuple[int, int, int], tmp_path: Path
) -> None:
    """Every kind of block with every width of heads: the same logits, or a refusal and no file."""
    hidden, heads, head_dim = sizes
    refused = []
    for number, (kind, beside) in enumerate(zip(KINDS, itertools.cycle(BESIDE), strict=False)):
        learned = kind.get("position") == "learned"
        more = {} if learned and "rope_scaling" in beside else beside
        shape = Model(
            layers=1, hidden=hidden, heads=heads, head_dim=head_dim, ffn=24, vocab=64, max_seq_len=32,
            **{"kv_heads": heads} | kind | more,
        )  # fmt: skip
        model, folder = random_model(shape), tmp_path / str(number)
        config = Config(model=shape, data=Data(source="megatron"))
        try:
            export(checkpoint_of(model, folder), config, folder / "out", "fp32", 10**9, quiet)
        except UserError as error:
            assert "transformers has no such model" in error.message
            refused.append(sorted(kind))
            continue
        assert read_shape(folder / "out").head_dim == head_dim
        expected, found = model(tokens()), logits(from_pretrained(folder / "out"), tokens())
        assert (expected - found).abs().max() <= 1e-5 * expected.abs().max(), shape
    gpt2 = sorted(KINDS[-1])
    assert refused == {
        EVEN: [], WIDE: [gpt2], UNEVEN: [gpt2]
    }[sizes]  # fmt: skip


def test_what_the_installed_transformers_refuses_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = replace(GPT2, norm="rmsnorm", mlp="swiglu", position="rope", bias=False)
    stored, config = checkpoint_of(random_model(shape), tmp_path), Config(model=shape)
    config = replace(config, data=Data(source="megatron"))
    before = sorted(tmp_path.iterdir())
    for wrong in ({"num_attention_heads": 5}, {"model_type": "llama17"}):
        monkeypatch.setattr(
            export_module, "write_shape", lambda it, wrong=wrong: write_shape(it) | wrong
        )
        with pytest.raises(UserError, match=r"transformers [\d.]+ refuses this model"):
            export(stored, config, tmp_path / "out", "fp32", 10**9, quiet)
        assert sorted(tmp_path.iterdir()) == before


def test_a_bias_of_experts_is_not_left_out_in_silence(tmp_path: Path) -> None:
    shape = replace(GPT2, norm="rmsnorm", mlp="swiglu", position="rope", bias=False, experts=4)
    shape = replace(shape, balance="bias", balance_rate=0.01)
    model, config = random_model(shape), Config(model=shape, data=Data(source="megatron"))
    lean = (torch.tensor([0.03, 0, -0.05, 0.02]) / BIAS_UNIT).round().long()
    for name, leaning in (("even", 0 * lean), ("moved", lean)):
        stored = checkpoint_of(model, tmp_path / name, {"balance.bias.layers.1": leaning})
        even = name == "even"
        if not even:
            with pytest.raises(UserError, match=r"up to 0\.05, .* is 0\.25"):
                export(stored, config, tmp_path / name / "out", "fp32", 10**9, quiet)
        written = export(stored, config, tmp_path / name / "out", "fp32", 10**9, quiet, not even)
        assert written.dropped_bias == pytest.approx(0 if even else 0.05)
    assert from_pretrained(tmp_path / "moved" / "out").config.model_type == "mixtral"


def test_types_and_one_file(tmp_path: Path) -> None:
    model = random_model(GPT2)
    stored, config = (
        checkpoint_of(model, tmp_path),
        Config(model=GPT2, data=Data(source="megatron")),
    )
    written = export(stored, config, tmp_path / "out", "bf16", 10**9, quiet)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", *written.files]
    held = load_file(tmp_path / "out" / "model.safetensors")
    expected = torch.cat(
        [getattr(model.layers["1"].attention, w).weight for w in ("wq", "wk", "wv")]
    )
    assert torch.equal(held["transformer.h.1.attn.c_attn.weight"], expected.T.bfloat16())
    assert from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_the_tokenizer_is_the_one_of_the_tokens(tmp_path: Path) -> None:
    """It is `data.tokenizer`, or the tokenizer of the run's initial model."""
    stored = checkpoint_of(random_model(GPT2), tmp_path)
    for name, eos in (("own", 9), ("begun", 7)):
        (tmp_path / name).mkdir()
        bytes_native().save(str(tmp_path / name / "tokenizer.json"))
        (tmp_path / name / "config.json").write_text(json.dumps({"eos_token_id": eos}))
        (tmp_path / name / "merges.txt").write_text(name)
    shape = replace(GPT2, init_from=str(tmp_path / "begun"))
    named = Data(source="megatron", tokenizer=str(tmp_path / "own" / "tokenizer.json"))
    for data, name, eos in ((Data(source="megatron"), "begun", 7), (named, "own", [9, 256])):
        out = tmp_path / f"out-{name}"
        written = export(stored, Config(model=shape, data=data), out, "fp32", 10**9, quiet)
        assert written.tokenizer and (out / "merges.txt").read_text() == name
        assert json.loads((out / "config.json").read_text())["eos_token_id"] == eos


def test_whole_or_absent(tmp_path: Path) -> None:
    stored = checkpoint_of(random_model(GPT2), tmp_path)
    config = Config(model=GPT2, data=Data(source="megatron"))

    def stop(_name: str, number: int, _count: int) -> None:
        if number == 9:
            raise KeyboardInterrupt

    (tmp_path / "there").mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        export(stored, config, tmp_path / "out", "fp32", 20_000, stop)
    with pytest.raises(UserError, match="already exists"):
        export(stored, config, tmp_path / "there", "fp32", 20_000, quiet)
    odd = replace(config, model=replace(GPT2, norm="rmsnorm"))
    with pytest.raises(UserError, match=r"gpt2 is the nearest, but for model\.norm=rmsnorm"):
        export(stored, odd, tmp_path / "out", "fp32", 20_000, quiet)
    assert sorted(tmp_path.iterdir()) == before


def test_every_file_is_on_disk_before_the_folder_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[str] = set()

    def noted(handle: int) -> None:
        if not (tmp_path / "out").exists():
            synced.add(Path(f"/proc/self/fd/{handle}").readlink().name)

    monkeypatch.setattr(os, "fsync", noted)
    config = Config(model=GPT2, data=Data(source="stdlib"))
    out = export(
        checkpoint_of(random_model(GPT2), tmp_path), config, tmp_path / "out", "fp32", 20_000, quiet
    )
    files = {file.name for file in out.folder.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= files
    assert files <= synced


def test_the_byte_tokenizer_as_a_file(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    bytes_native().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), ByteTokenizer()
    text = "def f():\n\treturn 'Größe \u4e16\u754c \U0001f600'\x00"
    assert theirs.encode(text) == ours.encode(text)
    assert theirs.decode(ours.encode(text)) == text
    assert theirs.decode([256], skip_special_tokens=True) == ""


def test_transformers_knows_the_end_of_a_document_of_a_bare_tokenizer_file(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    given = tmp_path / "given"
    given.mkdir()
    bytes_native().save(str(given / "tokenizer.json"))
    config = Config(
        model=GPT2, data=Data(source="megatron", tokenizer=str(given / "tokenizer.json"))
    )
    out = tmp_path / "out"
    out.mkdir()
    said = vocabulary.write(out, config)
    theirs = AutoTokenizer.from_pretrained(out)
    assert said["eos_token_id"] == theirs.eos_token_id == 256


@pytest.mark.parametrize(
    ("named", "exported"),
    [([256, 9], [256, 9]), (9, [9, 256]), (None, 256)],
    ids=["among them", "another", "none"],
)
def test_a_fine_tune_keeps_the_settings_of_generation_and_the_special_tokens(
    named: Any, exported: Any, tmp_path: Path
) -> None:
    model, tokens, out = (tmp_path / name for name in ("model", "tokens", "out"))
    for folder in (model, tokens, out):
        folder.mkdir()
    settings = {"eos_token_id": named, "temperature": 0.6, "do_sample": True}
    (model / "generation_config.json").write_text(json.dumps(settings))
    special = {"bos_token_id": 3, "eos_token_id": named, "pad_token_id": 7}
    (model / "config.json").write_text(json.dumps({"hidden_size": 8} | special))
    bytes_native().save(str(tokens / "tokenizer.json"))
    shape = replace(GPT2, init_from=str(model))
    config = Config(
        model=shape, data=Data(source="megatron", tokenizer=str(tokens / "tokenizer.json"))
    )
    assert vocabulary.write(out, config) == special | {"eos_token_id": exported}
    written = json.loads((out / "generation_config.json").read_text())
    assert written == settings | {"eos_token_id": exported}


@pytest.mark.parametrize("family", ["gemma3", "mistral3", "glm4_moe", "glm4_moe, merged"])
def test_what_training_does_not_change_is_copied_from_the_base(family: str, tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    if family in WRAPPERS:
        save_wrapper(family, base)
    else:
        save("glm4_moe", base, merged=family.endswith("merged"))
        file = base / "model.safetensors"
        save_file(load_file(file) | {"model.layers.2.enorm.weight": torch.ones(3)}, file)
    shape = replace(read_shape(base), init_from=str(base))
    model = random_model(shape)
    found = find(base, shape)
    trained = {tensor.name for pairs in found.values() for _, tensor in pairs}
    kept = count_kept(base, (tensor for pairs in found.values() for _, tensor in pairs))
    assert kept == len(read_folder(base)) - len(trained)
    config = Config(model=replace(shape, kept_tensors=kept), data=Data(source="megatron"))
    stored = checkpoint_of(model, tmp_path)
    export(stored, config, out, "fp32", 20_000, quiet)
    assert_rest_is_equal(base, out, trained)
    theirs = wrapper_from(out) if family in WRAPPERS else from_pretrained(out)
    expected = model(tokens())
    assert (expected - logits(theirs, tokens())).abs().max() <= 1e-5 * expected.abs().max()
    export(stored, config, tmp_path / "bf16", "bf16", 1 << 30, quiet)
    for level in (document := read_document(tmp_path / "bf16")), text_config(document):
        assert level.get("dtype", "bfloat16") == "bfloat16"

    shutil.rmtree(base)
    with pytest.raises(UserError, match=rf"{base}: does not exist.* copies the {kept} tensors"):
        export(stored, config, tmp_path / "again", "fp32", 1 << 30, quiet)
    assert not (tmp_path / "again").exists()


def test_a_head_of_its_own_is_new_in_a_base_that_ties_it(tmp_path: Path) -> None:
    save_wrapper("gemma3", tmp_path / "base")
    shape = replace(
        read_shape(tmp_path / "base"),
        tie_embeddings=False,
        init_from=str(tmp_path / "base"),
        kept_tensors=1,
    )
    model = random_model(shape)
    config = Config(model=shape, data=Data(source="megatron"))
    export(checkpoint_of(model, tmp_path), config, tmp_path / "out", "fp32", 1 << 30, quiet)
    expected = model(tokens())
    found = logits(wrapper_from(tmp_path / "out"), tokens())
    assert (expected - found).abs().max() <= 1e-5 * expected.abs().max()


# --- export and further training ------------------------------------------------------------------

VALID_SAMPLES = 8
GROUPED = Model(
    experts=8, expert_groups=4, expert_groups_per_token=2, router="sigmoid", expert_scale=2.5,
    shared_ffn=48, dense_layers=1, dense_ffn=64, balance="bias", balance_rate=0.01,
)  # fmt: skip


def write_documents(folder: Path) -> None:
    """Write a corpus of two documents, the second for validation, and one of the second alone."""
    numbers = np.random.default_rng(3).integers(0, 64, (2, VALID_SAMPLES * SEQ_LEN + 1))
    for name, documents in (("tokens", numbers), ("second", numbers[1:])):
        write_indexed(folder / name, documents)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "layout", "deepspeed"),
    [
        (Model(qk_norm=True), {"dp": 2, "tp": 2, "stage": 3}, False),
        exhaustive(Model(qkv_bias=True), {"dp": 2, "stage": 3}, True),
        (Model(experts=4, balance="aux"), {"dp": 2, "ep": 2, "stage": 3}, False),
        exhaustive(GROUPED, {"dp": 2, "ep": 2, "stage": 3}, False),
    ],
    ids=["qwen3, dp 2 · tp 2", "qwen2, deepspeed stage 3", "mixtral, ep 2", "glm4_moe, ep 2"],
)
def test_training_goes_on_from_an_export(
    shape: Model, layout: dict[str, Any], deepspeed: bool, tmp_path: Path
) -> None:
    write_documents(tmp_path)
    shape = replace(
        shape, layers=2, hidden=32, heads=8, kv_heads=4, head_dim=4, ffn=48, vocab=64,
        max_seq_len=32, init_std=0.2,
    )  # fmt: skip
    degrees = {key: value for key, value in layout.items() if key in ("tp", "ep")}
    base = make_config(
        tmp_path, dp=2, stage=layout["stage"], model=shape, precision="fp32", parallel=degrees
    )
    base = replace(
        base,
        backend=Backend(name="deepspeed" if deepspeed else "native"),
        data=replace(base.data, valid_fraction=0.5),
        checkpoint=Checkpoint(),
        train=replace(base.train, steps=6, micro_batch=2, eval_every=6, eval_samples=VALID_SAMPLES),
    )
    first = make_run(base, "first")
    train(first, base)
    (stored,) = store.list_checkpoints(first.checkpoints)
    out = first.path / "hf"
    export(stored, base, out, "fp32", 20_000, quiet)
    second = make_config(tmp_path, dp=2, model=replace(shape, init_from=str(out)), precision="fp32")
    second = replace(second, data=replace(second.data, path=str(tmp_path / "second")))
    if deepspeed:
        second = replace(second, backend=Backend(name="deepspeed"))
    second = replace(second, train=replace(second.train, steps=1))
    run = make_run(second, "second")
    train(run, second)
    assert read_metrics(first)[-1]["eval_loss"] < read_metrics(first)[0]["loss"] * 1.5
    assert read_metrics(run)[0]["loss"] == pytest.approx(
        read_metrics(first)[-1]["eval_loss"], rel=1e-6
    )
