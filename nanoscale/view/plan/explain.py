"""Explanations of the parts of a step: formulas, rates and sources."""

import re

from nanoscale.common.units import counted, duration
from nanoscale.config.model_math import routed_share
from nanoscale.config.parameters import block as block_parameters
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.plan.hardware.hardware import Hardware
from nanoscale.plan.memory.shards import rank_holdings
from nanoscale.plan.time import block, collectives, data_parallel, moe, operations
from nanoscale.plan.time.micro_batch_shape import MicroBatchShape
from nanoscale.plan.time.step import StepTime


def how(config: ResolvedConfig, hardware: Hardware, step: StepTime) -> dict[str, str]:
    """Explain each part of the step that takes any time, in one or more lines each."""
    shape, count = block.micro_batch_shape(config), config.accumulation
    efficiency = hardware.efficiency
    each = efficiency.compiled_s if shape.compiled else efficiency.eager_s
    texts = {
        "matmul": _matmul(hardware, shape, count),
        "attention": _attention(hardware, shape),
        "elementwise": "norms, rotations, activations, sums, the loss: their bytes over "
        f"{efficiency.memory:.0%} of {hardware.memory_bandwidth / 1e9:g} GB/s",
        "recomputed": _recomputed(config),
        "launch": "kernels finish faster than the CPU launches them; a launch takes "
        f"{duration(each)} or more",
        "tp": _tp(hardware, shape),
        "cp": _cp(shape),
        "ep": _ep(hardware, shape),
        "pp": "waiting for transfers of neighboring stages: at the start and the end of the step, with 1F1B "
        "for every micro batch",
        "dp": _dp(config, hardware, count),
        "bubble": _bubble(config),
        "optimizer": _optimizer(config, hardware),
        "offload": f"copies from and to host memory at {hardware.host_bandwidth / 1e9:g} GB/s; the part that "
        "is longer than the computation",
        "data": "token ids, 8 bytes each, over the link to the host",
        "jitter": f"the slowest host: {efficiency.jitter:.1%} · √(2 ln hosts) of all parts, the "
        "expected maximum of normal numbers",
    }
    return {name: text for name, text in texts.items() if getattr(step.parts, name) > 0}


def _matmul(hardware: Hardware, shape: MicroBatchShape, count: int) -> str:
    share = hardware.efficiency.matmul_fp8 if shape.kind == "fp8" else hardware.efficiency.matmul
    peak = hardware.peaks[shape.kind]
    lines = [
        f"2·m·n·k FLOPs over {share:.0%} of {peak / 1e12:g} TFLOP/s, longer if tiles do not fill the "
        f"{hardware.multiprocessors} multiprocessors; {count} micro batches, forward once and backward "
        f"{'once (the weights are frozen; the adapters twice)' if shape.adapter_rank else 'twice'}"
    ]
    linears = block.linears(shape.model, shape.tp, shape.ep, shape.expert_tp)
    names = [
        it for it, parameter in block_parameters(shape.model).items() if not parameter.is_vector
    ]
    for name, product in zip(names, linears, strict=True):
        name = re.sub(r"^(attention|mlp)\.(experts\.)?|\.weight$", "", name).replace(".", " ")
        name = {"router": "router, in fp32"}.get(name, name)
        seconds, rows = block.product(hardware, shape, product), product.rows(shape)
        flops = 2.0 * product.experts * rows * product.outputs * product.inputs
        each = f", of each of {product.experts} experts" if product.experts_per_token > 1 else ""
        lines.append(
            f"  {name}: [{rows}, {product.inputs}] · [{product.inputs}, {product.outputs}]{each} in "
            f"{duration(seconds)}, {flops / seconds / peak:.0%} of the peak"
        )
    return "\n".join(lines)


def _attention(hardware: Hardware, shape: MicroBatchShape) -> str:
    if shape.cp > 1 and shape.cp_method == "ring":
        shared = f"each rank computes {shape.cp} blocks of a ring, one of them causal"
    else:
        shared = f"cp divides the time by {shape.cp}"
    share, kernel = hardware.efficiency.attention, "FlashAttention-2"
    if shape.attention == "cudnn" and hardware.efficiency.cudnn != 1:
        share, kernel = share * hardware.efficiency.cudnn, "cuDNN, backward as FlashAttention-2"
    return (
        f"half of 4·s²·h FLOPs a sample and layer over {share:.0%} of the 16-bit peak forward; backward takes "
        f"{operations.BACKWARD_ATTENTION:.2f} times as long ({kernel}, arXiv:2307.08691); s = {shape.seq}, "
        f"{shared}, tp divides the heads by {shape.tp}"
    )


