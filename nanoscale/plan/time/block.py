"""The time of a micro batch in a block, the embedding and the head of a rank: forward, backward, recomputed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from nanoscale.config import model_math, parameters
from nanoscale.config.hardware.data_sheets import kind, wide_kind
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Model
from nanoscale.plan.hardware.hardware import Hardware
from nanoscale.plan.hardware.software import DTENSOR_S, NANOSCALE, Software
from nanoscale.plan.time import collectives, moe, operations
from nanoscale.plan.time.micro_batch_shape import NOTHING, MicroBatchShape, Passes, Work, passes

# Kernels of a block, counted in the model's code: starting each takes the CPU some microseconds.
_KERNELS = {False: (32, 58), True: (14, 24)}
"""Compiled or not → kernels of a forward and of a backward pass."""
_ADAPTER_KERNELS = (4, 7)
"""Kernels of an adapter, forward and backward: two products, the scale, and the sums with its layer's result
and gradient."""
_DIVIDED = 3
"""The factor by which operations take longer to start with tp, which reads parts of DTensors and
communicates."""
# Passes over memory of each element-wise operation, in numbers read and written, forward and backward:
_STREAM = {False: (10, 12), True: (8, 8)}
"""Passes over the residual stream: two norms (2 and 3 each), two additions (3 and 3 each); compiled code fuses
them."""
_COMPOSED = (32, 74)
"""Additional passes over the stream if two RMSNorms consist of single operations: each widens, squares,
averages, scales, narrows and weighs, 18 numbers forward and 40 backward."""
_ROPE = {False: (9, 9), True: (2, 2)}
"""Passes over queries and keys: four products of halves, two sums, one joining."""
_QK_NORM = {False: (2, 3), True: (1, 2)}
"""Passes over queries and keys, if they are normalized; compiled code does it together with the rotation."""
_GATED = {False: (5, 9), True: (3, 5)}
"""Passes over each inner number of SwiGLU: silu and product."""
_GELU = (2, 3)
_SUMS = 9
"""Passes over the stream, backward: the sums of the gradients of the common inputs of q, k, v and of gate,
up."""
_LOSS = 32
"""Bytes per logit in fp32 for cast, log-softmax, its gradient and cast back, without one read and one write."""
_SUMMING = 0.4
"""The exposed share of the traffic of fp32 sums that a product adds to: such products reach 0.71 of an A100's
peak where others reach 0.75, and 0.455 of a B200's in place of 0.5 (SimuMax's a100_pcie.json and
b200_bf16_ceperm.json)."""
_ROWWISE = 1.33
"""The time of an 8-bit product with a scale for every row over that of one with a scale for a tensor
(torchao's tables for Llama-3 8B on 8 H100, docs/source/workflows/training.md)."""
_OTHER_WAY = 4
"""Bytes per number that row-wise scales cost in addition to `Software.cast_bytes`: the largest of each row and
of each column are found apart, and the number is read once more for each."""
_MERGE = (26, 10)
"""Bytes per number to merge the result of a hop of the ring with the results so far, in fp32: the average and
its weight; the gradients (`parallel.ring`)."""
_MERGED = 0.75
"""The share of the queries, or of the keys, that a hop computes with: all and half of them in turn."""
CUDNN_HEAD_DIM = 128
"""The widest heads for which PyTorch gives attention to cuDNN, backward too."""


def slice_of(config: ResolvedConfig, software: Software = NANOSCALE) -> MicroBatchShape:
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
        wide=wide_kind(precision),
        compiled=software.fused
        or (config.backend.compile != "off" and not (software.dtensor and layout.tp > 1)),
        recompute=layout.selective_keep if mode == "selective" else mode,
        ep=layout.ep,
        attention=attention_kernel(config, software),
        software=software,
        fp8_recipe=config.precision.fp8_recipe,
        adapter_rank=config.lora.rank,
        adapted=tuple(model_math.adapted_layers(config.model, config.lora).values()),
    )


