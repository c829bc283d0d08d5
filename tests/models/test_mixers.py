"""Recurrent mixers: chunks as a loop over tokens computes them, and transformers' layers within documents."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nanoscale.common.errors import UserError
from nanoscale.config.schema import Config, Model
from nanoscale.models import hf_attention
from nanoscale.models.attention import CausalAttention, DocumentEnds
from nanoscale.models.hf_model import HFModel
from nanoscale.models.mixers.pieces import Division, Rows, convolve_rows, recur_rows
from nanoscale.models.mixers.recurrence import recur
from nanoscale.models.mixers.short_convolution import convolve
from nanoscale.parallel.context import positions
from tests.support import hf_models
from tests.support.jobs import make_config, packed_data, write_documents
from tests.support.ranks import run_ranks
from tests.support.reference import CURVE, assert_equal_curves
from tests.support.rows import exhaustive
from tests.train.test_foreign import curves_of

F64, CPU = torch.float64, torch.device("cpu")
SEQ = 21
ENDS = [[7, 8, 10, 21], [5, 21, 21, 21]]
"""Documents that end inside of chunks, of length 1, and shorter than a convolution."""


def numbers_of(ends: list[list[int]]) -> Tensor:
    positions = torch.arange(SEQ)
    return torch.stack(
        [torch.searchsorted(torch.tensor(row), positions, right=True) for row in ends]
    )


def inputs(kind: str, seq: int = SEQ) -> dict[str, Tensor | None]:
    torch.manual_seed(0)
    groups = 2 if kind == "mamba2" else 4
    channels = 3 if kind == "delta of channels" else 1
    given = {
        "q": torch.randn(2, seq, groups, 3, dtype=F64),
        "k": F.normalize(torch.randn(2, seq, groups, 3, dtype=F64), dim=-1),
        "v": torch.randn(2, seq, 4, 5, dtype=F64),
        # sums in a chunk are below -100, whose inverse factors would overflow in fp32
        "decay": -20 * torch.rand(2, seq, 4, channels, dtype=F64) ** 4,
        "state": torch.randn(2, 4, 3, 5, dtype=F64),
        "rate": 2 * torch.rand(2, seq, 4, dtype=F64),
    }
    return {
        name: x.requires_grad_() for name, x in given.items() if kind != "mamba2" or name != "rate"
    }


def by_token(
    q: Any, k: Any, v: Any, decay: Any, documents: Any, state: Any, rate: Any = None
) -> Any:
    outputs, ends = [], []
    repeats = v.shape[2] // k.shape[2]
    q, k = q.repeat_interleave(repeats, 2), k.repeat_interleave(repeats, 2)
    for row in range(len(v)):
        held, out = state[row], []
        for t in range(v.shape[1]):
            if t and documents[row, t] != documents[row, t - 1]:
                held = torch.zeros_like(held)
            held = held * decay[row, t].exp().unsqueeze(-1)
            written = v[row, t]
            if rate is not None:
                recalled = (held * k[row, t].unsqueeze(-1)).sum(-2)
                written = rate[row, t].unsqueeze(-1) * (written - recalled)
            held = held + k[row, t].unsqueeze(-1) * written.unsqueeze(-2)
            out.append((held * q[row, t].unsqueeze(-1)).sum(-2))
        outputs.append(torch.stack(out))
        ends.append(held)
    return torch.stack(outputs), torch.stack(ends)


def with_gradients(results: tuple[Tensor, Tensor], given: dict[str, Any]) -> list[Tensor]:
    weights = torch.linspace(-1, 2, results[0].numel(), dtype=F64).view_as(results[0])
    loss = (results[0] * weights).sum() + (results[1] ** 2).sum()
    return [*results, *torch.autograd.grad(loss, list(given.values()), retain_graph=True)]


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


KINDS = ("mamba2", "delta", "delta of channels")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 4, 8, 64])
def test_chunks_compute_the_recurrence_of_tokens(kind: str, chunk: int) -> None:
    given, documents = inputs(kind), numbers_of(ENDS)
    expected = with_gradients(by_token(**given, documents=documents), given)
    close(with_gradients(recur(**given, documents=documents, chunk=chunk), given), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [4, 9, 13])
def test_a_state_continues_in_the_next_half(kind: str, cut: int) -> None:
    given = inputs(kind)
    documents = numbers_of([[3, 18, 21, 21], [21, 21, 21, 21]])  # no cut is between two documents
    expected = with_gradients(recur(**given, documents=documents, chunk=4), given)
    state, outputs = given["state"], []
    for part in (slice(0, cut), slice(cut, SEQ)):
        now = {name: x[:, part] for name, x in given.items() if name != "state"}
        out, state = recur(**now, documents=documents[:, part], state=state, chunk=4)
        outputs.append(out)
    close(with_gradients((torch.cat(outputs, 1), state), given), expected)


def test_a_recurrence_keeps_no_more_than_its_inputs_for_the_backward_pass() -> None:
    kept, given = list[Tensor](), inputs("delta", 256)
    documents = torch.zeros(2, 256, dtype=torch.int64)
    names = ("q", "k", "v", "decay", "rate")
    tensors = q, k, v, decay, rate = [torch.as_tensor(given[it]).requires_grad_() for it in names]

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        recur_rows(q, k, v, decay, Rows(documents, torch.arange(256)), rate)
    assert sum(x.numel() for x in kept) <= sum(x.numel() for x in tensors)


def test_other_rows_and_documents_change_nothing() -> None:
    given, documents = inputs("delta"), numbers_of(ENDS)
    out, _ = recur(**given, documents=documents, chunk=8)
    (changed,) = torch.autograd.grad(out[0, 8:10].sum(), given["v"])
    changed = changed.abs().sum((2, 3)) != 0
    assert changed.nonzero().tolist() == [[0, 8], [0, 9]]


def test_strong_decays_are_exact_in_fp32() -> None:
    given = {name: x.detach() for name, x in inputs("delta of channels").items()}
    documents = numbers_of([[SEQ] * 4] * 2)
    expected, _ = recur(**given, documents=documents)
    out, _ = recur(**{name: x.float() for name, x in given.items()}, documents=documents)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_convolution_stays_in_its_document_and_hands_on_its_last_inputs(width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, SEQ, dtype=F64).requires_grad_()
    weight, bias = (torch.randn(3, *it, dtype=F64).requires_grad_() for it in ((width,), ()))
    documents = numbers_of(ENDS)
    given = {"x": x, "weight": weight, "bias": bias}

    def alone(piece: Tensor) -> Tensor:
        return F.conv1d(F.pad(piece, (width - 1, 0)), weight.unsqueeze(1), bias, groups=3)

    rows = [
        torch.cat([alone(row[:, a:b]) for a, b in pairwise([0, *ends]) if b > a], 1)
        for row, ends in zip(x, ENDS, strict=True)
    ]
    out, halo = convolve(x, weight, bias, documents)
    close(with_gradients((out, halo), given), with_gradients((torch.stack(rows), halo), given))
    first, handed = convolve(x[..., :9], weight, bias, documents[:, :9])
    second, last = convolve(x[..., 9:], weight, bias, documents[:, 9:], handed)
    close(
        with_gradients((torch.cat((first, second), 2), last), given),
        with_gradients((out, halo), given),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("method", "degree", "seq"), [("ring", 2, 24), ("ulysses", 3, 24), ("ring", 3, 12)]
)
def test_ranks_meet_the_states_and_inputs_before_their_pieces(
    kind: str, method: str, degree: int, seq: int
) -> None:
    """Documents begin and end with pieces, inside of them, and go through several; the last pieces are shorter
    than the convolution reaches."""
    given = inputs(kind, seq)
    del given["state"]
    given |= {"x": torch.randn(2, 5, seq, dtype=F64), "weight": torch.randn(5, 4, dtype=F64)}
    given = {name: x.detach().requires_grad_() for name, x in given.items()}
    starts = torch.tensor([[0, 4, 6, 12, 12], [0, 7, 8, 9, 11]])[:, :, None]
    documents = torch.where(starts <= torch.arange(seq), starts, 0).amax(1)
    *mixed, x, weight = given
    expected = (
        convolve(given[x], given[weight], None, documents)[0],
        recur(**{name: given[name] for name in mixed}, documents=documents, chunk=4)[0],
    )
    meeting, met = Barrier(degree, timeout=30), dict[int, Tensor]()
    count = 2 if method == "ring" else 1
    parts = [positions(method, seq // degree, it, degree, CPU) for it in range(degree)]
    numbers = [positions(method, count, it, degree, CPU).tolist() for it in range(degree)]

    def gather(local: list[int], pieces: Tensor) -> list[Tensor]:
        met.update(zip(local, pieces, strict=True))
        meeting.wait()
        everything = [met[number] for number in range(count * degree)]
        meeting.wait()
        return everything

    def run(rank: int) -> tuple[Tensor, Tensor]:
        local = numbers[rank]
        rows = Rows(documents[:, parts[rank]], parts[rank], Division(local, partial(gather, local)))
        convolved = convolve_rows(given[x][..., parts[rank]], given[weight], None, rows)
        q = {name: given[name][:, parts[rank]] for name in mixed}
        return convolved, recur_rows(**q, rows=rows)

    with ThreadPoolExecutor(degree) as pool:
        convolved, outputs = zip(*pool.map(run, range(degree)), strict=True)
    back = torch.cat(parts).argsort()
    found = torch.cat(convolved, 2)[..., back], torch.cat(outputs, 1)[:, back]
    close(with_gradients(found, given), with_gradients(expected, given))


COMMON = hf_models.COMMON | {"num_key_value_heads": 2, "head_dim": 8}
DELTA = COMMON | {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": DELTA,
    "falcon_h1": COMMON
    | {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 2}
    | {"mamba_d_ssm": 64},
    "lfm2": COMMON | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "kimi_linear": DELTA
    | {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8}
    | {"qk_rope_head_dim": 8, "v_head_dim": 8, "linear_num_heads": 4, "linear_head_dim": 8}
    | {"mlp_layer_types": ["dense", "dense"]},
    "mamba2": COMMON | {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2},
}


def made(family: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> HFModel:
    known = hf_models.FAMILIES
    monkeypatch.setitem(known, family, FAMILIES.get(family) or known[family])
    original = hf_models.save(family, folder)
    file = folder / "config.json"
    document = json.loads(file.read_text())
    if "time_step_limit" in document:  # written with an infinite number, which JSON does not have
        file.write_text(json.dumps(document | {"time_step_limit": [0.0, 1e30]}))
    model = HFModel(hf_models.shape_of(folder), real=True)
    model.hf.load_state_dict(original.state_dict())
    model.reset_buffers(torch.device("cpu"))
    return model


@pytest.mark.parametrize(
    "family",
    [*("qwen3_5_text", "falcon_h1", "lfm2"), exhaustive("kimi_linear"), exhaustive("mamba2")],
)
def test_packed_rows_train_as_separate_documents(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(family, tmp_path, monkeypatch)
    assert hf_attention.problem(model.hf) == ""
    tokens, targets = torch.randint(64, (2, 2, SEQ))
    with torch.no_grad():
        expected = model(tokens)
        model.attend_with(CausalAttention(Model()))
        torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-5)
    model = model.double()
    model.reset_buffers(torch.device("cpu"))

    def trained(rows: list[tuple[Tensor, Tensor, Any]]) -> list[Tensor]:
        model.zero_grad()
        losses = [
            F.cross_entropy(model(row, ends).flatten(0, 1), goal.flatten(), reduction="sum")
            for row, goal, ends in rows
        ]
        sum(losses).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return [torch.stack(losses).sum().detach(), *gradients]

    borders = [(i, a, b) for i, ends in enumerate(ENDS) for a, b in pairwise([0, *ends]) if b > a]
    with hf_models.without_rounding():
        alone = trained(
            [(tokens[i, None, a:b], targets[i, None, a:b], None) for i, a, b in borders]
        )
        packed = trained([(tokens, targets, DocumentEnds.of(np.array(ENDS, np.int32)))])
    torch.testing.assert_close(packed, alone, rtol=1e-12, atol=1e-12)


def test_code_that_hands_no_documents_to_its_layers_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made("lfm2", tmp_path, monkeypatch)
    model.attend_with(CausalAttention(Model()))
    with pytest.raises(UserError, match="does not hand documents to Lfm2ShortConv"):
        model.hf.model.layers[0].conv(torch.zeros(1, 4, 32))


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("falcon_mamba", {"state_size": 8}, "backbone.layers.0.mixer passes a state"),
        ("minimax", {"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ("rwkv", {"attention_hidden_size": 32}, "transformers' functions"),
    ],
)
def test_other_rules_are_named(family: str, changes: Any, reason: str) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**COMMON | changes))
    assert reason in hf_attention.problem(model)


LAYOUTS: list[dict[str, Any]] = [
    {"parallel": {"cp": 2}},
    {"parallel": {"cp": 2, "cp_method": "ulysses"}},
    {"parallel": {"cp": 2, "activation_checkpointing": "full"}, "stage": 3},
    {"parallel": {"pp": 2, "activation_checkpointing": "full"}},
    {"parallel": {"tp": 2, "sequence_parallel": False}},
    {"parallel": {"pp": 2, "cp": 2}},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        ("falcon_h1", LAYOUTS[:4]),
        exhaustive("qwen3_5_text", LAYOUTS),
        exhaustive("nemotron_h", LAYOUTS),
        exhaustive("kimi_linear", LAYOUTS),
        exhaustive("lfm2", LAYOUTS[:3]),
    ],
)
def test_layouts_train_what_one_process_trains(
    family: str, layouts: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(family, tmp_path / "model", monkeypatch)
    write_documents(tmp_path)
    more = {"model": model.shape, "data": packed_data(tmp_path)}
    expected = run_ranks(exact_curves, 1, [make_config(tmp_path, **more)])[0][0]
    for ranks in (2, 4):
        configs = [make_config(tmp_path, **more, **layout) for layout in layouts]
        configs = [config for config in configs if config.world_size == ranks]
        assert configs or ranks == 4
        for found in run_ranks(exact_curves, ranks, configs)[0]:
            assert_equal_curves(found, expected, "fp64")


def exact_curves(rank: int, configs: list[Config]) -> list[CURVE]:
    with hf_models.without_rounding():
        return curves_of(rank, configs)