def _recomputed(config: ResolvedConfig) -> str:
    mode, kept = config.parallel.activation_checkpointing, ""
    if mode == "selective":
        kept = f", keeping {config.parallel.selective_keep}"
    return (
        f"activation checkpointing {mode}{kept}: {block.recomputed_share(config):.0%} of the blocks repeat the "
        "forward pass, without the results that no backward pass needs"
    )


def _tp(hardware: Hardware, shape: MicroBatchShape) -> str:
    size = shape.tokens * shape.model.hidden * operations.WIDTH[shape.dtype]
    once = collectives.all_gather(hardware, collectives.group(hardware, shape.tp, 1), size)
    overlap = "; products run during it, so the exposed time counts" if shape.tp_overlap else ""
    return (
        f"a block gathers and scatters twice forward and twice backward (arXiv:2205.05198, section 4.2.2): "
        f"{size / 1e6:.1f} MB · (n - 1)/n with n = {shape.tp} over "
        f"{hardware.efficiency.intra_host:.0%} of {hardware.intra_bandwidth / 1e9:g} GB/s, plus "
        f"the latency of a ring, {duration(once)} each{overlap}"
    )


def _cp(shape: MicroBatchShape) -> str:
    if shape.cp_method == "ulysses":
        return f"all-to-alls among {shape.cp} ranks, from the sequence to heads and back (arXiv:2309.14509)"
    windows = "; layers with a window exchange the tokens that it reaches" if shape.windowed else ""
    return f"{shape.cp - 1} hops of keys and values, as far as a hop takes longer than its attention{windows}"


def _ep(hardware: Hardware, shape: MicroBatchShape) -> str:
    model = shape.model
    if not model.experts:
        return ""
    copies = shape.ep * routed_share(model.experts, model.experts_per_token, shape.ep)
    return (
        f"two all-to-alls forward and two backward among {shape.ep} ranks (arXiv:2006.16668, section 3.3) of "
        f"{shape.routed * copies:,.0f} rows of {model.hidden}, one for each rank that has any of a token's "
        f"experts, with equally loaded experts, {duration(moe.one_way(hardware, shape))} each; forward the "
        f"host first reads the numbers of rows, {duration(moe.counts(hardware, shape))}. In a micro batch of "
        "two samples or more, tokens of one half travel during work on the other half; the exposed time counts"
    )


def _dp(config: ResolvedConfig, hardware: Hardware, count: int) -> str:
    plan = data_parallel.plan(config, hardware, count)
    return (
        f"a block's parameters are gathered in {duration(plan.gather)}, {counted(plan.gathers, 'time')} "
        f"forward and {plan.gathers_backward} backward; its gradients are reduced in "
        f"{duration(plan.reduce + plan.all_reduce)}, {counted(plan.reduces, 'time')}, "
        f"{'during' if plan.overlapped else 'after'} the backward pass. The exposed time counts, "
        f"{hardware.efficiency.overlap:.0%} of the overlapped time, and copies"
    )


def _bubble(config: ResolvedConfig) -> str:
    layout, count = config.parallel, config.accumulation
    return (
        f"schedule {layout.schedule} with p = {layout.pp}, v = {layout.virtual_stages}, m = {count}: "
        "a rank waits for p - 1 stages, about (p - 1)/(v·m) of the work (arXiv:2104.04473, section 2.2), less "
        "if gradients of weights fill the bubble"
    )


def _optimizer(config: ResolvedConfig, hardware: Hardware) -> str:
    shards = data_parallel.shards(config)
    most = max(
        data_parallel.updated_parameters(config, held) for held in rank_holdings(config, shards)
    )
    return (
        f"{most / 1e6:.1f} M parameters on a rank, sharded over {counted(shards, 'rank')}; the update reads "
        "and writes each parameter with its gradient and moments, and clipping reads the gradients twice"
    )
