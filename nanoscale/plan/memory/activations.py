"""The tensors that autograd saves in a block (`models.transformer.Block`), and the backward pass's working
memory.

Sizes are bytes of one micro batch on one rank. With dropout, saved attention scores and without gathered
inputs, the sum is as in Korthikanti et al. 2022 (arXiv:2205.05198), section 4: s·b·h·(34 + 5·a·s/h) bytes a
layer.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from nanoscale.common.units import byte_size
from nanoscale.config.schema import Model, Parallel
from nanoscale.plan.memory.block_shape import Execution, Shape, Sizes
from nanoscale.plan.memory.moe import copies, moe_working_memory, routing, saved_by_moe

STATISTIC = 4
"""Bytes of a norm's mean or root mean square, and of attention's log-sum of a query: always fp32."""
_ADAPTED = tuple(f" of {name}" for name in ("wq", "wk", "v", "wo", "gate", "up"))
"""The results of A, B and W of these adapted layers, which autograd does not save: the ends of their names."""


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """Bytes of one block and one micro batch."""

    kept: int
    """Bytes kept from the forward to the backward pass."""
    recomputed: int
    """Bytes after recomputation: the kept tensors and all tensors that autograd saves."""
    working: int
    """Bytes that the backward pass adds to `recomputed` at its peak."""


def shape_of(model: Model, parallel: Parallel, micro_batch: int, seq_len: int) -> Shape:
    head_dim = model.head_width
    tp, seq = parallel.tp, seq_len // parallel.cp
    return Shape(
        model=model,
        tokens=micro_batch * seq,
        span=seq_len,
        shares=tp if parallel.sequence_parallel else 1,
        hidden=model.hidden,
        q=model.heads * head_dim // tp,
        kv=model.kv_head_count * head_dim // tp,
        ffn=model.ffn // (parallel.expert_tp if model.experts else tp),
        heads=model.heads // tp,
        rotary=seq * model.rotated_width if model.position == "rope" else 0,
        local_experts=model.experts // parallel.ep,
        experts_per_token=model.experts_per_token if model.experts else 1,
        shared=model.shared_ffn // tp,
        ep_over_tp=parallel.ep_over_tp,
        in_halves=parallel.ep > 1 and parallel.expert_tp == 1 and micro_batch % 2 == 0,
    )


def _dense(shape: Shape, tp: int) -> Shape:
    """Return the shape of the blocks without experts."""
    model, ffn = shape.model.dense, shape.model.dense_ffn // tp
    return replace(shape, model=model, ffn=ffn, local_experts=0, experts_per_token=1, shared=0)


def saved(shape: Shape, run: Execution) -> Sizes:
    """Return the bytes of every tensor that autograd saves in a block without recomputation."""
    sizes = _saved_if_trained(shape, run)
    return _saved_with_adapters(sizes, shape, run) if shape.adapter_rank else sizes


def _saved_with_adapters(sizes: Sizes, shape: Shape, run: Execution) -> Sizes:
    """Return the bytes of saved tensors if the block is frozen and only adapters are trained.

    Frozen products do not save their inputs. Frozen composed norms do not save the tensor that they multiply
    with their weights. An adapter saves its input and the result of A, and with DoRA the result of the layer
    before it is scaled.
    """
    adapted = shape.adapted
    inputs = {
        "normed": ("wq", "wk", "wv"),
        "turned": ("wo",),
        "normed middle": ("gate", "up"),
        "product" if shape.model.is_gated else "activated": ("down",),
        "dispatched": (),
        "normalized": (),
        "normalized heads": (),
    }
    kept = {}
    for name, size in sizes.items():
        adapters = sum(product in adapted for product in inputs.get(name, ()))
        if name not in inputs:
            kept[name] = size
        elif adapters and run.autocast and name.startswith("normed"):
            kept[name] = adapters * shape.tokens * shape.hidden * run.compute
        elif adapters:
            kept[name] = size
    kept["results of A"] = len(adapted) * shape.tokens * shape.adapter_rank * run.compute
    if shape.dora:
        kept["unscaled results"] = shape.tokens * sum(_adapted_widths(shape)) * run.compute
    return kept


def _adapted_widths(shape: Shape) -> list[int]:
    """Return the widths of the results of adapted layers."""
    widths = {"wq": shape.q, "wk": shape.kv, "wv": shape.kv, "gate": shape.ffn, "up": shape.ffn}
    return [widths.get(name, shape.hidden) for name in shape.adapted]


def _saved_if_trained(shape: Shape, run: Execution) -> Sizes:
    tokens, e = shape.tokens, run.compute
    local_tokens = tokens // shape.shares
    sizes = _norms(shape, run)
    is_new = shape.norms_before or shape.shares > 1 or run.autocast
    if is_new:
        normed = (tokens if run.gathered else local_tokens) * shape.hidden * e
        sizes["normed"] = normed * (3 if run.autocast else 1)
        sizes["normed middle"] = normed * (2 if run.autocast and shape.model.is_gated else 1)
    sizes |= _attention(shape, run)
    if shape.model.kv_rank:
        sizes |= _latents(shape, run)
    if shape.model.qk_norm:
        sizes |= _head_norms(shape, run)
    if shape.model.experts:
        return sizes | saved_by_moe(shape, run)
    inner = tokens * shape.ffn * e
    sizes["up"] = inner
    if shape.model.is_gated:
        sizes["gate"] = inner
    sizes["product" if shape.model.is_gated else "activated"] = inner
    if run.narrow_inputs:
        for name in ("normed", "normed middle", "product"):
            sizes[name] = sizes.get(name, 0) // e
    if shape.model.is_gated and not (run.fused or run.fused_activation):
        sizes["activated"] = inner * (4 if shape.model.mlp == "swiglu-clamped" else 1)
    if run.dropout:
        sizes["masks"] = 2 * local_tokens * shape.hidden
    return sizes


def _norms(shape: Shape, run: Execution) -> Sizes:
    """Return the stream's tensors: the inputs of norms, or of products without one, and what norms save."""
    numbers = 2 * shape.tokens // shape.shares * shape.hidden  # of the two halves of a block
    stream, wide = numbers * run.stream, numbers * max(4, run.stream)
    pairs, after = shape.norm_pairs, shape.model.norm_position != "before"
    sizes: Sizes = {}
    casts = run.composed_norm and not shape.layernorm and run.stream < 4
    if not (casts and shape.norms_before):
        sizes = {"input": stream // 2, "middle": stream // 2}
    if after and not casts:
        sizes["results"] = stream
    if casts:  # a norm in 16 bits saves its input after the cast to fp32
        sizes["fp32 inputs"] = pairs * wide
    if shape.model.norm == "rmsnorm1p":
        sizes["normalized"] = pairs * stream
    elif run.composed_norm and not shape.layernorm:
        sizes["normalized"] = pairs * wide
    statistics = numbers // shape.hidden * STATISTIC * (2 if shape.layernorm else 1)
    return sizes | {"statistics": pairs * statistics}


def _attention(shape: Shape, run: Execution) -> Sizes:
    tokens, e = shape.tokens, run.compute
    queries = tokens * shape.q * e
    sizes = {"q": queries, "k": tokens * shape.kv * e, "v": tokens * shape.kv * e}
    if run.attention == "math":  # PyTorch computes it in fp32 or better
        e = max(4, e)
        sizes = dict.fromkeys(sizes, tokens * shape.q * e)
    sizes["attended"] = queries
    if run.attention == "flash":
        sizes["log-sums"] = tokens * shape.heads * STATISTIC
    else:
        scores = tokens * shape.heads * shape.span
        sizes["scores"] = scores * e
        if run.dropout:
            sizes["dropped scores"] = scores * (e + 1)
    if run.exchanged:
        sizes["turned"] = queries
    if shape.rotary and run.compute != 4:  # cast from fp32, with autocast for queries and for keys
        sizes["rotation"] = shape.rotary * run.compute * (2 if run.autocast else 1)
    return sizes


def _latents(shape: Shape, run: Execution) -> Sizes:
    """Return what MLA saves: the latents, their norms' results, and attention's result without its padding."""
    model = shape.model
    assert model.kv_rank is not None
    number, ranks = run.compute, (model.kv_rank, model.q_rank or 0)
    sizes = {
        "wkv_a": shape.tokens * (model.kv_rank + model.rope_head_dim) * number,
        "wq_a": shape.tokens * ranks[1] * number,
        "normed latents": shape.tokens * sum(ranks) * number,
        "turned": shape.tokens * shape.heads * model.value_width * number,
        "statistics of latents": shape.tokens * sum(rank > 0 for rank in ranks) * STATISTIC,
    }
    if run.composed_norm:
        in_fp32 = shape.tokens * sum(ranks) * max(4, number)
        sizes |= {"normalized latents": in_fp32} | ({"fp32 latents": in_fp32} if number < 4 else {})
    return sizes


def _expanded(shape: Shape) -> int:
    """Return the elements of MLA's keys and values before the rotated part is added."""
    model = shape.model
    return shape.tokens * shape.heads * (model.head_width - model.rope_head_dim + model.value_width)


def _head_norms(shape: Shape, run: Execution) -> Sizes:
    """Return the tensors that the norms of queries and keys save: their inputs, the results of wq and wk, and
    statistics."""
    queries, keys = shape.tokens * shape.q, shape.tokens * shape.kv
    sizes = {"wq": queries * run.compute, "wk": keys * run.compute}
    if run.composed_norm:
        in_fp32 = (queries + keys) * max(4, run.compute)
        unscaled = shape.model.norm == "rmsnorm1p"
        sizes |= {"normalized heads": (queries + keys) * run.compute if unscaled else in_fp32}
        sizes |= {"fp32 heads": in_fp32} if run.compute < 4 else {}
    heads = shape.heads * (shape.q + shape.kv) // shape.q
    if shape.model.qk_norm_whole:
        heads = 2
    return sizes | {"statistics of heads": shape.tokens * heads * STATISTIC}


def kept_by_selective(shape: Shape, run: Execution, keep: str | frozenset[str]) -> Sizes:
    """Return the tensors that `activation.SavePolicy` keeps: the input, attention's result, reduced results and
    some products' results."""
    sizes, results = saved(shape, run), products(shape.model)
    names = set(results)
    if isinstance(keep, frozenset):
        names = set(keep)
    elif keep == "every-2nd-matmul":
        names = set(results[1::2])
    elif keep.endswith("attention"):
        names = set()
    in_parts = isinstance(keep, str) and shape.local_experts < shape.model.experts
    sums = 0 if keep == "core-attention" else 2 * run.tensor_parallel
    if run.fused and shape.model.norm_position == "before":
        # the compiler does not keep what the backward pass does not read
        names -= {"down", "wo"} if in_parts or sums else {"down"}
        sums //= 2
    kept: Sizes = {name: sizes[name] for name in ("rotation", "attended") if name in sizes}
    kept["input"] = entry(shape, run)
    if in_parts:  # attention is recomputed by itself (`parallel.expert.BlockInParts`)
        kept["middle"] = entry(shape, run)
    kept["log-sums"] = sizes.get("log-sums", 0)
    hidden = shape.tokens * shape.hidden * run.compute
    sizes_of = {"wo": hidden, "down": hidden, "v": shape.tokens * shape.kv * run.compute}
    sizes_of["wq"], sizes_of["wk"] = shape.tokens * shape.q * run.compute, sizes_of["v"]
    if shape.model.kv_rank:
        sizes_of |= {name: sizes[name] for name in ("wq_a", "wkv_a")}
        sizes_of["wkv_b"] = _expanded(shape) * run.compute
    rows = (shape.routed if shape.model.experts else shape.tokens) * shape.experts_per_token
    sizes_of["gate"] = sizes_of["up"] = rows * shape.ffn * run.compute
    if shape.model.experts:
        shared = shape.tokens * shape.shared * run.compute
        sizes_of |= {"shared gate": shared, "shared up": shared, "shared down": hidden}
        sizes_of["shared gating"] = shape.tokens * run.compute
        names = names - {"down"} if keep == "matmuls" else names - {"gate", "up", "down"}
        kept |= routing(sizes)
        if shape.local_experts < shape.model.experts:
            # Tokens, and the routing that is sent with them.
            row = hidden // shape.tokens + 2 * shape.experts_per_token * max(4, run.compute)
            kept["exchanged"] = copies(shape) * row
    kept["reduced"] = sums * hidden // shape.shares
    if run.exchanged:
        kept["received"] = 2 * (sizes_of["wq"] + sizes_of["v"])
    if shape.adapter_rank:
        return kept | _kept_with_adapters(shape, run, keep, sizes_of)
    for name in names:
        # Without rotation, attention saves the results of wq and wk themselves.
        kept[name if shape.rotary else {"wq": "q", "wk": "k"}.get(name, name)] = sizes_of[name]
    return kept


def _kept_with_adapters(
    shape: Shape, run: Execution, keep: str | frozenset[str], sizes_of: Sizes
) -> Sizes:
    """Return the products' results that the policy keeps. An adapted layer has three products: A, B and W."""
    results: list[tuple[str, int]] = []
    for name in products(shape.model):
        if {"v": "wv"}.get(name, name) in shape.adapted:
            results += [
                (f"A of {name}", shape.tokens * shape.adapter_rank * run.compute),
                (f"B of {name}", sizes_of[name]),
                (f"W of {name}", sizes_of[name]),
            ]
        else:
            results.append((name, sizes_of[name]))
    if keep == "every-2nd-matmul":
        results = results[1::2]
    return {} if "attention" in str(keep) else dict(results)


def products(model: Model) -> tuple[str, ...]:
    """Return the names of a block's matrix products, in the order of their computation."""
    kinds = (*(("gate",) if model.is_gated else ()), "up", "down")
    attention: tuple[str, ...] = ("wq", "wk", "v", "wo")
    if model.kv_rank:
        attention = (*(("wq_a",) if model.q_rank else ()), "wq", "wkv_a", "wkv_b", "wo")
    gate = ("shared gating",) if model.shared_gate else ()
    shared = tuple(f"shared {kind}" for kind in kinds) if model.shared_ffn else ()
    return (*attention, *kinds, *gate, *shared)


def entry(shape: Shape, run: Execution) -> int:
    """Return the bytes of the residual stream before a block."""
    return shape.tokens // shape.shares * shape.hidden * run.stream


@lru_cache(maxsize=16384)
def block_memory(
    shape: Shape, run: Execution, mode: str = "none", keep: str | frozenset[str] = "matmuls"
) -> BlockMemory:
    """Return the bytes of a block with activation checkpointing of mode none, full or selective."""
    sizes, working = saved(shape, run), working_memory(shape, run)
    if mode == "none":
        kept = sum(sizes.values())
        return BlockMemory(kept, kept, working)
    if mode == "full":
        inputs = {"rotation": sizes.get("rotation", 0), "input": entry(shape, run)}
        inputs |= routing(sizes) if shape.model.experts else {}
        return BlockMemory(sum(inputs.values()), sum((sizes | inputs).values()), working)
    policy = kept_by_selective(shape, run, keep)
    # Recomputation reads kept tensors and frees tensors that autograd does not save. The last product is not
    # recomputed, and its kept result stays.
    freed = sum(
        policy.get(name, 0) for name in ("wq", "wk", "wkv_b", "wo", "received", "raw scores")
    )
    freed += policy["reduced"] // (1 if run.fused and shape.model.norm_position == "before" else 2)
    freed += sum(size for name, size in policy.items() if name[1:] in _ADAPTED)
    if shape.model.experts:  # recomputation stops after the last product
        freed += policy["router"] + policy.get("exchanged", 0)
    return BlockMemory(sum(policy.values()), sum((sizes | policy).values()) - freed, working)


def working_memory(shape: Shape, run: Execution) -> int:
    """Return the bytes of gradients at the peak of the feed-forward's backward pass, minus tensors freed
    before.

    The gradient of the residual stream counts at each of these moments:

    * magnitudes of the last product: two more gradients of its result;
    * last product: the gradients of its input and, with sequence parallelism, of its gathered result;
    * activation: the gradients of its result and inputs. The last product's saved input is freed;
    * first products: the gradients of their results, and for each product one of their common input. The saved
      inputs of the activation are freed.
    """
    if shape.model.experts:
        return moe_working_memory(shape, run)
    inner = shape.tokens * shape.ffn * run.compute
    hidden = shape.tokens * shape.hidden * run.compute
    first = 2 if shape.model.is_gated else 1
    freed = inner // (run.compute if run.narrow_inputs else 1)  # the last product's saved input
    saved_activation = int(shape.model.is_gated and not (run.fused or run.fused_activation))
    last_product = inner + (hidden if shape.shares > 1 else 0)
    last_product += _copies(shape.hidden, shape.ffn, shape, run)
    activation = (first + 1) * inner - freed
    first_products = first * hidden + (1 - first - saved_activation) * inner - freed
    first_products += _copies(shape.ffn, shape.hidden, shape, run)
    magnitudes = 0
    if shape.dora and "down" in shape.adapted:
        magnitudes = (3 if shape.shares > 1 else 2) * hidden
        activation, first_products = activation - hidden, first_products - hidden
    stream = shape.tokens // shape.shares * shape.hidden * run.stream
    highest = max(magnitudes, last_product, activation, first_products) + stream
    return highest + 2 * run.gathered_keys * shape.q * run.compute


def _copies(outputs: int, inputs: int, shape: Shape, run: Execution) -> int:
    """Return the bytes of a product's 8-bit operands while the gradient of its weights is computed.

    There are a row-major and a column-major copy of the result's gradient, and a column-major copy of the
    input. If the block is not compiled, a second copy of each column-major tensor exists (torchao.float8:
    `matmul_with_hp_or_float8_args.backward`, and the copies of `preprocess_addmm`); mxfp8 has the matrix
    (torchao's `mx_mm.backward`).
    """
    if not run.fp8:
        return 0
    if run.mxfp8 and not run.fused:
        return shape.tokens * (2 * outputs + inputs) + outputs * inputs
    of_result, of_input = (2, 1) if run.fused else (3, 2)
    return shape.tokens * (of_result * outputs + of_input * inputs)


def between_passes(shape: Shape, run: Execution) -> int:
    """Return the bytes of a block's gradients that wait from the pass for inputs to the pass for weights.

    They are the gradients of the results of all products and of the norms that are not frozen: torch keeps the
    gradients that reach operations with weights (torch.distributed.pipelining._backward).
    """
    inner = (2 if shape.model.is_gated else 1) * shape.ffn + shape.hidden
    products = shape.q + 2 * shape.kv + shape.hidden + shape.experts_per_token * inner
    if (model := shape.model).kv_rank:
        latents = model.kv_rank + model.rope_head_dim + (model.q_rank or 0)
        products += latents + _expanded(shape) // shape.tokens - 2 * shape.kv
    number = max(4, run.stream) if run.composed_norm and not shape.layernorm else run.stream
    norms = 2 * shape.norm_pairs * (shape.tokens // shape.shares) * shape.hidden * number
    norms = 0 if shape.adapter_rank else norms
    products += sum(_adapted_widths(shape)) if shape.dora else 0
    return shape.tokens * products * run.compute + norms


def norm_working(shape: Shape, run: Execution) -> int:
    """Return the bytes that a norm's backward pass needs in addition to the gradients of its result and of the
    stream."""
    stream = shape.tokens // shape.shares * shape.hidden
    return 4 * stream * max(4, run.stream) if run.composed_norm and not shape.layernorm else 0


@dataclass(frozen=True, slots=True)
class StageActivations:
    """Bytes of the blocks of one stage for one micro batch."""

    kept: int
    """Kept on the device from the forward to the backward pass."""
    extra: int
    """Added to `kept` at the peak of the last block's backward pass."""
    last: int
    """The part of `kept` of the last block, or of the last recomputed group of blocks."""
    host: int
    """Kept in host memory."""
    waiting_gradients: int
    """Gradients that wait from the pass for inputs to the pass for weights."""
    for_inputs: int
    """Added to `kept` at the peak of a pass that computes the gradients of inputs alone."""
    for_weights: int
    """Added to `kept` at the peak of a pass that computes the gradients of weights alone."""


def stage_activations(
    layers: int, shape: Shape, run: Execution, parallel: Parallel, dense: int = 0
) -> StageActivations:
    """Return the bytes of a stage's blocks; the first `dense` blocks have no experts."""
    mode, every = parallel.activation_checkpointing, parallel.checkpoint_every
    others = parallel.tp, dense, mode, every, parallel.selective_keep
    return _stage_activations(layers, shape, run, *others)


@lru_cache(maxsize=16384)
def _stage_activations(
    layers: int, shape: Shape, run: Execution, tp: int, dense: int, mode: str, every: int, keep: str
) -> StageActivations:
    if not layers:
        return StageActivations(0, 0, 0, 0, 0, 0, 0)
    plain = block_memory(shape, run)
    chosen = sum(routing(saved(shape, run)).values()) if shape.model.experts else 0
    recomputed = 0
    if mode == "none":
        kept, extra, last = layers * plain.kept, plain.working, plain.kept
    else:
        block = block_memory(shape, run, mode, keep)
        count = ceil(layers / every)
        kept = count * block.kept + (layers - count) * plain.kept
        checkpointed = (layers - 1) % every == 0
        recomputed = block.recomputed - block.kept if checkpointed else 0
        extra = block.working + recomputed
        last = block.kept if checkpointed else plain.kept
    if dense:
        block, other_shape = block_memory(shape, run, mode, keep), _dense(shape, tp)
        other, count = block_memory(other_shape, run, mode, keep), ceil(dense / every)
        whole = block_memory(other_shape, run).kept - plain.kept
        kept += count * (other.kept - block.kept) + (dense - count) * whole
        if dense == layers:
            extra = other.working + other.recomputed - other.kept
    waiting = between_passes(shape, run)
    # The pass for inputs frees no saved tensor, and at its end it holds all gradients of a block.
    inner = shape.tokens * shape.experts_per_token * shape.ffn * run.compute
    not_freed = 0 if recomputed or run.fused else inner
    for_inputs = max(extra + not_freed, waiting + norm_working(shape, run))
    for_inputs += (layers - 1) * waiting
    waiting *= layers
    if run.offloaded:
        for_weights = recomputed + last
        # What autograd saves moves to the host; the experts that recomputation repeats do not.
        choices = 0 if mode == "none" else ceil((layers - dense) / every) * chosen
        return StageActivations(
            choices, extra + last, 0, kept - choices, waiting, for_inputs + last, for_weights
        )
    return StageActivations(kept, extra, last, 0, waiting, for_inputs, recomputed)


def describe(shape: Shape, run: Execution) -> str:
    """List the tensors that autograd saves in a block with their sizes, largest first."""
    sizes = sorted(saved(shape, run).items(), key=lambda item: -item[1])
    return " + ".join(f"{name} {byte_size(size)}" for name, size in sizes)
