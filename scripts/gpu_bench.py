"""What nanoscale reaches on one GPU, beside loops written by hand and Trainer, in one run.

Usage: scripts/gpu_bench.sh [--minutes N] [--tiny] [PART…]

Every row is a training of its own on random tokens, nanoscale's a `nanoscale bench` with the parts of its step;
`nanoscale plan --search` chooses the fastest layout that fits the device, and what runs beside it gets the same
micro batch and recomputation. A part that fails is told with its reason, and the others go on; none is begun
once its time is over. Figures go as JSON to $OUT, or to benchmarks/results/, after every part.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from nanoscale.data.indexed import IndexedWriter
from nanoscale.devices import detect, driver
from nanoscale.runs.parts import PARTS

ROOT = Path(__file__).parent.parent
WINDOWS, STEPS = 2, 2
"""windows that are timed, after one that warms up, and optimizer steps in each"""
VOCABULARY = 128256
ACCUMULATION = 4
"""micro batches in a step: the update and the masters' copies are amortised as in any real training"""
SURE = 0.9
"""probability of fitting, below which a layout is not tried: running out of memory costs a minute"""
SAME = (
    "zero=stage0",
    "parallel.dp=1",
    "backend.compile=on",
    "checkpoint=none",
    "logger=none",
    "scheduler.warmup_steps=1",
    "train.steps=100",
    "train.eval_every=0",
    "data.valid_fraction=0",
)
TINY = (
    "model.layers=2",
    "model.hidden=64",
    "model.heads=4",
    "model.kv_heads=2",
    "model.head_dim=16",
    "model.ffn=128",
    "model.vocab=512",
    "train.seq_len=64",
    "launcher.device=cpu",
    "backend.compile=off",
)
SHOWN = {
    "tokens_per_s": "{:,.0f}",
    "step_time_s": "{:.3f}",
    "mfu": "MFU {:.1%}",
    "memory_gib": "{:.1f} GiB",
}
"""figures of a row that are printed"""
FIGURES = (
    *SHOWN,
    "mfu_of_measured",
    "matmul_tflops",
    "first_step_s",
    "loss",
    "parts",
    "predicted",
)
"""what is kept of a bench"""


@dataclass(frozen=True)
class Model:
    """What is trained, and with which optimizer, so that it fits a GPU."""

    recipe: str
    seq: int
    optimizer: str


SMALL = Model("llama-1b", 8192, "adamw")
MIDDLE = Model("llama-3b", 8192, "adamw")
LARGE = Model("llama-8b", 4096, "adamw8bit")
FEWER = (24, 16, 12)
"""blocks of a model that does not fit whole"""


class Left(Exception):  # noqa: N818
    """Why something was not measured."""


