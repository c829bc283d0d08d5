"""The tensors of a shape, by our names and by Hugging Face's. Imports no torch.

| ours | Hugging Face's |
|---|---|
| a matrix `[out, in]` of a linear layer | the same; in GPT-2 `[in, out]` |
| queries, keys, values | the same; in GPT-2 and Phi-3 side by side in one matrix |
| gate and up | the same; in Phi-3 and GLM-4 one above the other in one matrix |
| a matrix of all experts `[experts, out, in]` | one of each expert `[out, in]` |
| with merged experts | the same, gate and up one above the other `[experts, 2 · out, in]` |
| in gpt-oss | the same, `[experts, in, 2 · out]`, in which the columns of gate and up take turns |

Rotary pairs are (i, i + head_dim / 2) on both sides.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from nanoscale.config import parameters
from nanoscale.config.hf.safetensors_headers import IN_FP32
from nanoscale.config.hf.text_part import HEAD
from nanoscale.config.parameters import Shape
from nanoscale.config.schema import Model

PREFIXES = ("model.", "transformer.")
"""Prefixes that files written without the head lack."""
_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")
"""Tensors that are not parameters: old versions of transformers saved them too."""


BIASES = "balance.bias.layers."
"""The begin of the names of routers' biases in a checkpoint."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class TensorPosition:
    """The position of one of our tensors, or of one expert's part of it, in a Hugging Face tensor."""

    name: str
    transposed: bool = False
    joined: tuple[str, ...] = ()
    """Our modules in a block that are side by side in the Hugging Face tensor, along `axis`; empty: one."""
    axis: int = 0
    before: int = 0
    """Rows, or columns, of the Hugging Face tensor before our first one, along `axis`."""
    after: int = 0
    expert: int | None = None
    """The index in our first dimension; None if that is not a dimension of experts."""
    every: int = 1
    """The distance of our rows, or columns, along `axis`; more than 1 if joined modules take turns."""

    def shape(self, own_shape: Shape) -> Shape:
        """Return the shape of the whole Hugging Face tensor."""
        own_shape = self._per_expert(own_shape)
        hf_shape = [own_shape[axis] for axis in self._order(own_shape)]
        size = hf_shape[self.axis]
        hf_shape[self.axis] = (
            self.every * size if self.every > 1 else size + self.before + self.after
        )
        return tuple(hf_shape)

    def slices(self, own_shape: Shape, offsets: Shape, sizes: Shape) -> tuple[slice, ...]:
        """Return the slices of a box of our tensor, or of its part for the expert, in the Hugging Face
        tensor."""
        own_shape, offsets, sizes = map(self._per_expert, (own_shape, offsets, sizes))
        order = self._order(own_shape)
        slices = [slice(offsets[axis], offsets[axis] + sizes[axis]) for axis in order]
        start, stop = slices[self.axis].start, slices[self.axis].stop
        first, last = (self.every * at + self.before for at in (start, stop - 1))
        slices[self.axis] = slice(first, last + 1, self.every)
        return tuple(slices)

    def _order(self, lengths: Shape) -> list[int]:
        """Return our axes in the order of the Hugging Face tensor's."""
        order = list(range(len(lengths)))
        return [*order[:-2], order[-1], order[-2]] if self.transposed else order

    def row(self, offsets: Shape, sizes: Shape) -> int | None:
        """Return the expert's row in a box of our tensor; None if the box does not contain it."""
        assert self.expert is not None
        row = self.expert - offsets[0]
        return row if 0 <= row < sizes[0] else None

    def _per_expert(self, lengths: Shape) -> Shape:
        return lengths if self.expert is None else lengths[1:]


def shapes(model: Model) -> dict[str, Shape]:
    """Return the shape of every parameter of `models.transformer.Transformer`."""
    return {name: parameter.shape for name, parameter in parameters.named(model).items()}


def hf_positions(
    model: Model, family: str, *, merged: bool = False
) -> dict[str, tuple[TensorPosition, ...]]:
    """Return the positions of each parameter in a file of a family: one, or one for each expert.

    With `merged`, experts are merged, as `is_merged` detects, and every parameter has one position.
    """
    if family == "gpt2":
        root = {"embed": "wte", "positions": "wpe", "norm": "ln_f"}
        return _all_positions(model, "transformer.", "h", root, _GPT2)
    root = {"embed": "embed_tokens", "norm": "norm"}
    own = _OWN_NAMES.get(family, {})
    block = _LLAMA | own | (_MERGED if merged and own is not _GPT_OSS else {})
    if model.q_rank is not None:
        block |= {"attention.wq": TensorPosition("self_attn.q_b_proj")}
    return _all_positions(model, "model.", "layers", root, block)


