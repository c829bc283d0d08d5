"""Measure nanoscale and its peers on this machine, as ratios in one run: `make bench`.

Prints one table and stores it under benchmarks/results/ with date, machine and versions. `make bench` takes
about ten minutes on two cores; name parts to run these alone. `--smallest` only shows that the parts run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.support.runs import create_run

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PEERS = ("nanoscale", "torch", "hydra-core", "typer", "deepspeed", "transformers", "accelerate")
Row = tuple[str, float, str, float | None]
"""The quantity, its figure, its unit, and the figure over its peer's."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)}; all by default")
    parser.add_argument("--no-save", action="store_true", help="only print the table")
    parser.add_argument(
        "--smallest",
        action="store_true",
        help="run each part at its smallest size; implies --no-save",
    )
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.parts) - PARTS.keys():
        parser.error(
            f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}"
        )
    rows: list[Row] = []
    for name in arguments.parts or PARTS:
        part, smallest = PARTS[name]
        rows += part(**smallest) if arguments.smallest else part()
    text = render(rows)
    print(text)
    if not (arguments.no_save or arguments.smallest):
        save(rows, text, "".join(f"-{name}" for name in arguments.parts))


def bench_start(turns: int = 6) -> list[Row]:
    """Measure the wall time of commands that only look things up, and of the peers' help."""
    return beside(
        {
            "torchrun --help": ["torchrun", "--help"],
            "deepspeed --help": ["deepspeed", "--help"],
            "accelerate launch --help": ["accelerate", "launch", "--help"],
            "nanoscale --help": ["nanoscale", "--help"],
            "nanoscale config show recipe=llama-8b": words("config show recipe=llama-8b"),
        },
        turns,
    )


def bench_runs(turns: int = 6, count: int = 200) -> list[Row]:
    """Measure the wall time of commands that read many runs of 500 logged steps."""
    from nanoscale.config.composing.compose import compose
    from nanoscale.config.composing.frozen import dump
    from nanoscale.config.rules import Devices, check
    from nanoscale.runs import status

    composed = compose(["recipe=debug"])
    text = dump(check(composed, Devices("cpu", 1)), composed.config)
    names = (
        "loss",
        "lr",
        "grad_norm",
        "tokens",
        "step_time_s",
        "tokens_per_s",
        "memory_gib",
        "time",
    )
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            made = create_run(Path(folder), f"run-{number}")
            made.config.write_text(text)
            status.write(
                made, status.Status("prepared", 0, float(number)).starting(1).ending("completed", 0)
            )
            lines = [
                json.dumps({"step": step, **dict.fromkeys(names, 1.5)}) for step in range(1, 501)
            ]
            made.metrics.write_text("\n".join(lines) + "\n")
        columns = ["--columns", "lr,loss,optimizer.lr", "--where", "loss<3", "--sort", "loss"]
        listing = ["nanoscale", "runs", "ls", "--root", folder]
        return beside(
            {
                "torchrun --help": ["torchrun", "--help"],
                f"nanoscale runs ls, {count} runs": listing,
                f"nanoscale runs ls with columns, {count} runs": [*listing, *columns],
                "nanoscale runs show": words(f"runs show {folder}/run-0"),
            },
            turns,
        )


def bench_plan(turns: int = 6) -> list[Row]:
    """Measure the wall time of plans of a large job, and of a peer's plans in the same minutes."""
    job = "recipe=llama-70b cluster=h100-sxm cluster.hosts=16"
    return beside(
        {
            "torchrun --help": ["torchrun", "--help"],
            "nanoscale plan, llama-70b on 128 H100": words(
                f"plan {job} parallel.tp=8 parallel.pp=4"
            ),
            "nanoscale plan --search, llama-70b on 128 H100": words(f"plan {job} --search"),
        },
        turns,
    )


def words(text: str) -> list[str]:
    return ["nanoscale", *text.split()]


def beside(commands: dict[str, list[str]], turns: int) -> list[Row]:
    """Measure each command's wall time, and its ratio to the first command's."""
    seconds = {
        name: median_of(turns, partial(run, [str(BIN / program), *arguments]))
        for name, (program, *arguments) in commands.items()
    }
    first = next(iter(seconds.values()))
    return [(name, value, "s", value / first) for name, value in seconds.items()]


