"""`model=hf` in every layout that it has, against transformers' model in a plain loop; resumed, exported."""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from nanoscale.backends.gradients import local_tensor
from nanoscale.checkpoint.hf import load_any_model
from nanoscale.checkpoint.hf.export import export
from nanoscale.checkpoint.hf.load_any_model import judge
from nanoscale.checkpoint.store import find_checkpoint
from nanoscale.config.hf.any_model import sizes
from nanoscale.config.schema import Backend, Config, Data, Lora, Model, Optimizer, Train
from nanoscale.config.translation.miniature import small_hf_model
from nanoscale.data.batch import IGNORED
from nanoscale.models.attention import CausalAttention, DocumentEnds
from nanoscale.models.distillation import Distillation
from nanoscale.models.hf_model import HFModel, RandomWeights, blocks, build
from nanoscale.models.initialization import fill
from nanoscale.models.lora import linear_layers
from nanoscale.models.preferences import Objective
from nanoscale.parallel.tensor import apply_plan
from nanoscale.runs.directory import RunDirectory
from nanoscale.train import job
from tests.checkpoint.test_export import save_state
from tests.support import hf_families, hf_models
from tests.support.jobs import (
    StopBefore,
    assert_same_training,
    assert_same_weights,
    curve,
    final_weights,
    make_config,
    make_run,
    never_stopped,
    packed_data,
    saving_config,
    train,
    write_documents,
    write_tokens,
)
from tests.support.layouts import record_all
from tests.support.ranks import run_ranks
from tests.support.reference import CURVE, assert_equal_curves
from tests.support.rows import exhaustive
from tests.support.wrappers import WRAPPERS, assert_rest_is_equal, save_wrapper, wrapper_from

