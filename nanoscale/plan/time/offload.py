"""The time to copy offloaded parameters or activations to and from the host. A disk (nvme) counts as host."""

from nanoscale.config.resolved import ResolvedConfig
from nanoscale.plan.hardware.hardware import Hardware
from nanoscale.plan.time import data_parallel, operations
from nanoscale.plan.time.micro_batch_shape import MicroBatchShape


def offloaded(config: ResolvedConfig) -> str:
    """Return the names of offloaded states: `none`, `optimizer` or `optimizer, parameters`."""
    zero = config.zero
    devices = {"optimizer": zero.offload_optimizer, "parameters": zero.offload_param}
    return ", ".join(name for name, device in devices.items() if device != "none") or "none"


def with_copies(
    config: ResolvedConfig, hardware: Hardware, shape: MicroBatchShape, *passes: float
) -> tuple[float, ...]:
    """Return the seconds of a block's passes if a pass also waits for its copies from or to host memory.

    Offloaded parameters are copied to the device for each pass, by FSDP2 in the dtype of the optimizer, and by
    a single rank of it not ahead. Activations are copied to host memory in parallel with the forward pass, and
    back in parallel with the backward pass.
    """
    zero, layout, model = config.zero, config.parallel, config.model
    alone = ahead = 0.0
    if zero.offload_param != "none":
        tables = 2 * model.vocab * model.hidden / layout.tp
        parameters = data_parallel.block_parameters(model, layout.tp) + tables / model.layers
        shards = data_parallel.shards(config)
        dtype = config.precision.params if config.offloads else shape.dtype
        copied = parameters / shards * operations.WIDTH[dtype]
        alone, ahead = (copied, 0.0) if config.offloads and shards == 1 else (0.0, copied)
    if layout.offload_activations:
        ahead += _saved(shape)
    link = hardware.host_bandwidth
    return tuple(max(computed, ahead / link) + alone / link for computed in passes)


def _saved(shape: MicroBatchShape) -> float:
    """Return the bytes that autograd saves in a block, approximately."""
    model = shape.model
    stream = shape.stream * model.hidden
    if shape.recompute == "full":
        return stream * operations.WIDTH[shape.dtype]
    width = model.head_width
    heads = shape.tokens / shape.tp * width * 2 * (model.heads + model.kv_head_count)
    inner = (3 if model.is_gated else 2) * shape.tokens * model.ffn / shape.tp
    if model.experts:  # in addition, the experts' permuted inputs and their outputs
        inner = model.experts_per_token * (inner + 2 * shape.tokens * model.hidden)
        inner += 4 * shape.tokens * model.shared_ffn / shape.tp
    if shape.recompute.endswith("attention"):
        inner, heads = 0.0, heads / 2
    numbers = 2 * stream + 2 * shape.tokens * model.hidden + heads + inner
    return numbers * operations.WIDTH[shape.dtype]
