"""What of a configuration decides about memory, in the form in which the arithmetic needs it."""

from __future__ import annotations

from dataclasses import dataclass

from nanoscale.config.derive import derive
from nanoscale.config.layout import is_replicated
from nanoscale.config.schema import Config
from nanoscale.plan.memory.activations import shape_of
from nanoscale.plan.memory.shape import Execution, Shape
from nanoscale.plan.memory.states import BYTES, BytesPerParameter, bytes_per_parameter


@dataclass(frozen=True, slots=True)
class Setting:
    """A job on its ranks. Other software differs from ours in the fields that say so."""

    config: Config
    states: BytesPerParameter
    shape: Shape
    run: Execution
    compute: int
    """bytes of a number in products"""
    reduce: int
    """bytes of a gradient on its way across ranks"""
    flat: bool
    """DeepSpeed's flat buffers, in place of FSDP2"""
    whole_ends: bool
    """tp leaves embedding and head whole"""
    single: bool
    """one process, or one of several that each have the whole model: without FSDP2 and its copies"""
    shards: int
    """ranks that share the weights, the states and, from stage 2 on, the gradients"""
    peers: int
    """ranks that train the same parameters: dp · cp"""
    stage: int
    pp: int
    micro_batches: int
    gpu: bool
    vocabulary: int
    """logits of a token on a rank"""
    vocabulary_parallel: bool
    loss: int
    """bytes of a number in the loss"""
    keep: frozenset[str] | None = None
    """other software: which products selective recomputation keeps"""
    copies_gradients: bool = True
    """flat buffers: the optimizer is handed a copy of this rank's gradients"""
    keeps_gradients: bool = False
    """flat buffers: gradients have theirs all the time, not only from one micro batch to the next"""
    placeholders: bool = False
    """flat buffers: an unread gradient of every matrix of a block stays allocated (Transformer Engine's, where
    gradients are summed by the products themselves)"""
    whole_logits: tuple[int, int] | None = None
    """other software: bytes of a logit from the forward pass on, and more of them where the loss's backward
    pass begins; None: never all of them"""


def setting_of(config: Config) -> Setting:
    """Of a configuration that `rules.check` has resolved."""
    layout, precision = config.parallel, config.precision
    sizes = derive(config)
    deepspeed = config.backend.name == "deepspeed"
    compute, params = BYTES[precision.compute], BYTES[precision.params]
    single = not deepspeed and (sizes.world_size == 1 or is_replicated(config))
    autocast = compute < params and deepspeed and config.zero.stage == 0
    gpu = config.launcher.device != "cpu"
    run = Execution(
        compute=compute,
        stream=params if autocast else compute,
        autocast=autocast,
        attention="math" if gpu and _unfused(config, compute) else "flash",
        tensor_parallel=layout.tp > 1,
        turned=config.model.position == "rope" and layout.cp == 1,
        exchanged=layout.cp > 1 and layout.cp_method == "ulysses",
        composed_norm=not gpu,
        fused=config.backend.compile == "on",
        offloaded=layout.offload_activations and gpu,
        grouped=gpu and _one_kernel(config),
        narrow=precision.fp8,
    )
    divided = layout.tp > 1 and not deepspeed
    stage = config.zero.stage
    return Setting(
        config=config,
        states=bytes_per_parameter(precision, config.optimizer),
        shape=shape_of(config.model, layout, sizes.micro_batch, config.train.seq_len),
        run=run,
        compute=compute,
        reduce=BYTES[precision.reduce],
        flat=deepspeed,
        whole_ends=deepspeed,
        single=single,
        shards=sizes.dp * layout.cp // layout.dp_replicate if stage else 1,
        peers=sizes.dp * layout.cp,
        stage=stage,
        pp=layout.pp,
        micro_batches=sizes.accumulation,
        gpu=gpu,
        vocabulary=config.model.vocab // (layout.tp if divided else 1),
        vocabulary_parallel=divided,
        loss=max(4, compute),
    )


def _one_kernel(config: Config) -> bool:
    """Whether a kernel takes all experts at once (`models.moe.run_experts`)."""
    ffn = config.model.ffn // config.parallel.tp
    return config.precision.compute == "bf16" and config.model.hidden % 8 == ffn % 8 == 0


def _unfused(config: Config, compute: int) -> bool:
    """Whether PyTorch has no fused attention for this on a GPU, and writes the scores down.

    Its memory-efficient kernel, which fp32 needs, takes no grouped heads, and none takes fp64. Our ring has
    kernels of its own.
    """
    model, layout = config.model, config.parallel
    grouped = model.kv_heads not in (None, model.heads)
    ring = layout.cp > 1 and layout.cp_method == "ring"
    if config.backend.attention == "math":
        return True
    return not ring and (compute == 8 or (compute == 4 and grouped))