DEEPSPEED = {"backend": Backend("deepspeed"), "precision": "fp32"}
LAYOUTS: list[dict[str, Any]] = [
    {"stage": 2},
    {"stage": 3, "parallel": {"activation_checkpointing": "full"}},
    {"stage": 0, "parallel": {"activation_checkpointing": "selective", "offload_activations": True}},
    {"stage": 3, **DEEPSPEED},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_neox", exhaustive("falcon"), exhaustive("minimax_m2")])
def test_every_layout_trains_what_transformers_trains(tmp_path: Path, family: str) -> None:
    write_tokens(tmp_path)
    hf_models.save(family, tmp_path / family)
    shape = hf_models.shape_of(tmp_path / family)
    configs = [make_config(tmp_path, dp=2, model=shape, **layout) for layout in LAYOUTS]
    curves = run_ranks(curves_of, 2, configs)[0]
    expected = {
        name: hf_models.plain_loop(tmp_path / family, dtype)
        for name, dtype in (("fp64", torch.float64), ("fp32", torch.float32))
    }
    for config, found in zip(configs, curves, strict=True):
        assert_equal_curves(found, expected[config.precision.params], config.precision.params)


@pytest.mark.parametrize(
    ("family", "scale"),
    [("qwen3", 1), ("cohere", 0.0625), ("gpt2", 1), ("gemma2", None), ("bart", 1)],
)
def test_the_loss_in_chunks_is_the_loss_of_all_logits(
    family: str, scale: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tied or not, scaled or not, for every kind of loss; a softcap keeps all logits."""
    hf_models.save(family, tmp_path / family)
    model = HFModel(hf_models.shape_of(tmp_path / family), real=True).double()
    head = model.head
    assert (head and head.scale) == scale
    if head is None:
        return
    monkeypatch.setattr("nanoscale.models.head.LOGITS_AT_ONCE", 64 * 7)
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    tokens, targets = torch.randint(64, (2, 4, 9))
    targets[1, 2:] = IGNORED
    teacher = torch.stack([torch.randn(4, 9, 3).double(), torch.randint(64, (4, 9, 3))], -1)
    settings: list[tuple[str, Any, Tensor | None]] = [
        ("objective", None, None),
        (
            "objective",
            Objective(Train(objective="dpo", preference_beta=0.3)),
            torch.randn(4, 2).double(),
        ),
        ("distillation", Distillation(0.7, 2.0), teacher),
        ("token_losses", lambda logits, its: logits.square().sum(1) * (its + 1), None),
    ]

    def loss_and_gradients(chunked: bool, references: Tensor | None) -> list[Tensor]:
        object.__setattr__(model, "head", head if chunked else None)
        head.batch = None
        model.zero_grad()
        loss = model(
            tokens, None, targets, None if references is None else references.view(torch.int64)
        )
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    for name, value, references in settings:
        for owner in (model, head):
            setattr(owner, name, value)
        chunked, whole = (loss_and_gradients(each, references) for each in (True, False))
        torch.testing.assert_close(chunked, whole, rtol=1e-12, atol=1e-12)
        for owner in (model, head):
            setattr(owner, name, None)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", exhaustive("gpt_neox"), exhaustive("qwen3")])
def test_plans_of_transformers_divide_layers(tmp_path: Path, family: str) -> None:
    """One has experts, with random weights; one has biases, the last tied embeddings and norms of heads.

    They are resumed without tp too.
    """
    long = tmp_path / "long"
    long.mkdir()
    write_tokens(tmp_path)
    write_tokens(long, samples=100)
    hf_models.save(family, tmp_path / family)
    shape = hf_models.shape_of(tmp_path / family, loaded=family != "mixtral")
    divided = {"tp": 2, "sequence_parallel": False}
    (expected,) = run_ranks(curves_of, 1, [make_config(tmp_path, model=shape)])[0]
    if shape.init_from:
        expected = hf_models.plain_loop(tmp_path / family, torch.float64)
    recomputed = divided | {"activation_checkpointing": "full"}
    for dp, stage, parallel in ((1, 0, divided), (2, 3, recomputed)):
        config = make_config(tmp_path, dp=dp, stage=stage, model=shape, parallel=parallel)
        (found,) = run_ranks(curves_of, 2 * dp, [config])[0]
        assert_equal_curves(found, expected, "fp64")
    config, alone = (
        saving_config(long, model=shape, parallel=divided),
        saving_config(long, model=shape),
    )
    run = make_run(config)
    train(run, config, StopBefore(4))
    train(run, alone)
    assert_same_training(run, never_stopped(long, alone))


def test_every_kind_of_plan_has_the_gradients_of_one_process() -> None:
    """Experts, sinks, keys that all heads share, norms of heads, activations with parameters, and parameters
    that another module's code reads or a parent class uses, and recurrent layers; some with documents."""
    for family, (differences, share) in run_ranks(tp_differences, 2, hf_models.DIVIDED)[0].items():
        assert differences and max(differences.values()) < 1e-12, (family, differences)
        assert share < 0.8, family


def tp_differences(
    rank: int, families: dict[str, Any]
) -> dict[str, tuple[dict[str, float], float]]:
    """Return the largest differences of gradients, relative to the largest gradient of a parameter, and this
    rank's share of the parameters, of models divided over two ranks."""
    mesh, cpu = init_device_mesh("cpu", (2,)), torch.device("cpu")
    results = {}
    for family, settings in families.items():
        document = hf_models.config_of(family, settings)
        shape = Model(source="hf", name=family, hf_config=document, **sizes(document))
        models = whole, divided = HFModel(shape), HFModel(shape)
        apply_plan(divided, mesh)
        torch.manual_seed(0)
        tokens, targets = torch.randint(64, (2, 2, 13))
        documents = None
        if family in ("qwen3", "granite_swa", "olmo_hybrid", "nemotron_h"):
            documents = DocumentEnds.of(np.array([[5, 9, 13], [4, 11, 13]]))
            for model in models:
                model.attend_with(CausalAttention(shape))
        weights = {
            name: 0.2 * torch.randn(value.shape).double() + (value.ndim == 1)
            for name, value in whole.named_parameters()
        }
        for model in models:
            model.double().materialize(cpu)
            fill(model, lambda name, _, weights=weights: weights[name])  # type: ignore[misc]
            with hf_models.without_rounding():
                model(tokens, documents, targets).backward()
        found = {name: value.grad.full_tensor() for name, value in divided.named_parameters()}
        differences = {
            name: ((found[name] - value.grad).abs().max() / value.grad.abs().max()).item()
            for name, value in whole.named_parameters()
        }
        sums = [sum(local_tensor(it).numel() for it in model.parameters()) for model in models]
        results[family] = differences, sums[1] / sums[0]
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["gpt2", exhaustive("gpt_oss"), exhaustive("gpt_neox"), exhaustive("falcon")]
)
def test_stages_train_what_the_whole_model_trains(tmp_path: Path, family: str) -> None:
    """Tied ends and an embedding of positions; documents and divided sequences in the stages of a V."""
    long = tmp_path / "long"
    long.mkdir()
    write_documents(tmp_path)
    write_tokens(long, samples=100)
    hf_models.save(
        family, tmp_path / family, **{hf_models.DEPTH.get(family, "num_hidden_layers"): 4}
    )
    shape = hf_models.shape_of(tmp_path / family)
    packed = (
        {"model": shape, "data": packed_data(tmp_path)} if family != "falcon" else {"model": shape}
    )
    (expected,) = run_ranks(curves_of, 1, [make_config(tmp_path, **packed)])[0]
    schedule = (
        "interleaved-1f1b" if shape.tie_embeddings else "zbv"
    )  # both ends of a V are on one rank
    layouts = [{"pp": 2, "schedule": "1f1b"}, {"pp": 2, "schedule": schedule, "virtual_stages": 2}]
    configs = [make_config(tmp_path, **packed, parallel=it) for it in layouts]
    for found in run_ranks(curves_of, 2, configs)[0]:
        assert_equal_curves(found, expected, "fp64")
    config = saving_config(long, model=shape, parallel=layouts[0])
    run = make_run(config)
    train(run, config, StopBefore(4))
    alone = saving_config(long, model=shape)
    train(run, alone)
    assert_same_training(run, never_stopped(long, alone))


@pytest.mark.slow
@pytest.mark.parametrize("lora", [Lora(), Lora(rank=3, dora=True)])
def test_axes_meet(tmp_path: Path, lora: Lora) -> None:
    """Stages, shards of layers and divided sequences with documents, two by two; also of adapters alone."""
    write_documents(tmp_path)
    hf_models.save("qwen3", tmp_path / "qwen3", num_hidden_layers=4)
    more = {"model": hf_models.shape_of(tmp_path / "qwen3"), "data": packed_data(tmp_path)}
    more["lora"] = lora
    (expected,) = run_ranks(curves_of, 1, [make_config(tmp_path, **more)])[0]
    rows: list[tuple[int, dict[str, Any]]] = [
        (1, {"pp": 2, "cp": 2, "activation_checkpointing": "full"}),
        *([(0, {"pp": 2, "tp": 2, "sequence_parallel": False})] if not lora.rank else []),
        (3, {"cp": 2, "tp": 1 if lora.rank else 2, "sequence_parallel": False}),
    ]
    configs = [make_config(tmp_path, stage=stage, parallel=it, **more) for stage, it in rows]
    for config in configs:
        (found,) = run_ranks(curves_of, config.world_size, [config])[0]
        assert_equal_curves(found, expected, "fp64")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "bound"),
    [("mixtral", "fp64"), exhaustive("gpt_oss", "fp64"), exhaustive("glm4_moe", "fp32")],
)
def test_ranks_with_other_experts_train_the_same_model(
    tmp_path: Path, family: str, bound: str
) -> None:
    """Experts, also with biases, or behind a dense block with a router in fp32; beside every other axis."""
    write_documents(tmp_path)
    hf_models.save(family, tmp_path / family, num_hidden_layers=4)
    more = {"model": hf_models.shape_of(tmp_path / family), "data": packed_data(tmp_path)}
    (expected,) = run_ranks(curves_of, 1, [make_config(tmp_path, **more)])[0]
    rows: list[tuple[int, int, int, dict[str, Any]]] = [
        (2, 0, 2, {"ep": 2}),
        (2, 3, 2, {"ep": 2, "activation_checkpointing": "full"}),
        (4, 3, 4, {"ep": 2, "dp_replicate": 2}),
        (4, 2, 2, {"ep": 2, "cp": 2}),
        (4, 1, 2, {"ep": 2, "pp": 2}),
    ]
    for ranks, stage, dp, parallel in rows:
        config = make_config(tmp_path, dp=dp, stage=stage, parallel=parallel, **more)
        (found,) = run_ranks(curves_of, ranks, [config])[0]
        assert_equal_curves(found, expected, bound)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "schedule-free"])
