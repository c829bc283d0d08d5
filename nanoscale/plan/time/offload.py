"""The time to copy offloaded parameters or activations from and to host memory. A disk (nvme) counts as host
memory."""

from nanoscale.config.resolved import ResolvedConfig
from nanoscale.plan.hardware.hardware import Hardware
from nanoscale.plan.memory.shards import RankParameters
from nanoscale.plan.time import data_parallel, operations
from nanoscale.plan.time.micro_batch_shape import MicroBatchShape


def offloaded(config: ResolvedConfig) -> str:
    """Return the names of offloaded states: `none`, `optimizer` or `optimizer, parameters`."""
    zero = config.zero
    devices = {"optimizer": zero.offload_optimizer, "parameters": zero.offload_param}
    return ", ".join(name for name, device in devices.items() if device != "none") or "none"


def waiting(
    config: ResolvedConfig,
    hardware: Hardware,
    shape: MicroBatchShape,
    holding: RankParameters,
    count: int,
    forward: float,
) -> float:
    """Return the seconds in which computation waits for the link to host memory.

    Offloaded parameters are copied to the device for each pass, by FSDP2 in the dtype of the optimizer, and by
    a single rank of it not ahead. Activations are copied to host memory in parallel with the forward pass, and
    back in parallel with the backward pass.
    """
    zero, layout = config.zero, config.parallel
    seconds = 0.0
    if zero.offload_param != "none":
        parameters = data_parallel.rank_parameters(config.model, layout.tp, holding)
        shards = data_parallel.shards(config)
        dtype = config.precision.params if config.offloads else shape.dtype
        copies = 2 * count * parameters / shards * operations.WIDTH[dtype] / hardware.host_bandwidth
        hidden = 0.0 if config.offloads and shards == 1 else 2 * count * forward * holding.blocks
        seconds += max(0.0, copies - hidden)
    if layout.offload_activations:
        copy = _saved(shape) / hardware.host_bandwidth
        seconds += 2 * count * holding.blocks * max(0.0, copy - forward)
    return seconds


def _saved(shape: MicroBatchShape) -> float:
    """Return the bytes that autograd saves in a block, approximately."""
    model = shape.model
    stream = shape.stream * model.hidden
    if shape.recompute in ("full", "sqrt"):
        return stream * operations.WIDTH[shape.dtype]
    width = model.head_width
    heads = shape.tokens / shape.tp * width * 2 * (model.heads + model.kv_head_count)
    inner = (3 if model.is_gated else 2) * shape.tokens * model.ffn / shape.tp
    if model.experts:  # in addition, the experts' permuted inputs and their outputs
        inner = model.experts_per_token * (inner + 2 * shape.tokens * model.hidden)
        inner += 4 * shape.tokens * model.shared_ffn / shape.tp
    if shape.recompute == "attention":
        inner, heads = 0.0, heads / 2
    numbers = 2 * stream + 2 * shape.tokens * model.hidden + heads + inner
    return numbers * operations.WIDTH[shape.dtype]