def bench_launch(turns: int = 4, ranks: int = 8) -> list[Row]:
    """Measure the time from a command to the end of the first step, with as many ranks as a host has GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "recipe=debug",
            f"parallel.dp={ranks}",
            "train.steps=1",
            f"train.global_batch={ranks}",
            "checkpoint.at_end=false",
            "logger=none",
            f"run.root={folder}",
        ]
        nanoscale = [str(BIN / "nanoscale"), "train", *words]
        pairs = []
        for attempt in range(turns):
            ours = time_to_first_step(
                [*nanoscale, f"run.name=ours-{attempt}"], Path(folder) / f"ours-{attempt}"
            )
            peer = Path(folder) / f"peer-{attempt}"
            peer.mkdir()
            (peer / "checkpoints").mkdir()
            (peer / "logs").mkdir()
            shutil.copy(Path(folder) / f"ours-{attempt}" / "config.yaml", peer)
            torchrun = [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={ranks}"]
            command = [*torchrun, "-m", "nanoscale.worker", str(peer)]
            pairs.append((ours, time_to_first_step(command, peer)))
    ours, theirs = medians_of(pairs)
    return [
        (f"torchrun, {ranks} ranks, to the first step", theirs, "s", 1.0),
        (f"nanoscale train, {ranks} ranks, to the first step", ours, "s", ours / theirs),
    ]


def bench_resume(turns: int = 4, ranks: int = 2) -> list[Row]:
    """Measure the time from a command to the end of the first step, of a new and of a resumed run."""
    with tempfile.TemporaryDirectory() as folder:
        job = ["recipe=tiny", f"parallel.dp={ranks}", "train.eval_every=0", "train.sample_tokens=0"]
        job += ["train.log_every=1", "scheduler.warmup_steps=0", "logger=none"]
        train = [str(BIN / "nanoscale"), "train", *job, f"run.root={folder}", "train.steps=1"]
        pairs = []
        for attempt in range(turns):
            path = Path(folder) / f"run-{attempt}"
            fresh = time_to_first_step([*train, f"run.name={path.name}"], path)
            resume = [str(BIN / "nanoscale"), "resume", str(path), "train.steps=2"]
            pairs.append((fresh, time_to_first_step(resume, path, step=2)))
    fresh, resumed = medians_of(pairs)
    return [
        (f"nanoscale train, tiny on {ranks} ranks, to the first step", fresh, "s", 1.0),
        (
            f"nanoscale resume, tiny on {ranks} ranks, to the next step",
            resumed,
            "s",
            resumed / fresh,
        ),
    ]


def bench_step(turns: int = 48, steps: int = 8, worlds: Sequence[int] = (1, 2)) -> list[Row]:
    """Measure the step time on one process and on two, with a plain PyTorch loop and other trainers, in
    turns."""
    names = {
        "plain": "plain PyTorch loop",
        "trainer": "transformers' Trainer",
        "deepspeed": "DeepSpeed by hand",
        "ours": "nanoscale",
    }
    rows: list[Row] = []
    for world in worlds:
        found = result_of("step", str(world), "0", str(turns), str(steps))
        kind = "1 process" if world == 1 else f"{world} processes"
        for name, shown in names.items():
            seconds, ratio = found[name]["seconds"], found[name]["ratio"]
            rows.append((f"{shown}, tiny, {kind}, one step", seconds * 1e3, "ms", ratio))
    return rows


def bench_checkpoint(turns: int = 5, layers: int = 6) -> list[Row]:
    """Measure how long a checkpoint stops the training."""
    found = result_of("checkpoint", str(turns), str(layers))
    state = f"checkpoint of {found['megabytes']:.0f} MB"
    longer = found["longer_s"] / found["save_s"]
    return [
        (f"{state}, the training waits", found["save_s"] * 1e3, "ms", 1.0),
        (f"{state}, asynchronous, stall", found["stall_s"] * 1e3, "ms", found["ratio"]),
        (f"{state}, the first one", found["first_stall_s"] * 1e3, "ms", found["first_ratio"]),
        (f"{state}, the step beside it is longer by", found["longer_s"] * 1e3, "ms", longer),
    ]


def bench_data(turns: int = 3, files: int = 10_000) -> list[Row]:
    """Measure text to tokens with the tokenizers library, and samples with slices of a numpy memmap."""
    result = result_of("data", str(turns), str(files))
    threads = f"{result['threads']} threads"
    return [
        (f"tokenizers, {threads}, from memory to nothing", result["tokenizers"], "MB/s", 1.0),
        (
            f"data prepare, {threads}, from file to folder",
            result["prepare"],
            "MB/s",
            result["prepare_ratio"],
        ),
        ("numpy memmap, samples of 1,024 tokens", result["memmap"], "1/s", 1.0),
        ("loader, samples of 1,024 tokens", result["loader"], "1/s", result["loader_ratio"]),
    ]


def bench_flood(turns: int = 5, mib: int = 1024) -> list[Row]:
    """Measure a rank that prints much, `cat` of the same bytes into the same file, and Ctrl-C meanwhile."""
    result = result_of("flood", str(mib), str(turns))
    text = f"{mib / 1024:g} GiB"
    return [
        (f"cat, {text} into a log", result["cat_s"], "s", 1.0),
        (f"a rank prints {text}, until it is in the log", result["whole_s"], "s", result["ratio"]),
        (f"a rank prints {text}, until the launch has ended", result["ended_s"], "s", None),
        ("Ctrl-C meanwhile, until the launch has ended", result["stop_s"], "s", None),
        ("growth of the launcher meanwhile", result["launcher_mib"], "MiB", None),
        ("growth of the agent meanwhile", result["agent_mib"], "MiB", None),
    ]


def bench_fanout(hosts: int = 2000) -> list[Row]:
    """Measure the launcher's own CPU time for a whole launch on many hosts, through ssh and through pdsh."""
    from benchmarks.cpu.fanout import measure

    rows: list[Row] = []
    for way in ("ssh", "pdsh"):
        it = measure(hosts, way)
        name = f"launch on {hosts:,} hosts, {way}"
        rows.append((f"{name}, CPU time of the launcher", it["cpu_s"], "s", None))
        rows.append((f"{name}, memory of the launcher", it["mib"], "MiB", None))
    return rows