def test_other_optimizers_are_equal_in_every_layout(name: Any, tmp_path: Path) -> None:
    write_tokens(tmp_path)
    hf_models.save("gpt_neox", tmp_path / "gpt_neox")
    shape = hf_models.shape_of(tmp_path / "gpt_neox")
    chosen = Optimizer(name=name, lr=1e-2, clip_norm=0.5)
    configs = [
        make_config(tmp_path, dp=2, stage=stage, model=shape, optimizer=chosen) for stage in (0, 3)
    ]
    whole, divided = run_ranks(curves_of, 2, configs)[0]
    assert_equal_curves(divided, whole, "fp64")


def curves_of(rank: int, configs: list[Config]) -> list[CURVE]:
    """Return the curves of one layout after another, with the weights of the folder."""
    return [
        [
            (record["loss"], record["grad_norm"], record["lr"], record["tokens"])
            for record in record_all(rank, config, begun_engine)
        ]
        for config in configs
    ]


def begun_engine(config: Config, device: torch.device) -> Any:
    engine = job.make_engine(config, device)
    job.load_initial_weights(engine, config, lambda *_: None)
    return engine


@pytest.mark.slow
def test_resumed_here_and_elsewhere_and_exported(tmp_path: Path) -> None:
    """Random weights: stage 3, stopped; resumed unchanged, and by DeepSpeed in one process."""
    from transformers import AutoModelForCausalLM

    write_tokens(tmp_path, samples=100)
    hf_models.save("falcon", tmp_path / "falcon")
    shape = hf_models.shape_of(tmp_path / "falcon", loaded=False)
    config = saving_config(tmp_path, model=shape, dp=2, stage=3, precision="fp32")
    whole = never_stopped(tmp_path, config)
    run = make_run(config)
    train(run, config, StopBefore(5))
    other = RunDirectory(shutil.copytree(run.path, tmp_path / "other", symlinks=True))
    train(run, config)
    assert curve(run) == curve(whole)
    assert_same_weights(run, whole)
    alone = saving_config(tmp_path, model=shape, stage=1, **DEEPSPEED)
    train(other, alone)
    for ours, theirs in zip(curve(other), curve(whole), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
    stored = find_checkpoint(run.checkpoints, None)
    export(stored, config, tmp_path / "out", "fp32", 30_000, lambda *_: None)
    loaded, about = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(about[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))  # type: ignore[has-type]
    ours = {n.removeprefix("model."): v for n, v in final_weights(run).items() if "model" in n}
    part = HFModel(shape)
    part.materialize(torch.device("cpu"))
    part.load_state_dict({n: v for n, v in ours.items() if n.startswith("hf.")}, strict=False)
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        assert torch.equal(part(tokens), loaded(tokens).logits)  # type: ignore[has-type]


def texts_of(wrapper: Any) -> Any:
    """Return what computes texts: for Llama 4 its part, since the wrapper of transformers 5.24 fails."""
    return wrapper.language_model if wrapper.config.model_type == "llama4" else wrapper


@pytest.mark.parametrize("family", WRAPPERS)
def test_the_part_for_texts_of_a_wrapper_is_read_and_exported(tmp_path: Path, family: str) -> None:
    """Nothing else of it is built, and an export gives all of it back."""
    base, out, tokens = tmp_path / "base", tmp_path / "out", torch.arange(20).view(2, 10)
    theirs = save_wrapper(family, base)
    shape = hf_models.shape_of(base)
    answer = judge(
        {"model": asdict(shape), "folder": str(base), "attention": "", "tp": 1, "pp": 1, "ep": 1}
    )
    assert answer["problem"] is None
    model = HFModel(replace(shape, kept_tensors=answer["kept_tensors"]))
    assert not any("vision" in name or "visual" in name for name, _ in model.named_modules())
    model.materialize(torch.device("cpu"))
    state = {f"model.{name}": value.data for name, value in model.named_parameters()}
    load_any_model.load(base, shape, state)
    with torch.no_grad():
        assert torch.equal(model(tokens), texts_of(theirs)(input_ids=tokens).logits)
        for value in state.values():
            value += 0.1
        expected = model(tokens)
    config = Config(model=model.shape, data=Data(source="megatron"))
    export(save_state(state, tmp_path), config, out, "fp32", 1 << 30, lambda *_: None)
    found = load_any_model.find(base, build(shape)).values()
    trained = {stored.name for tensor in found for stored in tensor.sources}
    assert_rest_is_equal(base, out, trained)
    with torch.no_grad():
        assert torch.equal(expected, texts_of(wrapper_from(out))(input_ids=tokens).logits)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"stage": 3}, exhaustive({"stage": 3, **DEEPSPEED})])
