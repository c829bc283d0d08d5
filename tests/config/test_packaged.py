"""Every file that comes with nanoscale composes, passes the laws, and is accounted for."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import reduce
from pathlib import Path

import pytest

from nanoscale.common.errors import UserError
from nanoscale.config.composing.compose import compose
from nanoscale.config.composing.library import RECIPE, Library, packaged
from nanoscale.config.reference import declared, defaults, flat, is_mapping, sections
from nanoscale.config.rules import Devices, check
from nanoscale.config.schema import RopeScaling
from nanoscale.config.token_formats import FORMATS
from nanoscale.config.values.convert import value_of
from tests.config.test_mixture import write_tokens
from tests.support.token_files import write_indexed

CPU = Devices("cpu", 2)
GPUS = Devices("cuda", 8, ("NVIDIA H100",) * 8)

FINE_TUNING = {
    **dict.fromkeys(("chat", "chat-lora", "finetune", "lora", "qlora", "dpo", "orpo", "kto"), ()),
    "distill": ("train.teacher=./model",),
    "classify": ("train.labels=2",),
    "encoder": ("train.mask_token=3",),
}
"""Recipes that need the user's data, and what they find in it; tests/cli/test_tasks.py trains them."""
_LLAMA = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048,
}  # fmt: skip
RECIPES = sorted(Library().options(RECIPE))
OPTIONS = sorted(
    (group, option)
    for group in Library().groups()
    if group != RECIPE
    for option in Library().options(group)
    if (group, option) != ("model", "hf")  # it needs a folder; tests/cli/test_foreign.py has one
)

NEEDS = {
    ("precision", "nvfp4"): ["model=llama-1b", "train.seq_len=256"],
    ("data", "stdlib-bpe"): ["model=llama-1b"],
    ("launcher", "env"): ["run.name=x"],
    ("launcher", "pdsh"): ["launcher.hostfile=hosts"],
    ("launcher", "ssh"): ["launcher.hostfile=hosts"],
    ("logger", "wandb"): ["logger.wandb=offline"],
    ("parallel", "hsdp"): ["zero=stage3"],
    ("scheduler", "piecewise"): ["train.phases={a: {until: 10, lr: 1.0}, b: {lr: 0.1}}"],
    ("zero", "stage2-offload"): ["backend=deepspeed"],
    ("zero", "stage3-offload"): ["backend=deepspeed"],
}
"""The overrides without which an option makes no sense."""
B200S = Devices("cuda", 8, ("NVIDIA B200",))
ON = {("precision", "fp8"): GPUS, ("precision", "mxfp8"): B200S, ("precision", "nvfp4"): B200S}
"""The devices that an option needs, if a CPU does not suffice."""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("nanoscale.common.versions.find_spec", lambda name: name)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_legal(name):
    needed = []
    if name in FINE_TUNING:
        write_indexed("corpus", [[7] * 50] * 400)
        Path("model").mkdir()
        kind = {"architectures": ["BertForMaskedLM"]} if name == "encoder" else {}
        Path("model/config.json").write_text(json.dumps(_LLAMA | kind))
        needed = ["data.path=corpus", "model.init_from=./model", *FINE_TUNING[name]]
        with pytest.raises(UserError, match=r"data\.path: is needed"):
            check(compose([f"recipe={name}", *needed[1:]]), CPU)
    composed = compose([f"recipe={name}", *needed])
    for devices in (CPU, GPUS):
        check(composed, devices)


@pytest.mark.parametrize("name", sorted({*RECIPES} - {*FINE_TUNING}))
def test_the_last_writer_of_every_key_is_who_set_it(name):
    composed = compose([f"recipe={name}", "zero=stage1", "train.seed=7", "model.max_seq_len=128k"])
    values = flat(asdict(composed.config), stop=is_mapping)
    assert set(composed.history) == set(values)
    for key, settings in composed.history.items():
        chosen_later = key in composed.left_to_plan
        assert chosen_later or value_of(key, settings[-1].value) == values[key], key
        assert settings[0].source == "default", key
        assert value_of(key, settings[0].value) == _default(key)


def _default(key: str) -> object:
    section, _, name = key.rpartition(".")
    return defaults(sections()[section])[name]


