"""The arithmetic of a step's parts in words, on request; a search computes none of it."""

from __future__ import annotations

from nanoscale.common.units import duration
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.plan.hardware.hardware import Hardware
from nanoscale.plan.hardware.software import NANOSCALE, Software
from nanoscale.plan.memory.shards import rank_holdings
from nanoscale.plan.time import block, collectives, data_parallel, moe, operations
from nanoscale.plan.time.micro_batch_shape import MicroBatchShape
from nanoscale.plan.time.step import StepTime


def how(
    config: ResolvedConfig, hardware: Hardware, step: StepTime, software: Software = NANOSCALE
) -> dict[str, str]:
    """Explain each part of the step that takes any time, in one or more lines, by the part's name."""
    part, count = block.slice_of(config, software), config.accumulation
    texts = {
        "matmul": _matmul(hardware, part, count),
        "attention": _attention(hardware, part),
        "elementwise": _elementwise(hardware),
        "recomputed": _recomputed(config),
        "launch": _launch(hardware, part),
        "tp": _tp(hardware, part),
        "cp": _cp(part),
        "ep": _ep(hardware, part),
        "pp": "waiting for what neighbors send: at the ends of the step, and with 1F1B, which has no micro "
        "batch to spare, for every one",
        "dp": _dp(config, hardware, count, software),
        "bubble": _bubble(config),
        "optimizer": _optimizer(config, hardware),
        "offload": f"host memory is {hardware.host_bandwidth / 1e9:g} GB/s away; the part that "
        f"computation does not hide",
        "data": "ids of tokens, 8 bytes each, over the link to the host",
        "jitter": f"the slowest host: {hardware.efficiency.jitter:.1%} · √(2 ln hosts) of the rest, the mean "
        "of the largest of so many normal numbers",
    }
    return {name: text for name, text in texts.items() if getattr(step.parts, name) > 0}


def _matmul(hardware: Hardware, part: MicroBatchShape, count: int) -> str:
    share = hardware.efficiency.matmul_fp8 if part.kind == "fp8" else hardware.efficiency.matmul
    peak = hardware.peaks[part.kind]
    lines = [
        f"2·m·n·k FLOPs over {share:.0%} of {peak / 1e12:g} TFLOP/s, more where tiles do not fill the "
        f"{hardware.multiprocessors} multiprocessors; {count} micro batches, forward once and backward "
        f"{'once (the weights are frozen; the adapters twice)' if part.adapter_rank else 'twice'}",
    ]
    linears = block.linears(part.model, part.tp, part.ep)
    for name, product in zip(_names(part), linears, strict=True):
        seconds, rows = block.product(hardware, part, product), product.rows(part.tokens)
        flops = 2.0 * product.experts * rows * product.outputs * product.inputs
        each = f", of each of {product.experts} experts" if product.taken > 1 else ""
        lines.append(
            f"  {name}: [{rows}, {product.inputs}] · [{product.inputs}, {product.outputs}]{each} in "
            f"{duration(seconds)}, {flops / seconds / peak:.0%} of the peak"
        )
    return "\n".join(lines)


def _names(part: MicroBatchShape) -> list[str]:
    gate = ["gate"] if part.model.mlp == "swiglu" else []
    router = ["router, in fp32"] if part.model.experts else []
    return ["wq", "wk", "wv", "wo", *router, *gate, "up", "down"]


def _launch(hardware: Hardware, part: MicroBatchShape) -> str:
    efficiency = hardware.efficiency
    each = efficiency.compiled_s if part.compiled else efficiency.eager_s
    return (
        f"kernels finish faster than the CPU launches them; a launch takes {duration(each)} or more"
    )