def attention_kernel(config: ResolvedConfig, software: Software = NANOSCALE) -> str:
    """Return the kernel whose rate attention has: cudnn where it is asked for, or PyTorch would choose it.

    On devices for which PyTorch never chooses it, both have one rate. Single operations (math) are planned at
    FlashAttention's.
    """
    asked, layout, model = config.backend.attention, config.parallel, config.model
    ring = layout.cp > 1 and layout.cp_method == "ring" and not software.fused
    if ring or asked in ("flash", "math"):
        return "flash"
    head_dim = model.head_width
    narrow = config.precision.compute in ("bf16", "fp16")
    return "cudnn" if asked == "cudnn" or (narrow and head_dim <= CUDNN_HEAD_DIM) else "flash"


@dataclass(frozen=True, slots=True)
class _Linear:
    """One product of a block after tp: `inputs` to `outputs` for every token, or for each of equal experts."""

    inputs: int
    outputs: int
    experts: int = 1
    """Experts of this rank."""
    taken: int = 1
    """Experts of a token."""
    wide: bool = False
    """True if it is computed in fp32, whatever the compute dtype."""

    @property
    def parameters(self) -> int:
        return self.experts * self.inputs * self.outputs

    def rows(self, tokens: int) -> int:
        """Return the rows of one expert, if all have equally many."""
        return max(1, tokens * self.taken // self.experts)


@lru_cache(maxsize=1024)
def linears(model: Model, tp: int, ep: int = 1) -> tuple[_Linear, ...]:
    """Return query, key, value, output, (router,) (gate,) up, down, in the order of their computation."""
    products = []
    for name, parameter in parameters.block(model).items():
        if parameter.is_vector:
            continue
        *experts, outputs, inputs = parameter.local(tp, ep)
        own, chosen = (experts[0], model.experts_per_token) if experts else (1, 1)
        products.append(_Linear(inputs, outputs, own, chosen, wide=name == "mlp.router.weight"))
    return tuple(products)


def adapters(part: MicroBatchShape) -> tuple[_Linear, ...]:
    """Return the products A and B of a block's adapters, which tp divides like the layers next to them."""
    table = parameters.block(part.model)
    products = []
    for name in part.adapted:
        outputs, inputs = table[f"{name}.weight"].local(part.tp)
        products += [_Linear(inputs, part.adapter_rank), _Linear(part.adapter_rank, outputs)]
    return tuple(products)


def product(hardware: Hardware, part: MicroBatchShape, linear: _Linear, swap: str = "") -> float:
    """Return the seconds of a product; `swap`: inputs, for the gradients of these, or weights, for theirs.

    With ep, as many choices arrive as leave. Experts are one kernel in bf16, otherwise one kernel each.
    """
    m, n, k = linear.rows(part.tokens), linear.outputs, linear.inputs
    if swap == "inputs":
        n, k = k, n
    elif swap == "weights":
        m, n, k = n, k, m
    kind = _wide(part) if linear.wide else part.kind
    if kind not in hardware.peaks:  # a device that a user described in few words
        kind = part.wide
    slower = 1.0
    if kind == "fp8" and part.fp8_recipe != "tensorwise":
        if swap == "weights" and part.fp8_recipe == "rowwise_with_gw_hp":
            kind = part.wide
        else:
            slower = _ROWWISE
    if linear.experts == 1 or kind == "bf16":
        return slower * operations.product(hardware, kind, m, n, k, linear.experts)
    return slower * linear.experts * operations.product(hardware, kind, m, n, k)


def _wide(part: MicroBatchShape) -> str:
    """Return the dtype in which experts are chosen."""
    return part.wide if part.wide in ("fp64", "tf32") else "fp32"


@lru_cache(maxsize=16384)
def block(hardware: Hardware, part: MicroBatchShape) -> Passes:
    """Return the passes of one block."""
    products = linears(part.model, part.tp, part.ep)
    forward_products = [product(hardware, part, p) for p in products]
    added = adapters(part)
    extra = sum(product(hardware, part, p) for p in added)
    # With adapters the other weights are frozen and need no gradients.
    trained = added or products
    backward_products = sum(product(hardware, part, p, "inputs") for p in (*products, *added))
    backward_products += sum(product(hardware, part, p, "weights") for p in trained)
    if part.software.sums_in_products:
        sums = 8.0 * sum(p.parameters for p in products)
        backward_products += _SUMMING * operations.elementwise(hardware, sums)
    core = _core(hardware, part)
    bytes_forward, bytes_backward = _traffic(part)
    inputs, outputs = _casts(part, products)
    tp_gather, tp_scatter = _tp_pair(hardware, part)
    cp_forward, cp_backward = _cp(hardware, part, core)
    ep_forward, ep_backward = moe.exchange(hardware, part)
    forward = _waiting(
        hardware,
        part,
        0,
        Work(
            matmul=sum(forward_products) + extra,
            attention=core,
            elementwise=operations.elementwise(hardware, bytes_forward + inputs),
            tp=_tp_forward(hardware, part, sum(forward_products)),
            cp=cp_forward,
            ep=ep_forward,
        ),
    )
    backward = _waiting(
        hardware,
        part,
        1,
        Work(
            matmul=backward_products,
            attention=core * operations.BACKWARD_ATTENTION,
            elementwise=operations.elementwise(hardware, bytes_backward + outputs),
            tp=_tp_backward(hardware, part, backward_products),
            cp=cp_backward,
            ep=ep_backward,
        ),
    )
    again = _again(part, len(products))
    recomputed = NOTHING
    if part.recompute != "none":
        whole = part.recompute in ("full", "sqrt")
        recomputed = _waiting(
            hardware,
            part,
            0,
            Work(
                matmul=sum(forward_products[i] for i in again) + extra,
                attention=core if whole else 0.0,
                elementwise=forward.elementwise,
                tp=2 * tp_gather + (tp_scatter if whole else 0.0),
                cp=cp_forward if whole else 0.0,
                ep=ep_forward if whole else 0.0,
            ),
        )
    taken = [p.taken * p.inputs * p.outputs for p in products]
    flops = sum(2.0 * part.tokens * taken[i] for i in again)
    if part.recompute in ("full", "sqrt"):
        flops += attention_flops(part)
    return passes(forward, backward, recomputed, flops)


def attention_flops(part: MicroBatchShape) -> float:
    """Return the FLOPs of one forward pass in full, as MFU counts them: 4·s·h a token."""
    width = part.model.head_width
    return 4.0 * part.tokens * part.seq * part.model.heads * width / part.tp


def _again(part: MicroBatchShape, count: int) -> range | list[int]:
    """Return the recomputed products. A block's last one is never recomputed: no backward pass needs its
    result."""
    if part.recompute in ("none", "matmuls"):
        return []
    if part.recompute == "every-2nd-matmul":
        return list(range(0, count - 1, 2))
    return range(count - 1)


def _core(hardware: Hardware, part: MicroBatchShape) -> float:
    model = part.model
    width = model.head_width
    heads = max(1, model.heads // part.tp)
    if part.cp_method == "ulysses" and part.cp > 1:
        tokens, heads = part.seq, max(1, heads // part.cp)
    else:
        tokens = part.seq // part.cp
    own = operations.attention(
        hardware, part.wide, part.batch, tokens, tokens, heads, width, kernel=part.attention
    )
    if part.cp_method == "ulysses":
        return own
    if part.cp == 1:
        return own
    return own + (part.cp - 1) * _hop(hardware, part, heads, width)


def _hop(hardware: Hardware, part: MicroBatchShape, heads: int, width: int) -> float:
    """Return the time of attention to another rank's keys: half of all pairs, on every rank (see
    `parallel.ring`)."""
    tokens = part.seq // part.cp
    return operations.attention(
        hardware,
        part.wide,
        part.batch,
        tokens,
        max(1, tokens // 2),
        heads,
        width,
        causal=False,
        kernel=part.attention,
    )


def _traffic(part: MicroBatchShape) -> tuple[float, float]:
    """Return the bytes of a block's element-wise operations, forward and backward."""
    model, compiled = part.model, part.compiled
    width = model.head_width
    stream = part.stream * model.hidden
    inner = part.tokens * model.ffn / part.tp
    routed = (0.0, 0.0)
    if model.experts:
        inner, routed = inner * model.experts_per_token, moe.traffic(part)
    activation = _GATED[compiled] if model.mlp == "swiglu" else _GELU
    rope = (0, 0)
    if model.position == "rope":
        rope = _ROPE[compiled]
    if model.qk_norm:
        rope = rope[0] + _QK_NORM[compiled][0], rope[1] + _QK_NORM[compiled][1]
    kv_heads = model.kv_head_count
    turned = part.tokens * (model.heads + kv_heads) * width / part.tp
    norms = _COMPOSED if part.software.composed_norm and not compiled else (0, 0)
    forward = (_STREAM[compiled][0] + norms[0]) * stream
    forward += activation[0] * inner + rope[0] * turned
    backward = (_STREAM[compiled][1] + norms[1]) * stream
    # An adapter's result is added to its layer's, and its gradient to the gradient of their input.
    added = adapters(part)
    forward += 3 * part.tokens * sum(p.outputs for p in added[1::2])
    backward += 3 * part.tokens * sum(p.inputs for p in added[::2])
    backward += activation[1] * inner + rope[1] * turned
    backward += _SUMS * part.tokens * model.hidden
    wide = operations.WIDTH[part.wide]
    merged = (0.0, 0.0)
    if part.cp > 1 and part.cp_method == "ring":
        hops = _MERGED * (part.cp - 1) * part.tokens * width / part.tp
        merged = hops * _MERGE[0] * model.heads, hops * _MERGE[1] * (model.heads + 2 * kv_heads)
    return forward * wide + merged[0] + routed[0], backward * wide + merged[1] + routed[1]


def _casts(part: MicroBatchShape, products: tuple[_Linear, ...]) -> tuple[float, float]:
    """Return the bytes moved to cast the operands to 8 bits, forward and backward.

    Forward: weights, and the inputs of attention, its output, the feed-forward block and its last product,
    each once. Backward: the gradients of all results; the rest is kept.
    """
    if part.kind != "fp8":
        return 0.0, 0.0
    weights = sum(p.inputs * p.outputs for p in products)
    inputs = products[0].inputs + products[3].inputs + products[4].inputs + products[-1].inputs
    outputs = sum(p.outputs for p in products)
    each = part.software.cast_bytes
    if part.fp8_recipe != "tensorwise":
        each += _OTHER_WAY
    return each * (weights + part.tokens * inputs), each * part.tokens * float(outputs)


def _tp_pair(hardware: Hardware, part: MicroBatchShape) -> tuple[float, float]:
    """Return the seconds of a gather of the sequence and of the scatter of partial sums; without sp they make
    one all-reduce.

    Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2: two pairs a block in each direction.
    """
    if part.tp == 1:
        return 0.0, 0.0
    size = part.tokens * part.model.hidden * operations.WIDTH[part.wide]
    ranks = collectives.group(hardware, part.tp, 1)
    scatter = gather = collectives.all_gather(hardware, ranks, size)
    if part.kind == "fp8" and part.software.narrow_gathers and part.fp8_recipe == "tensorwise":
        gather = collectives.all_gather(hardware, ranks, size / operations.WIDTH[part.wide])
    if part.software.dtensor:
        copied = operations.elementwise(hardware, 2 * size)
        return gather + copied, scatter + copied
    return gather, scatter


def _tp_forward(hardware: Hardware, part: MicroBatchShape, products: float) -> float:
    """Return the exposed seconds of tp forward: all pairs, or less if they run in parallel with products.

    Each is cut into as many chunks as there are ranks, which copy engines move in parallel with the products of
    the other chunks; one chunk has no product in parallel with it.
    """
    gather, scatter = _tp_pair(hardware, part)
    whole = 2 * (gather + scatter)
    if part.software.hidden_tp != "both":
        return whole
    late = max(0.0, whole - products)
    return late + (whole - late) / part.tp


def _tp_backward(hardware: Hardware, part: MicroBatchShape, products: float) -> float:
    """Return the exposed seconds of tp backward: all pairs, or less if collectives overlap with products.

    Then only the gathers before the row-split products are exposed: scatters run in parallel with the products
    for weights, and the second gathers of the inputs in parallel with those for inputs.
    """
    gather, scatter = _tp_pair(hardware, part)
    if part.software.hidden_tp == "none":
        return 2 * (gather + scatter)
    if part.software.hidden_tp == "both":
        return _tp_forward(hardware, part, products)
    hidden = 2 * (gather + scatter) if part.sequence_parallel else gather + scatter
    shown = 2 * gather if part.sequence_parallel else gather + scatter
    late = max(0.0, hidden - products)
    return shown + late + hardware.efficiency.overlap * (hidden - late)


def _cp(hardware: Hardware, part: MicroBatchShape, core: float) -> tuple[float, float]:
    """Return the exposed seconds of context parallelism, forward and backward."""
    if part.cp == 1:
        return 0.0, 0.0
    model = part.model
    ranks = collectives.group(hardware, part.cp, part.tp)
    width = model.head_width * operations.WIDTH[part.wide]
    kv_heads = model.kv_head_count / part.tp
    if part.cp_method == "ulysses":
        size = part.tokens * (2 * model.heads / part.tp + 2 * kv_heads) * width
        once = collectives.all_to_all(hardware, ranks, size)
        return once, once
    size = 2 * part.tokens * kv_heads * width
    # Backward the gradients of keys and values travel too, in fp32.
    back = size + 2 * part.tokens * kv_heads * width / operations.WIDTH[part.wide] * 4
    step, backward_step = (
        collectives.send(hardware, ranks, size),
        collectives.send(hardware, ranks, back),
    )
    of_core = core / part.cp
    forward = (part.cp - 1) * max(0.0, step - of_core)
    backward = (part.cp - 1) * max(0.0, backward_step - of_core * operations.BACKWARD_ATTENTION)
    return forward, backward


def _waiting(hardware: Hardware, part: MicroBatchShape, direction: int, work: Work) -> Work:
    """Return the work with the time in which the device waits for the CPU to start kernels."""
    efficiency = hardware.efficiency
    each = efficiency.compiled_s if part.compiled else efficiency.eager_s
    if part.tp > 1:
        each = DTENSOR_S if part.software.dtensor else _DIVIDED * each
    cpu = _kernels(part)[direction] * each
    return replace(work, launch=max(0.0, cpu - work.total))


def _kernels(part: MicroBatchShape) -> tuple[int, int]:
    """Return the kernels of a forward and of a backward pass; separate experts count with kernels each."""
    forward, backward = _KERNELS[part.compiled]
    forward += _ADAPTER_KERNELS[0] * len(part.adapted)
    backward += _ADAPTER_KERNELS[1] * len(part.adapted)
    if part.model.experts:
        more = moe.KERNELS[part.ep > 1]
        apart = 0 if part.kind == "bf16" else part.model.experts // part.ep - 1
        forward, backward = forward + more[0] + 5 * apart, backward + more[1] + 9 * apart
    return forward, backward


@lru_cache(maxsize=16384)
def embedding(hardware: Hardware, part: MicroBatchShape) -> Passes:
    """Return the passes of the input embedding: a look-up, and a gradient as large as the table."""
    wide = operations.WIDTH[part.wide]
    rows = part.tokens * part.model.hidden * wide
    table = part.model.vocab * part.model.hidden * wide / part.tp
    gather, _ = _tp_pair(hardware, part)
    if part.adapter_rank:  # frozen: nothing flows back to it
        return passes(
            Work(elementwise=operations.elementwise(hardware, 2 * rows), tp=gather), NOTHING
        )
    return passes(
        Work(elementwise=operations.elementwise(hardware, 2 * rows), tp=gather),
        Work(elementwise=operations.elementwise(hardware, 2 * rows + 2 * table), tp=gather),
    )


@lru_cache(maxsize=16384)
def head(hardware: Hardware, part: MicroBatchShape) -> Passes:
    """Return the passes of the last norm, the head and the loss over the vocabulary, which tp divides."""
    hidden, vocab, tokens = part.model.hidden, part.model.vocab // part.tp, part.tokens
    wide = operations.WIDTH[part.wide]
    gather, scatter = _tp_pair(hardware, part)
    stream = part.stream * hidden * wide
    loss = tokens * vocab * (_LOSS / 2 + wide)
    forward = Work(
        matmul=operations.product(hardware, part.wide, tokens, vocab, hidden),
        elementwise=operations.elementwise(hardware, 2 * stream + loss),
        tp=gather,
    )
    weights = operations.product(hardware, part.wide, vocab, hidden, tokens)
    backward = Work(
        matmul=operations.product(hardware, part.wide, tokens, hidden, vocab)
        + (0.0 if part.adapter_rank else weights),
        elementwise=operations.elementwise(hardware, 3 * stream + loss),
        tp=scatter,
    )
    return passes(forward, backward)


def recomputed_share(config: ResolvedConfig) -> float:
    """Return the recomputed share of a stage's blocks."""
    layout = config.parallel
    if layout.activation_checkpointing == "full":
        layers = config.model.layers
        return math.ceil(layers / layout.checkpoint_every) / layers
    return 0.0 if layout.activation_checkpointing == "none" else 1.0
