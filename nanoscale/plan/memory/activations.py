"""The activations that a block keeps for its backward pass, tensor by tensor, and the working memory of that
pass.

The tensors are those that autograd saves for `models.transformer.Block`; sizes are of one micro batch on one
rank. With dropout, stored attention scores and no gathered inputs the same list is that of Korthikanti et al.
2022 (arXiv:2205.05198), section 4: s·b·h·(34 + 5·a·s/h) bytes a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, isqrt

from nanoscale.common.units import byte_size
from nanoscale.config.schema import Model, Parallel
from nanoscale.plan.memory.block_shape import Execution, Shape, Sizes
from nanoscale.plan.memory.moe import saved_by_mixture, working_of_mixture

STATISTIC = 4
"""Bytes of a norm's mean or root, and of the log-sum of an attention row: fp32, whatever the compute dtype."""


_ADAPTED = tuple(f" of {name}" for name in ("wq", "wk", "v", "wo", "gate", "up"))
"""Ends of the names of the results of A, B and W of adapted layers, of which autograd saves none."""


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """Bytes of one block and one micro batch."""

    kept: int
    """Bytes kept from the forward to the backward pass."""
    whole: int
    """After recomputation: kept, and all that autograd saves."""
    working: int
    """Beyond `whole`, at the peak of the backward pass."""


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
        ffn=model.ffn // tp,
        heads=model.heads // tp,
        rotary=seq * head_dim if model.position == "rope" else 0,
        local_experts=model.experts // parallel.ep,
        experts_per_token=model.experts_per_token if model.experts else 1,
    )


def saved(shape: Shape, run: Execution) -> Sizes:
    """Return the bytes of every tensor that autograd saves in a block without recomputation."""
    sizes = _saved_if_trained(shape, run)
    return _saved_beside_adapters(sizes, shape, run) if shape.adapter_rank else sizes


