"""Rehearsals as the launcher starts them: their cache, and the process that plays ranks. Torch-free."""

import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from nanoscale.common.cache_folder import cache_path
from nanoscale.common.devices import cores
from nanoscale.common.errors import UserError, Violation
from nanoscale.common.json_text import Json, parse
from nanoscale.common.versions import missing, nanoscale_version
from nanoscale.config.composing.frozen import dump
from nanoscale.config.hardware.data_sheets import UnknownHardwareError, described
from nanoscale.config.reference import flat
from nanoscale.config.resolved import ResolvedConfig
from nanoscale.config.schema import Config
from nanoscale.rehearse.kinds import played_ranks, repeated_batches
from nanoscale.rehearse.played.record import RankRecord
from nanoscale.runs.directory import read_json, write_atomically, write_json

STEPS = 2
"""The steps of a rehearsal: the first one makes the optimizer's states."""
_BLOCK_S = 0.04
"""Seconds of processor time to play a block's forward and backward pass, measured with Llama 8B and 70B."""
_REPEATED = 0.03
"""The time of a repeated pass, as a share of a played one's: 2.5 % was measured (tp 2, full recomputation)."""
_SHARE = 0.8
"""The share of this machine's free memory that ranks may use."""


def why_unplayable(config: ResolvedConfig) -> Violation | None:
    """Return why a job cannot be rehearsed; None if it can be."""
    source = config.model.source
    foreign = {"model": source if source == "hooks" else None, "hooks.path": config.hooks.path}
    for key, value in foreign.items():
        if value is not None and config.launcher.device != "cpu":
            message = "is not nanoscale's own, which alone is rehearsed on GPUs"
            return Violation(key, value, "", message)
    if config.lora.base == "nf4":
        message = "keeps weights in tensors of torchao, which are not rehearsed"
        return Violation("lora.base", "nf4", "", message, ("lora.base=whole",))
    if (recipe := config.precision.fp8_recipe) in ("mxfp8", "nvfp4"):
        message = "casts in kernels of torchao that exist on GPUs alone, so it is not rehearsed"
        whole = "precision.fp8=false " if config.model.experts else ""
        advice = f"{whole}precision.fp8_recipe=tensorwise"
        return Violation("precision.fp8_recipe", recipe, "", message, (advice,))
    if config.backend.name == "deepspeed":
        what = (
            "DeepSpeed's own extensions need the devices, so only the native backend is rehearsed"
        )
        return Violation("backend", "deepspeed", "", what, ("backend=native",))
    return None


def device_of(config: ResolvedConfig) -> tuple[Json | None, int]:
    """Return the description of the job's GPUs, and the bytes that are not PyTorch's; None for CPUs."""
    if config.launcher.device == "cpu":
        return None, 0
    cluster = described(config)
    assert cluster.memory_gib is not None and cluster.devices_per_host is not None
    name = cluster.recognised[0] if cluster.recognised else cluster.device
    gpu = {
        "name": f"{'NVIDIA' if cluster.compute_capability else 'AMD Instinct'} {name}",
        "memory": int(cluster.memory_gib * 2**30),
        "devices": cluster.devices_per_host,
        "capability": divmod(round(10 * (cluster.compute_capability or 9.0)), 10),
    }
    return gpu, int((cluster.context_gib or 0.0) * 2**30)


def digest(
    config: Config, gpu: Json | None, ranks: list[int], steps: int,
    every_batch: bool = False,
) -> str:  # fmt: skip
    """Return the name of a rehearsal in the cache: equal for equal configurations and equal code."""
    what = [_shaping(config), gpu, ranks, steps, every_batch]
    names = [json.dumps(what, sort_keys=True), sys.version, nanoscale_version()]
    names += [importlib.metadata.version("torch"), missing("triton")]
    return hashlib.blake2b("\n".join(names).encode(), digest_size=16).hexdigest()


def _shaping(config: Config) -> Json:
    """Return the values that decide what a rank runs: all but numbers, paths and times."""
    values = flat(asdict(config))
    shaping = {key: value for key, value in values.items() if not key.startswith(_ONLY_NUMBERS)}
    return (
        shaping
        | {key: bool(values[key]) for key in _SWITCHES}
        | {"launcher.device": config.launcher.device, "launcher.env": config.launcher.env}
    )


_ONLY_NUMBERS = (
    "run.", "cluster.", "launcher.", "logger.", "profile.", "scheduler.", "optimizer.lr", "optimizer.betas",
    "optimizer.eps", "train.steps", "train.tokens", "train.epochs", "train.seed", "train.log_every",
    "train.eval_samples", "train.stop_when.", "train.sample_", "data.path", "data.valid_",
    "data.mixture", "data.tokenizer", "data.bpe_vocab", "data.cache_dir", "guard.", "checkpoint.keep_last",
    "checkpoint.keep_every", "checkpoint.at_stop", "checkpoint.upload", "checkpoint.best_metric",
    "train.eval_tasks",
)  # fmt: skip
"""The beginnings of the keys that are not in a rehearsal's name. A new key is, until it is listed here."""
_SWITCHES = (
    "optimizer.momentum", "optimizer.weight_decay", "checkpoint.every", "checkpoint.every_minutes",
    "checkpoint.keep_best", "train.eval_every", "train.eval_tasks",
)  # fmt: skip
"""Numbers that matter only as 0 or not: with 0, an update skips the term, and a rehearsal the action."""


