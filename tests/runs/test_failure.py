from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from functools import partial

import pytest
from torch.distributed import DistBackendError, DistNetworkError, DistStoreError

from nanoscale.common.errors import LostPeerError, UserError, Violation
from nanoscale.common.json_text import Json
from nanoscale.processes.messages import LONGEST_LINE, pack
from nanoscale.runs import failure
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.failure import Evidence, RankFailure, diagnose, digest, first_cause
from nanoscale.runs.job_messages import Ended, message_of
from tests.support.runs import create_run


def failed(rank, at, type="", message="", exit_code=1, **more):
    kind = more.pop("kind", "raised" if type else "ended")
    return RankFailure(
        kind, rank, rank, "h", at, type=type, message=message, exit_code=exit_code, **more
    )


CLOSED = "[/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"
RESET = "Read error [127.0.0.1]:21021: Connection reset by peer"
MISMATCH = (  # as gloo writes it
    "op.preamble.length <= op.nbytes. 24 vs 12. Received data size doesn't match expected size. "
    "Is there a distributed collective mismatch in your code?"
)
NCCL = "NCCL error: remote process exited or there was a network error\nncclRemoteError: A call"
STORE = "failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown?"
LATE = "[c10d] The client socket has timed out after 600000ms while trying to connect to (h, 1)"
LAZY = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.h:311] Connect timeout [none]"
LATE_READ = "[/pytorch/gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 6000ms for recv"
# As torch 2.11 and 2.13 and Triton 3.6 write them.
NO_CUDA = "module 'torch._C' has no attribute '_cuda_setDevice'"
OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU "
    "driver by downloading and installing a new version"
)
NO_DRIVER = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU"
NO_KERNEL = "CUDA error: no kernel image is available for execution on the device"
NO_CC = "RuntimeError: Failed to find C compiler. Please specify via CC environment variable or set"
NO_HEADERS = (
    "CalledProcessError: Command '['/usr/bin/gcc', '/tmp/tmpk3/cuda_utils.c', '-O3', '-shared', "
    "'-I/usr/include/python3.11']' returned non-zero exit status 1."
)


def lost(rank, at, message=CLOSED, exit_code=1):
    return failed(rank, at, "RuntimeError", message, exit_code, kind="lost")


def raised(error):
    """Return the failure of a rank that raises this, from a wait if it is a function."""
    try:
        if callable(error):
            error()
        raise error
    except Exception as caught:
        return RankFailure.of(caught, rank=0, local_rank=0, host="h")


def _wait(message):
    (None for _ in ()).throw(RuntimeError(message))  # raised as by work.wait(), which has no frame


def _pipeline():
    try:
        raise RuntimeError(LATE_READ)
    except RuntimeError as error:
        raise RuntimeError("[Stage 1] failed to run forward") from error


@pytest.mark.parametrize(
    "error",
    [
        *map(RuntimeError, (CLOSED, RESET, LAZY)),
        DistBackendError(NCCL),
        DistNetworkError(STORE),
        DistStoreError(LATE),
        LostPeerError("x"),
        _pipeline,
        partial(_wait, "Application timeout caused pair closure"),
        partial(_wait, "Socket closed [127.0.0.1]:4242"),
    ],
)
def test_an_error_of_another_rank_is_a_consequence_however_early(error):
    cause = failed(3, 2e12, "ValueError", "bad batch")
    consequence = raised(error)
    assert consequence.kind == "lost"
    assert first_cause([consequence, cause]) is cause


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("ProcessGroupGloo::allreduce: a wrong shape"),
        ValueError(CLOSED),
        partial(_wait, "Split sizes doesn't match total dim 0 size"),
        DistBackendError("NCCL error: invalid usage\nncclInvalidUsage: This usually reflects"),
        DistBackendError("NCCL error: unhandled cuda error\nncclUnhandledCudaError: Call to CUDA"),
    ],
)
def test_another_error_is_a_cause_whatever_it_says(error):
    assert raised(error).kind == "raised"


def test_a_mismatch_is_told_with_the_position_of_the_rank():
    found = raised(RuntimeError(f"[/pytorch/gloo/transport/tcp/pair.cc:456] {MISMATCH}"))
    assert found.kind == "mismatched" and found.position is not None
    assert first_cause([lost(1, 0.0), found]) is found


