"""What nanoscale reaches on one GPU, beside a loop written by hand and Trainer, in one run.

Usage: scripts/gpu_bench.sh [--minutes N] [--tiny] [PART…]

Every row is a training of its own on random tokens; `nanoscale plan --search` chooses the fastest layout that
fits the device, and what runs beside it gets the same micro batch and recomputation. A part that fails is told
with its reason, and the others go on; none is begun once its time is over. Figures go as JSON to $OUT, or to
benchmarks/results/, after every part.
"""

from __future__ import annotations

import argparse
import gzip
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from nanoscale.data.indexed import IndexedWriter
from nanoscale.devices import detect, driver

ROOT = Path(__file__).parent.parent
WINDOWS, STEPS = 2, 2
"""windows that are timed, after one to warm up, and optimizer steps in each"""
VOCABULARY = 128256
ACCUMULATION = 4
"""micro batches in a step: the update and the masters' copies are amortised as in any real training"""
ENOUGH = 300
"""seconds left, so that what is less wanted may come before other parts"""
SURE = 0.9
"""probability of fitting, below which a layout is not tried: running out of memory costs a minute"""
SAME = (
    "zero=stage0",
    "parallel.dp=1",
    "backend.compile=on",
    "checkpoint=none",
    "logger=none",
    "scheduler.warmup_steps=1",
    f"train.steps={(WINDOWS + 1) * STEPS}",
    f"train.log_every={STEPS}",
    "train.eval_every=0",
    "train.sample_tokens=0",
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
    "mfu": "{:.1%}",
    "memory_gib": "{:.1f}",
}
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""calls in which the host waits for the device"""
KINDS = {
    "products": r"gemm|nvjet|cutlass|scaled_mm|_mm_",
    "attention": r"flash|fmha|sdpa|attention",
    "optimizer": r"adam|multi_tensor|foreach",
    "copies": r"memcpy|memset|copy",
    "compiled": r"^triton_",
}
"""of kernels, by what their names hold; the first that fits"""


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

    def left(self) -> float:
        return self.until - time.monotonic()

    def train(self, what: str, words: tuple[str, ...], limit: float) -> Path:
        """Train with nanoscale and keep a row of it; the run directory."""
        name = re.sub(r"\W+", "-", what)
        run = self.folder / name
        place = (f"run.root={self.folder}", f"run.name={name}")
        self.call([sys.executable, "-m", "nanoscale", "train", *words, *place], limit, what)
        lines = (run / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines][1:]
        step = sum(record["step_time_s"] for record in records) / len(records)
        last = records[-1]
        scale = last["step_time_s"] / step
        self.keep(
            what,
            words,
            step_time_s=step,
            tokens_per_s=last["tokens_per_s"] * scale,
            mfu=None if last["mfu"] is None else last["mfu"] * scale,
            memory_gib=last["memory_gib"],
            loss=last["loss"],
        )
        return run

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


def main() -> None:
    parts: dict[str, tuple[Callable[[Bench], None], float]] = {
        "device": (device, 30),
        "8b": (of("llama-8b", 4096, "adamw8bit"), 180),
        "fp8": (fp8, 100),
        "3b": (of("llama-3b", 8192, "adamw"), 100),
        "1b": (of("llama-1b", 8192, "adamw"), 80),
        "profile": (profile, 50),
        "trainer": (trainer, 50),
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
    words = words_of(bench, "llama-1b", 8192, "adamw", "fp32")
    grows = {
        "PYTORCH_ALLOC_CONF": "expandable_segments:True"
    }  # of what is measured beside ours, too
    try:
        os.environ |= grows
        found = bench.bare("device", words, 40, "device")
    except Left as left:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:False"
        bench.told("memory in segments that grow", str(left))
        found = bench.bare("device", words, 40, "device")
    bench.about["reached"] = found
    print("  ".join(f"{name} {value:,.0f}" for name, value in found.items()), flush=True)


def of(recipe: str, seq: int, optimizer: str) -> Callable[[Bench], None]:
    """A model in bf16, and a loop by hand beside it."""

    def measure(bench: Bench) -> None:
        moments = optimizer
        if optimizer == "adamw8bit" and importlib.util.find_spec("torchao") is None:
            bench.told(f"{recipe} with {optimizer}", "torchao is not installed; with adamw instead")
            moments = "adamw"
        words, name = fastest(bench, recipe, seq, moments, "bf16")
        bench.beside("loop", f"loop {name} bf16", words, 120)

    return measure


def fp8(bench: Bench) -> None:
    """The largest model in 8 bits, by every recipe that there is for it."""
    if not bench.tiny and importlib.util.find_spec("torchao") is None:
        raise Left("torchao is not installed")
    words, name = layout_of(bench, "llama-8b", 4096, "adamw8bit", "fp8")
    bench.train(f"nanoscale {name} fp8", words, 120)
    if bench.left() > ENOUGH:
        more = (*words, "precision.fp8_recipe=rowwise")
        bench.train(f"nanoscale {name} fp8 rowwise", more, 80)


def trainer(bench: Bench) -> None:
    for name in ("transformers", "accelerate"):
        if importlib.util.find_spec(name) is None:
            raise Left(f"{name} is not installed")
    words, name = layout_of(bench, "llama-1b", 8192, "adamw", "bf16")
    bench.beside("trainer", f"Trainer {name} bf16", words, 100)


def profile(bench: Bench) -> None:
    """Where the time of steps goes, and how often the host waits for the device in them."""
    words, name = layout_of(bench, "llama-1b", 8192, "adamw", "bf16")
    first = WINDOWS * STEPS + 1  # of the last window, and it logs after the last step only
    run = bench.train(
        f"nanoscale {name} bf16, profiled", (*words, f"profile.steps={first}-{first + 1}"), 90
    )
    traces = sorted((run / "profile").rglob("*trace*.json*"))
    if not traces:
        raise Left(f"{run.name}/profile holds no trace")
    bench.about["profile"] = found = read_trace(traces[0])
    print(json.dumps(found, indent=1), flush=True)
    for summary in sorted((run / "profile").glob("*.txt")):
        (results() / f"{bench.about['date']}-gpu-{summary.name}").write_text(summary.read_text())


def grid(bench: Bench) -> None:
    """Memory and speed against the plan, as far as time is left."""
    minutes = max(0.0, (bench.left() - 45) / 60)
    script = str(ROOT / "scripts" / "measure_gpu.py")
    if bench.tiny:
        raise Left("it has no toy models")
    text = bench.call([sys.executable, script, str(results()), f"{minutes:.2f}"], 600, "grid")
    print(text, flush=True)


# Layouts


def words_of(
    bench: Bench, recipe: str, seq: int, optimizer: str, precision: str
) -> tuple[str, ...]:
    words = (
        f"recipe={recipe}",
        f"train.seq_len={seq}",
        f"optimizer={optimizer}",
        f"precision={precision}",
        *SAME,
        "data=megatron",
        f"data.path={bench.folder}/tokens",
        "train.tokens=null",
    )
    return (*words, *TINY) if bench.tiny else words


def layouts(
    bench: Bench, recipe: str, seq: int, optimizer: str, precision: str
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Overrides and name of the layouts that fit by the plan, the fastest first.

    A model that does not fit at all is cut to as many blocks as do.
    """
    words = words_of(bench, recipe, seq, optimizer, precision)
    for layers in ((), ("model.layers=24",), ("model.layers=16",), ("model.layers=12",)):
        search = ("train.global_batch=24", "cluster.hosts=1", "cluster.devices_per_host=1")
        text = bench.call(
            [
                sys.executable,
                "-m",
                "nanoscale",
                "plan",
                "--search",
                "--json",
                *words,
                *layers,
                *search,
            ],
            30,
            f"search {recipe} {precision}",
        )
        found = json.loads(text)["layouts"]
        fitting = [layout for layout in found if layout["fits_probability"] > SURE]
        for layout in fitting:
            chosen = dict(override.split("=") for override in layout["overrides"])
            micro = int(chosen.get("train.micro_batch", 1))
            batch = (f"train.micro_batch={micro}", f"train.global_batch={ACCUMULATION * micro}")
            kept = "parallel.activation_checkpointing"
            mode = f"{kept}={chosen.get(kept, 'none')}"
            cut = f" with {layers[0].rpartition('=')[2]} blocks" if layers else ""
            name = f"{recipe}{cut} {seq // 1024}k"
            yield (*words, *layers, mode, *batch), name
        if fitting:
            return


