"""The measurements on a GPU, part by part."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.gpu.base import write_base
from benchmarks.gpu.items import read_items
from benchmarks.gpu.session import Failed, Figures, NotMeasured, Session, TooSlow, cause

WARM_UP, TIMED = 2, 4
"""Optimizer steps of a row."""
ACCUMULATION = 4
"""Micro batches of a step: the update and the copies of the weights are amortised as in any real training."""
SURE = 0.9
"""The least probability that a layout fits: running out of memory costs a minute."""
PEER_SHARE = 0.9
"""Most of the device's memory that a peer may need by `Layout.peer_gib`, which is only an estimate."""
VOCABULARIES = (128256, 50257)
"""Vocabularies of Llama 3 and GPT-2: random tokens read as many rows of the embedding as a real training."""
SAME = (
    "zero=stage0",
    "parallel.dp=1",
    "checkpoint=none",
    "logger=none",
    "scheduler.warmup_steps=1",
    "train.steps=100",
    "train.tokens=null",
    "train.eval_every=0",
    "data=megatron",
    "data.valid_fraction=0",
)
TINY = (
    "model.layers=2",
    "model.hidden=64",
    "model.heads=4",
    "model.kv_heads=4",
    "model.head_dim=16",
    "model.ffn=128",
    "model.vocab=512",
    "train.seq_len=64",
    "launcher.device=cpu",
    "backend.compile=off",
)
COMMANDS = (["nvidia-smi"], ["gcc", "--version"], ["python3-config", "--includes"])
"""Commands whose output is stored with the machine: driver, compiler and the headers that Triton needs."""
_NAMES_ALLOCATOR = re.compile(r"expandable.segment|CUDA driver error", re.IGNORECASE)
"""torch's messages about failed expandable segments: only they call the driver's API here."""


@dataclass(frozen=True)
class Model:
    """A recipe, and what differs from it.

    Attributes:
        name: of the rows; None: the recipe's.
        has_base: True if the model is a folder of weights, all 0, which adapters need.
    """

    recipe: str
    seq: int
    optimizer: str
    more: tuple[str, ...] = ()
    name: str | None = None
    has_base: bool = False

    def job(self, precision: str) -> str:
        return f"{self.name or self.recipe} {self.seq // 1024}k {precision}"

    def overrides(self, precision: str) -> tuple[str, ...]:
        return (
            f"recipe={self.recipe}",
            f"train.seq_len={self.seq}",
            f"optimizer={self.optimizer}",
            f"precision={precision}",
            *(() if "backend.compile=off" in self.more else ("backend.compile=on",)),
            *self.more,
        )


SMALL = Model("llama-1b", 8192, "adamw")
MIDDLE = Model("llama-3b", 8192, "adamw")
LARGE = Model("llama-8b", 4096, "adamw")
"""Fits 80 GB with weights, gradients and moments in bf16 alone, in which no peer trains it there."""
LORA = Model("llama-8b", 4096, "adamw", ("lora.rank=16",), "LoRA llama-8b", has_base=True)
NF4 = replace(
    LORA, more=("lora.rank=16", "lora.base=nf4", "backend.compile=off"), name="NF4 llama-8b"
)
EXPERTS = Model("qwen3-30b-a3b", 4096, "adamw", ("model.layers=12",), "qwen3-30b-a3b of 12 layers")
OSS = Model(
    *("qwen3-30b-a3b", 4096, "adamw", ("model=gpt-oss-20b", "model.layers=8")),
    "gpt-oss-20b of 8 layers",
)
PACKED = replace(SMALL, more=("data.document_mask=true",), name="llama-1b packed")
SAVED = replace(
    SMALL,
    more=("checkpoint=periodic", "checkpoint.every=100", "checkpoint.asynchronous=true"),
    name="llama-1b with checkpoints",
)