def test_a_killed_rank_beats_those_that_lost_it():
    killed = failed(1, 11.0, exit_code=-signal.SIGKILL)
    assert first_cause([lost(0, 10.0), killed]) is killed


def test_an_abort_may_follow_from_a_lost_peer_but_says_more_than_one():
    aborted = failed(2, 12.0, exit_code=-signal.SIGABRT)
    peer = lost(0, 10.0, RESET)
    segfault = failed(1, 13.0, exit_code=-signal.SIGSEGV)
    assert first_cause([peer, aborted]) is aborted
    assert first_cause([peer, aborted, segfault]) is segfault


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("step 3\nterminate called after throwing an instance of 'E'\n  what():  a\nb\n", "a\nb"),
        ("step 3\nmalloc(): invalid size (unsorted)\n", "malloc(): invalid size (unsorted)"),
        ("", ""),
    ],
)
def test_the_message_of_an_abort_stands_before_the_stacks(before, message):
    stacks = 'Fatal Python error: Aborted\n\nThread 1:\n  File "x"\n\nExtension modules: numpy\n'
    assert failure.abort_message(before + stacks) == message


def test_of_several_causes_the_earliest_wins():
    first = failed(2, 10.0, "KeyError", "'x'")
    assert first_cause([failed(0, 10.5, "KeyError", "'x'"), first, failed(1, 11.0)]) is first


@pytest.mark.parametrize(
    ("kind", "message", "code", "words", "remedy"),
    [
        ("ValueError", "x", 1, "raised an exception", "traceback"),
        ("torch.OutOfMemoryError", "CUDA out of memory. Tried", 1, "GPU ran out", "micro_batch"),
        ("RuntimeError", "[enforce fail] can't allocate memory: you", 1, "host ran out", "ranks"),
        ("OSError", "[Errno 28] No space left on device: 'x'", 1, "disk is full", "free space"),
        ("DistNetworkError", "port: 1, EADDRINUSE, address already in use", 1, "port", "again"),
        ("nanoscale.train.stability.NonFiniteError", "loss is nan", 1, "diverged", "optimizer.lr"),
        ("ModuleNotFoundError", "No module named 'x'", 1, "missing", "install"),
        ("RuntimeError", "CUDA error: an illegal memory access", 1, "GPU operation", "BLOCKING"),
        ("AttributeError", NO_CUDA, 1, "built without CUDA", "launcher.device=cpu"),
        ("AssertionError", "Torch not compiled with CUDA enabled", 1, "built without", "cpu"),
        ("RuntimeError", OLD_DRIVER, 1, "driver is too old", "update the driver"),
        ("RuntimeError", NO_DRIVER, 1, "no GPU driver", "nvidia-smi"),
        ("torch.AcceleratorError", NO_KERNEL, 1, "no kernels for this GPU", "doctor"),
        ("torch._inductor.exc.InductorError", NO_CC, 1, "no C compiler", "launcher.env.CC="),
        ("torch._inductor.exc.InductorError", NO_HEADERS, 1, "Python.h", "backend.compile=off"),
        ("RuntimeError", "x.c:1: fatal error: Python.h: No such file", 1, "Python.h", "headers"),
        ("", "", 3, "ended with code 3", "log"),
        ("", "", None, "the process that starts this host's ranks was killed", "out-of-memory"),
        ("", MISMATCH, -signal.SIGABRT, "of another size", "other shapes"),
        ("", "CUDA error: an illegal memory access", -signal.SIGABRT, "GPU operation", "BLOCKING"),
        (
            "",
            "double free or corruption (out)\n#0",
            -signal.SIGABRT,
            "aborted: double free or",
            "log",
        ),
        ("", "", -signal.SIGABRT, "without a message", "log"),
        ("", "", -signal.SIGSEGV, "segmentation fault", "log"),
        ("", "", -signal.SIGBUS, "bus error", "/dev/shm"),
        ("", "", -signal.SIGTERM, "SIGTERM, which nanoscale did not send", "who"),
    ],
)
def test_diagnoses(kind, message, code, words, remedy):
    diagnosis, advice = diagnose(failed(0, 0.0, kind, message, code), Evidence())
    assert words in diagnosis
    assert remedy in advice


