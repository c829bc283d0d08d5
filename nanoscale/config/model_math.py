"""Parameters and floating-point operations of a model, in closed form, and of its adapters (LoRA)."""

from typing import Any

from nanoscale.config.objectives import made_for
from nanoscale.config.parameters import block, block_products, ends, kinds_of_blocks
from nanoscale.config.schema import Config, Lora, Model

ATTENTION = ("wq", "wk", "wv", "wo")
FEED_FORWARD = ("gate", "up", "down")


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""The names of the number of experts in config.json."""


def experts(model: Model) -> int:
    """Return the number of experts of a block, also of transformers' models; 0: there are none."""
    numbers = map(model.hf_config.get, EXPERTS)
    return model.experts or next((it for it in numbers if type(it) is int), 0)


def parameters(model: Model) -> int:
    """Count all parameters; an embedding that the head shares counts once. For code that is not nanoscale's,
    return the known count."""
    if model.source != "own":
        return model.parameters or 0
    outside = sum(parameter.numel for parameter in ends(model).values())
    return outside + sum(
        count * sum(parameter.numel for parameter in block(shape).values())
        for count, shape in kinds_of_blocks(model)
    )


def active_parameters(model: Model) -> int:
    """Count the active parameters of a token: all but the parameters of experts that it does not use."""
    idle = max(0, model.experts - model.experts_per_token)
    experts = sum(parameter.numel for parameter in block(model).values() if parameter.is_expert)
    layers = model.layers - model.dense_layers
    return parameters(model) - layers * experts * idle // max(1, model.experts)


def routed_share(experts: int, experts_per_token: int, ranks: float) -> float:
    """Return the share of tokens that have an expert on a rank, if all experts are chosen equally often."""
    others = experts - experts / ranks
    missed = 1.0
    for chosen in range(experts_per_token):
        missed *= max(0.0, others - chosen) / (experts - chosen)
    return 1 - missed


def matmul_parameters(model: Model) -> int:
    """Count the parameters that multiply every token: blocks and head, not the input embedding.

    Only the active experts of a token count.
    """
    if model.source != "own":
        # A classifier has no head over the vocabulary that its embedding could be.
        is_head = model.tie_embeddings and made_for(model.hf_config) != "classify"
        return parameters(model) - (0 if is_head else model.hidden * model.vocab)
    blocks = sum(count * block_products(shape) for count, shape in kinds_of_blocks(model))
    return blocks + model.hidden * model.vocab


def flops_per_token(model: Model, seq_len: int) -> int:
    """Return the FLOPs of forward and backward, by PaLM's convention: 6·N of the products + 12·L·h·s of
    attention.

    h is the width of all heads together, which is `hidden` unless `head_dim` sets another width; if values have
    another width than keys, it is the mean of both.
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
    return full - 2 * matmul_parameters(config.model) + 6 * adapter_parameters(config)


def recomputed_factor(config: Config, plan: dict[str, Any] | None) -> float | None:
    """Return all FLOPs over the model's, by the document of the job's plan; None if unknown.

    The factor does not depend on the speed that the plan expects.
    """
    if config.parallel.activation_checkpointing == "none":
        return 1.0
    factor: float | None = plan["hfu"] / plan["mfu"] if plan and plan.get("mfu") else None
    return factor


def _half_attention(model: Model, seq_len: int) -> int:
    width = model.heads * (model.head_width + model.value_width) // 2
    return 6 * model.layers * width * seq_len


# --- adapters -------------------------------------------------------------------------------------


def adapted_layers(model: Model, lora: Lora) -> dict[str, str]:
    """Return a block's layers with adapters: their names in the block by their names in `lora.targets`."""
    if not lora.rank:
        return {}
    chosen = adaptable_layers(model) if lora.targets is None else lora.targets
    return {name: f"{'attention' if name in ATTENTION else 'mlp'}.{name}" for name in chosen}


def adaptable_layers(model: Model) -> tuple[str, ...]:
    if model.experts:
        return ATTENTION
    return ATTENTION + (FEED_FORWARD if model.is_gated else FEED_FORWARD[1:])


def adapter_parameters(config: Config) -> int:
    """Count all parameters of the adapters of nanoscale's own model; of others they are not known."""
    model, lora = config.model, config.lora
    if model.source != "own":
        return 0
    table = block(model)
    shapes = [table[f"{module}.weight"].shape for module in adapted_layers(model, lora).values()]
    magnitudes = sum(outputs for outputs, _ in shapes) if lora.dora else 0
    return model.layers * (lora.rank * sum(map(sum, shapes)) + magnitudes)


def describe_adapters(config: Config) -> str:
    """Describe the trained and the frozen parameters, for people."""
    chosen = ", ".join(config.lora.targets or ["all linear layers"])
    adapters = f"adapters of rank {config.lora.rank}"
    if config.model.source == "own":
        chosen = ", ".join(adapted_layers(config.model, config.lora))
        adapters = f"{adapter_parameters(config):,} parameters of adapters"
    return (
        f"{adapters} ({chosen}) in addition to "
        f"{parameters(config.model):,} of the model, which are frozen"
    )


def window_keys(queries: int, window: int, earlier: int = 0) -> int:
    """Return the mean number of keys that a query sees, which are the last `window` tokens up to itself.

    Args:
        earlier: the number of keys before the first query.
    """
    return window - max(0, window - earlier) ** 2 // (2 * queries)


def window_reach(window: int, seq: int) -> int:
    """Return how many chunks of half of a rank's `seq` tokens a window reaches before a token's own chunk."""
    return max(1, -((1 - window) // (seq // 2)))
