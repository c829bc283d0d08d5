"""torch.compile of every block by itself: one compilation serves all. Around blocks only the loss is compiled.

Only a block's `forward` on the instance is replaced, so names stay and FSDP2's hooks stay outside.
Recomputation is compiled with it, so the compiler sees forward and recomputation together.

Unsupported are: a backward pass in two halves, for inputs and for weights (zero-bubble schedules); and
activations offloaded to the host, since a compiled block keeps its own. `config.rules` refuses both. With ep,
parts of an MoE block are compiled, and its exchanges are not: Inductor would change their order. With tp,
Inductor starts collectives as early as their inputs permit and waits as late as possible, so that the backward
pass computes gradients of weights while gradients of inputs are scattered; it may also fuse collectives with
products (`sequence_parallel.fuse_with_products`). Results differ from the eager ones by rounding, since
operations are fused: rule 1 between layouts applies with compilation in all or in none of them. Every new shape
(a shorter batch in an evaluation, a prompt) and the switch between training and evaluation compile again.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor import config as inductor

from nanoscale.config.resolved import ResolvedConfig
from nanoscale.models.moe import Experts
from nanoscale.parallel.expert import parts_of


def apply(layers: nn.ModuleDict, config: ResolvedConfig) -> None:
    """Compile each block of a model in place, when it first runs. Call it after `activation.apply`."""
    if config.backend.compile != "on":
        return
    torch._dynamo.config.capture_scalar_outputs = True  # numbers of `expert.exchange_counts`
    if torch.cuda.is_available() and config.parallel.tp > 1 and not config.parallel.tp_overlap:
        inductor.reorder_for_compute_comm_overlap = True
        inductor.reorder_for_compute_comm_overlap_passes = ["raise_comms", "sink_waits"]
    for owner, name in (it for block in layers.values() for it in parts_of(block, "compiled")):
        run = torch.compile(getattr(owner, name))
        run = partial(_of_any_length, run) if isinstance(owner, Experts) else run
        setattr(owner, name, run)


def _of_any_length(compiled: Any, *inputs: Tensor) -> Any:
    """Run code that is compiled once for all numbers of rows, 0 and 1 among them."""
    for each in inputs:
        torch._dynamo.decorators.mark_unbacked(each, 0)
    return compiled(*inputs)
