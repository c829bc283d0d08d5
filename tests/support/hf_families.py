"""Tiny models of transformers with random weights, one of each family, and folders of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FOURFOLD: dict[str, Any] = {"factor": 4.0, "rope_theta": 100.0}
PHI3: dict[str, Any] = COMMON | {
    "pad_token_id": 0,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "partial_rotary_factor": 0.75,
    "rope_scaling": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.3],
        "long_factor": [1.5, 2.0, 5.0],
    },
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", COMMON | {"rms_norm_eps": 1e-3}),
    "llama tied, llama3": ("Llama", COMMON | {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama biased": ("Llama", COMMON | {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", COMMON | {"sliding_window": None, "head_dim": 6}),
    "mistral, window": ("Mistral", COMMON | {"sliding_window": 24}),
    "qwen2": ("Qwen2", COMMON | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", COMMON | {"head_dim": 8}),
    "mixtral": ("Mixtral", COMMON | {"num_local_experts": 4, "sliding_window": 24}),
    "qwen3_moe": (
        "Qwen3Moe",
        COMMON
        | {"head_dim": 8, "moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
        | {"norm_topk_prob": True},
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        COMMON
        | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 20, "num_experts": 6}
        | {"num_experts_per_tok": 3, "norm_topk_prob": False},
    ),
    "glm4_moe": (
        "Glm4Moe",
        COMMON
        | {"head_dim": 8, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3}
        | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 2}
        | {"use_qk_norm": True, "attention_bias": True, "pad_token_id": 0},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        COMMON
        | {"num_key_value_heads": 8, "kv_lora_rank": 20, "q_lora_rank": 12, "qk_rope_head_dim": 4}
        | {"qk_nope_head_dim": 6, "v_head_dim": 8, "first_k_dense_replace": 1}
        | {"moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4}
        | {"topk_group": 2, "pad_token_id": 0}
        | {"rope_scaling": FOURFOLD | {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.7}
           | {"original_max_position_embeddings": 8}},
    ),
    "deepseek_v3, plain": (
        "DeepseekV3",
        COMMON
        | {"num_key_value_heads": 8, "kv_lora_rank": 20, "q_lora_rank": None, "qk_rope_head_dim": 4}
        | {"qk_nope_head_dim": 6, "v_head_dim": 10, "first_k_dense_replace": 0, "rope_interleave": False}
        | {"moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 1}
        | {"topk_group": 1, "pad_token_id": 0, "norm_topk_prob": False},
    ),
    "gpt_oss": (
        "GptOss",
        COMMON
        | {"num_hidden_layers": 3, "head_dim": 6, "sliding_window": 7, "pad_token_id": 0}
        | {"num_local_experts": 6, "num_experts_per_tok": 3, "rope_parameters": {"rope_type": "default"}},
    ),
    "gpt_oss, yarn": (
        "GptOss",
        COMMON
        | {"head_dim": 8, "layer_types": ["full_attention"] * 2}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}
        | {"rope_parameters": FOURFOLD | {"rope_type": "yarn", "truncate": False}
           | {"original_max_position_embeddings": 8}},
    ),
    "gpt_oss, mxfp4": (
        "GptOss",
        COMMON
        | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 8, "sliding_window": 7}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
    ),
    "llama, linear": ("Llama", COMMON | {"rope_parameters": FOURFOLD | {"rope_type": "linear"}}),
    "llama, dynamic": ("Llama", COMMON | {"rope_parameters": FOURFOLD | {"rope_type": "dynamic"}}),
    "qwen3, yarn": (
        "Qwen3",
        COMMON
        | {"head_dim": 8, "rope_parameters": FOURFOLD | {"rope_type": "yarn", "beta_fast": 8.0}
           | {"original_max_position_embeddings": 8}},
    ),
    "phi3": ("Phi3", COMMON | {"pad_token_id": 0, "sliding_window": 7}),
    "phi3, longrope": ("Phi3", PHI3 | {"original_max_position_embeddings": 16}),
    "phi3, short": ("Phi3", PHI3 | {"original_max_position_embeddings": 24}),
    "smollm3": ("SmolLM3", COMMON | {"num_hidden_layers": 5, "pad_token_id": 0, "no_rope_layer_interval": 2}),
    "granite": (
        "Granite",
        COMMON
        | {"embedding_multiplier": 3.0, "logits_scaling": 0.6, "residual_multiplier": 0.7}
        | {"attention_multiplier": 0.2},
    ),
    "glm": ("Glm", COMMON | {"head_dim": 12, "pad_token_id": 0}),
    "glm4": ("Glm4", COMMON | {"head_dim": 8, "pad_token_id": 0, "num_key_value_heads": 2}),
    "olmo2": ("Olmo2", COMMON),
    "olmo3": ("Olmo3", COMMON | {"num_hidden_layers": 5, "sliding_window": 7}),
    "olmo3, yarn": (
        "Olmo3",
        COMMON
        | {"num_hidden_layers": 5, "sliding_window": 7}
        | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}},
    ),
    "gemma": ("Gemma", COMMON | {"head_dim": 6, "tie_word_embeddings": False, "eos_token_id": None}),
    "gemma2": (
        "Gemma2",
        COMMON
        | {"num_hidden_layers": 3, "head_dim": 6, "sliding_window": 7, "query_pre_attn_scalar": 9}
        | {"tie_word_embeddings": False, "eos_token_id": None}
        | {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.5},
    ),
    "gemma3_text": (
        "Gemma3",
        COMMON
        | {"num_hidden_layers": 7, "head_dim": 6, "sliding_window": 7, "query_pre_attn_scalar": 6}
        | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "eos_token_id": None},
    ),
    "gpt2": (
        "GPT2",
        {
            "vocab_size": 64,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 8,
            "n_positions": 32,
            "initializer_range": 0.2,
            "layer_norm_epsilon": 1e-3,
        },
    ),
}  # fmt: skip
OF_ANY_LENGTH = [family for family in FAMILIES if family != "phi3, longrope"]
"""Families whose frequencies do not depend on the length of the sequence."""


def make(family: str, seed: int = 0) -> Any:
    """Create a model in fp32 whose norms and biases are random too."""
    import transformers

    name, settings = FAMILIES[family]
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    suffix = "TextConfig" if name == "Gemma3" else "Config"
    config = getattr(transformers, f"{name}{suffix}")(**settings)
    torch.manual_seed(seed)
    if "attn_logit_softcapping" in settings:
        config._attn_implementation = "eager"  # the others have no bound of the scores
    model = getattr(transformers, f"{name}{head}")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "_bias" in name:
                parameter += 0.3 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += 0.3 * torch.randn_like(buffer)
    return model


def save(
    family: str,
    folder: Path,
    shard: str = "5GB",
    dtype: torch.dtype | None = None,
    *,
    merged: bool = False,
) -> Any:
    """Save such a model in files of at most `shard`, with merged experts if `merged`; return the model."""
    model = make(family)
    if dtype is not None:
        model.to(dtype)
    model.save_pretrained(folder, max_shard_size=shard, save_original_format=not merged)
    return model


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return `[batch, seq, vocab]` for `[batch, seq]`."""
    with torch.no_grad():
        found: torch.Tensor = model(tokens).logits
    return found


def tokens(seq: int = 20) -> torch.Tensor:
    return torch.randint(0, 64, (2, seq), generator=torch.Generator().manual_seed(5))
