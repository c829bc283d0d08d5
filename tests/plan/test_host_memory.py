"""The memory of a host: what all of its ranks keep there must fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nanoscale.config.composing.compose import compose
from nanoscale.config.rules import Devices
from nanoscale.config.schema import Backend, Checkpoint, Cluster, Precision, Zero
from nanoscale.launch.request import check_request
from nanoscale.plan.memory.states import checkpoint_bytes, shared_memory_bytes
from nanoscale.plan.predict import predict
from nanoscale.plan.search.search import search
from nanoscale.view.plan.prediction import document, verdict
from nanoscale.view.plan.verdict import remedy
from tests.plan.machines import job
from tests.plan.test_search import looked_in
from tests.support.rows import exhaustive

OFFLOADED = Zero(stage=3, offload_optimizer="cpu", offload_param="cpu")


def of_host(memory_gib: float, **keys):
    cluster = Cluster(device="h100-sxm", host_memory_gib=memory_gib)
    return job(backend=Backend(name="deepspeed"), zero=OFFLOADED, cluster=cluster, **keys)


def test_the_states_of_all_ranks_of_a_host_are_added() -> None:
    plan = predict(of_host(2048))
    assert plan.fits
    assert plan.host_bytes == 8 * sum(part.bytes for part in plan.worst.host)
    small = predict(of_host(64))
    assert not small.fits and small.fits_probability == plan.fits_probability
    assert verdict(small).startswith("does not fit the memory of a host: its 8 ranks keep 135 of")
    assert document(small)["memory"]["host_in_use_gib"] > 64


def test_pipeline_ranks_of_a_host_are_added_each_with_its_own_size() -> None:
    keys = {"offload_activations": True, "activation_checkpointing": "full", "global_batch": 32}
    plan = predict(job(dp=2, pp=4, **keys))
    assert plan.host_bytes == 2 * sum(part.bytes for rank in plan.memory for part in rank.host)
    first = max(sum(part.bytes for part in rank.host) for rank in plan.memory)
    assert plan.host_bytes < 8 * first
    assert predict(job(dp=8, pp=4, **keys)).host_bytes == 8 * first


def test_a_search_and_an_open_micro_batch_keep_to_the_memory_of_a_host() -> None:
    words = ("recipe=llama-70b", "backend=deepspeed", "cluster=h100-sxm", "cluster.hosts=1")
    _, roomy = looked_in(*words)
    hardware = predict(roomy.base).hardware
    found = search(roomy, hardware)
    assert found.best is not None and found.best.host_bytes > 500 * 2**30
    assert search(roomy, replace(hardware, host_memory_gib=500.0)).best is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["checkpoint.asynchronous=false", exhaustive("optimizer=adamw8bit")]
)
def test_a_way_out_can_be_typed(way: str) -> None:
    words = ["recipe=llama-8b", "checkpoint.asynchronous=true", "cluster=h100-sxm"]
    words.append("cluster.host_memory_gib=64")
    devices = Devices("cuda", 8, ("NVIDIA H100 80GB HBM3",) * 8)
    request = check_request(compose(words), devices=devices, hosts=())
    plan = predict(request.config)
    assert not plan.fits
    assert way in remedy(request.composed, plan, devices).split()
    assert predict(check_request(compose([*words, way]), devices=devices, hosts=()).config).fits


@pytest.mark.parametrize("saving", [{"every": 10}, {"every_minutes": 5.0}, {"keep_best": 1}])
def test_the_copy_of_a_checkpoint_is_in_host_memory(saving) -> None:
    alone = Checkpoint(every=0, every_minutes=0, keep_best=0, asynchronous=True)
    base = job("gpt2", seq_len=1024, checkpoint=alone)
    assert predict(base).host_bytes == 0
    plan = predict(replace(base, checkpoint=replace(alone, **saving)))
    assert plan.host_bytes > 8 * 124e6 * 12


@pytest.mark.parametrize(
    ("layout", "ranks", "states"),
    [
        ({"dp": 8}, 8, 2.0),  # one host, with all of it
        ({"dp": 16}, 8, 2.0),  # half of it, and half of the other host's
        ({"dp": 16, "dp_replicate": 2}, 8, 2.0),  # all of it, as the other host has
        ({"dp": 32, "dp_replicate": 2}, 8, 1.0),  # half of it, as the third host has
        ({"dp": 8, "stage": 0}, 2, 2.0),
        ({"dp": 2, "tp": 4, "stage": 0}, 2, 1.0),  # half of it, as the third host has
        ({"dp": 2, "tp": 4}, 4, 2.0),
    ],
    ids=str,
)
def test_checkpoints_in_memory_are_two_of_each_state(layout, ranks, states) -> None:
    degrees = dict(layout)
    zero = Zero(stage=degrees.pop("stage", 3))
    config = job("gpt2", seq_len=1024, zero=zero, checkpoint=Checkpoint(memory_every=1), **degrees)
    planned = shared_memory_bytes(config, ranks)
    assert planned == pytest.approx(states * checkpoint_bytes(config), rel=0.01)
    assert planned == predict(config).shared_memory or ranks != 8
    off = replace(config, checkpoint=Checkpoint())
    assert predict(config).host_bytes - predict(off).host_bytes == predict(config).shared_memory


def test_checkpoints_in_memory_must_fit_the_host() -> None:
    states = 8.03e9 * 12 / 2**30  # two of them: 180 GiB
    keys = {"checkpoint": Checkpoint(memory_every=1), "precision": Precision(compute="bf16")}
    cluster = Cluster(device="h100-sxm", host_memory_gib=1.9 * states)
    assert not predict(job(cluster=cluster, **keys)).fits_host
    cluster = Cluster(device="h100-sxm", host_memory_gib=2.1 * states)
    assert predict(job(cluster=cluster, **keys)).fits_host
