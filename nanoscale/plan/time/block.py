"""The time of one micro batch in a block, the embedding and the head: forward, backward and recomputation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from nanoscale.config import model_math, parameters
from nanoscale.config.dtypes import narrow_blocks
from nanoscale.config.hardware.data_sheets import kind, wide_kind
from nanoscale.config.layout import keeps_narrow_experts, narrow_weights
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Model
from nanoscale.plan.hardware.hardware import DTENSOR_S, NANOSCALE, Hardware, Software
from nanoscale.plan.time import collectives, moe, operations
from nanoscale.plan.time.micro_batch_shape import (
    NOTHING,
    WORK,
    MicroBatchShape,
    Passes,
    Work,
    passes,
)

# Kernels of a block, counted in the model's code. The CPU takes some microseconds to start each kernel.
_KERNELS = {False: (32, 58), True: (14, 24)}
"""Compiled or not → kernels of a forward and of a backward pass."""
_ADAPTER_KERNELS = {False: (4, 7), True: (20, 12)}
"""DoRA or not → kernels of an adapter, forward and backward: two products, the scale, and the sums with the
result and the gradient of its layer. DoRA adds 14 for the norms, and kernels that scale the result."""
_TP_START = 3
"""The factor on the time to start a kernel with tp, which communicates and reads shards of DTensors."""
_DEEPSPEED_HOOKS = {0: 1.0, 1: 1.0, 2: 1.25, 3: 3.6}
"""ZeRO stage → `MicroBatchShape.hooks` of DeepSpeed 0.19, which calls Python for every gradient from stage 2
on, and in stage 3 before and after every module. Measured on a CPU, with blocks too small for computing to
count: 1.0, 1.0, 1.4 and 4.1 ms a block and micro batch, and 1.1 ms in the native backend."""
# Numbers that element-wise operations read and write for each element, forward and backward:
_STREAM = {False: (10, 12), True: (8, 8)}
"""Compiled → for each element of the residual stream: two norms (2 and 3 each) and two additions (3 and
3 each). A compiler fuses these operations."""
_NORM = {False: (4, 6), True: (2, 2)}
"""For each element of the stream: two further norms, of what attention and feed-forward add."""
_COMPOSED = (32, 74)
"""For each element of the stream, in addition, if the two RMSNorms of a block consist of single operations:
cast to fp32, square, mean, scale, cast back, product with the weights; 18 numbers forward and 40 backward for
one norm."""
_ROPE = {False: (9, 9), True: (2, 2)}
"""For each element of queries and keys: the rotation's four products of halves, two sums, one concatenation."""
_QK_NORM = {False: (2, 3), True: (1, 2)}
"""For each element of queries and keys: their norms, which a compiler fuses with the rotation."""
_GATED = {False: (5, 9), True: (3, 5)}
"""For each element of the hidden layer of SwiGLU: silu and product."""
_CLAMPED = {False: (16, 24), True: (3, 5)}
"""The same with bounds: two clamps, two factors, a sigmoid, a sum and two products."""
_SINKS = (3, 2)
"""For each element of queries and keys: the result is scaled, and the sinks' gradients are summed."""
_GELU = (2, 3)
_SUMS = 9
"""For each element of the stream, backward: the sum of the gradients of the input of q, k, v, and the sum of
the gradients of the input of gate and up."""
_LOSS = 32
"""Bytes per logit in fp32 for cast, log-softmax, its gradient and cast back, without one read and one write."""
_SUMMING = 0.4
"""The exposed share of reading and writing fp32 gradients, if a matrix product adds its result to them. Such a
product reaches 0.71 in place of 0.75 of an A100's peak, and 0.455 in place of 0.5 of a B200's peak (SimuMax's
a100_pcie.json and b200_bf16_ceperm.json)."""
ROWWISE = 1.33
"""The time of an 8-bit product with row-wise scales over the time with tensor-wise scales (torchao's tables for
Llama-3 8B on 8 H100, docs/source/workflows/training.md)."""
_ROWWISE_CAST_BYTES = 4
"""Bytes per number that row-wise fp8 scales cost in addition to `Software.cast_bytes`: one further pass,
because the maxima of rows and of columns are computed separately."""
_EAGER_CAST_BYTES = 75
"""Bytes for each number that torchao casts to fp8 by single operations, 12.8 ms in a block of Llama 3 8B with
4,096 tokens on an H100 (rehearsed). Products in 8 bits save 3.4 ms."""
_EXPERTS_CAST_BYTES = 5
"""Bytes per number of experts that torchao 0.18 casts to fp8 along one dimension: its kernels read it for the
maximum, read it again and write it (`torchao.prototype.moe_training.kernels`)."""
_MXFP8_CAST_BYTES = 6
"""Bytes per number that is cast to MXFP8 along one dimension. 3 bytes are read and written; fitted to torchao's
table of Llama-3 8B on 8 B200 (README of `mx_formats`): 0.93 to 0.96 of the speed with tensor-wise scales."""
_NVFP4_CAST_BYTES = 5 + 1 / 8
"""Bytes per number that is cast to NVFP4 along both dimensions, counted: torchao's kernels read 16 bits for the
maxima and again, and write two orders of 4 bits with a scale for 16 numbers. Not measured."""
_MERGE = (26, 10)
"""Bytes per number to merge the result of a hop of the ring with the results so far, in fp32. Forward: the
weighted mean and its log-sum. Backward: the gradients (`parallel.ring`)."""
_MERGED = 0.75
"""The mean share of a rank's queries, or of its keys, in a hop: all and half of them alternate."""
_CUDNN_HEAD_DIM = 128
"""The largest head size for which PyTorch uses cuDNN's attention, forward and backward, but for `_LATENT`."""
_LATENT = (192, 128)
"""The sizes of keys and of values with which PyTorch uses cuDNN's attention, too: DeepSeek-V3's."""


