"""Generated text, compared with transformers' own generation from the same weights."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nanoscale.checkpoint import sharded, store
from nanoscale.checkpoint.hf.export import export
from nanoscale.checkpoint.hf.load import fingerprint
from nanoscale.common.errors import UserError
from nanoscale.config.composing.frozen import dump, load
from nanoscale.config.schema import Config, Data, Lora
from nanoscale.data.tokens.tokenizer import ByteTokenizer
from nanoscale.generate import writing
from nanoscale.generate.sampling import Sampling
from nanoscale.generate.weights import Opened, open_model
from nanoscale.generate.writing import Wish, Written, batches, encode, write
from nanoscale.models.hf_cache import HFCache
from nanoscale.models.hf_model import saved_buffers
from tests.support import hf_families
from tests.support.hf_families import FAMILIES, OF_ANY_LENGTH
from tests.support.hf_models import run_of_transformers
from tests.support.jobs import BYTES, SHAPE, run_of_bytes
from tests.support.rows import exhaustive

GREEDY = Wish(Sampling(0.0), max_tokens=16)


def written(opened: Opened, prompt: list[int], wish: Wish) -> Written:
    found = Written()
    pieces = list(write(opened, prompt, wish, found))
    assert "".join(pieces) == found.text
    return found


def theirs(folder: Path, prompt: list[int], end: int | None, beams: int = 1) -> list[int]:
    from transformers import AutoModelForCausalLM

    # Transformers' grouped products of experts know no fp64.
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    ids = torch.tensor([prompt])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False,
        eos_token_id=end, pad_token_id=0, num_beams=beams,
    )  # fmt: skip
    new: list[int] = found[0, len(prompt) :].tolist()
    return new


@pytest.mark.parametrize("family", OF_ANY_LENGTH)
def test_the_most_likely_tokens_are_those_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, settings = FAMILIES[family]
    monkeypatch.setitem(FAMILIES, family, (name, settings | {"vocab_size": 257}))
    hf_families.save(family, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")  # not asked for
    opened = open_model(str(tmp_path), dtype="fp64", tokenizer="byte")
    prompt = encode(opened, "abc")
    assert prompt[-3:] == [97, 98, 99]
    found = written(opened, prompt, GREEDY)
    expected = theirs(tmp_path, prompt, ByteTokenizer.eos)
    ended = ByteTokenizer.eos in expected
    assert found.tokens == expected[: -1 if ended else None] and len(set(expected)) > 3
    assert found.finish == ("end" if ended else "length")


@pytest.mark.parametrize("beams", [2, 5])
def test_the_likeliest_text_is_the_one_that_transformers_finds(
    beams: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, settings = FAMILIES["llama"]
    monkeypatch.setitem(FAMILIES, "llama", (name, settings | {"vocab_size": 257}))
    hf_families.save("llama", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")  # not asked for
    opened = open_model(str(tmp_path), dtype="fp64", tokenizer="byte")
    wish = replace(GREEDY, beams=beams)
    drawn = set()
    for text in ("abc", "x", "of the", "(1 + 2"):
        prompt = encode(opened, text)
        for end in (None, *theirs(tmp_path, prompt, None, beams)[2:9:3]):
            found = written(replace(opened, ends=frozenset({end} - {None})), prompt, wish)
            expected = theirs(tmp_path, prompt, end, beams)
            assert found.tokens == [token for token in expected if token != end]
            assert found.finish == ("end" if end in expected else "length")
            drawn.add(tuple(found.tokens))
    assert len(drawn) > 6


def test_a_run_and_what_is_exported_of_it(tmp_path: Path) -> None:
    run = run_of_bytes(tmp_path)
    config = Config(model=BYTES, data=Data(source="stdlib", cache_dir=str(tmp_path)))
    stored = store.find_checkpoint(run.checkpoints, None)
    export(stored, config, tmp_path / "out", "fp64", 10**9, lambda *_: None)
    opened = open_model(str(run.path), dtype="fp64")
    assert opened.before == (256,) and opened.trained_len == 32
    prompt = encode(opened, "def ")
    found = written(opened, prompt, GREEDY)
    assert found.tokens == theirs(tmp_path / "out", prompt, None) and len(set(found.tokens)) > 3
    other = open_model(str(tmp_path / "out"), dtype="fp64")
    assert encode(other, "def ") == prompt[1:], "as its tokenizer.json begins a text"
    assert written(other, prompt, GREEDY).text == found.text


WINDOWS, STATES, LATENT = "gemma3_text", ("qwen3_next", "nemotron_h"), "deepseek_v3"


@pytest.mark.parametrize(
    "family",
    ["qwen3", WINDOWS, "gpt_oss", LATENT, *STATES, "gpt2"]
    + [exhaustive(it) for it in ("falcon", "gpt_neox", "gemma2", "mixtral", "glm4_moe", "hrm_text")]
    + [exhaustive(it) for it in ("minimax_m2", "gemma4_text", "cohere")],
)
def test_a_model_of_transformers_writes_as_its_export_does(family: str, tmp_path: Path) -> None:
    """Its own cache holds windows, sinks, latents, recurrent states, positions that are learned."""
    run = run_of_transformers(family, tmp_path)
    stored = store.find_checkpoint(run.checkpoints, None)
    out = tmp_path / "out"
    export(stored, load(run.config), out, "fp64", 10**9, lambda *_: None)
    opened = open_model(str(run.path), dtype="fp64")
    drawn = set()
    for text in ("def main(", "x"):
        prompt = encode(opened, text)
        for beams in (1, 3):
            found = written(replace(opened, ends=frozenset()), prompt, replace(GREEDY, beams=beams))
            assert found.tokens == theirs(out, prompt, None, beams)
            drawn |= {*found.tokens}
    assert len(drawn) > 3


class _Sums(nn.Module):
    """A model that keeps the sum of its tokens in a cache, with the names of transformers 5.24 and before."""

    def forward(self, input_ids: Any, cache: Any = None) -> Any:
        sums = input_ids.cumsum(1) + (0 if cache is None else cache)
        last = sums[:, -1:]
        return SimpleNamespace(logits=sums[..., None], cache=last, past_key_values=last)


class _OldSums(_Sums):
    def forward(self, input_ids: Any, past_key_values: Any = None) -> Any:
        return super().forward(input_ids, past_key_values)


class _NoCache(_Sums):
    def forward(self, input_ids: Any) -> Any:  # type: ignore[override]
        return super().forward(input_ids)


@pytest.mark.parametrize("kind", [_Sums, _OldSums, _NoCache])
def test_the_cache_is_given_by_its_name_or_not_at_all(kind: type[nn.Module]) -> None:
    cache = HFCache(SimpleNamespace(hf=kind()), 1)
    found = [cache.logits(torch.tensor([[token]]), last_only=True).item() for token in (1, 2, 4)]
    assert found == [1, 3, 7]


@pytest.mark.parametrize("dtype", ["fp32", exhaustive("fp64")])
@pytest.mark.parametrize(
    "family",
    ["qwen3", WINDOWS, *STATES, "gpt2"]
    + [exhaustive(it) for it in ("falcon", "gpt_neox", "gemma2", "mixtral", "glm4_moe", "gpt_oss")]
    + [exhaustive(it) for it in ("minimax_m2", "gemma4_text", "cohere", LATENT)],
)
def test_prompts_of_transformers_models_are_answered_as_one_by_one(
    family: str, dtype: str, tmp_path: Path
) -> None:
    """Prompts of one length share a batch."""
    opened = open_model(str(run_of_transformers(family, tmp_path).path), dtype=dtype)
    prompts = [encode(opened, text) for text in PROMPTS]
    wish = replace(GREEDY, max_tokens=12, stops=("e",))
    alone = [written(opened, prompt, wish) for prompt in prompts]
    found = [batch.run(opened) for batch in batches(opened, prompts, wish)]
    assert list(chain(*found)) == alone
    assert len({len(one.tokens) for one in alone}) > 1


@pytest.mark.parametrize("family", ["qwen3", exhaustive("nemotron_h")])
def test_adapters_of_transformers_models_write_as_their_export_does(
    family: str, tmp_path: Path
) -> None:
    """A checkpoint has the adapters and buffers, and the folder has the frozen weights."""
    run = run_of_transformers(family, tmp_path)
    opened = open_model(str(run.path), dtype="fp64")
    prompt = encode(opened, "def main(")
    before = written(replace(opened, ends=frozenset()), prompt, GREEDY).tokens

    config = replace(load(run.config), lora=Lora(rank=2, alpha=2.0, dora=True))
    run.config.write_text(dump(config))
    torch.manual_seed(0)
    buffers = saved_buffers(opened.model)
    state = {f"model.{name}": torch.randn_like(value) for name, value in buffers}
    for name, value in opened.model.named_parameters():
        if "layers." in name and name.endswith("proj.weight") and value.ndim == 2:
            adapter = f"model.{name.removesuffix('.weight')}.adapter"
            state[f"{adapter}.a"] = torch.randn(2, value.shape[1])
            state[f"{adapter}.b"] = torch.randn(value.shape[0], 2)
            state[f"{adapter}.magnitude"] = torch.rand(value.shape[0]) + 0.5
    base = fingerprint(tmp_path / family, config.model)
    about = {"consumed_samples": 0, "tokens": 0, "world_size": 1, "time": 1.0, "base": base}
    sharded.save(run.workspace(1), state, {"step": 8} | about)

    stored = store.find_checkpoint(run.checkpoints, None)
    export(stored, config, tmp_path / "out", "fp64", 10**9, lambda *_: None)
    opened = open_model(str(run.path), dtype="fp64")
    found = written(replace(opened, ends=frozenset()), prompt, GREEDY).tokens
    assert found == theirs(tmp_path / "out", prompt, None) != before


def test_models_of_transformers_that_cannot_write(tmp_path: Path) -> None:
    run = run_of_transformers("qwen3", tmp_path)
    with pytest.raises(UserError, match="run on one device: --device cpu"):
        open_model(str(run.path), device="cpu,cpu")
    config = load(run.config)
    for changes, message in (
        ({"trust_remote_code": True}, "was not made by your own runs, and model.trust_remote_code"),
        ({"hf_config": {"architectures": ["BertForMaskedLM"]}}, "masked, and predicts no next"),
        ({"hf_config": {"model_type": "unknown"}}, "transformers cannot build it"),
    ):
        run.config.write_text(dump(replace(config, model=replace(config.model, **changes))))
        with pytest.raises(UserError, match=message):
            open_model(str(run.path))


def test_text_of_transformers_models_is_drawn_by_the_seed(tmp_path: Path) -> None:
    opened = open_model(str(run_of_transformers("gpt_neox", tmp_path).path), dtype="fp64")
    opened, warm = replace(opened, ends=frozenset()), Wish(Sampling(1.0), max_tokens=12, seed=5)
    prompt = encode(opened, "def main(")
    drawn = [written(opened, prompt, replace(warm, seed=seed)).tokens for seed in (5, 5, 6)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_seeds_stops_and_the_end_of_the_context(tmp_path: Path) -> None:
    run = run_of_bytes(tmp_path)
    opened = open_model(str(run.path))
    prompt = encode(opened, "xyz")
    long = replace(GREEDY, sampling=Sampling(1.0), max_tokens=100, seed=1)
    first, again = written(opened, prompt, long), written(opened, prompt, long)
    assert first == again and first.finish in ("context", "end")
    other = written(opened, prompt, replace(long, seed=2))
    assert other.tokens != first.tokens
    full = next(w for w in (first, other) if w.finish == "context")
    assert full.prompt_tokens + len(full.tokens) == BYTES.max_seq_len == opened.context
    assert full.text == ByteTokenizer().decode(full.tokens)
    stop = full.text[5:8]
    seed = 1 if full is first else 2
    stopped = written(opened, prompt, replace(long, seed=seed, stops=(stop,)))
    assert stopped.finish == "stop" and stopped.text == full.text[: full.text.index(stop)]
    with pytest.raises(UserError, match="48"):
        encode(opened, "x" * 47)
    assert len(encode(opened, "x" * 46)) == 47


PROMPTS = ["a", "def main(", "xyz", "", "import os, sys and more", "a", "z" * 40]


@pytest.mark.parametrize("sampling", [Sampling(0.0), Sampling(1.0, top_k=20)])
def test_prompts_of_a_batch_are_answered_as_one_by_one(
    sampling: Sampling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that end at different steps, for different reasons, one of them at the end of the context."""
    opened = open_model(str(run_of_bytes(tmp_path).path), dtype="fp64")
    prompts = [encode(opened, text) for text in PROMPTS]
    wish = Wish(sampling, max_tokens=12, stops=("e",), seed=3)
    alone = [written(opened, prompt, wish) for prompt in prompts]
    assert len({len(one.tokens) for one in alone}) > 2 and len({one.finish for one in alone}) > 1
    for most, sizes in ((64, [7]), (3, [3, 3, 1])):
        monkeypatch.setattr(writing, "_MOST_ROWS", most)
        groups = list(batches(opened, prompts, wish))
        assert [len(group.prompts) for group in groups] == sizes
        assert [one for group in groups for one in group.run(opened)] == alone