def test_weights_as_published_are_trained_and_published_again(
    tmp_path: Path, layout: dict[str, Any]
) -> None:
    """Experts in a matrix each, and a buffer of theirs; trained at a rate of 0, resumed, and exported."""
    from safetensors.torch import load_file

    write_tokens(tmp_path, samples=100)
    hf_models.save("minimax_m2", tmp_path / "minimax")
    shape = hf_models.shape_of(tmp_path / "minimax")
    settings = {"dp": 2, "precision": "fp32"} | layout
    config = saving_config(tmp_path, model=shape, optimizer=Optimizer(lr=1e-20), **settings)
    run = make_run(config)
    train(run, config, StopBefore(5))
    train(run, config)
    stored = find_checkpoint(run.checkpoints, None)
    export(stored, config, tmp_path / "out", "fp32", 30_000, lambda *_: None)
    held, written = (
        {name: it for file in folder.glob("*.safetensors") for name, it in load_file(file).items()}
        for folder in (tmp_path / "minimax", tmp_path / "out")
    )
    assert held.keys() == written.keys()
    assert all(torch.equal(value, written[name]) for name, value in held.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"stage": 0}, id="one process"),
        exhaustive({"dp": 2, "stage": 3}, name="stage 3"),
        *(
            exhaustive({"dp": dp, "stage": stage, **DEEPSPEED}, name=f"deepspeed {stage}")
            for dp, stage in ((1, 0), (2, 3))
        ),
    ],
)
def test_a_model_with_unused_parameters_resumes(tmp_path: Path, layout: dict[str, Any]) -> None:
    """In every layout a parameter that no loss uses decays, as if its gradient were 0."""
    write_tokens(tmp_path, samples=100)
    initial = hf_models.save("bart", tmp_path / "bart").state_dict()
    shape = hf_models.shape_of(tmp_path / "bart")
    config = saving_config(tmp_path, model=shape, **{"precision": "fp64"} | layout)
    whole = never_stopped(tmp_path, config)
    run = make_run(config)
    train(run, config, StopBefore(5))
    train(run, config)
    assert curve(run) == curve(whole)
    assert_same_weights(run, whole)
    rates = [record["lr"] for record in curve(run)]
    decay = math.prod(1 - rate * config.optimizer.weight_decay for rate in rates)
    assert decay < 0.999
    name = "model.decoder.layers.1.encoder_attn.k_proj"
    weights = final_weights(run)
    for kind, factor in (("weight", decay), ("bias", 1.0)):
        torch.testing.assert_close(
            weights[f"model.hf.{name}.{kind}"],
            initial[f"{name}.{kind}"].to(weights[f"model.hf.{name}.{kind}"].dtype) * factor,
        )
        moments = [f"optimizer.hf.{name}.{kind}.{it}" for it in ("exp_avg", "exp_avg_sq")]
        assert not any(weights[it].any() for it in moments)
        assert weights[f"optimizer.hf.{name}.{kind}.step"] == len(rates)