def bench_backends(
    backends: Sequence[str] = ("native", "deepspeed"),
    stages: Sequence[int] = (0, 2, 3),
    steps: int = 30,
    warm_up: bool = True,
) -> list[Row]:
    """Measure one recipe on both backends, two ranks, by ZeRO stage: time to the first step, step time, and
    memory."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        words = ["recipe=tiny", "parallel.dp=2", f"train.steps={steps}", "checkpoint.at_end=false"]
        words += ["scheduler.warmup_steps=2", "train.eval_every=0", "train.sample_tokens=0"]
        words += ["train.log_every=1", "logger=none", "launcher.device=cpu", f"run.root={folder}"]
        command = [str(BIN / "nanoscale"), "train", *words]
        if warm_up:  # prepares the corpus
            run([*command, "train.steps=2", "run.name=warm"])
        for stage in stages:
            figures = {}
            for backend in backends:
                name = f"{backend}-{stage}"
                job = [*command, f"backend={backend}", f"zero=stage{stage}", f"run.name={name}"]
                first = time_to_first_step(job, Path(folder) / name)
                figures[backend] = (first, *settled(Path(folder) / name))
            units = (("to the first step", "s"), ("one step", "ms"), ("memory of a rank", "GiB"))
            for part, (what, unit) in enumerate(units):
                for backend, values in figures.items():
                    ratio = values[part] / figures["native"][part]
                    rows.append((f"{backend}, stage {stage}, {what}", values[part], unit, ratio))
    return rows


def result_of(script: str, *arguments: str) -> dict[str, Any]:
    """Return the last line that a script of ours prints, which is JSON."""
    command = [sys.executable, "-m", f"benchmarks.cpu.{script}", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def settled(run_dir: Path) -> tuple[float, float]:
    """Return the median step, ms, after the first few, and the peak memory, GiB."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    step = statistics.median(record["step_time_s"] for record in records[5:])
    return step * 1e3, max(record["memory_gib"] for record in records)


def time_to_first_step(command: list[str], run_dir: Path, step: int = 1) -> float:
    began = time.time()
    run(command)
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return next(float(it["time"]) for it in records if it["step"] == step) - began


def run(command: list[str]) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")


def median_of(turns: int, act: Callable[[], None]) -> float:
    """Return the median duration of the turns without the first, which loads files from disk into memory."""
    seconds = []
    for _ in range(turns):
        began = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:] or seconds)


def medians_of(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the medians of the pairs without the first, for which the corpus is prepared."""
    first, second = (statistics.median(times) for times in zip(*(pairs[1:] or pairs), strict=True))
    return first, second


def render(rows: list[Row]) -> str:
    width = max(len(row[0]) for row in rows)
    lines = [f"{'':{width}}      figure        ratio"]
    for name, figure, unit, ratio in rows:
        shown = "" if ratio is None else f"{ratio:.3f}"
        lines.append(f"{name:{width}}  {figure:10.3f} {unit:4} {shown:>6}")
    return "\n".join(lines)


def save(rows: list[Row], text: str, which: str) -> None:
    """Store the figures. Figures of single parts do not replace the figures of all, which are of one run."""
    day = time.strftime("%Y-%m-%d")
    about: dict[str, Any] = {
        "date": day,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PEERS},
        "rows": [dict(zip(("what", "figure", "unit", "ratio"), row, strict=True)) for row in rows],
    }
    folder = ROOT / "benchmarks" / "results"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{day}-cpu{which}.json").write_text(json.dumps(about, indent=1) + "\n")
    (folder / f"{day}-cpu{which}.txt").write_text(text + "\n")


PARTS: dict[str, tuple[Callable[..., list[Row]], dict[str, Any]]] = {
    "start": (bench_start, {"turns": 1}),
    "runs": (bench_runs, {"turns": 1, "count": 1}),
    "plan": (bench_plan, {"turns": 1}),
    "launch": (bench_launch, {"turns": 1, "ranks": 1}),
    "resume": (bench_resume, {"turns": 1, "ranks": 1}),
    "step": (bench_step, {"turns": 1, "steps": 1, "worlds": [1]}),
    "checkpoint": (bench_checkpoint, {"turns": 2, "layers": 1}),
    "backends": (
        bench_backends,
        {"backends": ["native"], "stages": [2], "steps": 6, "warm_up": False},
    ),
    "data": (bench_data, {"turns": 1, "files": 20}),
    "fanout": (bench_fanout, {"hosts": 2}),
    "flood": (bench_flood, {"turns": 1, "mib": 4}),
}
"""The parts, and their arguments at the smallest size."""


if __name__ == "__main__":
    main()