def bias_positions(model: Model) -> dict[str, TensorPosition]:
    """Return the positions of the biases of the experts' choice, by their names in a checkpoint; families with
    another router have none."""
    if model.router != "sigmoid":
        return {}
    return {
        f"{BIASES}{layer}": TensorPosition(f"model.layers.{layer}.mlp.gate.{IN_FP32}")
        for layer in range(model.dense_layers, model.layers)
    }


def is_merged(names: Iterable[str]) -> bool:
    """True if a file has the experts of a block in one tensor, as in transformers 5, and in gpt-oss always.

    `save_pretrained` separates them, unless it is called with save_original_format=False.
    """
    return any(name.endswith(_MERGED["mlp.experts.gate"].name) for name in names)


def is_buffer(name: str) -> bool:
    """True if a tensor of a file is not a parameter, but one that old versions of transformers saved too."""
    return name.endswith(_BUFFERS)


def is_needless(name: str, model: Model) -> bool:
    """True if the model does not need a tensor of a file, such as layers that predict further tokens."""
    layer = _LAYER.match(name)
    further = layer is not None and model.router == "sigmoid" and int(layer[1]) >= model.layers
    return is_buffer(name) or further or (model.tie_embeddings and name == HEAD)


_LLAMA = {
    "attention_norm": TensorPosition("input_layernorm"),
    "attention.wq": TensorPosition("self_attn.q_proj"),
    "attention.wk": TensorPosition("self_attn.k_proj"),
    "attention.wv": TensorPosition("self_attn.v_proj"),
    "attention.wo": TensorPosition("self_attn.o_proj"),
    "mlp_norm": TensorPosition("post_attention_layernorm"),
    "mlp.gate": TensorPosition("mlp.gate_proj"),
    "mlp.up": TensorPosition("mlp.up_proj"),
    "mlp.down": TensorPosition("mlp.down_proj"),
}
_MIXTRAL = {
    "mlp.router": TensorPosition("block_sparse_moe.gate"),
    "mlp.experts.gate": TensorPosition("block_sparse_moe.experts.{expert}.w1.weight"),
    "mlp.experts.up": TensorPosition("block_sparse_moe.experts.{expert}.w3.weight"),
    "mlp.experts.down": TensorPosition("block_sparse_moe.experts.{expert}.w2.weight"),
}
_KINDS = ("gate", "up", "down")
_QWEN3_MOE = {"mlp.router": TensorPosition("mlp.gate")} | {
    f"mlp.experts.{kind}": TensorPosition(f"mlp.experts.{{expert}}.{kind}_proj.weight")
    for kind in _KINDS
}
_GROUPED_EXPERTS = _QWEN3_MOE | {
    f"mlp.shared.{kind}": TensorPosition(f"mlp.shared_experts.{kind}_proj") for kind in _KINDS
}
_LATENTS = {
    "attention.wq_a": TensorPosition("self_attn.q_a_proj"),
    "attention.q_norm": TensorPosition("self_attn.q_a_layernorm"),
    "attention.wkv_a": TensorPosition("self_attn.kv_a_proj_with_mqa"),
    "attention.kv_norm": TensorPosition("self_attn.kv_a_layernorm"),
    "attention.wkv_b": TensorPosition("self_attn.kv_b_proj"),
}
_QWEN2_MOE = _QWEN3_MOE | {
    "mlp.shared_gate": TensorPosition("mlp.shared_expert_gate"),
    **{f"mlp.shared.{kind}": TensorPosition(f"mlp.shared_expert.{kind}_proj") for kind in _KINDS},
}
_GATED_EXPERTS = ("mlp.experts.gate", "mlp.experts.up")
_MERGED = {
    "mlp.router": TensorPosition("mlp.gate"),
    **dict.fromkeys(
        _GATED_EXPERTS, TensorPosition("mlp.experts.gate_up_proj", joined=_GATED_EXPERTS, axis=1)
    ),
    "mlp.experts.down": TensorPosition("mlp.experts.down_proj"),
}
_TURNS = TensorPosition("mlp.experts.gate_up_proj", True, axis=-1, every=2)
_BIASES_TAKE_TURNS = TensorPosition("mlp.experts.gate_up_proj_bias", axis=-1, every=2)
_GPT_OSS = {
    "attention": TensorPosition("self_attn"),
    "mlp.router": TensorPosition("mlp.router"),
    "mlp.experts.gate": _TURNS,
    "mlp.experts.up": replace(_TURNS, before=1),
    "mlp.experts.down": TensorPosition("mlp.experts.down_proj", True),
    "mlp.experts.gate_bias": _BIASES_TAKE_TURNS,
    "mlp.experts.up_bias": replace(_BIASES_TAKE_TURNS, before=1),
    "mlp.experts.down_bias": TensorPosition("mlp.experts.down_proj_bias"),
}
_QKV = ("attention.wq", "attention.wk", "attention.wv")
_GATED = ("mlp.gate", "mlp.up")
_GATE_UP = dict.fromkeys(_GATED, TensorPosition("mlp.gate_up_proj", joined=_GATED))
_POST_NORMS = {
    "attention_post_norm": TensorPosition("post_attention_layernorm"),
    "mlp_norm": TensorPosition("pre_feedforward_layernorm"),
    "mlp_post_norm": TensorPosition("post_feedforward_layernorm"),
}
_OWN_NAMES = {
    "mixtral": _MIXTRAL,
    "qwen3_moe": _QWEN3_MOE,
    "qwen2_moe": _QWEN2_MOE,
    "glm4_moe": _GROUPED_EXPERTS,
    "gpt_oss": _GPT_OSS,
    "deepseek_v3": _GROUPED_EXPERTS | _LATENTS,
    "phi3": _GATE_UP | dict.fromkeys(_QKV, TensorPosition("self_attn.qkv_proj", joined=_QKV)),
    "glm": _GATE_UP,
    "glm4": _GATE_UP
    | {
        "attention_post_norm": TensorPosition("post_self_attn_layernorm"),
        "mlp_post_norm": TensorPosition("post_mlp_layernorm"),
    },
    **dict.fromkeys(("olmo2", "olmo3", "gemma2", "gemma3_text"), _POST_NORMS),
}
"""The names of a family that are not Llama's, by `model_type`."""
_GPT2 = {
    "attention_norm": TensorPosition("ln_1"),
    **dict.fromkeys(_QKV, TensorPosition("attn.c_attn", True, _QKV, axis=-1)),
    "attention.wo": TensorPosition("attn.c_proj", True),
    "mlp_norm": TensorPosition("ln_2"),
    "mlp.up": TensorPosition("mlp.c_fc", True),
    "mlp.down": TensorPosition("mlp.c_proj", True),
}