@pytest.mark.slow
def test_random_weights_follow_the_models_own_rules(tmp_path: Path) -> None:
    """GPT-2's reach from a block's parts into their projections; Gemma's norms begin at 0."""
    cpu = torch.device("cpu")
    for family, scaled in (("gpt2", "h.1.mlp.c_proj.weight"), ("gemma2", None)):
        hf_models.save(family, tmp_path / family, initializer_range=0.2)
        shape = hf_models.shape_of(tmp_path / family, loaded=False)
        model, draw = build(shape), RandomWeights(shape, 3, cpu)
        drawn = {name: draw(f"hf.{name}", p.shape) for name, p in model.named_parameters()}
        for name, value in reversed(drawn.items()):  # in any order, by any rank
            assert torch.equal(value, RandomWeights(shape, 3, cpu)(f"hf.{name}", value.shape))
        first, second = list(blocks(model))
        inside = next(n for n, v in drawn.items() if n.startswith(first) and v.ndim == 2)
        assert not torch.equal(drawn[inside], drawn[inside.replace(first, second)])
        assert float(drawn[inside].std()) == pytest.approx(0.2, rel=0.1)
        norm = next(v for n, v in drawn.items() if "norm" in n or "ln_f" in n)
        assert norm.unique().tolist() == ([0.0] if family == "gemma2" else [1.0])
        if scaled is not None:
            assert float(drawn[f"transformer.{scaled}"].std()) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize(
    ("family", "mean", "spread"),
    [("apertus", math.log(math.expm1(0.8)), None), ("openai-gpt", 0.0, 0.02)],
)
def test_weights_without_a_rule_are_those_of_the_constructor(
    family: str, mean: float, spread: float | None
) -> None:
    """The numbers of Apertus' activation, and the matrices of GPT's, which their classes initialize."""
    document = hf_models.config_of(family, hf_models.COMMON)
    shape = small_hf_model(Model(source="hf", name=family, hf_config=document))
    draw = RandomWeights(shape, 3, torch.device("cpu"))
    end = "c_fc.weight" if spread else "alpha_p"
    drawn = {name: draw(name, it.shape) for name, it in build(shape).named_parameters()}
    values = next(it for name, it in drawn.items() if name.endswith(end))
    assert float(values.mean()) == pytest.approx(mean, abs=1e-3)
    assert spread is None or float(values.std()) == pytest.approx(spread, rel=0.1)
    assert all(it.isfinite().all() for it in drawn.values())


