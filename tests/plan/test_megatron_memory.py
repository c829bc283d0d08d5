"""The tensors that Transformer Engine saves, the effect of a recipe on them, and published runs of 2026."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.plan.megatron_memory import SCALED, Recipe, saved_by_megatron
from benchmarks.plan.published_runs import RUNS_OF_2026, compare, stages_of
from benchmarks.plan.software import MEGATRON, memory_of, software_setting
from nanoscale.config.model_math import parameters
from nanoscale.config.schema import Launcher, Zero
from nanoscale.plan.memory.activations import saved
from nanoscale.plan.memory.setting import MemorySetting
from tests.plan.machines import BF16, job

FP8 = replace(BF16, fp8=True)


def setting(model: str, recipe: Recipe | None = None, **keys) -> MemorySetting:
    config = job(model, launcher=Launcher(device="cuda"), zero=Zero(stage=1), **keys)
    return software_setting(config, MEGATRON, recipe)


def size(setting: MemorySetting, recipe: Recipe = Recipe()) -> int:  # noqa: B008
    return sum(saved_by_megatron(setting.shape, setting.run, recipe).values())


def test_products_in_8_bits_save_their_inputs_in_8_bits():
    """Two norms' results and the feed-forward's product; attention's result is saved in 16 bits in addition."""
    wide, narrow = (setting("llama-8b", precision=it, seq_len=8192) for it in (BF16, FP8))
    halved, added = 8192 * (2 * 4096 + 14336), 8192 * 4096
    expected = (2 - SCALED) * halved - SCALED * added
    assert size(wide) - size(narrow) == pytest.approx(expected, rel=1e-6)


def test_the_inputs_of_experts_are_saved_in_8_bits():
    wide, narrow = (setting("qwen3-30b-a3b", precision=it, seq_len=4096) for it in (BF16, FP8))
    experts = 8 * 4096 * (2048 + 768)
    others = 4096 * 2048  # of the first norm
    attended = 4096 * 4096
    expected = (2 - SCALED) * (experts + others) - SCALED * attended
    assert size(wide) - size(narrow) == pytest.approx(expected, rel=1e-6)


def test_recomputed_modules_free_what_they_make():
    latent = setting("deepseek-v3", seq_len=4096, dp=64, ep=64, global_batch=64)
    queries, keys, values = (4096 * 128 * width * 2 for width in (192, 192, 128))
    latents, rotation = 4096 * (1536 + 512) * 2, 4096 * 64 * 2
    freed = size(latent) - size(latent, Recipe(recompute=frozenset({"mla_up_proj"})))
    assert freed == queries + keys + values + latents + rotation
    activations = size(latent) - size(latent, Recipe(recompute=frozenset({"moe_act"})))
    assert activations == 8 * 4096 * 2048 * 2
    assert size(latent) == size(latent, Recipe(recompute=frozenset({"mlp"})))
    norms = size(latent) - size(latent, Recipe(recompute=frozenset({"layernorm"})))
    assert norms == 2 * 4096 * 7168 * 2


def test_activation_and_weights_of_experts_are_one_operation():
    whole = setting("qwen3-30b-a3b", seq_len=4096)
    inner = 8 * 4096 * 768 * 2
    ours = sum(saved(whole.shape, whole.run).values())
    assert ours - size(whole) == 2 * inner


def test_megatron_s_fsdp_shards_weights_gradients_and_states():
    config = job(
        "llama-70b", dp=64, global_batch=64, seq_len=8192, zero=Zero(stage=3),
        launcher=Launcher(device="cuda"), precision=replace(BF16, reduce="bf16"),
    )  # fmt: skip
    (rank,) = memory_of(software_setting(config, MEGATRON), None)
    share = parameters(config.model) / 64
    assert rank.part("weights").bytes == pytest.approx(4 * share, rel=0.01)
    assert rank.part("optimizer").bytes == pytest.approx(8 * share, rel=0.01)
    assert rank.part("compute copies").bytes == pytest.approx(2 * share, rel=0.01)
    assert rank.part("gradients").bytes < 2 * share + 9 * 2**30


def test_moments_blocks_in_host_memory_and_recomputed_blocks_take_less():
    def activations(**keys) -> int:
        config = job("llama-8b", launcher=Launcher(device="cuda"), zero=Zero(stage=1))
        recipe = Recipe(**keys)
        (rank,) = memory_of(software_setting(config, MEGATRON, recipe), None, recipe)
        return rank.part("activations").bytes

    block = size(setting("llama-8b"))
    assert activations() - activations(host_layers=5) == pytest.approx(4 * block, rel=0.01)
    assert 0.8 < (activations() - activations(recomputed_layers=5)) / (5 * block) < 1
    narrow, wide = (setting("llama-8b", Recipe(moments=it)).states for it in (4, 8))
    assert wide.optimizer == 2 * narrow.optimizer == 8


def test_stages_of_a_pipeline_are_stated_or_equal_or_shorter_at_the_ends():
    row = {"pp": "4", "vp": "4", "software": "megatron", "overrides": "stages=4*15+1"}
    assert stages_of(row, 61) == [4] * 15 + [1]
    row |= {"pp": "8", "vp": "8", "overrides": ""}
    assert stages_of(row, 126) == [1] + [2] * 62 + [1]
    assert stages_of(row, 64) == [1] * 64
    assert sum(stages_of(row | {"software": "torch"}, 126)) == 126


def test_measured_memory_of_mixtures_with_latent_attention():
    errors = [
        one.memory_error
        for one in compare(RUNS_OF_2026)
        if one.memory_error is not None and one.row["software"].startswith("megatron")
    ]
    assert len(errors) == 6 and max(map(abs, errors)) < 0.02


def test_published_runs_that_ran_are_planned_to_fit():
    """Four of 79 are not. The recipe of gpt-oss on H100 has a micro batch of 1, where its table states 4."""
    refused = {one.row["id"] for one in compare(RUNS_OF_2026) if not one.plan.fits}
    assert refused == {
        "26-gpt-oss-120b-h100-sxm-64.2",
        "26-llama3-70b-gb200-64.2",
        "26-llama3-70b-gb300-64",
        "26-qwen3-235b-a22b-h100-sxm-256",
    }