def _saved_beside_adapters(sizes: Sizes, shape: Shape, run: Execution) -> Sizes:
    """Return the bytes if the block is frozen and only adapters are trained.

    A frozen product saves its weights alone, and a composed norm not what it multiplies with its weights. An
    adapter saves its input and the result of A.
    """
    adapted = shape.adapted
    inputs = {
        "normed": ("wq", "wk", "wv"),
        "turned": ("wo",),
        "normed middle": ("gate", "up"),
        "product" if shape.gated else "activated": ("down",),
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
    return kept


def _saved_if_trained(shape: Shape, run: Execution) -> Sizes:
    tokens, e = shape.tokens, run.compute
    part = tokens // shape.shares
    stream = part * shape.hidden * run.stream
    sizes = {"input": stream, "middle": stream}
    if run.composed_norm and not shape.layernorm:
        # inputs in the compute dtype are cast, and the results saved
        sizes = {} if run.stream < 4 else sizes
        wide = 2 * part * shape.hidden * max(4, run.stream)
        sizes |= {"normalized": wide} | ({"widened": wide} if run.stream < 4 else {})
    sizes["statistics"] = 2 * part * STATISTIC * (2 if shape.layernorm else 1)
    if not run.fused or run.tensor_parallel:
        normed = (tokens if run.gathered else part) * shape.hidden * e
        sizes["normed"] = normed * (3 if run.autocast else 1)
        sizes["normed middle"] = normed * (2 if run.autocast and shape.gated else 1)
    sizes |= _attention(shape, run)
    if shape.model.qk_norm:
        sizes |= _head_norms(shape, run)
    if shape.experts:
        return sizes | saved_by_mixture(shape, run)
    inner = tokens * shape.ffn * e
    sizes["up"] = inner
    if shape.gated:
        sizes["gate"] = inner
    if not run.fused:
        sizes["product" if shape.gated else "activated"] = inner
        if shape.gated and not run.fused_activation:
            sizes["activated"] = inner
    if run.dropout:
        sizes["masks"] = 2 * part * shape.hidden
    return sizes


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
        if run.keeps_softmax_input:
            sizes["raw scores"] = scores * e
    if run.turned or run.exchanged:
        sizes["turned"] = queries
    if shape.rotary and run.compute != 4:  # cast from fp32, once or at each use
        sizes["rotation"] = shape.rotary * run.compute * (2 if run.autocast else 1)
    return sizes


def _head_norms(shape: Shape, run: Execution) -> Sizes:
    """Return the inputs of the norms of queries and keys, which are product results, and what the norms save
    in addition to them."""
    queries, keys = shape.tokens * shape.q, shape.tokens * shape.kv
    sizes = {"wq": queries * run.compute, "wk": keys * run.compute}
    if run.composed_norm:
        wide = (queries + keys) * max(4, run.compute)
        sizes |= {"normalized heads": wide} | ({"widened heads": wide} if run.compute < 4 else {})
    heads = shape.heads * (shape.q + shape.kv) // shape.q
    return sizes | {"statistics of heads": shape.tokens * heads * STATISTIC}


def kept_by_selective(shape: Shape, run: Execution, keep: str | frozenset[str]) -> Sizes:
    """Return what `activation.SavePolicy` keeps: the input, attention, reduced results, some products."""
    sizes, names = saved(shape, run), set(products(shape.gated, shape.experts > 0))
    if isinstance(keep, frozenset):
        names = set(keep)
    elif keep == "every-2nd-matmul":
        names = set(products(shape.gated, shape.experts > 0)[1::2])
    elif keep == "attention":
        names = set()
    kept: Sizes = {name: sizes[name] for name in ("rotation", "attended") if name in sizes}
    kept["input"] = entry(shape, run)
    kept["log-sums"] = sizes.get("log-sums", 0)
    whole = shape.tokens * shape.hidden * run.compute
    made = {"wo": whole, "down": whole, "v": shape.tokens * shape.kv * run.compute}
    made["wq"], made["wk"] = shape.tokens * shape.q * run.compute, made["v"]
    made["gate"] = made["up"] = shape.tokens * shape.experts_per_token * shape.ffn * run.compute
    if shape.experts:
        made |= {"router": sizes["scores of experts"], "down": sizes["found"]}
        if shape.local_experts < shape.experts:  # sent to an expert, and back
            kept["exchanged"] = 2 * sizes["found"]
    if run.tensor_parallel:
        kept["reduced"] = 2 * whole // shape.shares
    if run.exchanged:
        kept["received"] = 2 * (made["wq"] + made["v"])
    if shape.adapter_rank:
        return kept | _kept_beside_adapters(shape, run, keep, made)
    for name in names:
        # Without rotation attention saves the product itself.
        kept[name if shape.rotary else {"wq": "q", "wk": "k"}.get(name, name)] = made[name]
    return kept


def _kept_beside_adapters(
    shape: Shape, run: Execution, keep: str | frozenset[str], made: Sizes
) -> Sizes:
    """Return the products' results that the policy keeps, of which each adapted layer has three."""
    results: list[tuple[str, int]] = []
    for name in products(shape.gated, shape.experts > 0):
        if {"v": "wv"}.get(name, name) in shape.adapted:
            results += [
                (f"A of {name}", shape.tokens * shape.adapter_rank * run.compute),
                (f"B of {name}", made[name]),
                (f"W of {name}", made[name]),
            ]
        else:
            results.append((name, made[name]))
    if keep == "every-2nd-matmul":
        results = results[1::2]
    return {} if keep == "attention" else dict(results)


def products(gated: bool, router: bool = False) -> tuple[str, ...]:
    """Return the names of a block's matrix products in their order."""
    first = ("wq", "wk", "v", "wo", *(("router",) if router else ()))
    return (*first, *(("gate",) if gated else ()), "up", "down")


def entry(shape: Shape, run: Execution) -> int:
    """Return the bytes of the residual stream before a block."""
    return shape.tokens // shape.shares * shape.hidden * run.stream


@lru_cache(maxsize=16384)
def block_memory(
    shape: Shape, run: Execution, mode: str = "none", keep: str | frozenset[str] = "matmuls"
) -> BlockMemory:
    """Return the bytes of a block in `mode`: none, full or selective.

    A group of blocks (sqrt) consists of blocks of mode none.
    """
    sizes = saved(shape, run)
    whole = sum(sizes.values())
    if mode == "none":
        return BlockMemory(whole, whole, working_memory(shape, run))
    if mode == "full":
        kept = {"input": entry(shape, run), "rotation": sizes.get("rotation", 0)}
        again = sum((sizes | kept).values())
        return BlockMemory(sum(kept.values()), again, working_memory(shape, run))
    held = kept_by_selective(shape, run, keep)
    # The second pass takes kept tensors out of the cache: those that autograd does not save then are freed.
    # The pass ends before the last product, whose result stays.
    taken = sum(held.get(name, 0) for name in ("wq", "wk", "wo", "received"))
    taken += held.get("reduced", 0) // 2
    taken += sum(size for name, size in held.items() if name[1:] in _ADAPTED)
    if shape.experts:  # with experts the second pass ends later
        taken += sum(held.get(name, 0) for name in ("router", "down", "exchanged"))
    whole = sum((sizes | held).values()) - taken
    return BlockMemory(sum(held.values()), whole, working_memory(shape, run))


def working_memory(shape: Shape, run: Execution) -> int:
    """Return gradients at the peak of the feed-forward's backward pass, less the tensors freed by then.

    The residual stream's gradient is always among them. At the last product there are also those of its
    result, which sequence parallelism has gathered, and of its input. At the activation there are those of its
    output and of its inputs; the input of the last product has been freed, unless it was only recomputed now.
    At the first products there are those of their results and, once for each product, of their common input;
    the inputs of the activation have been freed too. The 8-bit copies of a product are added to these.
    """
    if shape.experts:
        return working_of_mixture(shape, run)
    inner = shape.tokens * shape.ffn * run.compute
    whole = shape.tokens * shape.hidden * run.compute
    first = 2 if shape.gated else 1
    again = 0 if run.fused else 1
    apart = again if shape.gated and not run.fused_activation else 0
    last_product = inner + (whole if shape.shares > 1 else 0)
    last_product += _copies(shape.hidden, shape.ffn, shape, run)
    activation = (first + 1 - again) * inner
    first_products = first * whole + (1 - first - again - apart) * inner
    first_products += _copies(shape.ffn, shape.hidden, shape, run)
    stream = shape.tokens // shape.shares * shape.hidden * run.stream
    highest = max(last_product, activation, first_products) + stream
    return highest + 2 * run.gathered_keys * shape.q * run.compute


def _copies(outputs: int, inputs: int, shape: Shape, run: Execution) -> int:
    """Return the bytes of a product's 8-bit operands during the pass for its weights' gradients.

    The gradient of its result by rows and by columns, and its input by columns; if not compiled, each
    column-wise copy also exists by rows (torchao.float8: `matmul_with_hp_or_float8_args.backward`, and the
    copies of `preprocess_addmm`).
    """
    if not run.narrow:
        return 0
    of_result, of_input = (2, 1) if run.fused else (3, 2)
    return shape.tokens * (of_result * outputs + of_input * inputs)


def between_passes(shape: Shape, run: Execution) -> int:
    """Return the bytes of a block's gradients that wait from the pass for inputs to the pass for weights.

    They are the gradients of the results of all its products and norms that are not frozen: torch keeps the
    gradients that reach the operations with weights (torch.distributed.pipelining._backward).
    """
    inner = (2 if shape.gated else 1) * shape.ffn + shape.hidden
    products = shape.q + 2 * shape.kv + shape.hidden + shape.experts_per_token * inner
    wide = max(4, run.stream) if run.composed_norm and not shape.layernorm else run.stream
    norms = 0 if shape.adapter_rank else 2 * (shape.tokens // shape.shares) * shape.hidden * wide
    return shape.tokens * products * run.compute + norms


def norm_working(shape: Shape, run: Execution) -> int:
    """Return the bytes that a norm's backward pass needs in addition to the gradients of its result and of the
    stream."""
    part = shape.tokens // shape.shares * shape.hidden
    return 4 * part * max(4, run.stream) if run.composed_norm and not shape.layernorm else 0


@dataclass(frozen=True, slots=True)
class StageActivations:
    """Bytes of the blocks of one stage for one micro batch."""

    kept: int
    """On the device, from the forward to the backward pass."""
    extra: int
    """Beyond `kept`, at the peak of the last block's backward pass."""
    last: int
    """Kept for the last block or group alone."""
    host: int
    """Kept in host memory."""
    waiting_gradients: int
    """Gradients between the pass for inputs and the pass for weights."""
    for_inputs: int
    """Like `extra`, for a pass that computes the gradients of inputs alone."""
    for_weights: int
    """Like `extra`, for a pass that computes the gradients of weights alone."""


def stage_activations(
    layers: int,
    shape: Shape,
    run: Execution,
    parallel: Parallel,
    keep: frozenset[str] | None = None,
) -> StageActivations:
    """Return the bytes of a stage's blocks; `keep` replaces `parallel.selective_keep`."""
    mode = parallel.activation_checkpointing
    plain = block_memory(shape, run)
    again = 0
    if mode == "none":
        kept, extra, last = layers * plain.kept, plain.working, plain.kept
    elif mode == "sqrt":
        groups = isqrt(layers - 1) + 1
        first = block_memory(shape, run, "full").kept
        kept, last = groups * first, first
        again = ceil(layers / groups) * plain.whole - first
        extra = again + plain.working
    else:
        block = block_memory(shape, run, mode, keep or parallel.selective_keep)
        number = ceil(layers / parallel.checkpoint_every)
        kept = number * block.kept + (layers - number) * plain.kept
        recomputed = (layers - 1) % parallel.checkpoint_every == 0
        again = block.whole - block.kept if recomputed else 0
        extra = block.working + again
        last = block.kept if recomputed else plain.kept
    one = between_passes(shape, run)
    # The pass for inputs frees nothing, and at its end it holds all gradients of a block.
    inner = shape.tokens * shape.experts_per_token * shape.ffn * run.compute
    held = 0 if again or run.fused else inner
    for_inputs = (layers - 1) * one + max(extra + held, one + norm_working(shape, run))
    if run.offloaded:
        return StageActivations(
            0, extra + last, 0, kept, layers * one, for_inputs + last, again + last
        )
    return StageActivations(kept, extra, last, 0, layers * one, for_inputs, again)


def describe(shape: Shape, run: Execution) -> str:
    """List the tensors of a block with their sizes, largest first."""
    sizes = sorted(saved(shape, run).items(), key=lambda item: -item[1])
    return " + ".join(f"{name} {byte_size(size)}" for name, size in sizes)
