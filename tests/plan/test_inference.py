"""The memory of inference in closed form, compared with the tensors of the real engine on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nanoscale.config.schema import Model
from nanoscale.data.tokens.tokenizer import ByteTokenizer
from nanoscale.generate.harness import ScoringBatch
from nanoscale.generate.sampling import Sampling
from nanoscale.generate.weights import Opened, _empty
from nanoscale.generate.writing import Wish, WritingBatch
from nanoscale.models.kv_cache import Cache
from nanoscale.plan.inference import InferenceMemory
from nanoscale.rehearse.played.live_memory import LiveMemory
from nanoscale.view.plan.inference_text import inference_document
from tests.plan.machines import machine

LLAMA = Model(
    layers=3, hidden=64, heads=8, kv_heads=2, head_dim=8, ffn=160, vocab=300, max_seq_len=256
)
COMMANDS = ("generate", "eval")
MODELS = {
    "llama": LLAMA,
    "large vocabulary": replace(LLAMA, vocab=5000),
    "small feed-forward": replace(LLAMA, ffn=64),
    "wide heads": replace(LLAMA, head_dim=32, qk_norm=True),
    "window": replace(LLAMA, sliding_window=200),
    "gpt2": replace(
        LLAMA, mlp="gelu", position="learned", norm="layernorm", bias=True, tie_embeddings=True
    ),
    "experts": replace(LLAMA, experts=8, experts_per_token=2, ffn=64, balance="bias"),
}
"""Each kind of model, with another largest part of its memory."""


def opened(model: Model, dtype: torch.dtype) -> Opened:
    made = _empty(model, [torch.device("cpu")], dtype)
    for parameter in made.parameters():
        parameter.normal_(std=0.02)
    tokenizer = ByteTokenizer()
    return Opened(made, tokenizer, torch.device("cpu"), "", (), frozenset(), tokenizer.eos)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_cache_are_those_of_the_engine(name: str, dtype: torch.dtype) -> None:
    memory = InferenceMemory(MODELS[name], dtype.itemsize)
    engine = opened(MODELS[name], dtype)
    tensors = [*engine.model.parameters(), *engine.model.buffers()]
    assert memory.weights == sum(it.numel() * it.element_size() for it in tensors)
    Cache(engine.model, 4, 96)
    cores = [block.attention.core for block in engine.model.layers.values()]  # type: ignore
    held = sum(it.nbytes for core in cores for it in (core.keys, core.values))
    assert 4 * 96 * memory.token == held


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("texts", "length"), [(1, 192), (4, 96)])
def test_the_peak_is_that_of_the_command(name: str, command: str, texts: int, length: int) -> None:
    memory = InferenceMemory(MODELS[name], 4)
    engine = opened(MODELS[name], torch.float32)
    tokens = [token % 250 for token in range(length)]
    wish = Wish(Sampling(0.0), max_tokens=1)
    batches: dict[str, WritingBatch | ScoringBatch] = {
        "generate": WritingBatch([tokens[1:]] * texts, wish, frozenset()),
        "eval": ScoringBatch([([0], tokens)] * texts),
    }
    with LiveMemory() as live:
        batches[command].run(engine)
    planned = memory.needed(command, texts, length) - memory.weights
    # The CPU computes experts one after another, and frees what one kernel for all of them keeps.
    assert planned == pytest.approx(live.peak, rel=0.2 if "experts" in name else 0.03)


@pytest.mark.parametrize("command", COMMANDS)
def test_one_more_does_not_fit(command: str) -> None:
    memory, capacity = InferenceMemory(LLAMA, 2), 50_000_000
    texts, longest = memory.most(command, capacity, 256), memory.most(command, capacity)
    assert texts > 1 and longest > 256
    for more in (0, 1):
        fits = memory.needed(command, texts + more, 256) <= capacity
        assert fits == (memory.needed(command, 1, longest + more) <= capacity) == (not more)
    assert memory.most(command, memory.weights) == memory.most(command, memory.weights, 256) == 0


def test_no_text_is_longer_than_the_model_reads() -> None:
    document = inference_document(LLAMA, machine("h100-sxm"), on_gpu=True)
    assert document["generate"]["longest_sequence"] == document["context"] == 256
    assert document["generate"]["largest_batch"] > 1
