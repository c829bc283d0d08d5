"""Checkpoints in the memory of hosts: what real ranks wrote is loaded in another layout without a lost host."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

from nanoscale.agent.memory_keeper import MemoryKeeper, keeper_for
from nanoscale.checkpoint import memory_reader
from nanoscale.checkpoint.flat import Box, FlatShard
from nanoscale.checkpoint.memory_writer import Boxes, MemoryWriter, SharedMemoryError, _Slot, divide
from nanoscale.checkpoint.saver import Saver
from nanoscale.checkpoint.staging import Staging
from nanoscale.checkpoint.store import list_checkpoints
from nanoscale.common.errors import LostPeerError
from nanoscale.config.machines import Host
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Checkpoint
from nanoscale.launch.fleet.connections import Member
from nanoscale.launch.lifecycle.memory_source import newest_in_memory, pair
from nanoscale.parallel import process_group
from nanoscale.plan.memory.states import shared_memory_bytes
from nanoscale.processes import listener, peer_files, scratch
from nanoscale.processes.lifeline import MEMORY
from nanoscale.processes.peer_files import PeerFiles, PeerFileServer
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.failure import Evidence, RankFailure, diagnose
from nanoscale.runs.job_messages import HostRanks
from nanoscale.runs.memory_order import (
    MemoryOrder,
    MemoryPeer,
    MemorySource,
    committed_in,
    index_with_sum,
    read_index,
    write_order,
)
from nanoscale.runs.rank_context import StopFlag
from tests.support import jobs
from tests.support.ranks import run_ranks

KEY = bytes(range(32))
WHOLE = torch.arange(70.0).reshape(10, 7)


def state_of(value: torch.Tensor, world: int) -> dict[str, torch.Tensor]:
    """Return a tensor in shards, a range of a flattened one, one that is computed, and a replicated one."""
    mesh = init_device_mesh("cpu", (world,))
    rank, flat = dist.get_rank(), value.view(-1)
    first, last = 70 * rank // world, 70 * (rank + 1) // world
    half = FlatShard([flat / 2], (10, 7), 0, join=lambda it: it * 2)
    return {
        "model.sharded": distribute_tensor(value, mesh, [Shard(0)]),
        "model.flat": FlatShard(flat[first:last].clone(), (10, 7), first),
        "optimizer.computed": half,
        "loss_scale.scale": value[0].clone(),
    }


def test_a_tensor_computed_for_a_copy_lives_until_the_copy_is_complete() -> None:
    """A GPU reads it while the training continues, which would use its memory for other tensors."""
    staging = Staging()
    computed = torch.ones(3)
    memory = StorageWeakRef(computed.untyped_storage())
    staging.copy({"loss_scale.scale": computed})
    del computed
    assert not memory.expired()
    staging.fill()
    assert memory.expired()


def save_rank(rank: int, orders: list[MemoryOrder], lost: list[str]) -> None:
    world = len(orders)
    process_group.join(world, torch.device("cpu"), 120.0)
    writer = MemoryWriter(orders[rank], rank, lost.append)
    for step in (1, 2, 3):
        state = state_of(WHOLE * step, world)
        writer.begin(state, {"step": step, "data": "x", "consumed_samples": 8 * step})
        writer.hold()
    writer.settle()
    assert not lost


def load_rank(rank: int, order: MemoryOrder, source: MemorySource, world: int) -> Any:
    process_group.join(world, torch.device("cpu"), 120.0)
    state = state_of(torch.zeros(10, 7), world)
    state["optimizer.computed"] = torch.zeros(10, 7)
    manifest = memory_reader.load(order, source, state)
    local = state["model.flat"].local  # type: ignore[attr-defined]
    whole = state["model.sharded"].full_tensor()  # type: ignore[attr-defined]
    return manifest["step"], local, whole, state["optimizer.computed"], state["loss_scale.scale"]


@pytest.fixture
def keepers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[MemoryKeeper]]:
    monkeypatch.setenv("NANOSCALE_MEMORY", "")
    keepers = [MemoryKeeper(KEY.hex()) for _ in range(3)]
    yield keepers
    for keeper in keepers:
        scratch.remove(keeper.folder)


def address_of(_: Host) -> str:
    return "127.0.0.1"


def peer(number: int, keeper: MemoryKeeper) -> MemoryPeer:
    return MemoryPeer(f"n{number}", "127.0.0.1", keeper.facts()["port"])


def member(name: str, keeper: MemoryKeeper, machine: str = "", switch: str = "") -> Member:
    facts = {"machine": machine or name, "memory": keeper.facts() | {"switch": switch}}
    return Member(Host(name, 1), facts=facts)


def test_three_hosts_write_and_two_load_without_the_first(
    keepers: list[MemoryKeeper], tmp_path: Path
) -> None:
    peers = [peer(number, keeper) for number, keeper in enumerate(keepers)]
    orders = [
        MemoryOrder(str(keeper.folder), KEY.hex(), 1, node, 3, 1, peers[(node + 1) % 3], None)
        for node, keeper in enumerate(keepers)
    ]
    run_ranks(save_rank, 3, orders, [])
    members = [member(f"n{number}", keeper) for number, keeper in enumerate(keepers)]
    rest = members[1:]
    source = newest_in_memory(rest, address_of, set())
    assert source is not None
    assert (source.attempt, source.count, source.step) == (1, 2, 3)
    assert [it.host for it in source.peers] == ["n1", "n2"]
    assert newest_in_memory(members[2:], address_of, set()) is None  # it has no part of the second
    assert newest_in_memory(rest, address_of, {(1, 2)}).step == 2  # type: ignore[union-attr]
    results = run_ranks(load_rank, 2, orders[1], source, 2)
    for rank, (step, flat, whole, computed, scale) in enumerate(results):
        assert step == 3
        assert torch.equal(flat, (3 * WHOLE).view(-1)[35 * rank : 35 * (rank + 1)])
        assert torch.equal(whole, 3 * WHOLE)
        assert torch.equal(computed, 3 * WHOLE)
        assert torch.equal(scale, 3 * WHOLE[0])
    with pytest.raises(Exception, match="step 3 is not complete"):
        run_ranks(load_rank, 1, orders[2], replace(source, peers=()), 1)

    # One flipped bit: the other copy counts, and without one the step before it.
    (own,) = [
        path
        for path, about in committed_in(keepers[1].folder)
        if path.match("1-1-*") and about["step"] == 3
    ]
    data, index = own.with_suffix(".data"), own.read_bytes()
    for bit in range(8 * len(index)):
        with pytest.raises(ValueError, match="differ from their sum"):
            read_index(flipped(index, bit))
    own.write_bytes(flipped(index, 1))
    assert len(keepers[1].facts()["damaged"]) == 1
    own.write_bytes(index)
    data.rename(
        data.with_name("hidden")
    )  # a rank that lives on removes its file meanwhile: no damage
    assert keepers[1].facts()["damaged"] == []
    data.with_name("hidden").rename(data)
    content = data.read_bytes()
    data.write_bytes(flipped(content, 320))
    members[1] = member("n1", keepers[1])
    assert len(members[1].facts["memory"]["damaged"]) == 1  # type: ignore[index]
    assert newest_in_memory(members, address_of, set()).step == 3  # type: ignore[union-attr]
    assert newest_in_memory(members[:2], address_of, set()).step == 2  # type: ignore[union-attr]
    data.write_bytes(content)

    # The launcher is lost: the hosts copy what they have of their own ranks to the disk.
    run = RunDirectory(tmp_path)
    for node, keeper in enumerate(
        keepers[1:]
    ):  # in an attempt without the first one, and with other numbers
        host = HostRanks(f"n{node}", node, 2, (node,), 2, "127.0.0.1", 1, 2)
        keeper.begin(run, host, {"source": asdict(source), "peers": [None] * 3})
        keeper.rescue()
    (run.memory / "1-9-0-0.json").write_text("{")  # a file that cannot be read counts as damaged
    damaged: list[str] = []
    copied = newest_in_memory([], address_of, set(), run.memory, damaged.append)
    text = "1-9-0-0.json cannot be read: its bytes differ from their sum"
    assert damaged == [f"{run.memory}: {text}; it is not used"]
    assert copied == replace(source, peers=(), folder=str(run.memory))
    empty = replace(orders[0], folder=str(tmp_path))
    ((_, _, whole, _, _),) = run_ranks(load_rank, 1, empty, copied, 1)
    assert torch.equal(whole, 3 * WHOLE)


ABOUT = {
    **dict.fromkeys(("attempt", "count", "node", "rank", "bytes"), 0),
    "nodes": 1,
    "ranks": 1,
    "step": 3,
    "covers": [0],
    "file": "0-0-0-0.data",
    "sum": "",
    "manifest": {"step": 3, "data": "x", "consumed_samples": 24},
    "tensors": {},
}


@pytest.mark.parametrize("lost", [[], [0]])
def test_an_agent_without_its_launcher_copies_the_states_of_lost_hosts(
    keepers: list[MemoryKeeper], tmp_path: Path, lost: list[int]
) -> None:
    """n1 keeps its own part and a copy of n0's; the launcher told it that n0 is lost, and was lost then."""
    run, host = RunDirectory(tmp_path), HostRanks("n1", 1, 2, (1,), 2, "127.0.0.1", 1, 1)
    keepers[1].begin(run, host, {"source": None, "peers": [None, None]})
    for node in range(2):
        name, sum_ = f"1-0-{node}-{node}", xxhash.xxh3_128_hexdigest(b"")
        where = {"attempt": 1, "node": node, "nodes": 2, "covers": [node], "file": f"{name}.data"}
        (keepers[1].folder / f"{name}.json").write_bytes(
            index_with_sum(json.dumps(ABOUT | {"sum": sum_} | where))
        )
        (keepers[1].folder / f"{name}.data").touch()
    order = {"memory_key": KEY.hex(), "has_peers": True, "lost_nodes": lost}
    keeper_for(order, keepers[1]).rescue()  # type: ignore[union-attr]
    copied = newest_in_memory([], address_of, set(), run.memory)
    assert (copied is not None) == bool(lost)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"step": "x"}, "`step` is 'x'"),
        ({"nodes": 10**12}, "`nodes` is '1000000000000'"),
        ({"manifest": {}}, "'consumed_samples'"),
        ({"manifest": ABOUT["manifest"] | {"consumed_samples": 1e12}}, "`samples` is"),
        ({"file": "../0.data", "bytes": 4}, "file elsewhere"),
        ({"file": "fifo", "bytes": 4}, "not a regular file"),
        ({"tensors": "DEEP"}, "nested too deeply"),
    ],
)
def test_a_strangers_state_is_named_and_not_used(
    tmp_path: Path, changes: dict[str, Any], problem: str | None
) -> None:
    os.mkfifo(tmp_path / "fifo")
    text = json.dumps(ABOUT | {"sum": xxhash.xxh3_128_hexdigest(b"")} | changes)
    text = text.replace('"DEEP"', "[" * 100_000 + "]" * 100_000)
    (tmp_path / "0-0-0-0.json").write_bytes(index_with_sum(text))
    damaged: list[str] = []
    source = newest_in_memory([], address_of, set(), tmp_path, damaged.append)
    assert (source is not None) == (problem is None) and len(damaged) == (problem is not None)
    assert problem is None or problem in damaged[0]


