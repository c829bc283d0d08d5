"""Optimizers on plain and on sharded parameters, and their state when saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from nanoscale.backends import gradients
from nanoscale.backends.adamw import LocalAdamW, update_averages
from nanoscale.backends.native import NativeEngine
from nanoscale.backends.optimizer import (
    SGD,
    Lion,
    NamedParameters,
    clip_in_update,
    dequantize,
    fill_own_state,
    fill_state,
    is_quantized,
    load_state,
    make_optimizer,
    named_state,
    set_lr,
)
from nanoscale.checkpoint.flat import FlatShard
from nanoscale.common.errors import UserError
from nanoscale.config.optimizers import AVERAGE
from nanoscale.config.schema import Optimizer as OptimizerConfig
from nanoscale.data.batch import Batch
from nanoscale.parallel import process_group
from nanoscale.rehearse.played.live_memory import LiveMemory
from tests.support.jobs import make_config
from tests.support.ranks import run_ranks

SIZES = {"wide": (128, 256), "uneven": (67, 48), "vector": (96,)}
NAMES = ["adamw", "adamw8bit", "sgd"]


def config(name: str) -> OptimizerConfig:
    return OptimizerConfig(name=name, lr=1e-2, weight_decay=0.3)  # type: ignore[arg-type]


def draw(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=generator) for name, size in SIZES.items()}


def draw_gradients(step: int) -> dict[str, Tensor]:
    """Draw the gradients of a step; the first columns are 0, as for an input that is always 0."""
    first = torch.tensor(0)
    return {name: value.index_fill(-1, first, 0.0) for name, value in draw(step + 1).items()}


def make_parameters(mesh: Any = None, placements: Any = None) -> NamedParameters:
    return [(name, nn.Parameter(shard(v, mesh, placements))) for name, v in draw(0).items()]


def shard(value: Tensor, mesh: Any, placements: Any) -> Tensor:
    if mesh is None:
        return value
    usable = [p if not p.is_shard() or p.dim < value.ndim else Replicate() for p in placements]
    return distribute_tensor(value, mesh, usable, src_data_rank=None)


def train(parameters: NamedParameters, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for (_, parameter), gradient in zip(parameters, draw_gradients(step).values(), strict=True):
            if isinstance(parameter, DTensor):
                gradient = shard(gradient, parameter.device_mesh, parameter.placements)
            parameter.grad = gradient.to(parameter.dtype)
        set_lr(optimizer, 1e-2 / (step + 1))
        optimizer.step()


def whole(tensors: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return copies of whole tensors; for 8-bit moments, of this rank's shard."""
    return {name: numbers(value).detach().clone() for name, value in tensors}


def numbers(value: Tensor) -> Tensor:
    if isinstance(value, FlatShard):
        return value.local
    return value.full_tensor() if isinstance(value, DTensor) else value


def in_fp32(moment: Any) -> Tensor:
    return dequantize(moment.codes, moment.scale, moment.qmap, signed=moment.signed).view(
        moment.shape
    )


def trained(name: str, steps: int, mesh: Any = None, placements: Any = None) -> Any:
    parameters = make_parameters(mesh, placements)
    optimizer = make_optimizer(parameters, config(name))
    train(parameters, optimizer, range(steps))
    return parameters, optimizer


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """True if they are equal bit for bit, with the same names."""
    assert first.keys() == second.keys() and first
    return all(torch.equal(value, second[name]) for name, value in first.items())


def test_adamw_equals_its_equations() -> None:
    """In fp64, with a rate that changes, and no decay of vectors."""
    parameters = [(name, nn.Parameter(value.double())) for name, value in draw(0).items()]
    train(parameters, make_optimizer(parameters, config("adamw")), range(3))
    for name, parameter in parameters:
        p = draw(0)[name].double()
        m = v = torch.zeros_like(p)
        for step in range(3):
            g, lr = draw_gradients(step)[name].double(), 1e-2 / (step + 1)
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
            decay = 0.3 if p.ndim > 1 else 0.0
            root = (v / (1 - 0.95 ** (step + 1))).sqrt()
            p = p - lr * (decay * p + m / (1 - 0.9 ** (step + 1)) / (root + 1e-8))
        torch.testing.assert_close(parameter.detach(), p, rtol=1e-9, atol=1e-12)


