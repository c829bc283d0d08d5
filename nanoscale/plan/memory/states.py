"""Bytes per parameter, of weights, compute copy, gradients and optimizer states, and of saved copies.

Sources: Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054), section 3.1; 8-bit states: Dettmers et al. 2022,
arXiv:2110.02861.
"""

from dataclasses import dataclass

from nanoscale.config.dtypes import DTYPES
from nanoscale.config.model_math import adapter_parameters, parameters
from nanoscale.config.optimizers import keeps_average, moments_of, rule_of
from nanoscale.config.parameters import block, kinds_of_blocks
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Optimizer, Precision
from nanoscale.plan.memory.shards import rank_holdings

QUANTIZED = 1 + 4 / 256
"""Bytes of an 8-bit moment, with an fp32 scale for every 256 of them."""


@dataclass(frozen=True, slots=True)
class BytesPerParameter:
    """Bytes of one parameter without sharding."""

    weights: float
    """The weights that the optimizer updates: fp32 master weights if there is a compute copy."""
    copy: float
    """The copy in the compute dtype; 0 if the weights have the compute dtype."""
    gradients: float
    optimizer: float
    """The optimizer's moments, without master weights."""
    in_blocks: float
    """The moments of matrices of blocks."""
    frozen: float
    """A weight that is not trained, in the compute dtype."""

    def moments(self, numel: int, in_blocks: int) -> int:
        """Return the bytes of the moments of `numel` parameters, with `in_blocks` in matrices of blocks."""
        return int(self.optimizer * (numel - in_blocks) + self.in_blocks * in_blocks)


def moments(optimizer: Optimizer, params: int, *, in_blocks: bool = False) -> float:
    """Return the bytes of the moments of a parameter of `params` bytes, in a matrix of a block or elsewhere."""
    kept = len(moments_of(optimizer, in_blocks=in_blocks))
    return moment_width(optimizer, params) * kept + average_width(optimizer, params)


def moment_width(optimizer: Optimizer, params: int) -> float:
    """Return the bytes of one moment of a parameter of `params` bytes."""
    if rule_of(optimizer).quantized:
        return QUANTIZED
    return float(DTYPES["bf16"].bytes if optimizer.moments_dtype == "bf16" else params)


def average_width(optimizer: Optimizer, params: int) -> int:
    """Return the bytes of the average of a parameter of `params` bytes; 0 if the job keeps none."""
    return max(params, DTYPES["fp32"].bytes) if keeps_average(optimizer) else 0


def bytes_per_parameter(precision: Precision, optimizer: Optimizer) -> BytesPerParameter:
    """Return the bytes per parameter of a job. Gradients for the optimizer have the dtype of the weights."""
    params, compute = DTYPES[precision.params].bytes, DTYPES[precision.compute].bytes
    return BytesPerParameter(
        weights=params,
        copy=compute if compute != params else 0,
        gradients=params,
        optimizer=moments(optimizer, params),
        in_blocks=moments(optimizer, params, in_blocks=True),
        frozen=compute,
    )


def checkpoint_bytes(config: ResolvedConfig) -> int:
    """Return the bytes of the trained parameters and their moments, in any layout; 0 if it is unknown."""
    trained = adapter_parameters(config) if config.lora.rank else parameters(config.model)
    in_blocks = trained
    if not config.lora.rank and config.model.source == "own":
        in_blocks = sum(
            count * it.numel
            for count, shape in kinds_of_blocks(config.model)
            for it in block(shape).values()
            if not it.is_vector
        )
    return _bytes(config, trained, in_blocks)


def host_bytes(config: ResolvedConfig, ranks: int) -> int:
    """Return the bytes of the state of the fullest host's ranks, each tensor once.

    Args:
        ranks: the ranks of a host.
    """
    layout, group = config.parallel, _group(config)
    in_stage = config.world_size // layout.pp
    same_stage = min(ranks, in_stage)
    sizes = []
    shards = _shards(config)
    for rank in rank_holdings(config, shards):
        params, copies = rank.trained, min(same_stage, group)
        numel, in_blocks = params.shard, params.in_blocks_shard
        if config.backend.name == "deepspeed":  # flat shards
            numel, in_blocks = -(-params.numel // shards), -(-params.in_blocks // shards)
        sizes.append(_bytes(config, copies * numel, copies * in_blocks))
    largest = sorted(sizes, reverse=True)[: -(-ranks // same_stage)]
    # tp does not divide all tensors, and shards of rows are rounded up.
    return min(sum(largest), checkpoint_bytes(config) or sum(largest))


def shared_memory_bytes(config: ResolvedConfig, ranks: int) -> int:
    """Return the bytes of checkpoints in the shared memory of the fullest host: `checkpoint.memory_every`.

    There are two files of each state: one is complete while the other one is written.
    """
    if not config.checkpoint.memory_every:
        return 0
    return 2 * host_bytes(config, ranks) * (2 if sends_copies(config, ranks) else 1)


def sends_copies(config: ResolvedConfig, ranks: int) -> bool:
    """True if each host sends its state to another one, as no other one holds the same tensors in any case."""
    in_stage = config.world_size // config.parallel.pp
    has_twin = in_stage >= 2 * max(ranks, _group(config))
    return config.world_size > ranks and not has_twin


def _group(config: ResolvedConfig) -> int:
    """Return the number of neighboring ranks of a stage that hold its whole state."""
    return config.parallel.tp * max(_shards(config), config.parallel.data_ep)


def _shards(config: ResolvedConfig) -> int:
    layout = config.parallel
    return layout.dp * layout.cp // layout.dp_replicate if config.zero.stage else 1


def _bytes(config: ResolvedConfig, numel: int, in_blocks: int) -> int:
    """Return the bytes of parameters, with `in_blocks` of them in matrices of blocks, and of their moments."""
    width = DTYPES[config.precision.params].bytes
    stored = 4.0 if rule_of(config.optimizer).quantized else moment_width(config.optimizer, width)
    width += average_width(config.optimizer, width)
    kept = [len(moments_of(config.optimizer, in_blocks=it)) for it in (True, False)]
    return int(numel * width + stored * (kept[0] * in_blocks + kept[1] * (numel - in_blocks)))