def test_a_fifo_in_a_strangers_memory_is_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "1-0-0-0.json")
    assert newest_in_memory([], address_of, set(), tmp_path) is None
    assert not [*committed_in(tmp_path)]
    order = MemoryOrder(str(tmp_path), KEY.hex(), 2, 0, 1, 1, None, None)
    with pytest.raises(LostPeerError):
        memory_reader.load(order, MemorySource(1, 0, 1, ()), {})


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize(
    ("parts", "is_whole"),
    [
        ([((0, 0), (2, 3)), ((2, 0), (2, 3))], True),
        ([((0, 0), (4, 1)), ((0, 1), (4, 2))], True),
        ([((0, 0), (2, 3)), ((3, 0), (1, 3))], False),  # a hole
        ([((0, 0), (3, 3)), ((2, 0), (2, 3))], False),  # a row twice
        ([((0, 0), (2, 3)), ((1, 0), (2, 3))], False),  # a row twice, and one is missing
    ],
)
def test_parts_in_memory_hold_each_element_once(parts: list[Any], is_whole: bool) -> None:
    reader = memory_reader._Reader()
    about = {"dtype": "float32", "shape": [4, 3], "boxes": parts, "start": 0}
    reader.add(Path(), {"file": "", "tensors": {"a": about}, "manifest": {}})
    assert reader.has_all({"a": torch.zeros(4, 3)}) == is_whole


