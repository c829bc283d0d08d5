"""The tensors of a shape, by our names and by Hugging Face's, as in `names.yaml`. Imports no torch.

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
from functools import cache
from pathlib import Path

from nanoscale.common.json_text import Json
from nanoscale.config import parameters
from nanoscale.config.hf.safetensors_headers import IN_FP32
from nanoscale.config.hf.text_part import HEAD
from nanoscale.config.parameters import Shape
from nanoscale.config.schema import Model
from nanoscale.config.values import yaml_file

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
        return _all_positions(model, "transformer.", "h", root, _rows(_table(), "gpt2"))
    root = {"embed": "embed_tokens", "norm": "norm"}
    block = _rows(_table(), "llama") | _rows(_table()["families"], family)
    if merged and family != "gpt_oss":
        block |= _rows(_table(), "merged")
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
    return any(name.endswith("mlp.experts.gate_up_proj") for name in names)


def is_buffer(name: str) -> bool:
    """True if a tensor of a file is not a parameter, but one that old versions of transformers saved too."""
    return name.endswith(_BUFFERS)


def is_needless(name: str, model: Model) -> bool:
    """True if the model does not need a tensor of a file, such as layers that predict further tokens."""
    layer = _LAYER.match(name)
    further = layer is not None and model.router == "sigmoid" and int(layer[1]) >= model.layers
    return is_buffer(name) or further or (model.tie_embeddings and name == HEAD)


@cache
def _table() -> Json:
    return yaml_file.read(Path(__file__).with_suffix(".yaml")).content


def _rows(table: Json, name: str) -> dict[str, TensorPosition]:
    """Return a part of the table; empty if it has none of this name."""
    rows = {
        it: {"name": row} if isinstance(row, str) else row
        for it, row in table.get(name, {}).items()
    }
    return {
        it: TensorPosition(**row | {"joined": tuple(row.get("joined", ()))})
        for it, row in rows.items()
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
