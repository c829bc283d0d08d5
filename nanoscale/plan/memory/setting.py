"""The settings of a configuration that determine memory."""

from dataclasses import dataclass, replace
from typing import Literal

from nanoscale.config import model_math
from nanoscale.config.dtypes import DTYPES, fp8_tile
from nanoscale.config.layout import is_replicated, narrow_weights
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.plan.memory.activations import shape_of
from nanoscale.plan.memory.block_shape import Execution, Shape
from nanoscale.plan.memory.states import BytesPerParameter, bytes_per_parameter


@dataclass(frozen=True, slots=True)
class MemorySetting:
    """The settings of a job on its ranks. Fields marked "other software" keep their defaults for nanoscale."""

    config: ResolvedConfig
    states: BytesPerParameter
    shape: Shape
    run: Execution
    compute: int
    """Bytes of a number in products."""
    reduce: int
    """Bytes of a gradient in a reduction across ranks."""
    accumulated: int
    """Bytes of a gradient to which micro batches are added before its reduction: 4 or more."""
    flat: bool
    """True for DeepSpeed's flat buffers, in place of FSDP2."""
    single: bool
    """True for one process, or for several processes that each have the whole model: without FSDP2."""
    shards: int
    """Ranks over which the weights, the states and, from stage 2 on, the gradients are sharded."""
    peers: int
    """Ranks that train the same parameters: dp · cp."""
    stage: int
    pp: int
    micro_batches: int
    gpu: bool
    vocabulary: int
    """Logits of one token on a rank."""
    vocabulary_parallel: bool
    loss: int
    """Bytes of a number in the loss."""
    narrow_weights: int
    """Weights of a block that are gathered in 8 bits."""
    whole_logits: tuple[int, int] | None = None
    """Other software: bytes of a logit from the forward pass on, and bytes that the loss's backward pass adds;
    None: logits are computed in chunks."""


def setting_of(config: ResolvedConfig) -> MemorySetting:
    """Return the setting of a configuration that `rules.check` has resolved."""
    layout, precision, train = config.parallel, config.precision, config.train
    deepspeed = config.backend.name == "deepspeed"
    compute, params = DTYPES[precision.compute].bytes, DTYPES[precision.params].bytes
    alone = config.world_size == 1 and not config.offloads
    single = not deepspeed and (alone or is_replicated(config))
    autocast = compute < params and deepspeed and config.zero.stage == 0
    gpu, compiled = config.launcher.device != "cpu", config.backend.compile == "on"
    ffn = config.model.ffn // layout.expert_tp
    run = Execution(
        compute=compute,
        stream=params if autocast else compute,
        autocast=autocast,
        attention=_attention(config, compute, gpu),
        tensor_parallel=layout.tp > 1,
        exchanged=layout.cp > 1 and layout.cp_method == "ulysses",
        composed_norm=not gpu,
        fused=compiled,
        offloaded=layout.offload_activations and gpu,
        # One kernel computes all experts in bf16 (`models.moe.run_experts`).
        grouped=gpu and precision.compute == "bf16" and config.model.hidden % 8 == ffn % 8 == 0,
        fp8=precision.fp8,
        mxfp8=precision.fp8_recipe == "mxfp8",
        tile=min(fp8_tile(precision.fp8_recipe), 32) if precision.fp8 else 1,
    )
    divided = layout.tp > 1 and not deepspeed
    stage = config.zero.stage
    return MemorySetting(
        config=config,
        states=bytes_per_parameter(precision, config.optimizer),
        shape=replace(
            shape_of(config.model, layout, train.micro_batch, train.seq_len),
            adapter_rank=config.lora.rank,
            adapted=tuple(model_math.adapted_layers(config.model, config.lora)),
            dora=config.lora.dora,
        ),
        run=run,
        compute=compute,
        reduce=DTYPES[precision.reduce].bytes,
        accumulated=max(4, DTYPES[precision.reduce].bytes),
        flat=deepspeed,
        single=single,
        shards=config.parallel.dp * layout.cp // layout.dp_replicate if stage else 1,
        peers=config.parallel.dp * layout.cp,
        stage=stage,
        pp=layout.pp,
        micro_batches=config.accumulation,
        gpu=gpu,
        vocabulary=config.model.vocab // (layout.tp if divided else 1),
        vocabulary_parallel=divided,
        loss=max(4, compute),
        narrow_weights=narrow_weights(config),
    )


def _attention(config: ResolvedConfig, compute: int, gpu: bool) -> Literal["flash", "math"]:
    """Return `Execution.attention`. On a GPU it is `math` if PyTorch has no fused attention.

    For fp32 there is only the memory-efficient kernel, which does not support grouped heads. No kernel supports
    fp64. Ring attention, documents, sinks and bounded scores have kernels of their own.
    """
    model, layout = config.model, config.parallel
    grouped = model.kv_heads not in (None, model.heads)
    ring = layout.cp > 1 and layout.cp_method == "ring"
    unfused = compute == 8 or (compute == 4 and grouped) or config.backend.attention == "math"
    limited = any((model.attention_softcap, model.attention_sinks, config.data.document_mask))
    return "math" if gpu and unfused and not ring and not limited else "flash"
