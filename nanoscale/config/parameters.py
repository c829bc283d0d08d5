"""The parameters of `models.transformer.Transformer`: their names, full shapes, and how tp and ep divide them.

Imports no torch. The names follow from the modules, the shapes are torch's: outputs, then inputs.
"""

import math
from dataclasses import dataclass

from nanoscale.config.schema import Model

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A vector, a matrix, or the matrices of all experts."""

    shape: Shape
    split: int | None = None
    """The dimension that tp divides; None: every rank of tp has all of it."""
    is_expert: bool = False
    """True if the first dimension counts experts, which ep divides."""

    @property
    def is_vector(self) -> bool:
        """True for norms and biases."""
        return len(self.shape) == 1 + self.is_expert

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def local(self, tp: int, ep: int = 1, expert_tp: int | None = None) -> Shape:
        """Return the shape on a rank of tp and ep; `expert_tp` ranks divide the width of experts (None: tp)."""
        shape = list(self.shape)
        if self.split is not None:
            shape[self.split] //= expert_tp if self.is_expert and expert_tp else tp
        if self.is_expert:
            shape[0] //= ep
        return tuple(shape)


Parameters = dict[str, Parameter]
"""Parameters by name."""


def ends(model: Model) -> Parameters:
    """Return the parameters outside of the blocks."""
    table = {"embed.weight": Parameter((model.vocab, model.hidden), 0)}
    if model.position == "learned":
        table["positions.weight"] = Parameter((model.max_seq_len, model.hidden), 0)
    table |= _norm("norm", model)
    if not model.tie_embeddings:
        table["head.weight"] = Parameter((model.vocab, model.hidden), 0)
    return table


def block(model: Model) -> Parameters:
    """Return the parameters of a block; matrices are in the order of their computation."""
    q, kv, hidden, ffn = model.q_width, model.kv_width, model.hidden, model.ffn
    experts = model.experts
    kinds = {"before": ("norm",), "after": ("post_norm",), "both": ("norm", "post_norm")}
    table: Parameters = {}
    for kind in kinds[model.norm_position]:
        table |= _norm(f"attention_{kind}", model) | _norm(f"mlp_{kind}", model)
    if model.kv_rank:
        table |= _latent_attention(model, model.kv_rank)
    else:
        qkv_bias = model.bias or model.qkv_bias
        table |= _linear("attention.wq", q, hidden, 0, qkv_bias)
        table |= _linear("attention.wk", kv, hidden, 0, qkv_bias)
        table |= _linear("attention.wv", kv, hidden, 0, qkv_bias)
        table |= _linear("attention.wo", hidden, q, 1, model.bias)
    if model.attention_sinks:
        table["attention.sinks"] = Parameter((model.heads,), 0)
    if experts:
        table["mlp.router.weight"] = Parameter((experts, hidden))
        table["mlp.experts.gate"] = Parameter((experts, ffn, hidden), 1, is_expert=True)
        table["mlp.experts.up"] = Parameter((experts, ffn, hidden), 1, is_expert=True)
        table["mlp.experts.down"] = Parameter((experts, hidden, ffn), 2, is_expert=True)
        if model.bias:
            table["mlp.router.bias"] = Parameter((experts,))
            table["mlp.experts.gate_bias"] = Parameter((experts, ffn), 1, is_expert=True)
            table["mlp.experts.up_bias"] = Parameter((experts, ffn), 1, is_expert=True)
            table["mlp.experts.down_bias"] = Parameter((experts, hidden), is_expert=True)
        if model.shared_gate:
            table["mlp.shared_gate.weight"] = Parameter((1, hidden))
    if width := model.shared_ffn if experts else ffn:
        name = "mlp.shared" if experts else "mlp"
        if model.is_gated:
            table |= _linear(f"{name}.gate", width, hidden, 0, model.bias)
        table |= _linear(f"{name}.up", width, hidden, 0, model.bias)
        table |= _linear(f"{name}.down", hidden, width, 1, model.bias)
    if model.qk_norm_whole:
        table["attention.q_norm.weight"] = Parameter((model.q_width,), 0)
        table["attention.k_norm.weight"] = Parameter((model.kv_width,), 0)
    elif model.qk_norm:
        table["attention.q_norm.weight"] = Parameter((model.head_width,))
        table["attention.k_norm.weight"] = Parameter((model.head_width,))
    return table


def _latent_attention(model: Model, rank: int) -> Parameters:
    table: Parameters = {}
    if model.q_rank is not None:
        table["attention.wq_a.weight"] = Parameter((model.q_rank, model.hidden))
        table["attention.q_norm.weight"] = Parameter((model.q_rank,))
    table |= _linear("attention.wq", model.q_width, model.q_rank or model.hidden, 0, False)
    table["attention.wkv_a.weight"] = Parameter((rank + model.rope_head_dim, model.hidden))
    table["attention.kv_norm.weight"] = Parameter((rank,))
    expanded = model.head_width - model.rope_head_dim + model.value_width
    table |= _linear("attention.wkv_b", model.heads * expanded, rank, 0, False)
    return table | _linear("attention.wo", model.hidden, model.heads * model.value_width, 1, False)


def named(model: Model) -> Parameters:
    """Return all parameters by their names in the whole model."""
    table: Parameters = {}
    last = ends(model)
    for name in ("embed.weight", "positions.weight"):
        if name in last:
            table[name] = last.pop(name)
    for layer in range(model.layers):
        each_block = block(model.of_layer(layer))
        table |= {f"layers.{layer}.{name}": each for name, each in each_block.items()}
    return table | last


def kinds_of_blocks(model: Model) -> list[tuple[int, Model]]:
    """Return the numbers of dense blocks and of other blocks, each with the shape of its blocks."""
    kinds = [(model.dense_layers, model.dense), (model.layers - model.dense_layers, model)]
    return [(count, shape) for count, shape in kinds if count]


def block_products(model: Model) -> int:
    """Count the matrix parameters of a block that multiply a token, without experts that it does not use."""
    matrices = [parameter for parameter in block(model).values() if not parameter.is_vector]
    experts = sum(parameter.numel for parameter in matrices if parameter.is_expert)
    idle = experts * (model.experts - model.experts_per_token) // max(1, model.experts)
    return sum(parameter.numel for parameter in matrices) - idle


def _norm(name: str, model: Model) -> Parameters:
    """Return the norm's parameters; a layer norm has a bias in addition to its weight."""
    kinds = ("weight", "bias") if model.norm == "layernorm" else ("weight",)
    return {f"{name}.{kind}": Parameter((model.hidden,)) for kind in kinds}


def _linear(name: str, outputs: int, inputs: int, split: int, bias: bool) -> Parameters:
    """Return a linear layer's parameters: tp divides its outputs (0) and their biases, or its inputs (1)."""
    table = {f"{name}.weight": Parameter((outputs, inputs), split)}
    if bias:
        table[f"{name}.bias"] = Parameter((outputs,), 0 if split == 0 else None)
    return table
