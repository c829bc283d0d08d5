"""The entry of a rank: `python -m nanoscale.worker RUN_DIR`, or `main` from the agent's fork server.

A rank reads the frozen configuration of its run directory, and its identity from the environment: RANK,
LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT as set by torchrun, and from the agent NANOSCALE_ATTEMPT,
NANOSCALE_HOST, and in NANOSCALE_FAILURE_FILE the file for the report of a failure.
"""

import faulthandler
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path

from nanoscale.common.errors import UserError
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.processes.messages import (
    BANDWIDTH,
    BENCH,
    CONFORMITY,
    EVALUATION,
    MODEL_CARD,
    TRAINING,
)
from nanoscale.processes.proc import allow_open_files, bind_to_gpu, keep_freed_memory
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.failure import RankFailure, write_rank_failure
from nanoscale.runs.position import NOW, answer_questions
from nanoscale.runs.rank_context import RankContext, StopFlag

EXIT_CODES = {"completed": 0, "stopped": 75}
_FLIGHT_RECORDER = {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}
"""Names of the variable that says where it writes; by default every job of a user writes to one place."""


Job = Callable[[RankContext], str]
"""The job of a rank; it returns a key of EXIT_CODES."""

JOBS = {
    TRAINING: "nanoscale.train.job",
    BANDWIDTH: "nanoscale.measure.bandwidth",
    EVALUATION: "nanoscale.train.evaluation",
    BENCH: "nanoscale.measure.steps",
    CONFORMITY: "nanoscale.measure.conformity",
    MODEL_CARD: "nanoscale.measure.model_card",
}
"""The module whose `run` is the job, by the launcher's name of the job."""


def main(run_dir: Path | str, job: Job | str = TRAINING) -> str:
    """Run the job as the rank given by the environment, and return how it ended.

    Args:
        run_dir: the run directory, with its frozen configuration.
        job: the job, or its name in JOBS.

    Raises:
        Exception: the error that ended the rank, after it was written to the rank's failure file.
    """
    stop = StopFlag()
    stop.listen()
    allow_open_files()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)  # the agent's request for the stacks of a rank that hangs
    if "NANOSCALE_FAILURE_FILE" in os.environ:
        answer_questions(Path(os.environ["NANOSCALE_FAILURE_FILE"]))
    _flush_every_line()
    run = RunDirectory(Path(run_dir).absolute())
    NOW.program = run.program if run.program.is_file() else None
    try:
        context = _context(run, stop)
        _use_threads(context.config)
        if context.config.launcher.device == "cpu":
            keep_freed_memory()
        else:
            _prepare_for_gpu(context)
        _set_kernels(context.config)
        return (named_job(job) if isinstance(job, str) else job)(context)
    except BaseException as error:
        _record(run, error)
        raise


def host_name() -> str:
    """Return the launcher's name of this host."""
    return os.environ.get("NANOSCALE_HOST") or socket.gethostname()


def attempt_number() -> int:
    """Return the number of this attempt of the run, from 1; 0 if torchrun started it, without a launcher."""
    return int(os.environ.get("NANOSCALE_ATTEMPT", "0"))


def exit_code(error: BaseException) -> int:
    """Return 2 if the user has to change something, else 1."""
    return 2 if isinstance(error, UserError) else 1


def _context(run: RunDirectory, stop: StopFlag) -> RankContext:
    from nanoscale.config.composing.frozen import load

    return RankContext(
        run=run,
        config=load(run.config),
        rank=_rank(),
        local_rank=_local_rank(),
        world_size=int(os.environ["WORLD_SIZE"]),
        host=host_name(),
        attempt=attempt_number(),
        stop=stop,
    )


def _rank() -> int:
    return int(os.environ["RANK"])


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def named_job(name: str) -> Job:
    """Return the job with the launcher's name for it."""
    return import_module(JOBS[name]).run


def _flush_every_line() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")


def _use_threads(config: ResolvedConfig) -> None:
    threads = config.launcher.threads
    if threads == "auto":  # the agent has divided the cores of its host
        threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    import torch

    torch.set_num_threads(threads)


def _set_kernels(config: ResolvedConfig) -> None:
    precision, backend = config.precision, config.backend
    default = backend.attention == "auto" and backend.compile == "off"
    if not default or precision.tf32 is True or precision.deterministic:
        from nanoscale.parallel.kernel_choice import set_kernels

        set_kernels(config)


def _prepare_for_gpu(context: RankContext) -> None:
    """Bind this rank to the cores near its GPU; NCCL's flight recorder writes next to the rank's logs."""
    bind_to_gpu(context.local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    logs = context.run.attempt_logs(context.attempt)
    if logs.is_dir() and not _FLIGHT_RECORDER.intersection(os.environ):
        # PyTorch appends the rank's number.
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(logs / "flight-recorder.rank-")


def _record(run: RunDirectory, error: BaseException) -> None:
    failure = RankFailure.of(error, rank=_rank(), local_rank=_local_rank(), host=host_name())
    default_file = run.rank_failure(attempt_number(), failure.host, _rank())  # under plain torchrun
    write_rank_failure(Path(os.environ.get("NANOSCALE_FAILURE_FILE", default_file)), failure)


def command_line(arguments: list[str]) -> int:
    """Run as the rank given by the environment; return the exit code of the process."""
    if len(arguments) != 1:
        print("usage: python -m nanoscale.worker RUN_DIR", file=sys.stderr)
        return 2
    try:
        return EXIT_CODES[main(arguments[0])]
    except Exception as error:
        traceback.print_exc()
        return exit_code(error)


if __name__ == "__main__":
    # one module, not a second one as __main__
    from nanoscale.worker import command_line as canonical

    sys.exit(canonical(sys.argv[1:]))
