"""The time of parameters or activations in host memory. A disk (nvme) is treated as host memory."""

from __future__ import annotations

from nanoscale.config.resolved import ResolvedConfig
from nanoscale.plan.hardware.hardware import Hardware
from nanoscale.plan.memory.shards import RankParameters
from nanoscale.plan.time import data_parallel, operations
from nanoscale.plan.time.micro_batch_shape import MicroBatchShape


def offloaded(config: ResolvedConfig) -> str:
    """Return the names of offloaded states: `none`, `optimizer` or `optimizer, parameters`."""
    zero = config.zero
    there = {"optimizer": zero.offload_optimizer, "parameters": zero.offload_param}
    return ", ".join(name for name, where in there.items() if where != "none") or "none"


def waiting(
    config: ResolvedConfig,
    hardware: Hardware,
    part: MicroBatchShape,
    holding: RankParameters,
    count: int,
    forward: float,
) -> float:
    """Return the seconds for which computing waits for the link to host memory.

    Offloaded parameters come up for each pass; activations go down in parallel with the forward pass and come
    up in parallel with the backward pass.
    """
    zero, layout = config.zero, config.parallel
    seconds = 0.0
    if zero.offload_param != "none":
        whole = data_parallel.rank_parameters(config.model, layout.tp, holding)
        size = whole / data_parallel.shards(config)
        passes = 2 * count * size * operations.WIDTH[part.wide] / hardware.host_bandwidth
        seconds += max(0.0, passes - 2 * count * forward * holding.blocks)
    if layout.offload_activations:
        moved = _saved(part) / hardware.host_bandwidth
        seconds += 2 * count * holding.blocks * max(0.0, moved - forward)
    return seconds


def _saved(part: MicroBatchShape) -> float:
    """Return the bytes that a block keeps for its backward pass, approximately."""
    model = part.model
    stream = part.stream * model.hidden
    if part.recompute in ("full", "sqrt"):
        return stream * operations.WIDTH[part.wide]
    width = model.head_width
    heads = part.tokens / part.tp * width * 2 * (model.heads + model.kv_head_count)
    inner = (3 if model.mlp == "swiglu" else 2) * part.tokens * model.ffn / part.tp
    if model.experts:  # and their ordered inputs and their outputs
        inner = model.experts_per_token * (inner + 2 * part.tokens * model.hidden)
    if part.recompute == "attention":
        inner, heads = 0.0, heads / 2
    numbers = 2 * stream + 2 * part.tokens * model.hidden + heads + inner
    return numbers * operations.WIDTH[part.wide]
