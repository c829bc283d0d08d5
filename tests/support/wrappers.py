"""Tiny models of transformers for texts and images with random weights, and folders of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 16,
    "patch_size": 8,
}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
WRAPPERS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        _TEXT | {"sliding_window": 16},
        _VISION,
        {"mm_tokens_per_image": 4, "image_token_index": 60, "eos_token_id": [1, 7]},
    ),
    "mistral3": (
        _TEXT | {"model_type": "mistral"},
        _VISION | {"model_type": "pixtral", "head_dim": 8},
        {"image_token_index": 60, "tie_word_embeddings": False},
    ),
    "qwen3_5": (
        _TEXT
        | _DELTA
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
        | {"layer_types": ["linear_attention", "full_attention"]},
        {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 16, "patch_size": 8}
        | {"out_hidden_size": 32, "num_position_embeddings": 4},
        {},
    ),
    "qwen3_5_moe": (  # experts in the files in another form than transformers'
        _TEXT
        | _DELTA
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4}
        | {"layer_types": ["linear_attention", "full_attention"], "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
        {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 16, "patch_size": 8}
        | {"out_hidden_size": 32, "num_position_embeddings": 4},
        {},
    ),
    "llama4": (
        _TEXT | {"intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1},
        _VISION | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
        {},
    ),
}
"""Settings for text, for images and of the whole, by `model_type`."""


def save_wrapper(family: str, folder: Path) -> Any:
    """Save such a model, with a layer for further tokens, a counter and the files of a processor; return it."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    text, vision, whole = WRAPPERS[family]
    torch.manual_seed(0)
    config: Any = CONFIG_MAPPING[family]
    config = config(text_config=text, vision_config=vision, **whole)
    model = AutoModelForImageTextToText.from_config(config).eval()
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    more = {"mtp.norm.weight": torch.randn(32).bfloat16(), "counter": torch.arange(3)}
    save_file(load_file(file) | more, file, {"format": "pt"})
    for name in ("preprocessor_config.json", "processor_config.json", "chat_template.jinja"):
        (folder / name).write_text(f'{{"file": "{name}"}}')
    return model


def wrapper_from(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder).eval()


def assert_rest_is_equal(base: Path, out: Path, changed: set[str]) -> None:
    """Assert that two folders have the same files and tensors except for the content of the changed tensors."""
    from nanoscale.config.hf.safetensors_headers import read_folder

    before, after = read_folder(base), read_folder(out)
    assert list(before) == list(after)
    assert {name: it.dtype for name, it in before.items()} == {
        name: it.dtype for name, it in after.items()
    }
    differ = {name for name, it in before.items() if [*it.content()] != [*after[name].content()]}
    assert differ == changed
    others = [file.name for file in base.iterdir() if "safetensors" not in file.name]
    for name in others:
        assert (base / name).read_bytes() == (out / name).read_bytes(), name