def test_the_size_of_a_batch_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_model(str(run_of_bytes(tmp_path).path))

    def sizes(prompts: list[list[int]]) -> list[int]:
        return [len(group.prompts) for group in batches(opened, prompts, wish)]

    wish = Wish(max_tokens=8)
    monkeypatch.setattr(writing, "_MOST_TOKENS", 20)
    assert sizes([[1] * 4] * 6) == [5, 1], "4 tokens each"
    assert sizes([[1] * 4, [1] * 9, [1] * 30, [1]]) == [2, 1, 1], "with padding"
    monkeypatch.setattr(writing, "_MOST_TOKENS", 1000)
    each = 2 * BYTES.layers * BYTES.kv_head_count * BYTES.head_width * 4 * (4 + 8)
    monkeypatch.setattr(writing, "_MOST_CACHE", 3 * each)
    assert sizes([[1] * 4] * 7) == [3, 3, 1]
    assert sizes([]) == []


def test_what_a_checkpoint_of_experts_prefers_is_read(tmp_path: Path) -> None:
    shape = replace(BYTES, experts=4, experts_per_token=2, balance="bias")
    lean = {f"balance.bias.layers.{n}": torch.tensor([n, -1, 2, 3]) for n in range(4)}
    opened = open_model(str(run_of_bytes(tmp_path, shape, **lean).path), dtype="bf16")
    for number, block in opened.model.layers.items():
        assert block.mlp.router.choice_bias.tolist() == [int(number), -1, 2, 3]
        assert block.mlp.router.load.tolist() == [0, 0, 0, 0]
    assert {p.dtype for p in opened.model.parameters()} == {torch.bfloat16}


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    run = run_of_bytes(tmp_path)
    small = run_of_bytes(tmp_path, replace(SHAPE, vocab=64), "small")
    file = next((run.checkpoints / "step-00000007").glob("*.distcp"))
    for name, options, words in (
        (str(run.path), {"step": 3}, "no checkpoint of step 3"),
        (str(run.path), {"device": "cuda:99"}, "not a device of this machine"),
        (str(run.path), {"device": "toaster"}, "not a device of this machine"),
        (str(run.path), {"tokenizer": str(tmp_path / "t.json")}, "there is no such file"),
        (str(small.path), {}, "it belongs to another model"),
        (str(tmp_path / "nothing"), {}, "does not exist"),
    ):
        with pytest.raises(UserError, match=words):
            open_model(name, **options)  # type: ignore[arg-type]
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(UserError, match="is damaged: .*bytes instead of the written"):
        open_model(str(run.path))
    text = run.config.read_text().replace("source: stdlib", "source: megatron")
    run.config.write_text(text)
    with pytest.raises(UserError, match="no tokenizer is known"):
        open_model(str(run.path))