def micro_batch_shape(config: ResolvedConfig, software: Software = NANOSCALE) -> MicroBatchShape:
    layout, train, precision = config.parallel, config.train, config.precision
    mode = layout.activation_checkpointing
    return MicroBatchShape(
        model=config.model,
        batch=train.micro_batch,
        seq=train.seq_len,
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel and layout.tp > 1,
        cp=layout.cp,
        cp_method=layout.cp_method,
        kind=kind(precision),
        dtype=wide_kind(precision),
        compiled=software.fused
        or (config.backend.compile != "off" and not (software.dtensor and layout.tp > 1)),
        recompute=layout.selective_keep if mode == "selective" else mode,
        ep=layout.ep,
        attention=attention_kernel(config),
        document=min(config.data.document_length or train.seq_len, train.seq_len)
        if config.data.document_mask
        else None,
        windowed=_windowed_share(config),
        software=software,
        fp8_recipe=config.precision.fp8_recipe,
        narrow_weights=software.torchao and narrow_weights(config) > 0,
        cast_share=1 / config.accumulation if keeps_narrow_experts(config) else 1.0,
        hooks=_DEEPSPEED_HOOKS[config.zero.stage] if config.backend.name == "deepspeed" else 1.0,
        tp_overlap=layout.tp_overlap,
        adapter_rank=config.lora.rank,
        dora=config.lora.dora,
        ep_over_tp=layout.ep_over_tp,
        paired=config.train.is_of_answers,
        adapted=tuple(model_math.adapted_layers(config.model, config.lora).values()),
    )


def _windowed_share(config: ResolvedConfig) -> float:
    """Return the share of layers whose window is shorter than the sequence."""
    model = config.model
    if not model.is_windowed(config.train.seq_len):
        return 0.0
    return sum(map(model.has_window, range(model.layers))) / model.layers


def attention_kernel(config: ResolvedConfig) -> str:
    """Return the attention kernel of rows without limits: the configured one, or the one that PyTorch chooses.

    On devices for which PyTorch never chooses cuDNN, flash and cudnn have the same rate. Attention by single
    operations (math) is planned at the rate of flash. With context parallelism values are as wide as keys.
    """
    kernel, model = config.backend.attention, config.model
    if kernel in ("flash", "math"):
        return "flash"
    widths = model.head_width, model.value_width
    takes = max(widths) <= _CUDNN_HEAD_DIM or (widths == _LATENT and config.parallel.cp == 1)
    chosen = config.precision.compute in ("bf16", "fp16") and takes
    return "cudnn" if kernel == "cudnn" or chosen else "flash"


