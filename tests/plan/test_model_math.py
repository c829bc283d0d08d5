"""Closed forms against published figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nanoscale.config.composing.compose import compose
from nanoscale.config.model_math import (
    flops_per_token,
    flops_per_token_causal,
    matmul_parameters,
    parameters,
)
from nanoscale.config.schema import Model
from nanoscale.view.measured_text import _use

PUBLISHED = {
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "llama-405b": 405_853_388_800,
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "mixtral-8x7b": 46_702_792_704,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b": 7_248_023_552,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_number(name):
    assert parameters(compose([f"model={name}"]).config.model) == PUBLISHED[name]


WITHOUT_EMBEDDING = {"0.6b": 0.44, "1.7b": 1.4, "4b": 3.6, "8b": 6.95, "14b": 13.2, "32b": 31.2}
"""Billions of parameters in addition to embedding and head, on the pages of Qwen3's weights."""


@pytest.mark.parametrize("size", WITHOUT_EMBEDDING)
def test_blocks_of_qwen3_have_the_published_size(size):
    model = compose([f"model=qwen3-{size}"]).config.model
    matrices = 1 if model.tie_embeddings else 2
    blocks = parameters(model) - matrices * model.vocab * model.hidden
    assert blocks / 1e9 == pytest.approx(WITHOUT_EMBEDDING[size], rel=0.01)


def test_gpt3_differs_from_its_paper_by_the_head_and_the_padded_vocabulary():
    """Table D.1 of arXiv:2005.14165 gives 174,600 M parameters."""
    model = compose(["model=gpt3-175b"]).config.model
    published = replace(model, vocab=50_257, tie_embeddings=True)
    assert parameters(published) == pytest.approx(174.6e9, rel=1e-4)
    assert parameters(model) - parameters(published) == (50_304 + 50_304 - 50_257) * 12_288


def test_the_models_of_our_own_have_the_size_that_they_are_called_by():
    assert parameters(compose(["model=gpt-10b"]).config.model) == pytest.approx(10e9, rel=0.02)
    assert 1e6 < parameters(compose(["model=tiny"]).config.model) < 5e6


def test_matmul_parameters_leave_the_input_embedding_and_the_norms_out():
    model = compose(["model=llama-8b"]).config.model
    norms = (2 * 32 + 1) * 4096
    assert matmul_parameters(model) == PUBLISHED["llama-8b"] - 128_256 * 4096 - norms


def test_a_token_multiplies_the_experts_that_it_takes():
    """Mixtral's 12.9 B "active" parameters (arXiv:2401.04088, table 1) count the input embedding, too."""
    model = compose(["model=mixtral-8x7b"]).config.model
    assert matmul_parameters(model) + 32_000 * 4096 == pytest.approx(12.9e9, rel=0.005)
    qwen = compose(["model=qwen3-30b-a3b"]).config.model
    assert parameters(qwen) == 30_532_122_624
    assert matmul_parameters(qwen) + 151_936 * 2048 == pytest.approx(3.3e9, rel=0.02)


def test_a_tied_head_multiplies_all_the_same():
    untied, tied = Model(), Model(tie_embeddings=True)
    assert matmul_parameters(tied) == matmul_parameters(untied)
    assert parameters(untied) - parameters(tied) == 320 * 64


def test_flops_follow_the_palm_convention():
    model = compose(["model=llama-8b"]).config.model
    attention = 12 * 32 * 4096 * 8192
    assert flops_per_token(model, 8192) == 6 * matmul_parameters(model) + attention
    assert flops_per_token_causal(model, 8192) == 6 * matmul_parameters(model) + attention // 2


def test_attention_is_as_wide_as_the_heads_are():
    narrow = Model(hidden=64, heads=8, head_dim=4)
    wide = Model(hidden=64, heads=8, head_dim=8)
    products = matmul_parameters(wide) - matmul_parameters(narrow)
    attention = 12 * 8 * (64 - 32) * 128
    assert flops_per_token(wide, 128) - flops_per_token(narrow, 128) == 6 * products + attention


def test_open_head_counts_mean_what_the_schema_says():
    assert parameters(Model(heads=8)) == parameters(Model(heads=8, kv_heads=8, head_dim=8))


def test_the_embedding_of_a_classifier_multiplies_nothing():
    """In a small encoder it is most of the parameters: counted as a head, it shows an MFU far above 100 %."""
    known = {"source": "hf", "hidden": 64, "vocab": 30_522, "parameters": 2_100_000}
    known["tie_embeddings"] = True
    masked = Model(**known, hf_config={"architectures": ["BertForMaskedLM"]})
    classify = Model(**known, hf_config={"architectures": ["BertForSequenceClassification"]})
    assert matmul_parameters(masked) == 2_100_000
    assert matmul_parameters(classify) == 2_100_000 - 64 * 30_522


def test_more_than_a_peak_is_no_share_of_it():
    told = {"model_tflops": 9.0, "peak_tflops": None, "matmul_tflops": 1.0, "device": "cpu"}
    told |= {"mfu_of_measured": 9.0, "hfu_of_measured": None}
    (_, _, products) = _use(told, lambda name, text: f"{name} {text}")
    assert "%" not in products and "unknown" in products