def test_8_bits_follow_32() -> None:
    exact, near = (whole(trained(name, steps=5)[0]) for name in ("adamw", "adamw8bit"))
    assert not equal(exact, near)
    for name, value in exact.items():
        moved = (value - draw(0)[name]).norm()
        assert (value - near[name]).norm() < 0.1 * moved


def test_8_bit_moments_take_a_quarter() -> None:
    """A code for each element, a scale for each 256, and 256 levels; small or ragged tensors stay."""
    parameters, optimizer = trained("adamw8bit", steps=1)
    weights = dict(parameters)
    states = {name: optimizer.state[weights[name]] for name in SIZES}
    assert {name: is_quantized(state["exp_avg"]) for name, state in states.items()} == {
        "wide": True,
        "uneven": False,
        "vector": False,
    }
    parts = states["wide"]["exp_avg"]
    size = sum(getattr(parts, part).nbytes for part in ("codes", "scale", "qmap"))
    assert size == 128 * 256 * (1 + 4 / 256) + 256 * 4


@pytest.mark.parametrize("signed", [True, False])
def test_quantizing_again_gives_the_same_bits(signed: bool) -> None:
    """This holds for every code in a block, for magnitudes of all kinds, and for negative largest values."""
    from torchao.optim.subclass_8bit import OptimState8bit

    generator = torch.Generator().manual_seed(2)
    scales = torch.rand(2000, 1, generator=generator).exp() * 10.0 ** torch.randint(
        -14, 8, (2000, 1), generator=generator
    )
    values = torch.randn(2000, 256, generator=generator) ** 3 * scales
    values[0] = 0
    values[1] = torch.linspace(-1, 1, 256)
    values[2] = -(values[1] ** 3) - 1e-3
    values = values if signed else values.square()
    once = OptimState8bit.zeros((2000, 256), signed=signed)
    once.copy_(values)
    assert not signed or (values.amin(1) == -values.abs().amax(1)).sum() > 900
    again = OptimState8bit.zeros((2000, 256), signed=signed)
    again.copy_(in_fp32(once))
    assert torch.equal(once.codes, again.codes) and torch.equal(once.scale, again.scale)
    plain = OptimState8bit.zeros((2000, 256), signed=signed)
    plain.copy_(once.dequantize())
    assert torch.equal(once.scale, plain.scale) != signed, "dequantize() would not be needed"
    error = (in_fp32(once) - values).abs().amax(1) / values.abs().amax(1).clip(1e-12)
    assert error.max() < 0.02


def save_and_load(state: dict[str, Tensor], into: dict[str, Tensor], folder: Path) -> None:
    alone = not torch.distributed.is_initialized()
    dcp.save(dict(state), checkpoint_id=folder, no_dist=alone)
    dcp.load(into, checkpoint_id=folder, no_dist=alone)


