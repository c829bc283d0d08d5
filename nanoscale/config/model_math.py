"""Parameters and floating-point operations of a model, in closed form."""

from __future__ import annotations

from nanoscale.config import lora
from nanoscale.config.parameters import block, block_products, ends
from nanoscale.config.schema import Config, Model


def parameters(model: Model) -> int:
    """Count all parameters; an embedding that the head shares counts once. For `model=hf`, return the known
    count."""
    if model.source == "hf":
        return model.parameters or 0
    outside = sum(parameter.numel for parameter in ends(model).values())
    return outside + model.layers * sum(parameter.numel for parameter in block(model).values())


def active_parameters(model: Model) -> int:
    """Count the active parameters of a token: all but those of experts that it does not use."""
    idle = max(0, model.experts - model.experts_per_token)
    experts = sum(parameter.numel for parameter in block(model).values() if parameter.is_expert)
    return parameters(model) - model.layers * experts * idle // max(1, model.experts)


def matmul_parameters(model: Model) -> int:
    """Count the parameters that multiply every token: blocks and head, not the input embedding.

    Only the active experts of a token count.
    """
    if model.source == "hf":
        embedding = 0 if model.tie_embeddings else model.hidden * model.vocab
        return parameters(model) - embedding
    return model.layers * block_products(model) + model.hidden * model.vocab


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
    return 6 * model.layers * model.q_width * seq_len