@dataclass
class Bench:
    """One run of this script."""

    until: float
    tiny: bool
    folder: Path
    """of the runs, which are thrown away"""
    rows: list[dict[str, Any]] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    chosen: dict[tuple[str, str], tuple[tuple[str, ...], str] | None] = field(default_factory=dict)
    """overrides and name of the layout of a recipe in a precision"""

    def left(self) -> float:
        return self.until - time.monotonic()

    def ours(self, what: str, words: tuple[str, ...], limit: float) -> None:
        """Train with nanoscale and keep a row of it."""
        counts = (f"--warmup={STEPS}", f"--steps={WINDOWS * STEPS}")
        place = (f"run.root={self.folder}",)
        found = json.loads(self.nanoscale("bench", *words, *place, *counts, limit=limit, what=what))
        self.keep(what, words, **{name: found[name] for name in FIGURES})
        print(where_time_goes(found["parts"]), flush=True)

    def nanoscale(self, *words: str, limit: float, what: str) -> str:
        return self.call([sys.executable, "-m", "nanoscale", *words, "--json"], limit, what)

    def beside(self, kind: str, what: str, words: tuple[str, ...], limit: float) -> None:
        """Train with something else and keep a row of it; in half the micro batch where memory is short."""
        key = "train.micro_batch="
        (micro,) = (int(word.removeprefix(key)) for word in words if word.startswith(key))
        try:
            found = self.bare(kind, (*words, f"run.root={self.folder}"), limit, what)
        except Left as left:
            if "memory" not in str(left) or micro == 1:
                raise
            print(f"{what:44} out of memory with micro batches of {micro}", flush=True)
            others = tuple(word for word in words if not word.startswith(key))
            self.beside(kind, what, (*others, f"{key}{micro // 2}"), limit)
        else:
            self.keep(what, words, **found)

    def bare(self, kind: str, words: tuple[str, ...], limit: float, what: str) -> dict[str, Any]:
        script = str(ROOT / "scripts" / "gpu_bare.py")
        command = [sys.executable, script, kind, str(WINDOWS), str(STEPS), *words]
        found: dict[str, Any] = json.loads(self.call(command, limit, what).splitlines()[-1])
        return found

    def keep(self, what: str, words: tuple[str, ...], **figures: Any) -> None:
        self.rows.append({"what": what, **figures, "words": [w for w in words if w not in SAME]})
        shown = [text.format(figures[name]) for name, text in SHOWN.items() if figures.get(name)]
        print(f"{what:44} {'  '.join(shown)}", flush=True)

    def told(self, what: str, why: str) -> None:
        self.rows.append({"what": what, "why": why})
        print(f"{what:44} left out: {why}", flush=True)

    def call(self, command: list[str], limit: float, what: str) -> str:
        """Standard output of a command that ends well and in time.

        Raises:
            Left: it did not.
        """
        limit = min(limit, self.left())
        name = re.sub(r"[^a-z0-9]+", "-", what.lower())
        with (
            (self.folder / f"{name}.out").open("w") as out,
            (self.folder / f"{name}.err").open("w") as err,
        ):
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                text=True,
                stdout=out,
                stderr=err,
                start_new_session=True,
                env=os.environ | ({"OMP_NUM_THREADS": "1"} if self.tiny else {}),
            )
            try:
                process.wait(timeout=max(1.0, limit))
            except subprocess.TimeoutExpired:
                end(process)
                raise Left(f"it took more than {limit:.0f} s") from None
        said = Path(out.name).read_text()
        if process.returncode:
            raise Left(cause(said + Path(err.name).read_text()))
        return said


def end(process: subprocess.Popen[str]) -> None:
    """Of a command and all that it has started: first as a user would, then at once."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def cause(text: str) -> str:
    """What a log that ends badly says of it, on one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [one for one in lines if re.search(r"error|Error|does not fit|out of memory", one)]
    return (telling or lines or ["it said nothing"])[-1][:300]


def where_time_goes(parts: dict[str, Any] | None) -> str:
    """The parts of a step, and the dearest kernels, on one line each."""
    if parts is None:
        return "    its parts are unknown"
    shares = {name: parts[f"{name}_s"] / parts["step_s"] for name in PARTS}
    told = [f"{name} {share:.1%}" for name, share in shares.items() if share > 0]
    waits = sum(parts["waits"].values())
    dearest = list(parts["kernels"].items())[:4]
    kernels = [f"{name[:40]} {spent / parts['step_s']:.1%}" for name, spent in dearest]
    lines = [f"{' · '.join(told)} · the host waited {waits} times", " · ".join(kernels)]
    return "\n".join(f"    {line}" for line in lines if line)


