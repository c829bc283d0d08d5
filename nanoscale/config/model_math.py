"""Parameters and floating-point operations of a model, in closed form.

`model` is a resolved `config.schema.Model`: `kv_heads` and `head_dim` may still be null, which
means as many as `heads`, and `hidden / heads`.
"""

from __future__ import annotations

from nanoscale.config import lora
from nanoscale.config.schema import Config, Model


def parameters(model: Model) -> int:
    """Count all parameters; an embedding that the head shares counts once. For `model=hf`, return the known
    count."""
    if model.source == "hf":
        return model.parameters or 0
    head = 0 if model.tie_embeddings else model.hidden * model.vocab
    return (
        model.vocab * model.hidden
        + _positions(model)
        + model.layers * (_block_matrices(model) + _block_vectors(model))
        + _norm(model)
        + head
    )


def active_parameters(model: Model) -> int:
    """Count the active parameters of a token: all but those of experts that it does not use."""
    idle = max(0, model.experts - model.experts_per_token) if model.experts else 0
    return parameters(model) - model.layers * idle * _feed_forward(model)


def matmul_parameters(model: Model) -> int:
    """Count the parameters that multiply every token: blocks and head, not the input embedding.

    Only the active experts of a token count.
    """
    if model.source == "hf":
        embedding = 0 if model.tie_embeddings else model.hidden * model.vocab
        return parameters(model) - embedding
    return model.layers * _block_products(model) + model.hidden * model.vocab


def _block_products(model: Model) -> int:
    """Count the active matrix parameters of a block."""
    taken = model.experts_per_token if model.experts else 1
    return _attention_matrices(model) + _router(model) + taken * _feed_forward(model)


def flops_per_token(model: Model, seq_len: int) -> int:
    """Return the FLOPs of forward and backward, by PaLM's convention: 6·N of the products + 12·L·h·s of
    attention.

    h is the width of all heads together, which is `hidden` unless `head_dim` sets another width.
    """
    return 6 * matmul_parameters(model) + 2 * _half_attention(model, seq_len)


def flops_per_token_causal(model: Model, seq_len: int) -> int:
    """Return the FLOPs if attention only looks back: half of the scores are needed."""
    return 6 * matmul_parameters(model) + _half_attention(model, seq_len)


def trained_flops_per_token(config: Config) -> int:
    """Return the FLOPs of a job: with `lora` the frozen matrices need no gradients."""
    full = flops_per_token(config.model, config.train.seq_len)
    if not config.lora.rank:
        return full
    return full - 2 * matmul_parameters(config.model) + 6 * lora.parameters(config)


def describe_adapters(config: Config) -> str:
    """Describe the trained and the frozen parameters, for people."""
    chosen = ", ".join(lora.modules(config.model, config.lora))
    return (
        f"{lora.parameters(config):,} parameters of adapters ({chosen}) beside "
        f"{parameters(config.model):,} of the model, which are frozen"
    )


def _half_attention(model: Model, seq_len: int) -> int:
    return 6 * model.layers * _heads_width(model) * seq_len


def _heads_width(model: Model) -> int:
    return model.heads * _head_dim(model)


def _head_dim(model: Model) -> int:
    return model.head_dim or model.hidden // model.heads


def _kv_width(model: Model) -> int:
    return (model.kv_heads or model.heads) * _head_dim(model)


def _block_matrices(model: Model) -> int:
    return (
        _attention_matrices(model) + _router(model) + max(1, model.experts) * _feed_forward(model)
    )


def _attention_matrices(model: Model) -> int:
    """Count query, key, value and output."""
    return model.hidden * (2 * _heads_width(model) + 2 * _kv_width(model))


def _feed_forward(model: Model) -> int:
    """Count the two matrices of one expert, or three if it is gated."""
    return (3 if model.mlp == "swiglu" else 2) * model.hidden * model.ffn


def _router(model: Model) -> int:
    return model.experts * model.hidden


def _block_vectors(model: Model) -> int:
    """Count the norms, and one bias for every output of the matrices above that has one."""
    norms = 2 * _norm(model) + (2 * _head_dim(model) if model.qk_norm else 0)
    inner = _heads_width(model) + 2 * _kv_width(model)
    if not model.bias:
        return norms + (inner if model.qkv_bias else 0)
    gates = 2 if model.mlp == "swiglu" else 1
    return norms + inner + model.hidden + gates * model.ffn + model.hidden


def _norm(model: Model) -> int:
    """Count a norm's parameters; a layer norm has a bias beside its weight."""
    return model.hidden * (2 if model.norm == "layernorm" else 1)


def _positions(model: Model) -> int:
    return model.max_seq_len * model.hidden if model.position == "learned" else 0