@dataclass(frozen=True, slots=True)
class _Linear:
    """This rank's shard of one linear layer of a block, or of the same layer of all its experts."""

    inputs: int
    outputs: int
    experts: int = 1
    """The number of experts on this rank; 1 for a layer outside of experts."""
    experts_per_token: int = 1
    of_experts: bool = False
    router: bool = False
    """True for the router, whose operands are never narrower than 16 bits."""
    is_summed: bool = False
    """True if tp divides the inputs, so that ranks sum their results."""

    @property
    def parameters(self) -> int:
        return self.experts * self.inputs * self.outputs

    def tokens(self, shape: MicroBatchShape) -> int:
        """Return the tokens that pass through the layer, once for each of their experts."""
        is_routed = self.of_experts or self.router
        return (shape.routed if is_routed else shape.tokens) * self.experts_per_token

    def rows(self, shape: MicroBatchShape) -> int:
        """Return the rows of the layer's input, for each expert if there are several."""
        return max(1, self.tokens(shape) // self.experts)


@lru_cache(maxsize=1024)
def linears(
    model: Model, tp: int, ep: int = 1, expert_tp: int | None = None
) -> tuple[_Linear, ...]:
    """Return query, key, value, output, (router,) (gate,) up, down, in the order of their computation."""
    products = []
    for name, parameter in parameters.block(model).items():
        if parameter.is_vector:
            continue
        *experts, outputs, inputs = parameter.local(tp, ep, expert_tp)
        counts = (experts[0], model.experts_per_token, True) if experts else (1, 1, False)
        is_summed = parameter.split == len(experts) + 1
        router = name == "mlp.router.weight"
        products.append(_Linear(inputs, outputs, *counts, router, is_summed))
    return tuple(products)


def adapters(shape: MicroBatchShape) -> tuple[_Linear, ...]:
    """Return the products A and B of a block's adapters. tp divides an adapter like its layer."""
    table = parameters.block(shape.model)
    products = []
    for name in shape.adapted:
        outputs, inputs = table[f"{name}.weight"].local(shape.tp)
        products += [_Linear(inputs, shape.adapter_rank), _Linear(shape.adapter_rank, outputs)]
    return tuple(products)


def product(
    hardware: Hardware, shape: MicroBatchShape, linear: _Linear, gradients: str = ""
) -> float:
    """Return `_product`, or its mean over blocks if some stay in the compute dtype."""
    share, narrow = _narrow_share(shape), _product(hardware, shape, linear, gradients)
    if share == 1:
        return narrow
    wide = _product(hardware, replace(shape, kind=shape.dtype), linear, gradients)
    return share * narrow + (1 - share) * wide


def _narrow_share(shape: MicroBatchShape) -> float:
    recipe = shape.fp8_recipe * shape.software.torchao
    return narrow_blocks(recipe, shape.model.layers) / shape.model.layers


def _product(
    hardware: Hardware, shape: MicroBatchShape, linear: _Linear, gradients: str = ""
) -> float:
    """Return the seconds of a linear layer's forward product, or of the product for a gradient.

    Args:
        gradients: of the layer's `inputs` or of its `weights`; empty for the forward product.

    With ep, a rank is assumed to receive as many rows as it sends. All experts are one kernel in bf16 and fp8,
    otherwise one kernel for each expert.
    """
    m, n, k = linear.rows(shape), linear.outputs, linear.inputs
    if gradients == "inputs":
        n, k = k, n
    elif gradients == "weights":
        m, n, k = n, k, m
    kind = shape.kind
    if linear.router:
        kind = shape.dtype
    elif kind == "fp8" and shape.fp8_recipe in hardware.peaks and not linear.of_experts:
        kind = "nvfp4"
    if kind not in hardware.peaks:  # a user's own description of a device names few peaks
        kind = shape.dtype
    factor = 1.0
    by_torchao = linear.of_experts and shape.software.torchao
    by_row = by_torchao and "fp" not in shape.fp8_recipe
    if kind == "fp8" and (by_row or "row" in shape.fp8_recipe):
        if gradients == "weights" and shape.fp8_recipe == "rowwise_with_gw_hp":
            kind = shape.dtype
        else:
            factor = ROWWISE
    if linear.experts == 1 or kind not in ("bf16", "fp8"):
        return factor * linear.experts * operations.product(hardware, kind, m, n, k)
    rate = shape.software.grouped
    return factor * operations.product(hardware, kind, m, n, k, linear.experts, grouped=rate)


@lru_cache(maxsize=16384)
def block(hardware: Hardware, shape: MicroBatchShape) -> Passes:
    """Return the passes of one block."""
    in_halves = shape.in_parts and shape.expert_tp == 1 and shape.batch % 2 == 0
    return _in_halves(hardware, shape) if in_halves else _block(hardware, shape)


def _in_halves(hardware: Hardware, shape: MicroBatchShape) -> Passes:
    """Return the passes of a block that computes one half of the batch while tokens of the other half travel
    (`parallel.expert.BlockInParts`)."""
    part = replace(shape, batch=shape.batch // 2)
    half = _block(hardware, part)
    one_way, counts = moe.one_way(hardware, part), moe.counts(hardware, part)
    products = linears(shape.model, shape.tp, shape.ep, shape.expert_tp)
    experts = sum(product(hardware, part, p) for p in products if p.of_experts)
    # The gradients of weights are summed over the halves.
    sums = operations.elementwise(
        hardware, 3 * operations.WIDTH[shape.dtype] * sum(p.parameters for p in products)
    )

    def doubled(work: Work, during: Sequence[float], exposed: float, added: float = 0.0) -> Work:
        """Return two halves, with exchanges during these seconds of other work and others by themselves."""
        for seconds in during:
            hidden = min(one_way, seconds)
            exposed += one_way - hidden + hardware.efficiency.overlap * hidden
        both = {name: 2 * getattr(work, name) for name in WORK}
        both |= {"ep": exposed, "elementwise": both["elementwise"] + added}
        return Work(**both)

    attention = half.seconds[0] - half.forward.ep - experts
    forward = doubled(half.forward, (attention, experts, experts), one_way + 2 * counts)
    attention = half.seconds[1] - half.backward.ep - 2 * experts
    backward = doubled(
        half.backward,
        (attention, 2 * experts, 2 * experts),
        one_way,
        0.0 if shape.adapter_rank else sums,
    )
    recomputed = half.recomputed
    if recomputed.ep:
        recomputed = doubled(recomputed, (recomputed.total - recomputed.ep - experts, experts), 0.0)
    elif recomputed.total:
        recomputed = doubled(recomputed, (), 0.0)
    hidden = ("ep", "tp") if shape.tp_overlap else ("ep",)
    return passes(forward, backward, recomputed, 2 * half.recomputed_flops, *hidden)


def _block(hardware: Hardware, shape: MicroBatchShape) -> Passes:
    products = linears(shape.model, shape.tp, shape.ep, shape.expert_tp)
    forward_products = [product(hardware, shape, p) for p in products]
    lora = adapters(shape)
    lora_forward = sum(product(hardware, shape, p) for p in lora)
    # With adapters the other weights are frozen and need no gradients.
    trained = lora or products
    backward_products = sum(product(hardware, shape, p, "inputs") for p in (*products, *lora))
    backward_products += sum(product(hardware, shape, p, "weights") for p in trained)
    if shape.software.sums_in_products:
        sums = 8.0 * sum(p.parameters for p in products)
        backward_products += _SUMMING * operations.elementwise(hardware, sums)
    attention = _attention(hardware, shape)
    bytes_forward, bytes_backward = _traffic(shape)
    casts_forward, casts_backward = _casts(shape, products)
    tp_gather, tp_scatter = _tp_pair(hardware, shape)
    in_products = _tp_in_products(hardware, shape) if shape.tp_overlap else []
    cp_forward, cp_backward = _cp(hardware, shape)
    one_way = moe.one_way(hardware, shape)
    forward = Work(
        matmul=sum(forward_products) + lora_forward,
        attention=attention,
        elementwise=operations.elementwise(hardware, bytes_forward + casts_forward),
        tp=sum(in_products) if in_products else _tp_forward(hardware, shape, sum(forward_products)),
        cp=cp_forward,
        ep=2 * one_way + moe.counts(hardware, shape),
    )
    backward = Work(
        matmul=backward_products,
        attention=attention * operations.BACKWARD_ATTENTION,
        elementwise=operations.elementwise(hardware, bytes_backward + casts_backward),
        tp=sum(_tp_in_products(hardware, shape, "inputs"))
        if in_products
        else _tp_backward(hardware, shape, backward_products),
        cp=cp_backward,
        ep=2 * one_way,
    )
    forward = _with_launches(hardware, shape, 0, forward)
    backward = _with_launches(hardware, shape, 1, backward)
    recomputed_products = _recomputed_products(shape, products)
    recomputed, flops = NOTHING, 0.0
    full = shape.recompute == "full"
    if shape.recompute != "none":
        sums = full or shape.recompute == "core-attention"
        tp_recomputed = _tp_pairs(shape) * tp_gather + (tp_scatter if sums else 0.0)
        if in_products:
            tp_recomputed = sum(in_products[:3] if sums else in_products[::2])
        recomputed = Work(
            matmul=sum(forward_products[i] for i in recomputed_products) + lora_forward,
            attention=attention if full else 0.0,
            elementwise=forward.elementwise - moe.not_recomputed(hardware, shape),
            tp=tp_recomputed,
            cp=cp_forward if full else 0.0,
            # Tokens are sent again, and results are not needed.
            ep=one_way if full else 0.0,
        )
        if full or not shape.software.host_s:
            recomputed = _with_launches(hardware, shape, 0, recomputed)
    for p in (products[i] for i in recomputed_products):
        flops += 2.0 * p.tokens(shape) * p.inputs * p.outputs
    hidden = ("tp",) if in_products or shape.software.hidden_tp in ("backward", "both") else ()
    return passes(forward, backward, recomputed, flops + attention_flops(shape) * full, *hidden)


def attention_flops(shape: MicroBatchShape) -> float:
    """Return the FLOPs of attention in one forward pass, without the causal mask, as in MFU: 4·s·h a token."""
    width = shape.model.head_width
    return 4.0 * shape.tokens * shape.seq * shape.model.heads * width / shape.tp


def _recomputed_products(shape: MicroBatchShape, products: Sequence[_Linear]) -> list[int]:
    """Return the indices of the recomputed products of a block. The router's product is kept.

    No backward pass needs the result of a last product: recomputation ends before it, or the compiler leaves it
    out. What is repeated or compiled by itself has a last product of its own: attention, and the experts.
    """
    if shape.recompute == "none":
        return []
    full, every = shape.recompute == "full", 1 + (shape.recompute == "every-2nd-matmul")
    dense = [i for i, it in enumerate(products) if not (it.router or it.of_experts)]
    experts = [i for i, it in enumerate(products) if it.of_experts]
    # The sum of the last product's rows saves their tokens.
    last = [] if shape.compiled and not (shape.in_parts and full) else experts[-1:]
    if shape.recompute == "matmuls":
        return last
    output = next(i for i, it in enumerate(products) if it.is_summed)
    repeated = [i for i in dense[::every] if i != output or not _keeps_output(shape)]
    return repeated + experts[:-1] + last if experts else [i for i in repeated if i != dense[-1]]


def _keeps_output(shape: MicroBatchShape) -> bool:
    """True if recomputation does not repeat attention's last product: in parts, or since its sum is kept."""
    full, is_summed = shape.recompute == "full", shape.compiled and shape.tp > 1
    return not full and (shape.in_parts or (is_summed and shape.recompute != "core-attention"))


def _attention(hardware: Hardware, shape: MicroBatchShape) -> float:
    """Return the seconds of attention in a forward pass.

    In each of the cp - 1 hops of a ring, a rank computes half of the pairs of its queries and another rank's
    keys. Layers with a window have no hops, and their queries see keys of other ranks, too (`parallel.ring`).
    """
    heads, tokens = max(1, shape.model.heads // shape.tp), shape.seq // shape.cp
    ring = shape.cp > 1 and shape.cp_method != "ulysses"
    if not ring and shape.cp > 1:
        tokens, heads = shape.seq, max(1, heads // shape.cp)

    model, count = shape.model, max(1, shape.seq // (shape.document or shape.seq))
    limited = bool(shape.document) or model.attention_sinks or model.attention_softcap is not None

    def seconds(keys: int, causal: bool, window: int | None = None) -> float:
        """Return the seconds of queries with these keys, which documents divide equally."""
        length, keys = max(1, tokens // count), max(1, keys // count)
        kernel = "flash" if limited or window else shape.attention
        if window and (ring or window < keys):
            keys, causal = model_math.window_keys(keys, min(window, keys)), False
        # FlashAttention pads values to the width of keys.
        values = model.value_width if kernel == "cudnn" else model.head_width
        sizes = shape.batch * count, length, keys, heads, (model.head_width + values) // 2
        return operations.attention(hardware, shape.dtype, *sizes, causal, kernel)

    whole = seconds(tokens, True)
    if ring:
        whole += (shape.cp - 1) * seconds(max(1, tokens // 2), False)
    if not shape.windowed:
        return whole
    windowed = seconds(shape.seq, True, model.sliding_window)
    return whole + shape.windowed * (windowed - whole)


def _traffic(shape: MicroBatchShape) -> tuple[float, float]:
    """Return the bytes that a block's element-wise operations move, forward and backward."""
    model, compiled = shape.model, shape.compiled
    width = model.head_width
    stream = shape.stream * model.hidden
    inner = shape.tokens * model.ffn / shape.tp
    routed = (0.0, 0.0)
    if model.experts:
        inner = inner * model.experts_per_token + shape.tokens * model.shared_ffn / shape.tp
        routed = moe.traffic(shape)
    activation = _GATED[compiled] if model.is_gated else _GELU
    if model.mlp == "swiglu-clamped":
        activation = _CLAMPED[compiled]
    rope: tuple[float, ...] = (0, 0)
    if model.position == "rope":
        rope = tuple(count * model.rope_fraction for count in _ROPE[compiled])
    norms = _COMPOSED if shape.software.composed_norm and not compiled else (0, 0)
    if model.qk_norm:  # two norms of a block, one of queries and keys
        own = zip(rope, _QK_NORM[compiled], norms, strict=True)
        rope = tuple(turned + norm + composed / 2 for turned, norm, composed in own)
    if model.attention_sinks:
        rope = rope[0] + _SINKS[0], rope[1] + _SINKS[1]
    kv_heads = model.kv_head_count
    queries_keys = shape.tokens * (model.heads + kv_heads) * width / shape.tp
    pairs = 2 if model.norm_position == "both" else 1
    further = _NORM[compiled] if pairs == 2 else (0, 0)
    forward = (_STREAM[compiled][0] + further[0] + pairs * norms[0]) * stream
    forward += activation[0] * inner + rope[0] * queries_keys
    backward = (_STREAM[compiled][1] + further[1] + pairs * norms[1]) * stream
    # Adapter and layer have one input. Their results are added, and so are their gradients of the input.
    lora = adapters(shape)
    forward += 3 * shape.tokens * sum(p.outputs for p in lora[1::2])
    backward += 3 * shape.tokens * sum(p.inputs for p in lora[::2])
    if shape.dora:  # the norms read W twice; the result is scaled, and its gradient is used twice
        outputs = sum(p.outputs for p in lora[1::2])
        weights = sum(a.inputs * b.outputs for a, b in zip(lora[::2], lora[1::2], strict=True))
        forward += 2 * (shape.tokens * outputs + weights)
        backward += 5 * shape.tokens * outputs
    backward += activation[1] * inner + rope[1] * queries_keys
    backward += _summed(shape)
    if shape.tp_overlap:  # two scatters in each direction: a rank sums the chunks that it receives
        forward += 2 * (shape.tokens + shape.stream) * model.hidden
        backward += 2 * (shape.tokens + shape.stream) * model.hidden
    width_bytes = operations.WIDTH[shape.dtype]
    merged = (0.0, 0.0)
    if shape.cp > 1 and shape.cp_method == "ring":
        hops = (1 - shape.windowed) * _MERGED * (shape.cp - 1) * shape.tokens * width / shape.tp
        merged = hops * _MERGE[0] * model.heads, hops * _MERGE[1] * (model.heads + 2 * kv_heads)
    return (
        forward * width_bytes + merged[0] + routed[0],
        backward * width_bytes + merged[1] + routed[1],
    )


def _summed(shape: MicroBatchShape) -> float:
    """Return the numbers moved, backward, to sum the gradients of the input of several layers.

    With `tp_overlap` they are one product, for which weights and gradients are copied
    (`parallel.joined_products`); the gradients of an MoE's input are summed.
    """
    hidden = shape.model.hidden
    if not shape.tp_overlap:
        return _SUMS * shape.tokens * hidden
    joined = [
        p
        for p in linears(shape.model, shape.tp, shape.ep)
        if p.inputs == hidden and not (p.is_summed or p.router or p.of_experts)
    ]
    copied = 2 * sum(shape.tokens * p.outputs + p.parameters for p in joined)
    return copied + (_SUMS / 3 * shape.tokens * hidden if shape.model.experts else 0.0)


def _casts(shape: MicroBatchShape, products: tuple[_Linear, ...]) -> tuple[float, float]:
    """Return the bytes moved to cast the operands of a block's products to 8 bits, forward and backward.

    Forward: all weights, and once each the common input of q, k, v, the input of wo, the common input of gate
    and up, and the input of down. Backward: the gradients of all results. The other operands are saved in 8
    bits, but not the experts' of torchao.
    """
    if shape.kind != "fp8":
        return 0.0, 0.0
    experts = [p for p in products if p.of_experts and shape.software.torchao]
    dense = [p for p in products if not (experts and (p.of_experts or p.router))]
    reading = [p for i, p in enumerate(dense) if i in (0, 3, 4, len(dense) - 1)]
    if shape.fp8_recipe == "mxfp8":
        return _casts_again(shape, [*dense, *experts], [*reading, *experts[1:]], _MXFP8_CAST_BYTES)
    each = shape.software.cast_bytes + _ROWWISE_CAST_BYTES * ("row" in shape.fp8_recipe)
    if shape.software.torchao and not shape.compiled:
        each = _EAGER_CAST_BYTES
    of_experts: float = _EXPERTS_CAST_BYTES
    if shape.fp8_recipe == "nvfp4":
        each, of_experts = (
            _narrow_share(shape) * it for it in (_NVFP4_CAST_BYTES, _MXFP8_CAST_BYTES)
        )
    of_weights = 2 if shape.narrow_weights else each  # the backward pass reads them column-major
    forward, backward = _casts_again(shape, experts, experts[1:], of_experts)
    forward += of_weights * sum(p.inputs * p.outputs for p in dense)
    forward += each * shape.tokens * sum(p.inputs for p in reading)
    return forward, backward + each * shape.tokens * sum(p.outputs for p in dense)


def _casts_again(
    shape: MicroBatchShape, products: list[_Linear], reading: list[_Linear], each: float
) -> tuple[float, float]:
    """Return the bytes of `_casts` if the backward pass casts from 16 bits again.

    Args:
        reading: the products whose inputs are cast: q, k and v have one, and so have gate and up.
        each: bytes per number that is cast along one dimension.
    """
    once = sum(p.parameters * (shape.cast_share if p.of_experts else 1) for p in products)
    once += sum(p.tokens(shape) * p.inputs for p in reading)
    results = sum(p.tokens(shape) * p.outputs for p in products)
    return each * once, each * (once + 2 * results)


def _tp_pair(hardware: Hardware, shape: MicroBatchShape) -> tuple[float, float]:
    """Return the seconds of an all-gather of the sequence and of a reduce-scatter of partial sums.

    Without sequence parallelism the pair is one all-reduce. A block has two pairs in each direction
    (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2).
    """
    if shape.tp == 1:
        return 0.0, 0.0
    size = shape.tokens * shape.model.hidden * operations.WIDTH[shape.dtype]
    ranks = collectives.group(hardware, shape.tp, 1)
    scatter = gather = collectives.all_gather(hardware, ranks, size)
    if shape.kind == "fp8" and shape.software.narrow_gathers and shape.fp8_recipe == "tensorwise":
        gather = collectives.all_gather(hardware, ranks, size / operations.WIDTH[shape.dtype])
    if shape.software.dtensor:
        copied = operations.elementwise(hardware, 2 * size)
        return gather + copied, scatter + copied
    return gather, scatter


def _tp_pairs(shape: MicroBatchShape) -> int:
    """Return the pairs of a block in one direction: routed experts need none if each rank routes its part."""
    return 1 if shape.ep_over_tp and shape.model.experts and not shape.model.shared_ffn else 2


def _tp_forward(hardware: Hardware, shape: MicroBatchShape, products: float) -> float:
    """Return the exposed seconds of tp in a forward pass: both pairs, unless they overlap with products.

    To overlap, each collective is divided into tp chunks. Copy engines move one chunk during the products of
    the other chunks, so that 1/tp of the collective is exposed.
    """
    gather, scatter = _tp_pair(hardware, shape)
    pairs = _tp_pairs(shape) * (gather + scatter)
    return _in_chunks(shape, pairs, products) if shape.software.hidden_tp == "both" else pairs


def _in_chunks(shape: MicroBatchShape, collectives: float, products: float) -> float:
    longer = max(0.0, collectives - products)
    return longer + (collectives - longer) / shape.tp


def _tp_in_products(hardware: Hardware, shape: MicroBatchShape, gradients: str = "") -> list[float]:
    """Return the exposed seconds of each collective of a pass with `tp_overlap`, in a forward pass's order.

    Each runs during its own products only: q, k and v, then wo, then gate and up, then down. The collectives
    of an MoE do not run during products, except a shared expert's collectives with `ep_over_tp`.
    """
    table, hidden = linears(shape.model, shape.tp, shape.ep), shape.model.hidden
    end = 1 + next(i for i, p in enumerate(table) if p.is_summed)
    dense = shape.ep_over_tp or not shape.model.experts
    feed_forward = [p for p in table[end:] if dense and not (p.router or p.of_experts)]
    exposed = []
    for layers in (table[:end], feed_forward)[: _tp_pairs(shape)]:
        columns = [p for p in layers if p.inputs == hidden and not p.is_summed]
        rows = [p for p in layers if p.is_summed]
        for collective, during in zip(_tp_pair(hardware, shape), (columns, rows), strict=True):
            seconds = sum(product(hardware, shape, p, gradients) for p in during)
            exposed.append(_in_chunks(shape, collective, seconds))
    return exposed


def _tp_backward(hardware: Hardware, shape: MicroBatchShape, products: float) -> float:
    """Return the exposed seconds of tp in a backward pass: both pairs, unless they overlap with products.

    With `hidden_tp="scatters"`, the products for the weights that read the gathered input hide each scatter.
    With "backward", only the gathers before the row-split products are exposed. Scatters overlap with the
    products for weights, and the second gathers of the inputs overlap with the products for inputs.
    """
    gather, scatter = _tp_pair(hardware, shape)
    if (
        shape.software.hidden_tp == "scatters"
        and shape.compiled
        and shape.sequence_parallel
        and not shape.adapter_rank
    ):
        in_chunks = _tp_in_products(hardware, shape, "weights")[::2]
        hidden = sum(scatter - it for it in in_chunks) * shape.tp / max(1, shape.tp - 1)
        whole = _tp_forward(hardware, shape, products)
        return whole - (1 - hardware.efficiency.overlap) * hidden
    if shape.software.hidden_tp != "backward":
        return _tp_forward(hardware, shape, products)
    overlapped = 2 * (gather + scatter) if shape.sequence_parallel else gather + scatter
    exposed = 2 * gather if shape.sequence_parallel else gather + scatter
    longer = max(0.0, overlapped - products)
    return exposed + longer + hardware.efficiency.overlap * (overlapped - longer)


def _cp(hardware: Hardware, shape: MicroBatchShape) -> tuple[float, float]:
    """Return the exposed seconds of context parallelism, forward and backward.

    The hops of a ring overlap with attention. The exchange of a layer with a window does not.
    """
    if shape.cp == 1:
        return 0.0, 0.0
    model, number = shape.model, operations.WIDTH[shape.dtype]
    ranks = collectives.group(hardware, shape.cp, shape.tp)
    kv_heads = model.kv_head_count / shape.tp
    if shape.cp_method == "ulysses":
        heads = 2 * model.heads / shape.tp + 2 * kv_heads
        size = shape.tokens * heads * model.head_width * number
        exchange = collectives.all_to_all(hardware, ranks, size)
        return exchange, exchange
    keys_values = 2 * shape.tokens * kv_heads * model.head_width
    computation = _attention(hardware, replace(shape, windowed=0.0)) / shape.cp
    reach = 2 * shape.cp * (model.sliding_window or 0) / shape.seq  # in chunks

    def exposed(size: float, hidden: float) -> float:
        in_ring = (shape.cp - 1) * max(0.0, collectives.send(hardware, ranks, size) - hidden)
        in_window = collectives.send(hardware, ranks, size * min(reach, shape.cp - 1))
        return in_ring + shape.windowed * (in_window - in_ring)

    # In a backward pass the fp32 gradients of keys and values are sent with them.
    return (
        exposed(keys_values * number, computation),
        exposed(keys_values * (number + 4), computation * operations.BACKWARD_ATTENTION),
    )


def _with_launches(hardware: Hardware, shape: MicroBatchShape, direction: int, work: Work) -> Work:
    """Return the work with the time in which the device waits for the CPU to start kernels, and without the
    exchanges that another micro batch's computation hides."""
    efficiency, software = hardware.efficiency, shape.software
    work = replace(work, ep=work.ep - min(software.hidden_ep * work.ep, work.total - work.ep))
    each = efficiency.compiled_s if shape.compiled else efficiency.eager_s
    if shape.tp > 1:
        each = DTENSOR_S if software.dtensor else _TP_START * each
    cpu = _kernels(shape)[direction] * each * shape.hooks
    if shape.model.experts and software.host_s:
        cpu = software.host_s
    hidden = work.total if hardware.multiprocessors > 1 else 0.0  # a CPU is the host, too
    return replace(work, launch=max(0.0, cpu - hidden))


def _kernels(shape: MicroBatchShape) -> tuple[int, int]:
    """Return the kernels of a forward and of a backward pass. Without bf16 every expert has kernels of its
    own."""
    forward, backward = _KERNELS[shape.compiled]
    forward += _ADAPTER_KERNELS[shape.dora][0] * len(shape.adapted)
    backward += _ADAPTER_KERNELS[shape.dora][1] * len(shape.adapted)
    if shape.model.experts:
        routing = moe.KERNELS[shape.ep > 1]
        others = 0 if shape.kind in ("bf16", "fp8") else shape.model.experts // shape.ep - 1
        forward, backward = forward + routing[0] + 5 * others, backward + routing[1] + 9 * others
    return forward, backward


@lru_cache(maxsize=16384)
def embedding(hardware: Hardware, shape: MicroBatchShape) -> Passes:
    """Return the passes of the input embedding: a look-up, and a gradient as large as the table."""
    number = operations.WIDTH[shape.dtype]
    rows = shape.tokens * shape.model.hidden * number
    table = shape.model.vocab * shape.model.hidden * number / shape.tp
    gather, _ = _tp_pair(hardware, shape)
    forward = Work(elementwise=operations.elementwise(hardware, 2 * rows), tp=gather)
    if shape.adapter_rank:  # the embedding is frozen and gets no gradient
        return passes(forward, NOTHING)
    moved = operations.elementwise(hardware, 2 * rows + 2 * table)
    return passes(forward, Work(elementwise=moved, tp=gather))


@lru_cache(maxsize=16384)
def head(hardware: Hardware, shape: MicroBatchShape) -> Passes:
    """Return the passes of the last norm, the head and the loss. tp divides the vocabulary."""
    hidden, vocab, tokens = shape.model.hidden, shape.model.vocab // shape.tp, shape.tokens
    number = operations.WIDTH[shape.dtype]
    gather, scatter = _tp_pair(hardware, shape)
    stream = shape.stream * hidden * number
    loss = tokens * vocab * (_LOSS / 2 + number)
    times = 2 if shape.paired else 1  # the logits once more, after the losses of whole pairs
    forward = Work(
        matmul=times * operations.product(hardware, shape.dtype, tokens, vocab, hidden),
        elementwise=times * operations.elementwise(hardware, 2 * stream + loss),
        tp=gather,
    )
    weights = operations.product(hardware, shape.dtype, vocab, hidden, tokens)
    inputs = operations.product(hardware, shape.dtype, tokens, hidden, vocab)
    backward = Work(
        matmul=inputs + (0.0 if shape.adapter_rank else weights),
        elementwise=operations.elementwise(hardware, 3 * stream + loss),
        tp=scatter,
    )
    return passes(forward, backward)


def recomputed_share(config: ResolvedConfig) -> float:
    """Return the share of a stage's blocks that are recomputed."""
    layout = config.parallel
    if layout.activation_checkpointing == "none":
        return 0.0
    layers = max(1, config.model.layers // (layout.pp * layout.virtual_stages))
    return math.ceil(layers / layout.checkpoint_every) / layers