def main() -> None:
    parts: dict[str, tuple[Callable[[Bench], None], float]] = {
        "device": (device, 30),
        "8b": (of(LARGE), 180),
        "fp8": (fp8, 100),
        "3b": (of(MIDDLE), 100),
        "1b": (of(SMALL), 80),
        "trainer": (trainer, 50),
        "fp8-loop": (fp8_loop, 80),
        "fp8-rowwise": (fp8_rowwise, 90),
        "grid": (grid, 60),
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything (9)")
    parser.add_argument("--tiny", action="store_true", help="toy models, on the CPU, not compiled")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(parts):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(began + 60 * arguments.minutes, arguments.tiny, Path(folder))
        bench.about = machine()
        print(json.dumps(bench.about))
        write_tokens(bench)
        for name in arguments.parts or parts:
            measure, needed = parts[name]
            if bench.left() < needed / 3:
                bench.told(name, f"{bench.left():.0f} s are left")
                continue
            try:
                measure(bench)
            except Left as why:
                bench.told(name, str(why))
            except Exception as error:  # a part of this script itself is wrong
                bench.told(name, f"{type(error).__name__}: {error}")
            save(bench)
    compare(bench)
    bench.about["seconds"] = round(time.monotonic() - began)
    print(f"{bench.about['seconds']} s; written to {save(bench)}")


def machine() -> dict[str, Any]:
    devices = detect()
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "device": devices.names[0] if devices.names else f"CPU, {devices.cores} cores",
        "driver": driver(),
        "python": platform.python_version(),
    }
    for name in ("torch", "triton", "torchao", "transformers", "accelerate"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def write_tokens(bench: Bench) -> None:
    """Random tokens of the whole vocabulary: as many rows of the embedding are read as in a real training."""
    vocabulary, count = (512, 1 << 16) if bench.tiny else (VOCABULARY, 1 << 22)
    tokens = np.random.default_rng(0).integers(vocabulary, size=count)
    with IndexedWriter(bench.folder / "tokens", np.int32) as writer:
        for document in tokens.reshape(-1, 1 << 12):
            writer.add_document(document)
        writer.finish()


# Parts


def device(bench: Bench) -> None:
    """What the device reaches in products and copies, which any step can be held against."""
    words = words_of(bench, SMALL, "fp32")
    try:
        # Of what is measured beside ours, too.
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        found = bench.bare("device", words, 40, "device")
    except Left as left:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:False"
        bench.told("memory in segments that grow", str(left))
        found = bench.bare("device", words, 40, "device")
    bench.about["reached"] = found
    print("  ".join(f"{name} {value:,.0f}" for name, value in found.items()), flush=True)


def of(model: Model) -> Callable[[Bench], None]:
    """A model in bf16, and a loop by hand beside it."""

    def measure(bench: Bench) -> None:
        words, name = fastest(bench, model, "bf16")
        bench.beside("loop", f"loop {name} bf16", words, 120)

    return measure


def fp8(bench: Bench) -> None:
    """The largest model in 8 bits."""
    words, name = in_8_bits(bench)
    bench.ours(f"nanoscale {name} fp8", words, 120)


def fp8_loop(bench: Bench) -> None:
    words, name = in_8_bits(bench)
    bench.beside("loop", f"loop {name} fp8", words, 120)


def fp8_rowwise(bench: Bench) -> None:
    """The recipe that keeps more of the gradients' digits."""
    words, name = in_8_bits(bench)
    bench.ours(f"nanoscale {name} fp8 rowwise", (*words, "precision.fp8_recipe=rowwise"), 120)


def in_8_bits(bench: Bench) -> tuple[tuple[str, ...], str]:
    if not bench.tiny and importlib.util.find_spec("torchao") is None:
        raise Left("torchao is not installed")
    return layout_of(bench, LARGE, "fp8")


def trainer(bench: Bench) -> None:
    """Hugging Face's Trainer with each of the models, as far as time is left."""
    for name in ("transformers", "accelerate"):
        if importlib.util.find_spec(name) is None:
            raise Left(f"{name} is not installed")
    for model in (SMALL, MIDDLE, LARGE):
        if bench.left() < 40:
            raise Left(f"{bench.left():.0f} s are left for {model.recipe}")
        words, name = layout_of(bench, model, "bf16")
        try:
            bench.beside("trainer", f"Trainer {name} bf16", words, 120)
        except Left as why:
            bench.told(f"Trainer {name} bf16", str(why))


def grid(bench: Bench) -> None:
    """Memory and speed against the plan, as far as time is left."""
    minutes = max(0.0, (bench.left() - 45) / 60)
    script = str(ROOT / "scripts" / "measure_gpu.py")
    if bench.tiny:
        raise Left("it has no toy models")
    text = bench.call([sys.executable, script, str(results()), f"{minutes:.2f}"], 600, "grid")
    print(text, flush=True)


# Layouts


def words_of(bench: Bench, model: Model, precision: str) -> tuple[str, ...]:
    words = (
        f"recipe={model.recipe}",
        f"train.seq_len={model.seq}",
        f"optimizer={model.optimizer}",
        f"precision={precision}",
        *SAME,
        "data=megatron",
        f"data.path={bench.folder}/tokens",
        "train.tokens=null",
    )
    return (*words, *TINY) if bench.tiny else words


def layouts(bench: Bench, model: Model, precision: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Overrides and name of the layouts that fit by the plan, the fastest first.

    A model that does not fit at all is cut to as many blocks as do.
    """
    words = words_of(bench, model, precision)
    for cut in ((), *((f"model.layers={layers}",) for layers in FEWER)):
        fitting = fitting_layouts(bench, (*words, *cut), f"search {model.recipe} {precision}")
        few = f" with {cut[0].rpartition('=')[2]} blocks" if cut else ""
        for chosen in fitting:
            yield (*words, *cut, *chosen), f"{model.recipe}{few} {model.seq // 1024}k"
        if fitting:
            return


def fitting_layouts(bench: Bench, words: Sequence[str], what: str) -> list[tuple[str, ...]]:
    """Micro batch and recomputation of the layouts that surely fit, the fastest first."""
    job = ("train.global_batch=24", "cluster.hosts=1", "cluster.devices_per_host=1")
    text = bench.nanoscale("plan", "--search", *words, *job, limit=30, what=what)
    kept = "parallel.activation_checkpointing"
    found: list[tuple[str, ...]] = []
    for layout in json.loads(text)["layouts"]:
        if layout["fits_probability"] > SURE:
            chosen = dict(override.split("=") for override in layout["overrides"])
            micro = int(chosen.get("train.micro_batch", 1))
            batch = (f"train.micro_batch={micro}", f"train.global_batch={ACCUMULATION * micro}")
            found.append((f"{kept}={chosen.get(kept, 'none')}", *batch))
    return found


def layout_of(bench: Bench, model: Model, precision: str) -> tuple[tuple[str, ...], str]:
    """The layout that was trained before, or else the first of those that fit.

    Raises:
        Left: none fits.
    """
    key = (model.recipe, precision)
    if key not in bench.chosen:
        bench.chosen[key] = next(layouts(bench, model, precision), None)
    if (found := bench.chosen[key]) is None:
        raise Left("nothing fits by the plan")
    return found


def fastest(bench: Bench, model: Model, precision: str) -> tuple[tuple[str, ...], str]:
    """Train in the fastest layout that fits; in the next where the device runs out of memory all the same."""
    if model.optimizer == "adamw8bit" and importlib.util.find_spec("torchao") is None:
        bench.told(model.recipe, "with adamw8bit: torchao is not installed; with adamw instead")
        model = replace(model, optimizer="adamw")
    why = "nothing fits by the plan"
    for words, name in islice(layouts(bench, model, precision), 3):
        try:
            bench.ours(f"nanoscale {name} {precision}", words, 180)
        except Left as left:
            why = str(left)
            if "memory" not in why:
                break
            bench.told(f"nanoscale {name} {precision}", why)
        else:
            bench.chosen[model.recipe, precision] = words, name
            return words, name
    raise Left(why)


# Results


def compare(bench: Bench) -> None:
    """What nanoscale reaches of the others, and 8 bits of 16."""
    speeds = {row["what"]: row["tokens_per_s"] for row in bench.rows if row.get("tokens_per_s")}
    for what, speed in speeds.items():
        maker, _, rest = what.partition(" ")
        ours = speeds.get(f"nanoscale {rest}")
        if maker in ("loop", "Trainer") and ours:
            bench.about[f"nanoscale over {what}"] = ours / speed
        sixteen = speeds.get(re.sub(" fp8.*", " bf16", what))
        if " fp8" in what and sixteen:
            bench.about[f"{what} over bf16"] = speed / sixteen
    for name, ratio in bench.about.items():
        if " over " in name:
            print(f"{name:60} {ratio:.3f}")


def results() -> Path:
    folder = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save(bench: Bench) -> Path:
    target = results() / f"{bench.about['date']}-gpu-bench{'-tiny' if bench.tiny else ''}.json"
    target.write_text(json.dumps({**bench.about, "rows": bench.rows}, indent=1) + "\n")
    return target


if __name__ == "__main__":
    main()