@dataclass(frozen=True)
class Layout:
    """A layout that fits by the plan.

    Attributes:
        overrides: micro batch and recomputation.
        gib: memory that nanoscale allocates.
        peer_gib: memory that a loop with autocast and whole logits allocates: a residual stream in fp32 makes
            activations a quarter larger, and logits take 10 bytes an element (bf16, fp32 and a gradient).
        capacity_gib: memory of the device.
    """

    overrides: tuple[str, ...]
    gib: float
    peer_gib: float
    capacity_gib: float

    @classmethod
    def read(cls, found: Figures, logits: int) -> Layout:
        """Read one of the layouts of `plan --search --json`, with the number of logits of a sequence."""
        chosen = dict(override.split("=") for override in found["overrides"])
        micro = int(chosen.get("train.micro_batch", 1))
        kept = "parallel.activation_checkpointing"
        batch = (f"train.micro_batch={micro}", f"train.global_batch={ACCUMULATION * micro}")
        memory = found["memory"]
        more = memory["parts"]["activations"] / 4 + 10 * micro * logits / 2**30
        overrides = (f"{kept}={chosen.get(kept, 'none')}", *batch)
        gib = memory["allocated_gib"]
        return cls(overrides, gib, gib + more, memory["capacity_gib"])


@dataclass
class Bench:
    """The benchmark of one machine.

    Attributes:
        runs: the folder of tokens and of runs, which is deleted.
        searched: layouts that fit, the fastest first, by recipe and precision.
    """

    session: Session
    runs: Path
    tiny: bool
    searched: dict[tuple[str, str], list[Layout]] = field(default_factory=dict)

    def machine(self) -> Figures:
        """Describe the machine, load the libraries once, so that no limit pays for it, and write tokens."""
        printed = {" ".join(command): self.printed(command) for command in COMMANDS}
        chosen = os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        try:
            found = self.peer("machine")
        except Failed as failed:
            if not _NAMES_ALLOCATOR.search(failed.log):
                raise
            chosen = os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:False"
            found = self.peer("machine")
        return {**found, "allocator": chosen, "commands": printed}

    def printed(self, command: list[str]) -> list[str]:
        try:
            text = self.session.run(command)
        except (OSError, Failed) as error:  # it is not installed, or does not work
            text = str(error)
        print(f"$ {' '.join(command)}\n{text}", flush=True)
        return text.splitlines()

    def several(self, module: str) -> Figures:
        """Run the measurements of a module, also those after one that ends the process."""
        rows: dict[str, Figures] = {}
        device, ended, is_over = "cpu" if self.tiny else "cuda", "", False
        while not is_over:
            words = [sys.executable, "-m", f"benchmarks.gpu.{module}", device, str(self.runs)]
            log, before = "", len(rows)
            try:
                output, is_over = self.session.run([*words, *rows]), True
            except TooSlow as late:
                output, is_over, ended = late.log, True, f", {late}"
            except Failed as failed:
                output, log = failed.log, cause(failed.log)
            rows |= read_items(output)
            if log and len(rows) == before:
                raise NotMeasured(f"failed: {log}", output)
            for row in rows.values():
                row.setdefault("verdict", f"WRONG: {log}" if log else "not finished")
        return {"items": [*rows.values()], "ended": ended}

    def device(self) -> Figures:
        """Measure products and copies, which bound any step."""
        return self.peer("device")

    def nanoscale(self, model: Model, precision: str, *more: str) -> Figures:
        """Train with nanoscale in the fastest layout that fits."""
        overrides = (*self.words(model, precision), *more)
        return first_that_fits(
            self.layouts(model, precision), lambda layout: self.bench(*overrides, *layout.overrides)
        )

    def beside(self, kind: str, model: Model, precision: str) -> Figures:
        """Train with a peer in the fastest of these layouts that also fits without nanoscale's savings."""
        layouts = self.layouts(model, precision)
        fitting = [it for it in layouts if it.peer_gib < PEER_SHARE * it.capacity_gib]

        def train(layout: Layout) -> Figures:
            overrides = self.overrides(*model.overrides(precision), *layout.overrides)
            return {**self.peer(kind, *overrides), "overrides": overrides}

        return first_that_fits(fitting, train)

    def bench(self, *chosen: str) -> Figures:
        overrides = self.overrides(*chosen)
        counts = (f"--warmup={WARM_UP}", f"--steps={TIMED}")
        found = self.command("bench", *overrides, *counts)
        stall = (found.get("checkpoint") or {}).get("stall_s")
        return {**found, "stall_s": stall, "overrides": overrides}

    def layouts(self, model: Model, precision: str) -> list[Layout]:
        key = (model.job(precision), precision)
        if key not in self.searched:
            batch = ("train.global_batch=24", "cluster.hosts=1", "cluster.devices_per_host=1")
            overrides = self.overrides(*self.words(model, precision), *batch)
            found = self.command("plan", "--search", *overrides)["layouts"]
            sure = [it for it in found if it["fits_probability"] > SURE]
            logits = 64 * 512 if self.tiny else model.seq * VOCABULARIES[0]
            self.searched[key] = [Layout.read(it, logits) for it in sure]
        return self.searched[key]

    def words(self, model: Model, precision: str) -> tuple[str, ...]:
        """Return the overrides of a model, whose base is written if it has one."""
        words = model.overrides(precision)
        if not model.has_base:
            return words
        base = self.runs / "base"
        if not base.exists():
            write_base(base, f"recipe={model.recipe}", "data=stdlib", *(TINY if self.tiny else ()))
        return (*words, f"model.init_from={base}")

    def overrides(self, *chosen: str) -> tuple[str, ...]:
        vocabulary = VOCABULARIES["recipe=gpt2" in chosen[0]]
        folders = (f"data.path={self.runs}/tokens-{vocabulary}", f"run.root={self.runs}")
        toy: tuple[str, ...] = TINY if self.tiny else ()
        if any(it.startswith("model.init_from=") for it in chosen):
            toy = tuple(it for it in toy if not it.startswith("model."))
        return (*SAME, *chosen, *folders, *toy)

    def command(self, *words: str) -> Figures:
        text = self.session.run([sys.executable, "-m", "nanoscale", *words, "--json"])
        found: Figures = json.loads(text)
        return found

    def peer(self, kind: str, *overrides: str) -> Figures:
        device = "cpu" if self.tiny else "cuda"
        module = "benchmarks.gpu.peers"
        words = [sys.executable, "-m", module, kind, device, str(self.runs), *overrides]
        found: Figures = json.loads(self.session.run(words).splitlines()[-1])
        return found