def _attention(hardware: Hardware, part: MicroBatchShape) -> str:
    again = operations.BACKWARD_ATTENTION
    if part.cp > 1 and part.cp_method == "ring":
        shared = f"a ring of {part.cp} computes it in as many blocks, one of them causal"
    else:
        shared = f"cp divides it by {part.cp}"
    share, kernel = hardware.efficiency.attention, "FlashAttention-2"
    if part.attention == "cudnn" and hardware.efficiency.cudnn != 1:
        share, kernel = share * hardware.efficiency.cudnn, "cuDNN, backward as FlashAttention-2"
    return (
        f"half of 4·s²·h FLOPs a sample and layer over {share:.0%} of the 16-bit peak "
        f"forward, {again:.2f} times that backward ({kernel}, arXiv:2307.08691); s = {part.seq}, "
        f"{shared}, tp the heads by {part.tp}"
    )


def _elementwise(hardware: Hardware) -> str:
    share, bandwidth = hardware.efficiency.memory, hardware.memory_bandwidth / 1e9
    return f"norms, rotations, activations, sums, the loss: their bytes over {share:.0%} of {bandwidth:g} GB/s"


def _recomputed(config: ResolvedConfig) -> str:
    layout = config.parallel
    kept = (
        f", keeping {layout.selective_keep}"
        if layout.activation_checkpointing == "selective"
        else ""
    )
    return (
        f"activation checkpointing {layout.activation_checkpointing}{kept}: the forward pass of "
        f"{block.recomputed_share(config):.0%} of the blocks again, but for what nothing backward needs"
    )


def _tp(hardware: Hardware, part: MicroBatchShape) -> str:
    size = part.tokens * part.model.hidden * operations.WIDTH[part.wide]
    once = collectives.all_gather(hardware, collectives.group(hardware, part.tp, 1), size)
    return (
        f"a block gathers and scatters twice forward and twice backward (arXiv:2205.05198, section 4.2.2): "
        f"{size / 1e6:.1f} MB · (n - 1)/n with n = {part.tp} over "
        f"{hardware.efficiency.intra_host:.0%} of {hardware.intra_bandwidth / 1e9:g} GB/s and what "
        f"hops of a ring wait for, {duration(once)} each"
    )


def _cp(part: MicroBatchShape) -> str:
    if part.cp_method == "ulysses":
        return f"heads change places with the sequence among {part.cp} ranks, and back (arXiv:2309.14509)"
    return f"{part.cp - 1} rounds of keys and values, where one takes longer than its part of attention"


def _ep(hardware: Hardware, part: MicroBatchShape) -> str:
    rows = part.tokens * part.model.experts_per_token
    once, _ = moe.exchange(hardware, part)
    return (
        f"two all-to-alls forward and two backward among {part.ep} ranks (arXiv:2006.16668, section 3.3) of "
        f"{rows:,} rows of {part.model.hidden}, with equally loaded experts; forward the host first learns how "
        f"many arrive, {duration(once)} in total"
    )


def _dp(config: ResolvedConfig, hardware: Hardware, count: int, software: Software) -> str:
    plan = data_parallel.plan(config, hardware, count, software)
    return (
        f"a block's parameters are gathered in {duration(plan.gather)}, {plan.gathers} times forward and "
        f"{plan.gathers_again} backward; its gradients are reduced in "
        f"{duration(plan.reduce + plan.all_reduce)}, {plan.reduces} times, "
        f"{'beside' if plan.hidden else 'after'} the backward pass. What a block's own time does not hide, "
        f"{hardware.efficiency.overlap:.0%} of what it hides, and the copies of both"
    )


def _bubble(config: ResolvedConfig) -> str:
    layout, count = config.parallel, config.accumulation
    return (
        f"schedule {layout.schedule} with p = {layout.pp}, v = {layout.virtual_stages}, m = {count}: "
        "a rank waits for p - 1 stages, about (p - 1)/(v·m) of the work (arXiv:2104.04473, section 2.2), less "
        "where gradients of weights fill it"
    )


def _optimizer(config: ResolvedConfig, hardware: Hardware) -> str:
    shards = data_parallel.shards(config)
    most = max(data_parallel.own_parameters(config, held) for held in rank_holdings(config, shards))
    return (
        f"{most / 1e6:.1f} M parameters on a rank, which {shards} ranks share out; each is read and "
        " written with its gradient and moments, and clipping reads the gradients twice"
    )