def test_ranks_of_a_host_divide_what_they_all_hold() -> None:
    box: Boxes = (Box.whole((4,)),)
    replicated = [("a", box, 16), ("b", box, 16), ("c", box, 8), ("d", box, 8)]
    shares = [
        divide([(0, replicated), (0, replicated), (1, replicated)], rank) for rank in range(3)
    ]
    assert sorted([*shares[0].local, *shares[1].local]) == ["a", "b", "c", "d"]
    assert len(shares[0].local) == 2
    assert shares[2].local == ("a", "b", "c", "d")
    assert all(it.is_covered and it.covers == (0, 1) for it in shares)  # no copy is sent
    first: Boxes = (Box((0,), (2,)),)
    second: Boxes = (Box((2,), (2,)),)
    alone = divide([(0, [("a", first, 8)]), (1, [("a", second, 8)])], 0)
    assert alone.covers == (0,)
    assert not alone.is_covered


def test_copies_are_on_another_machine_and_switch(keepers: list[MemoryKeeper]) -> None:
    def partners(*places: tuple[str, str]) -> list[str | None]:
        members = [
            member(f"n{number}", keepers[0], machine, switch)
            for number, (machine, switch) in enumerate(places)
        ]
        return [it and it["host"] for it in pair(members, address_of)]

    assert partners(("a", "")) == [None]
    assert partners(("a", ""), ("a", "")) == [None, None]
    assert partners(("a", ""), ("b", ""), ("c", "")) == ["n1", "n2", "n0"]
    assert partners(("a", "s"), ("b", "s"), ("c", "t"), ("d", "t")) == ["n2", "n3", "n0", "n1"]
    assert partners(("a", "s"), ("b", "s"), ("c", "s")) == ["n1", "n2", "n0"]
    members = [member(name, keepers[0]) for name in ("n0", "n1", "n2")]
    members[1].facts = None  # it is being reached
    assert [it and it["host"] for it in pair(members, address_of)] == ["n2", None, "n0"]
    assert pair([members[1]], address_of) == [None]
    assert partners(("a", ""), ("a", ""), ("b", "")) == ["n2", "n2", "n0"]


