"""torch.compile of every block by itself: one compilation serves all. Around blocks only the loss is compiled.

Only a block's `forward` on the instance is replaced, so names stay and FSDP2's hooks stay outside.
Recomputation is compiled with it, so the compiler sees forward and recomputation together.

Unsupported are: a backward pass in two halves, for inputs and for weights (zero-bubble schedules); and
activations offloaded to the host, since a compiled block keeps its own. `config.rules` refuses both. In an MoE
block with ep the numbers of rows depend on the data: the compiler traces them as symbols, and compiles once.
With tp, Inductor may fuse collectives with products (`sequence_parallel.fuse_with_products`).
Results differ from the eager ones by rounding, since operations are fused: rule 1 between layouts applies with
compilation in all or in none of them. Every new shape (a shorter batch in
an evaluation, a prompt) and the switch between training and evaluation compile again.
"""

import torch
from torch import nn

from nanoscale.config.resolved import ResolvedConfig


def apply(layers: nn.ModuleDict, config: ResolvedConfig) -> None:
    """Compile each block of a model in place, when it first runs. Call it after `activation.apply`."""
    if config.backend.compile != "on":
        return
    # the numbers of rows of `expert.exchange_counts`
    torch._dynamo.config.capture_scalar_outputs = True
    blocks: list[nn.Module] = list(layers.values())
    for block in blocks:
        block.forward = torch.compile(block.forward)