def cached(name: str) -> Path:
    """Return the file of a rehearsal in the cache."""
    return cache_path(None) / "rehearsals" / f"{name}.json"


def known(name: str) -> Json | None:
    """Return the document of a rehearsal in the cache; None if there is none that this user wrote and that can
    be read."""
    with suppress(OSError, ValueError):
        about = cached(name).stat()
        total, _, text = cached(name).read_text("utf-8").partition("\n")
        is_own = about.st_uid == os.getuid() and not about.st_mode & 0o022
        if is_own and total == _sum(text):
            return parse(text)
    return None


def _sum(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def known_of(config: ResolvedConfig) -> Json | None:
    """Return the document of the present code's rehearsal of a job on its hardware; None if there is none."""
    try:
        gpu, _ = device_of(config)
    except UnknownHardwareError:
        return None
    return known(digest(config, gpu, sorted(played_ranks(config)), STEPS))


def estimated_seconds(config: ResolvedConfig) -> float:
    """Return the estimated seconds of a rehearsal on this machine, from the ranks that take longest."""
    layout, kinds = config.parallel, len(played_ranks(config))
    repeated = repeated_batches(config)
    cost = _REPEATED if layout.pp > 1 else 0.0
    micro_batches = config.accumulation - repeated + cost * repeated
    passes = STEPS * micro_batches * config.model.layers / layout.pp
    return _BLOCK_S * passes * -(-kinds // cores())


def keep(name: str, document: Json) -> None:
    """Write the document of a rehearsal into the cache; errors of a full or read-only disk are ignored."""
    with suppress(OSError):
        cached(name).parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(document)
        write_atomically(cached(name), f"{_sum(text)}\n{text}")
        cached(name).chmod(0o644)


@dataclass(frozen=True)
class Task:
    """The ranks that a process plays, and the resources that it may use."""

    ranks: list[int]
    steps: int
    gpu: Json | None
    """The fields of `rehearse.played.cuda.Gpu`; None for a job on CPUs."""
    processes: int
    """The most ranks that are played at once."""
    memory: int
    """The most bytes of host memory that one rank may use."""
    snapshots: bool = False
    """True to write the history of each GPU's memory."""
    every_batch: bool = False
    """True to play all micro batches of a step."""

    def write(self, folder: Path) -> None:
        write_json(folder / "task.json", asdict(self))

    @classmethod
    def read(cls, folder: Path) -> Self:
        return cls(**read_json(folder / "task.json"))


def record_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def snapshot_file(folder: Path, rank: int) -> Path:
    """Return the file with the history of a rank's GPU, for pytorch.org/memory_viz."""
    return folder / f"rank-{rank}.pickle"


def rehearse(
    config: Config,
    gpu: Json | None,
    ranks: list[int],
    steps: int,
    progress: Callable[[str], None],
    snapshots: Path | None = None,
    *,
    every_batch: bool = False,
) -> list[RankRecord]:
    """Play ranks in processes of their own, and return their records in this order.

    Args:
        snapshots: the folder for the history of each rank's GPU.

    Raises:
        UserError: the process that plays them could not do so.
    """
    import psutil

    with tempfile.TemporaryDirectory(prefix="nanoscale-rehearse-") as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(dump(config), "utf-8")
        free = int(_SHARE * psutil.virtual_memory().available)
        at_once, writes = min(cores(), len(ranks)), snapshots is not None
        Task(ranks, steps, gpu, at_once, free, writes, every_batch).write(folder)
        progress("loading torch …")
        with _process(folder) as process:
            assert process.stdout is not None
            for number, _ in enumerate(process.stdout, 1):
                progress(f"{number} of {len(ranks)} ranks rehearsed …")
        if code := process.wait():
            errors = (folder / "errors").read_text("utf-8", errors="replace").split("\n")
            cause = next((line for line in reversed(errors) if line.strip()), code)
            raise UserError("rehearse", f"the rehearsal itself failed: {cause}")
        if snapshots is not None:
            snapshots.mkdir(exist_ok=True)
            for file in folder.glob("*.pickle"):
                shutil.move(file, snapshots / file.name)
        return [RankRecord.of_json(read_json(record_file(folder, rank))) for rank in ranks]


@contextmanager
def _process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start the process that plays ranks, in a group of its own; none of the group outlives the block."""
    command = [sys.executable, "-m", "nanoscale.rehearse", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"TMPDIR": str(folder), "TRITON_CACHE_DIR": str(folder)}  # of all copies
    with (folder / "errors").open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            env=environment,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