def _all_positions(
    model: Model, prefix: str, layers: str, root: dict[str, str], block: dict[str, TensorPosition]
) -> dict[str, tuple[TensorPosition, ...]]:
    positions: dict[str, tuple[TensorPosition, ...]] = {}
    own_shapes = shapes(model)
    for name in own_shapes:
        module, _, kind = name.rpartition(".")
        if module == "head" or module in root:
            hf_module = "lm_head" if module == "head" else f"{prefix}{root[module]}"
            positions[name] = (TensorPosition(f"{hf_module}.{kind}"),)
            continue
        _, layer, in_block = name.split(".", 2)
        if module.endswith(".experts"):
            position = block[in_block]
        else:
            in_block = in_block.removesuffix(f".{kind}")
            # Modules of newer families have our names in Hugging Face's `self_attn`.
            position = block.get(in_block) or TensorPosition(
                in_block.replace("attention.", "self_attn.")
            )
            transposed = position.transposed and kind == "weight"
            position = replace(position, name=f"{position.name}.{kind}", transposed=transposed)
        position = replace(position, name=f"{prefix}{layers}.{layer}.{position.name}")
        if "{expert}" in position.name:
            names = enumerate(position.name.format(expert=i) for i in range(model.experts))
            positions[name] = tuple(replace(position, name=it, expert=i) for i, it in names)
            continue
        if position.joined:
            # Only matrices of all experts have a dimension before their rows.
            axis = position.axis if len(own_shapes[name]) == 3 else 0
            rows = [own_shapes[name.replace(in_block, each)][axis] for each in position.joined]
            number = position.joined.index(in_block)
            before, after = sum(rows[:number]), sum(rows[number + 1 :])
            position = replace(position, before=before, after=after)
        positions[name] = (position,)
    return positions