def test_a_lost_connection_without_a_cause_is_told():
    diagnosis, advice = diagnose(lost(0, 0.0), Evidence())
    assert "no rank reported a cause" in diagnosis and "logs" in advice


def test_a_kill_is_called_the_kernels_only_if_the_kernel_counted_one():
    killed = failed(0, 0.0, exit_code=-signal.SIGKILL)
    by_kernel, _ = diagnose(killed, Evidence(oom_kills=1, available_gib=0.25))
    by_somebody, advice = diagnose(killed, Evidence(oom_kills=0, available_gib=9.0))
    assert "out-of-memory killer" in by_kernel and "256 MiB" in by_kernel
    assert "from outside" in by_somebody and "out-of-memory" in advice


def test_the_document_names_rank_host_log_and_who_else_failed(tmp_path):
    run = create_run(tmp_path, "x")
    found = digest(
        run,
        2,
        [lost(0, 2.0), failed(1, 3.0, exit_code=-9)],
        {"h": Evidence(oom_kills=1), "other": Evidence()},
    )
    assert "out-of-memory" in found.diagnosis
    assert (found.rank, found.signal, found.also_failed) == (1, "SIGKILL", (0,))
    assert found.log == "logs/attempt-2/h.rank-1.err"
    failure.write(run, found)
    assert failure.read(run) == found
    gone = digest(run, 2, [failure.agent_failure("h", "the agent was lost")], {})
    assert (gone.rank, gone.diagnosis) == (None, "the agent was lost") and "agent" in gone.log
    assert digest(run, 2, [failure.agent_failure("h", "x")], {}, "srun").log.endswith(
        "srun.agent.log"
    )


def test_code_is_compared_before_devices_are_blamed_for_replicas_that_differ(tmp_path):
    found = digest(RunDirectory(tmp_path), 1, [failed(0, 1.0, "ReplicaError", "rank 0")], {})
    first = f"first `nanoscale conform --config {tmp_path}/config.yaml`"
    assert found.remedy.startswith(first) and "test the devices" in found.remedy


def test_a_users_error_comes_out_as_it_went_in(tmp_path, monkeypatch):
    run = create_run(tmp_path, "x")
    error = UserError(
        "data", "gone", [Violation("data.path", 3, "command line", "is not", ("a", "b"))]
    )
    said = RankFailure.of(error, rank=0, local_rank=0, host="h")
    with monkeypatch.context() as disk:  # the report of a rank waits for no disk
        disk.delattr(os, "fsync")
        failure.write_rank_failure(run.rank_failure(1, "h", 0), said)
    heard = failure.read_rank_failure(run.rank_failure(1, "h", 0))
    assert heard == said
    failure.write(run, digest(run, 1, [heard], {}))
    assert failure.user_error(failure.read(run)) == error
    damages: list[Json] = [{}, {"violations": [5]}, {"violations": [{"suggestions": []}]}]
    for part in damages:
        document = json.loads(run.failure.read_text())
        run.failure.write_text(json.dumps({**document, "user_error": part}))
        with pytest.raises(UserError, match="failure.json has a `user_error` of another form"):
            failure.read(run)


def test_a_damaged_file_is_named_and_is_no_failure_of_a_rank(tmp_path):
    run = create_run(tmp_path, "x")
    run.failure.write_text("{")
    with pytest.raises(UserError, match=r"failure.json is not JSON"):
        failure.read(run)
    assert failure.read_rank_failure(run.failure) is None


def test_what_a_rank_says_is_bounded_so_that_all_ranks_of_a_host_can_say_it():
    def fail():
        raise ValueError("begin" + "😀" * (1 << 20) + "end")

    try:
        fail()
    except ValueError as error:
        one = RankFailure.of(error, rank=0, local_rank=0, host="h")
    assert "characters are omitted" in one.message
    assert one.message.startswith("begin") and one.message.endswith("end")
    assert "in fail" in one.traceback
    many = tuple(replace(one, rank=rank) for rank in range(64))
    assert len(pack(message_of(Ended(1, "failed", many)))) < LONGEST_LINE
