"""The advice of `model=hf` for keys that such a model cannot have, accepted in their place."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from nanoscale.common.devices import Devices
from nanoscale.common.errors import UserError, Violation
from nanoscale.config.composing.compose import compose
from nanoscale.config.rules import check
from nanoscale.config.schema import Config

FAMILIES = {
    "gpt_neox": {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2},
    "gptj": {"n_layer": 2, "n_embd": 8, "n_head": 2, "n_positions": 64},
}
LAWS = {
    "parallel.tp=2 parallel.sequence_parallel=true": "parallel.sequence_parallel=false",
    "parallel.ep=2": "parallel.ep=1",
    "precision=fp8": "precision=bf16",
    "lora.rank=2 parallel.tp=2": "lora.rank=0",
}
"""The typed overrides, and the overrides that must be advised, if it matters."""


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for family, sizes in FAMILIES.items():
        name = {"gpt_neox": "GPTNeoXForCausalLM", "gptj": "GPTJForCausalLM"}[family]
        document = {"model_type": family, "architectures": [name], "vocab_size": 320, **sizes}
        Path(family).mkdir()
        (Path(family) / "config.json").write_text(
            json.dumps(document | {"tie_word_embeddings": False})
        )


def checked(*words: str) -> Config:
    return check(compose(["recipe=debug", *words]), Devices("cuda", 8))


def wrong(*words: str) -> list[Violation]:
    with pytest.raises(UserError) as caught:
        checked(*words)
    return list(caught.value.violations)


def replaced(words: list[str], advice: str) -> list[str]:
    typed = shlex.split(advice)
    keys = {word.partition("=")[0] for word in typed}
    return [*(word for word in words if word.partition("=")[0] not in keys), *typed]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("key", "value"),
    [("layers", 4), ("hidden", 16), ("heads", 4), ("vocab", 640), ("tie_embeddings", True)],
)
def test_a_size_is_changed_where_config_json_has_it(family: str, key: str, value: Any) -> None:
    """The second piece of advice is for a shape of one's own, without the file's weights."""
    model, mistake = ["model=hf", f"model.name={family}"], f"model.{key}={value}".lower()
    (found,) = wrong(*model, mistake)
    as_in_file, changed = found.suggestions
    assert checked(*model, as_in_file).model == checked(*model).model
    shape = checked(*model, changed).model
    assert getattr(shape, key) == value
    assert sum(shape.hf_config.get(name) == value for name in shape.hf_config) == 1
    (name,) = [
        it for it, one in shape.hf_config.items() if one == value and type(one) is type(value)
    ]
    assert name in FAMILIES[family] or name in ("vocab_size", "tie_word_embeddings")


def test_layers_are_counted_by_their_kinds() -> None:
    kinds = ["mamba", "moe", "attention"]
    document = {"model_type": "nemotron_h", "vocab_size": 320, "layers_block_type": kinds}
    Path("hybrid").mkdir()
    Path("hybrid/config.json").write_text(json.dumps(document | {"num_hidden_layers": 52}))
    model = ["model=hf", "model.name=hybrid"]
    (found,) = wrong(*model, "model.layers=4")
    assert checked(*model, *found.suggestions).model.layers == 3


@pytest.mark.parametrize("line", LAWS)
def test_a_law_of_models_from_transformers_advises_what_is_accepted(line: str) -> None:
    model, typed = ["model=hf", "model.name=gptj"], shlex.split(line)
    found = wrong(*model, *typed)
    assert found and all(each.suggestions for each in found)
    assert not LAWS[line] or LAWS[line] in [text for each in found for text in each.suggestions]
    words = typed
    for each in found:
        words = replaced(words, each.suggestions[0])
    checked(*model, *words)


def test_tp_alone_leaves_the_stream_whole_and_without_tp_the_default_stays() -> None:
    model = ["model=hf", "model.name=gptj"]
    assert not checked(*model, "parallel.tp=2").parallel.sequence_parallel
    assert checked(*model).parallel.sequence_parallel
    assert checked("parallel.tp=2").parallel.sequence_parallel


def test_keys_of_such_models_alone_are_answered_with_the_model() -> None:
    for word in ("model.trust_remote_code=true", "model.hf_config.n_layer=3"):
        (found,) = wrong(word)
        for text in found.suggestions:
            if text == "model=hf":
                checked(word, "model.name=gptj", text)
            else:
                checked(text)