def first_that_fits(layouts: list[Layout], train: Callable[[Layout], Figures]) -> Figures:
    """Train in the first layout; if the GPU runs out of memory, in the next that needs a tenth less.

    Raises:
        NotMeasured: it failed otherwise, took too long, or nothing fits.
    """
    too_large: list[tuple[str, ...]] = []
    while layouts:
        layout = layouts[0]
        try:
            return {**train(layout), "ran_out_of_memory": too_large}
        except Failed as failed:
            if not failed.out_of_memory:
                raise
        too_large.append(layout.overrides)
        layouts = [it for it in layouts if it.gib < 0.9 * layout.gib]
    tried = f"; the GPU ran out of memory with {too_large}" if too_large else ""
    raise NotMeasured(f"does not fit: no layout is planned to{tried}")


# Parts


@dataclass(frozen=True)
class Measurement:
    """A row.

    Attributes:
        needed_s: its least duration, seconds: with less time left it is not started.
        peer: True if it is measured after all of nanoscale's own of the same call, which matter more.
    """

    what: str
    act: Callable[[Bench], Figures]
    needed_s: float
    peer: bool = False
    limit_s: float | None = None


FP8 = "precision.fp8=true"


def ours(model: Model, precision: str, needed_s: float, *more: str) -> Measurement:
    words = ("fp8" if it == FP8 else it.partition("=")[2] for it in more)
    name = " ".join([f"nanoscale {model.job(precision)}", *words])
    return Measurement(name, lambda bench: bench.nanoscale(model, precision, *more), needed_s)