def layout_of(bench: Bench, *what: Any) -> tuple[tuple[str, ...], str]:
    """The first of the layouts that fit.

    Raises:
        Left: none fits.
    """
    for found in layouts(bench, *what):
        return found
    raise Left("nothing fits by the plan")


def fastest(
    bench: Bench, recipe: str, seq: int, optimizer: str, precision: str
) -> tuple[tuple[str, ...], str]:
    """Train in the fastest layout that fits; in the next where the device runs out of memory all the same."""
    why = "nothing fits by the plan"
    for words, name in list(layouts(bench, recipe, seq, optimizer, precision))[:3]:
        try:
            bench.train(f"nanoscale {name} {precision}", words, 180)
            return words, name
        except Left as left:
            why = str(left)
            if "memory" not in why:
                break
            bench.told(f"nanoscale {name} {precision}", why)
    raise Left(why)


# Traces


def read_trace(path: Path) -> dict[str, Any]:
    """Of a trace of PyTorch's profiler: ms of the device by kind of work, idle ms, and who waited for it."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = [e for e in json.loads(raw)["traceEvents"] if e.get("ph") == "X"]
    work = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    waits = [e for e in events if e["name"] in WAITS]
    found: dict[str, Any] = {"waits": count(e["name"] for e in waits)}
    if not work:
        return found | {"device": "no work of a device is in the trace"}
    begin, stop = min(e["ts"] for e in work), max(e["ts"] + e["dur"] for e in work)
    inside = [e for e in waits if begin <= e["ts"] < stop]
    kinds: dict[str, float] = {}
    names: dict[str, float] = {}
    for event in work:
        kind = next((k for k, p in KINDS.items() if re.search(p, event["name"], re.I)), "other")
        kinds[kind] = kinds.get(kind, 0.0) + event["dur"] / 1e3
        names[event["name"]] = names.get(event["name"], 0.0) + event["dur"] / 1e3
    longest = sorted(names.items(), key=lambda pair: -pair[1])[:12]
    return found | {
        "waits_while_the_device_works": count(e["name"] for e in inside),
        "span_ms": (stop - begin) / 1e3,
        "idle_ms": (stop - begin - busy(work)) / 1e3,
        "ms_by_kind": dict(sorted(kinds.items(), key=lambda pair: -pair[1])),
        "longest_ms": {name[:120]: ms for name, ms in longest},
    }


def count(names: Iterator[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in names:
        found[name] = found.get(name, 0) + 1
    return found


def busy(work: list[dict[str, Any]]) -> float:
    """µs in which anything ran, whatever streams it was on."""
    total, until = 0.0, 0.0
    for event in sorted(work, key=lambda e: e["ts"]):
        stop = event["ts"] + event["dur"]
        total += max(0.0, stop - max(until, event["ts"]))
        until = max(until, stop)
    return total


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