@pytest.mark.parametrize(
    ("family", "excluded"),
    [("phimoe", "mlp.router"), ("llama4_text", "feed_forward.router"), ("deepseek_v4", "o_a_proj")],
)
def test_adapters_are_added_to_plain_products(family: str, excluded: str) -> None:
    """Routers return several tensors, and a grouped layer multiplies parts."""
    document = hf_models.config_of(family, {})
    shape = small_hf_model(Model(source="hf", name=family, hf_config=document))
    block = list(blocks(build(shape)).values())[-1]
    names = dict(block.named_modules())
    (name,) = [it for it in names if it.endswith(excluded)]
    assert isinstance(names[name], nn.Linear)
    assert any(it.endswith("_proj") for it in linear_layers(block, None))
    assert name not in linear_layers(block, None)


@pytest.mark.slow
def test_narrow_compute_leaves_rotary_frequencies_alone(tmp_path: Path) -> None:
    """DeepSpeed casts all tensors of a module."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    hf_models.save("gpt_neox", tmp_path / "neox", rope_parameters=rope)
    shape = hf_models.shape_of(tmp_path / "neox")
    write_tokens(tmp_path)
    config = make_config(tmp_path, model=shape, stage=1, precision="bf16")
    config = replace(config, backend=Backend("deepspeed"))
    exact = build(shape).gpt_neox.rotary_emb.inv_freq
    assert run_ranks(frequencies, 1, config)[0] == exact.tolist() != exact.bfloat16().tolist()


def frequencies(_rank: int, config: Config) -> list[float]:
    engine = job.make_engine(config, torch.device("cpu"))
    (part,) = engine.stages.values()
    assert all(p.dtype == torch.bfloat16 for p in part.parameters())
    found: list[float] = part.hf.gpt_neox.rotary_emb.inv_freq.tolist()
    return found


def test_experts_of_transformers_compute_in_fp64() -> None:
    """Its products of all experts at once have no fp64, in which `conform` compares layouts."""
    _, settings = hf_families.FAMILIES["mixtral"]
    document = {**settings, "model_type": "mixtral"}
    shape = Model(source="hf", name="mixtral", hf_config=document, **sizes(document))
    exact, narrow = HFModel(shape).double(), HFModel(shape)
    for model in (exact, narrow):
        model.materialize(torch.device("cpu"))
    for number, parameter in enumerate(exact.parameters()):
        torch.manual_seed(number)
        nn.init.normal_(parameter, std=0.1)
    narrow.load_state_dict(exact.state_dict())
    logits = exact(torch.tensor([[1, 5, 9, 2]]))
    assert logits.dtype == torch.float64
    torch.testing.assert_close(
        narrow(torch.tensor([[1, 5, 9, 2]])).double(), logits, rtol=1e-4, atol=1e-5
    )