@pytest.mark.slow
@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_is_legal(group, option):
    words = [*NEEDS.get((group, option), []), f"{group}={option}", "train.steps=10"]
    if option in FORMATS:
        write_tokens(Path("corpus"), 5000)
        Path("corpus").write_bytes(bytes(2 * 5000))
        Path("corpus.index").write_bytes((5000).to_bytes(8, "little"))
        words += ["data.path=corpus"] + ["data.eos=0"] * FORMATS[option].reads_eos
    if option == "hooks":
        parameters = {"model": "config", "optimizer": "groups, config", "data": "config, split"}
        Path("mine.py").write_text(f"def {group}({parameters[group]}): pass")
        words.append("hooks.path=mine.py")
    composed = compose(words)
    check(composed, ON.get((group, option), CPU))


@pytest.mark.parametrize(
    "path",
    [p for folder in packaged() for p in sorted(folder.rglob("*.yaml"))],
    ids=lambda p: p.stem,
)
def test_every_file_says_what_it_is_and_how_to_use_it(path):
    first, second, *_ = path.read_text().splitlines()
    assert first.startswith("# ")
    assert second.startswith("#   nanoscale ")
    name = path.stem if path.stem != "config" else "recipe="
    assert name in second


CHOICES = {"launcher/local": "launcher.name", "zero/stage0": "zero.stage"}
"""Keys for which rules ask whether somebody chose the option (`Composed.asked_for`)."""


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_an_option_holds_only_what_differs_from_the_defaults(group, option):
    default = flat(defaults(sections()[""]), stop=is_mapping)
    content = Library().serve(f"{group}/{option}").content
    values = flat({group: content}, stop=is_mapping)
    repeated = {key for key, it in values.items() if key in default and it == default[key]}
    assert repeated - {CHOICES.get(f"{group}/{option}")} == set()


def test_every_model_and_recipe_of_the_brief_is_there():
    llama = {f"llama-{size}" for size in ("8b", "70b", "405b", "1b", "3b")}
    gpt = {"gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt-10b"}
    qwen = {f"qwen3-{size}" for size in ("0.6b", "1.7b", "4b", "8b", "14b", "32b", "30b-a3b")}
    others = {"gpt3-175b", "mistral-7b", "mixtral-8x7b", "tiny", "debug"}
    assert {*llama, *gpt, *qwen, *others} <= set(RECIPES)
    assert {*llama, *gpt, *qwen, *others} <= set(Library().options("model"))


def test_the_debug_recipe_is_what_other_tests_count_on():
    config = compose(["recipe=debug"]).config
    model = config.model
    assert (model.layers, model.heads, model.kv_heads, config.train.seq_len) == (8, 8, 4, 64)
    assert (model.vocab, model.ffn, config.train.global_batch) == (320, 128, 8)
    assert (config.data.source, config.data.tokenizer) == ("stdlib", "byte")
    assert config.logger.tensorboard == "off"


def test_every_key_has_a_meaning_and_a_legal_default():
    for name, key in declared().items():
        assert key.meaning and not key.meaning[0].isspace(), name
        assert key.type
        assert value_of(name, key.default) == key.default
    for name, section in sections().items():
        assert section.__doc__, name


def test_published_shapes():
    def shape(name: str) -> tuple:
        model = compose([f"model={name}"]).config.model
        return model.layers, model.hidden, model.heads, model.kv_heads, model.ffn, model.vocab

    assert shape("llama-8b") == (32, 4096, 32, 8, 14336, 128256)
    assert shape("llama-70b") == (80, 8192, 64, 8, 28672, 128256)
    assert shape("llama-405b") == (126, 16384, 128, 8, 53248, 128256)
    scaling = compose(["model=llama-8b"]).config.model.rope_scaling
    assert scaling == RopeScaling(8.0, 1.0, 4.0, 8192)


def test_a_reference_to_another_key_is_followed_and_remembered():
    composed = compose(["recipe=debug", "model.max_seq_len='${train.seq_len}'"])
    assert composed.config.model.max_seq_len == reduce(  # type: ignore[comparison-overlap]
        getattr, ("train", "seq_len"), composed.config
    )
    assert composed.history["model.max_seq_len"][-1].value == "${train.seq_len}"
