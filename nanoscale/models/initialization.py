"""Initial weights that do not depend on the layout.

Every parameter is drawn whole from a generator of its own, seeded by the run's seed and the parameter's name,
and then cut to the rank's shard. No seed checkpoint and no communication is needed, and a rank holds at most
one whole parameter beyond its shards.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from nanoscale.config.schema import Model

RESIDUAL_OUTPUTS = (
    "attention.wo.weight",
    "mlp.down.weight",
    "mlp.shared.down.weight",
    "mlp.experts.down",
)
ADAPTER = ".adapter."
"""A part of the names of the adapters of `models.lora`."""


Draw = Callable[[str, torch.Size], Tensor]
"""A function from a parameter's name and size to the whole parameter, in fp32."""


@torch.no_grad()
def initialize(model: nn.Module, shape: Model, seed: int) -> None:
    """Fill every parameter of a materialized model, sharded (DTensor) or not."""
    device = next(model.parameters()).device
    fill(model, partial(draw, shape=shape, seed=seed, device=device))


@torch.no_grad()
def fill(model: nn.Module, initializer: Draw, adapters_only: bool = False) -> None:
    """Fill every parameter with this rank's shard of the drawn one."""
    for name, parameter in model.named_parameters():
        if adapters_only and ADAPTER not in name:
            continue
        whole = initializer(name, torch.Size(parameter.shape)).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            parameter.to_local().copy_(local_shard(whole, parameter))
        else:
            parameter.copy_(whole)


def local_shard(whole: Tensor, like: DTensor) -> Tensor:
    """Return this rank's shard of a whole tensor, sharded like `like`."""
    offsets, sizes = local_region(like)
    return whole[
        tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    ]


def local_region(
    like: DTensor, coordinate: Sequence[int] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and sizes of a rank's shard in the whole tensor, without communication.

    The axes of a mesh shard from the first to the last, except strided ones: FSDP shards what remains after
    tensor parallelism, the axis after it.

    Args:
        coordinate: the rank's coordinate in the mesh; None: this rank.
    """
    coordinate = coordinate or like.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is in the mesh"
    offsets, sizes = [0] * like.ndim, list(like.shape)
    axes = range(like.device_mesh.ndim)
    strided = [axis for axis in axes if isinstance(like.placements[axis], _StridedShard)]
    for axis in [axis for axis in axes if axis not in strided] + strided[::-1]:
        placement = like.placements[axis]
        if isinstance(placement, Shard | _StridedShard):
            rank, ranks, dim = coordinate[axis], like.device_mesh.size(axis), placement.dim
            chunk = -(-sizes[dim] // ranks)  # like torch.chunk: the last ones may be empty
            start = min(rank * chunk, sizes[dim])
            offsets[dim] += start
            sizes[dim] = min(chunk, sizes[dim] - start)
    return tuple(offsets), tuple(sizes)


def draw(name: str, size: torch.Size, shape: Model, seed: int, device: torch.device) -> Tensor:
    """Draw one whole parameter, in fp32, as a function of its name, size and the seed alone.

    Normal with `init_std`; projections back into the residual stream are scaled by 1/√(2·layers) (Radford et
    al. 2019, GPT-2, section 2.3). In an adapter, B is 0, and A has the variance 1/(3·in) of the authors' code
    (Hu et al. 2021, arXiv:2106.09685, whose section 4.1 specifies normal numbers).
    """
    if name.endswith(("bias", f"{ADAPTER}b")):
        return torch.zeros(size, device=device)
    if len(size) == 1 and not name.endswith("sinks"):
        return torch.full(size, 0.0 if shape.norm == "rmsnorm1p" else 1.0, device=device)
    std = shape.init_std
    if name.endswith(RESIDUAL_OUTPUTS):
        std /= math.sqrt(2 * shape.layers)
    if ADAPTER in name:
        std = 1 / math.sqrt(3 * size[1])
    generator = torch.Generator(device).manual_seed(parameter_seed(seed, name))
    return torch.empty(size, device=device).normal_(0, std, generator=generator)


def parameter_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