def warm(model: Model, precision: str, needed_s: float) -> Measurement:
    """Return a row for a second training with the compiled kernels of the one before."""
    again = ours(model, precision, needed_s)
    return replace(again, what=f"{again.what}, warm")


def peer(kind: str, model: Model, precision: str, needed_s: float) -> Measurement:
    name = f"{kind} {model.job(precision)}"
    return Measurement(name, lambda bench: bench.beside(kind, model, precision), needed_s, True)


def grid() -> Iterator[Measurement]:
    """Yield jobs for comparing memory with the plan, the most different first: time may not suffice.

    Blocks are not compiled, which would take a minute a job.
    """
    for mode in ("none", "selective", "full"):
        for model, batch, seq in (("gpt2-medium", 8, 1024), ("llama-1b", 2, 4096)):
            yield cell(model, batch, seq, mode, "bf16")
    for precision in ("fp32", "fp8"):
        yield cell("llama-1b", 2, 2048, "none", precision)
    for batch, seq in ((1, 2048), (4, 2048), (8, 1024), (1, 8192), (4, 8192)):
        yield cell("llama-1b", batch, seq, "none", "bf16")
    yield cell("llama-3b", 1, 4096, "full", "bf16")
    yield cell("llama-3b", 2, 4096, "selective", "bf16")
    yield cell("gpt2-xl", 4, 1024, "none", "bf16")
    yield cell("llama-8b", 1, 4096, "full", "bf16-pure", "optimizer=adamw")


def cell(model: str, batch: int, seq: int, mode: str, precision: str, *more: str) -> Measurement:
    overrides = (
        f"recipe={model}",
        f"train.micro_batch={batch}",
        f"train.global_batch={2 * batch}",
        f"train.seq_len={seq}",
        f"parallel.activation_checkpointing={mode}",
        f"precision={precision}",
        "backend.compile=off",
        *more,
    )
    name = f"grid {model} {batch}x{seq} {mode} {precision}"
    return Measurement(name, lambda bench: bench.bench(*overrides), 15)


MACHINE = Measurement("machine", Bench.machine, 0, limit_s=120)
PARTS: dict[str, tuple[Measurement, ...]] = {
    "correct": (Measurement("correct", lambda bench: bench.several("correct"), 60, limit_s=90),),
    "8b": (ours(LARGE, "bf16-pure", 80), ours(LARGE, "bf16-pure", 80, FP8)),
    "kernels": (Measurement("kernels", lambda bench: bench.several("kernels"), 30, limit_s=75),),
    "experts": (ours(EXPERTS, "bf16-pure", 80), ours(OSS, "bf16-pure", 80)),
    "lora": (ours(LORA, "bf16", 60), ours(NF4, "bf16", 60)),
    "packed": (ours(PACKED, "bf16", 50),),
    "stalls": (ours(SAVED, "bf16", 50), warm(SAVED, "bf16", 40)),
    "device": (Measurement("device", lambda bench: bench.device(), 10, limit_s=120),),
    "fp8": (ours(MIDDLE, "fp8", 80),),
    "3b": (ours(MIDDLE, "bf16", 70), peer("loop", MIDDLE, "bf16", 60)),
    "1b": (ours(SMALL, "bf16", 60), peer("loop", SMALL, "bf16", 50)),
    "trainer": tuple(peer("Trainer", model, "bf16", 40) for model in (SMALL, MIDDLE)),
    "fp8-rowwise": (ours(MIDDLE, "fp8", 80, "precision.fp8_recipe=rowwise"),),
    "fp8-loop": (peer("loop", MIDDLE, "fp8", 70),),
    "grid": tuple(grid()),
}