def resume_exactly(name: str, folder: Path, mesh: Any = None, placements: Any = None) -> bool:
    """Train two steps, save, train two steps; compare with four."""
    parameters, optimizer = trained(name, 2, mesh, placements)
    fresh = make_parameters(mesh, placements)
    resumed = make_optimizer(fresh, config(name))
    fill_state(resumed)
    moments = named_state(fresh, resumed, to_load=True)
    save_and_load(
        {**dict(parameters), **named_state(parameters, optimizer)},
        {**dict(fresh), **moments},
        folder,
    )
    load_state(fresh, resumed, moments)
    before, after = whole([*moments.items()]), whole([*named_state(fresh, resumed).items()])
    assert equal(before, after)
    assert all((v >= 0).all() for key, v in before.items() if key.endswith("exp_avg_sq"))
    train(parameters, optimizer, range(2, 4))
    train(fresh, resumed, range(2, 4))
    return equal(whole(parameters), whole(fresh)) and equal(
        whole([*named_state(parameters, optimizer).items()]),
        whole([*named_state(fresh, resumed).items()]),
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", NAMES)
def test_resumed_optimizer_goes_on_exactly(tmp_path: Path, name: str) -> None:
    assert resume_exactly(name, tmp_path)


def in_shards(rank: int, folder: Path) -> dict[str, Any]:
    process_group.join(4, torch.device("cpu"), 120.0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layouts = {"rows": (Replicate(), Shard(0)), "2d": (Shard(0), Shard(1)), "strided": None}
    found: dict[str, Any] = {}
    for layout, placements in layouts.items():
        placements = placements or (Shard(0), Shard(0))
        for name in NAMES:
            path = folder / f"{layout}-{name}"
            exact = resume_exactly(name, path, mesh, placements)
            parameters, optimizer = trained(name, 2, mesh, placements)
            local = optimizer.state[parameters[0][1]]
            local = local.get("exp_avg", local.get("momentum_buffer")).to_local()
            weights = {key: value.numpy() for key, value in whole(parameters).items()}
            found[f"{layout} {name}"] = (exact, tuple(local.shape), weights)
    process_group.leave()
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_sharded_parameters(tmp_path: Path) -> None:
    """On a 2-D mesh: the same update as whole, shards of moments, exact resume, and any layout from any."""
    everyone = run_ranks(in_shards, 4, tmp_path)
    for key, (exact, shape, parameters) in everyone[0].items():
        layout, name = key.split()
        assert exact, key
        assert shape == {"rows": (64, 256), "2d": (64, 128), "strided": (32, 256)}[layout]
        alone = whole(trained(name, 2)[0])
        if name != "adamw8bit":
            for weight in SIZES:
                np.testing.assert_allclose(parameters[weight], alone[weight], rtol=0, atol=1e-6)
        # The checkpoint of four ranks in one process.
        fresh = make_parameters()
        optimizer = make_optimizer(fresh, config(name))
        fill_state(optimizer)
        moments = named_state(fresh, optimizer, to_load=True)
        dcp.load(
            {**dict(fresh), **moments}, checkpoint_id=tmp_path / key.replace(" ", "-"), no_dist=True
        )
        load_state(fresh, optimizer, moments)
        reference = trained(name, 2)
        for moment, value in named_state(*reference).items():
            loaded, value = numbers(named_state(fresh, optimizer)[moment]), numbers(value)
            assert (loaded - value).norm() <= 0.02 * value.norm(), moment


def test_saving_8_bit_moments_never_widens_all_of_them() -> None:
    """All of them in fp32 would take four times their memory, on the device that trains."""
    sizes = [(f"{number}", (256, 256)) for number in range(16)]
    parameters = [(name, nn.Parameter(torch.randn(size))) for name, size in sizes]
    optimizer = make_optimizer(parameters, config("adamw8bit"))
    fill_state(optimizer)
    with LiveMemory() as memory:
        state = named_state(parameters, optimizer)
        held = memory.peak
        for moment in state.values():
            numbers(moment)  # a writer has it for as long as it takes to copy it to the host
    one = 256 * 256 * 4
    assert held < 32 * one / 3, "codes and scales"
    assert one < memory.peak - held <= 4 * one


@pytest.mark.parametrize("limit", [0.5, 1e3], ids=["clipped", "short enough"])
def test_clipping_in_the_update_is_clipping_before_it(limit: float) -> None:
    apart, joined = make_parameters(), make_parameters()
    optimizers = [make_optimizer(named, config("adamw")) for named in (apart, joined)]
    for step in range(3):
        for named in (apart, joined):
            for (_, parameter), gradient in zip(named, draw_gradients(step).values(), strict=True):
                parameter.grad = gradient.clone()
        before = [p.grad for _, p in apart if p.grad is not None]
        norm = gradients.local_norm(before)
        gradients.clip(before, norm, limit)
        assert clip_in_update(optimizers[1], norm, limit)
        untouched = [p.grad for _, p in joined if p.grad is not None]
        assert torch.equal(gradients.local_norm(untouched), norm), "no pass of its own"
        for optimizer in optimizers:
            optimizer.step()
    for (name, one), (_, other) in zip(apart, joined, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-7, msg=name)


def test_an_update_that_cannot_clip_says_so() -> None:
    wide = [(name, nn.Parameter(value.double())) for name, value in draw(0).items()]
    assert not clip_in_update(make_optimizer(wide, config("adamw")), torch.ones(()).double(), 1.0)
    for name in ("sgd", "adamw8bit"):
        assert not clip_in_update(
            make_optimizer(make_parameters(), config(name)), torch.ones(()), 1.0
        )


class Counting(torch.optim.Optimizer):
    """A user's optimizer that counts its steps in its groups, and keeps a state of None."""

    def __init__(self, groups: list[dict[str, Any]], **more: Any) -> None:
        super().__init__(groups, {"k": 0, "total": torch.tensor(0.0), "eps": 1e-3} | more)
        self.calls = 0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            group["total"] += group["lr"]
            for parameter in group["params"]:
                self.state[parameter]["buffer"] = None


def test_numbers_in_groups_of_a_user_s_optimizer_are_kept() -> None:
    parameters = make_parameters()

    def build(**more: Any) -> torch.optim.Optimizer:
        return make_optimizer(parameters, config("hooks"), build=lambda it: Counting(it, **more))

    optimizer = build()
    assert {group["k"] for group in optimizer.param_groups} == {0}, "the trial does not count"
    train(parameters, optimizer, range(3))
    resumed = build(eps=1e-4)
    fill_own_state(resumed)
    load_state(parameters, resumed, named_state(parameters, optimizer))
    for group, other in zip(resumed.param_groups, optimizer.param_groups, strict=True):
        assert group["k"] == other["k"] == 3 and type(group["k"]) is int
        assert group["total"] == other["total"] != 0
        assert group["eps"] == 1e-4, "a setting is the present one"


def test_what_a_user_s_optimizer_keeps_elsewhere_is_refused() -> None:
    class Elsewhere(Counting):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            self.calls += 1

    class Late(Counting):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            self.param_groups[0]["late"] = 1

    for kind, key in ((Elsewhere, "calls"), (Late, "late")):
        with pytest.raises(UserError, match=f"changes {key}: a checkpoint has"):
            make_optimizer(make_parameters(), config("hooks"), build=kind)


def test_an_update_of_muon_runs_a_hook_once() -> None:
    """PyTorch wraps the `step` of a class when its first object is made."""
    LocalAdamW([nn.Parameter(torch.zeros(2))])
    parameters = [
        ("layers.0.w", nn.Parameter(torch.ones(2, 2))),
        ("b", nn.Parameter(torch.ones(2))),
    ]
    optimizer, calls = make_optimizer(parameters, config("muon")), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for _, parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert calls == ["before", "after"]
    assert all(not torch.equal(p, torch.ones_like(p)) for _, p in parameters)


def test_the_engine_clips_in_a_pass_of_its_own_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = NativeEngine(make_config(tmp_path, precision="fp32"), torch.device("cpu"))
    clipped = []
    monkeypatch.setattr(gradients, "clip", lambda *given: clipped.append(given))
    config, seq = engine.config, engine.config.train.seq_len
    rows = (
        np.arange(config.train.micro_batch * (seq + 1)).reshape(config.train.micro_batch, -1) % 60
    )
    result = engine.train_step([Batch.of_rows(rows)] * config.accumulation, 1e-2)
    assert result.grad_norm > 0.5 and len(clipped) == 1


@pytest.mark.parametrize(
    "optimizer_of",
    [
        lambda groups: SGD(groups, lr=0.1, momentum=0.9),
        lambda groups: SGD(groups, lr=0.1, momentum=0.0),
        lambda groups: Lion(groups, lr=0.1, betas=(0.9, 0.99)),
    ],
)
def test_a_moving_average_is_of_the_weights_whatever_the_moments(optimizer_of):
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer, average = optimizer_of([{"params": [parameter]}]), None
    for step in range(1, 5):
        parameter.grad = torch.full_like(parameter, step)
        optimizer.step()
        update_averages(optimizer, 0.5)
        weights = parameter.detach().clone()
        average = weights if average is None else 0.5 * average + 0.5 * weights
    assert torch.allclose(optimizer.state[parameter][AVERAGE], average)
