"""The parallelization of a stage of the model; read it from top to bottom."""

from torch.distributed import ProcessGroup

from nanoscale.config.layout import is_replicated, keeps_narrow_experts
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.models import lora
from nanoscale.models.hf_model import HFModel
from nanoscale.models.transformer import Transformer
from nanoscale.parallel import activation, compile, context, expert, fsdp, tensor
from nanoscale.parallel.mesh import Layout
from nanoscale.parallel.sequence_parallel import fuse_with_products


def parallelize(model: Transformer, config: ResolvedConfig, layout: Layout) -> None:
    """Distribute a stage on the meta device over the ranks, in place."""
    parallel = config.parallel
    # Matrices are divided first: all later steps see only a rank's shard of them.
    if layout.tensor is not None and isinstance(model, HFModel):
        tensor.apply_plan(model, layout.tensor)
    elif layout.tensor is not None:
        tensor.apply(model, layout.tensor, parallel.sequence_parallel)
    if layout.tensor is not None and parallel.tp_overlap:
        fuse_with_products(layout.tensor)
    # The step before leaves MoE blocks whole. Their experts are divided over ep and tp at once.
    if layout.experts is not None and isinstance(model, HFModel):
        expert.apply_to_foreign(model, parallel.ep, layout.experts)
    elif config.model.experts:
        expert.apply(model, config.parallel, layout.tensor, layout.experts)
    # Adapters are attached to divided matrices, and then divided as these are.
    if config.lora.rank:
        lora.attach(model, config.lora, fsdp.TORCH_DTYPES[config.precision.params])
        if layout.tensor is not None:
            tensor.divide_adapters(model, layout.tensor)
    prepare_blocks(model, config, layout.context, layout.coordinates.cp)
    # FSDP comes last: parameters are gathered outside of recomputed and compiled regions.
    if layout.data is not None and not is_replicated(config):
        fsdp.shard(model, config, layout.data, layout.experts)
    if keeps_narrow_experts(config):  # of gathered weights
        for block in model.layers.values():
            for experts in expert.experts_of(block):
                block.register_forward_pre_hook(experts.cast_once)


def prepare_blocks(
    model: Transformer, config: ResolvedConfig, context_group: ProcessGroup | None, cp_rank: int
) -> None:
    """Apply the steps between dividing matrices and sharding parameters, for either backend; in place."""
    if context_group is not None:
        context.apply(model, config, context_group, cp_rank)
    # Recomputed before compiled: a recomputed region is compiled as a whole.
    activation.apply(model.layers, config.parallel)
    model.run_layers = activation.make_run_layers(config.parallel, model.run_layers)
    compile.apply(model.layers, config)
    if config.backend.compile == "on" and model.last and model.head is not None:
        model.head.fused = True  # the operations of the loss between its products
