"""A folder of a Llama in Hugging Face's format, all of whose weights are 0 and take no space on the disk."""

from __future__ import annotations

import json
import math
from pathlib import Path

from nanoscale.common.devices import detect
from nanoscale.config.composing.compose import compose
from nanoscale.config.hf.shape import write_shape
from nanoscale.config.rules import check


def write_base(folder: Path, *overrides: str) -> None:
    """Write config.json and a sparse model.safetensors for the model of a recipe."""
    model = check(compose(overrides), detect()).model
    head, hidden, ffn = model.head_width, model.hidden, model.ffn
    q, kv = model.heads * head, model.kv_head_count * head
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (model.vocab, hidden),
        "model.norm": (hidden,),
        "lm_head": (model.vocab, hidden),
    }
    for layer in range(model.layers):
        of_layer: dict[str, tuple[int, ...]] = {
            "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden), "mlp.down_proj": (hidden, ffn),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    if model.tie_embeddings:
        del shapes["lm_head"]
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(write_shape(model)))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