def test_a_server_admits_only_its_job_and_its_folder(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "secret").write_text("x")
    server = PeerFileServer(tmp_path / "folder", KEY)
    with pytest.raises(ConnectionError, match="hung up"):
        PeerFiles("127.0.0.1", server.port, bytes(32))
    files = PeerFiles("127.0.0.1", server.port, KEY)
    files.write("1-0.data", b"abc")
    files.write("1-0.data", b"xy")
    assert files.read("1-0.data") == b"xy"
    assert files.names("1-*") == ["1-0.data"]
    files.remove("1-0.data")
    with pytest.raises(ConnectionError, match="No such file"):
        files.read("1-0.data")
    with pytest.raises(ConnectionError):
        files.read("../secret")


def test_strangers_get_no_thread_and_one_deadline_for_all_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_PATIENCE_S", 0.3)
    monkeypatch.setattr(peer_files, "_CHECK_S", 0.1)
    server = PeerFileServer(tmp_path, KEY)
    threads = threading.active_count()
    strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(50)]
    challenges = [stranger.recv(32) for stranger in strangers]  # all of them are accepted
    assert {len(it) for it in challenges} == {32} and threading.active_count() == threads
    assert PeerFiles("127.0.0.1", server.port, KEY).names("*") == []
    slow = strangers[0]
    slow.settimeout(0.1)
    for _ in range(20):  # a byte each 0.1 s: a limit for each byte would never end it
        with suppress(TimeoutError):
            assert slow.recv(1) == b""
            break
        slow.send(b"x")
    else:
        raise AssertionError("the stranger is still connected")
    for stranger in strangers:
        stranger.close()


def test_a_job_on_one_host_has_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEMORY, "")
    monkeypatch.setattr("nanoscale.agent.memory_keeper.PeerFileServer", None)
    keeper = MemoryKeeper(KEY.hex(), has_peers=False)
    try:
        assert pair([member("n0", keeper)], address_of) == [None]
        order = MemoryOrder(str(keeper.folder), KEY.hex(), 2, 0, 1, 1, None, None)
        with pytest.raises(LostPeerError):  # and asks nobody
            memory_reader.load(order, MemorySource(1, 0, 1, (peer(0, keeper),)), {})
    finally:
        scratch.remove(keeper.folder)


def train_rank(rank: int, path: Path, folder: str, stop: StopFlag | None = None) -> str:
    os.environ[MEMORY] = folder
    return jobs.train_rank(rank, path, stop or StopFlag())


def test_planned_bytes_are_those_of_two_real_ranks(
    tmp_path: Path, keepers: list[MemoryKeeper]
) -> None:
    path, folder, config = saving_run(
        tmp_path, keepers[0].folder, 2, replace(IN_MEMORY, memory_every=1)
    )
    run_ranks(train_rank, 2, path, folder)
    written = sum(path.stat().st_size for path in Path(folder).glob("*.data"))
    assert written == pytest.approx(shared_memory_bytes(config, 2), rel=0.01)


class Slow(StopFlag):
    """Holds the allocation for the first checkpoint, in memory or on disk, until `steps` steps are done."""

    def __init__(self, on_disk: bool, steps: int) -> None:
        self.on_disk, self.steps, self.questions = on_disk, steps, 0

    @property
    def requested(self) -> bool:  # type: ignore[override]
        if not self.questions:
            self._patch()
        if self.questions == self.steps:
            assert self.begun.wait(60), "nothing has been allocated before the checkpoint is due"
            self.gate.set()
        self.questions += 1
        return False

    def _patch(self) -> None:
        self.begun, self.gate = threading.Event(), threading.Event()
        owner: Any = Staging if self.on_disk else os
        name = "_allocate" if self.on_disk else "posix_fallocate"
        plain = getattr(owner, name)

        def slow(*args: Any) -> Any:
            self.begun.set()
            assert self.gate.wait(60)
            return plain(*args)

        setattr(owner, name, slow)


def saving_run(
    folder: Path, memory: Path, steps: int, saving: Checkpoint
) -> tuple[Path, str, ResolvedConfig]:
    """Return the path, the memory's folder and the configuration of a job on two ranks."""
    jobs.write_tokens(folder)
    config = jobs.make_config(folder, dp=2, stage=3, steps=steps, checkpoint=saving)
    write_order(MemoryOrder(str(memory), KEY.hex(), 1, 0, 1, 2, None, None))
    return jobs.make_run(config).path, str(memory), config


IN_MEMORY = Checkpoint(memory_every=3, every_minutes=0, at_end=False)
ON_DISK = Checkpoint(every=3, every_minutes=0, at_end=False, asynchronous=True)


@pytest.mark.parametrize("saving", [IN_MEMORY, ON_DISK], ids=["in memory", "on disk"])
def test_memory_of_the_first_checkpoint_is_allocated_while_steps_continue(
    tmp_path: Path, keepers: list[MemoryKeeper], saving: Checkpoint
) -> None:
    path, folder, _ = saving_run(tmp_path, keepers[0].folder, 7, saving)
    stop = Slow(saving.asynchronous, steps=2)
    assert run_ranks(train_rank, 2, path, folder, stop) == ["completed"] * 2
    if saving is ON_DISK:
        assert [it.step for it in list_checkpoints(RunDirectory(path).checkpoints)] == [3, 6]
    else:
        assert sorted(about["step"] for _, about in committed_in(Path(folder))) == [3, 3, 6, 6]


@pytest.mark.parametrize("saving", [IN_MEMORY, ON_DISK], ids=["in memory", "on disk"])
def test_a_job_ends_while_memory_is_allocated(
    tmp_path: Path, keepers: list[MemoryKeeper], saving: Checkpoint
) -> None:
    path, folder, _ = saving_run(tmp_path, keepers[0].folder, 2, saving)
    start = time.monotonic()
    stop = Slow(saving.asynchronous, steps=9)
    assert run_ranks(train_rank, 2, path, folder, stop) == ["completed"] * 2
    assert time.monotonic() - start < 50, "it does not wait for the gate"


def test_prepared_shared_memory_that_is_too_small_fails_the_first_checkpoint(
    tmp_path: Path, keepers: list[MemoryKeeper]
) -> None:
    path, folder, _ = saving_run(tmp_path, keepers[0].folder, 5, IN_MEMORY)
    with pytest.raises(RuntimeError, match="for a checkpoint in memory does not fit into"):
        run_ranks(train_in_full_memory, 2, path, folder)
    assert jobs.read_metrics(RunDirectory(path))[-1]["step"] == 3


def train_in_full_memory(rank: int, path: Path, folder: str) -> None:
    os.posix_fallocate = full
    train_rank(rank, path, folder)


def full(*_: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_nothing_is_allocated_without_a_checkpoint_that_needs_it(tmp_path: Path) -> None:
    def state() -> dict[str, torch.Tensor]:
        raise AssertionError("it is not asked for")

    for saving in (Checkpoint(every=3), Checkpoint(every_minutes=0, asynchronous=True)):
        Saver(tmp_path, saving, 1).prepare(state)


def test_too_little_shared_memory_is_an_error_with_both_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Namespace(free=2**20))
    with pytest.raises(SharedMemoryError) as caught:
        _Slot(tmp_path / "1-0-0-0.data", 3 * 2**20, False)
    assert not [*tmp_path.iterdir()]
    failure = RankFailure.of(caught.value, rank=0, local_rank=0, host="h")
    diagnosis, remedy = diagnose(failure, Evidence())
    assert "3 MiB" in diagnosis and f"{tmp_path}, where 1 MiB are free" in diagnosis
    assert "--shm-size" in remedy and "checkpoint.memory_every=0" in remedy


def test_a_state_that_no_host_has_is_a_lost_peer(tmp_path: Path) -> None:
    order = MemoryOrder(str(tmp_path), KEY.hex(), 2, 0, 1, 1, None, None)
    with pytest.raises(LostPeerError):
        memory_reader.load(order, MemorySource(1, 0, 1, ()), {})
