"""Predictions of the benchmark's rows, from the code that the compiler writes for a GPU that is not here.

Usage: python3 -m benchmarks.gpu.predictions [--parts PART,…] [--out DIR] CLUSTER…

Searches for the layout of each row as on the GPU and rehearses it (`nanoscale rehearse`). Writes
DATE-compiled-CLUSTER.json and .txt, from which `benchmarks.gpu` shows a prediction next to each row.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from benchmarks.gpu import kernels
from benchmarks.gpu.parts import PARTS, Bench
from benchmarks.gpu.peers import write_tokens
from benchmarks.gpu.session import Failed, Figures, Session
from benchmarks.gpu.wheels import ROOT
from nanoscale.config.composing.compose import compose
from nanoscale.config.hardware.data_sheets import described, recognise
from nanoscale.config.rules import check
from nanoscale.plan.hardware.hardware import Hardware, described_hardware
from nanoscale.plan.hardware.planned_devices import planned_devices
from nanoscale.plan.rehearsed.step_time import described as text_of
from nanoscale.plan.rehearsed.step_time import times_of
from nanoscale.plan.rehearsed.streams import RankTime
from nanoscale.plan.time import operations

RESULTS = ROOT / "benchmarks" / "results"
PREDICTED = ("device", "kernels", "8b", "1b", "experts", "lora", "fp8", "3b")
"""Parts that are predicted by default. `packed` and `stalls` train nearly the same as `1b`, `fp8-rowwise` as
`fp8`; `grid` is not compiled, and peers are not rehearsed."""
LIMIT_S = 500.0
"""The longest rehearsal of a row, seconds."""
MOST = 20
"""Operations that are listed."""
_OF_HERE = ("data.path=", "run.root=", "model.init_from=")
"""Overrides that name folders of the machine that rehearses."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clusters", nargs="+", metavar="CLUSTER", help="such as h100-sxm")
    parser.add_argument("--parts", default=",".join(PREDICTED), help="parts of benchmarks.gpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the predictions")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for cluster in arguments.clusters:
        predict(cluster, arguments.parts.split(","), arguments.out)


def predict(cluster: str, parts: list[str], folder: Path) -> None:
    """Write the predictions of parts for one GPU of a cluster."""
    day = time.strftime("%Y-%m-%d")
    file = folder / f"{day}-compiled-{cluster}.json"
    chosen = [it for part in parts for it in PARTS[part] if not it.peer]
    with tempfile.TemporaryDirectory() as runs:
        until = time.monotonic() + 2 * LIMIT_S * len(chosen)
        session = Session(until, Path(runs) / file.stem)  # an interrupt leaves the file as it was
        session.about |= {"date": day, "cluster": cluster}
        session.about["versions"] = {name: version(name) for name in ("torch", "triton")}
        write_tokens(Path(runs), 16, 512)
        bench = Rehearsals(session, Path(runs), tiny=False, cluster=cluster)
        for one in chosen:
            session.measure(one.what, partial(one.act, bench), limit_s=LIMIT_S)
    session.rows[:] = with_others(session.rows, file)
    session.results = file.with_suffix("")
    session.save()


def with_others(rows: list[Figures], file: Path) -> list[Figures]:
    """Return the rows, and the rows of other parts in the file of the same day."""
    before = json.loads(file.read_text())["rows"] if file.is_file() else []
    present = {row["what"]: row for row in rows}
    return [present.pop(row["what"], row) for row in before] + list(present.values())


def newest(device: str, folder: Path = RESULTS) -> dict[str, Figures]:
    """Return the newest predictions for a device by its driver's name, by row; none if there are none.

    A row that was rehearsed in no layout that fits has the reason, `why`.
    """
    files = sorted(folder.glob(f"*-compiled-{recognise(device)}.json"))
    rows = json.loads(files[-1].read_text())["rows"] if files else []
    return {row["what"]: row for row in rows if not row.get("why", "").startswith("failed")}


@dataclass
class Rehearsals(Bench):
    """A benchmark that rehearses each training for one GPU of a cluster, in place of running it."""

    cluster: str = ""

    @property
    def described(self) -> tuple[str, ...]:
        return f"cluster={self.cluster}", "cluster.hosts=1", "cluster.devices_per_host=1"

    def command(self, *words: str) -> Figures:
        return super().command(*dict.fromkeys((*words, *self.described)))

    def bench(self, *chosen: str) -> Figures:
        overrides = self.overrides(*chosen)
        try:
            document = self.command("rehearse", *overrides)
        except Failed as failed:
            document = _printed(failed.log)
            if document.get("fits") is not False:
                raise
            sizes = {**document["ranks"][0], "capacity": document["capacity"]}
            gib = (sizes[name] / 2**30 for name in ("allocated", "total", "capacity"))
            note = "{:.1f} GiB allocated, {:.1f} GiB in use of {:.1f} GiB".format(*gib)
            notes = self.session.about.setdefault("notes", [])
            notes.append(f"row {len(self.session.rows) + 1}, {' '.join(chosen[-3:])}: {note}")
            raise Failed("the GPU ran out of memory in the rehearsal") from failed
        composed = compose([*overrides, *self.described])
        (rank,) = times_of(check(composed, planned_devices(composed)), document)
        shown = tuple(it for it in overrides if not it.startswith(_OF_HERE))
        return {**figures(document, rank), "overrides": shown}

    def several(self, module: str) -> Figures:
        """Return the TFLOP/s that the plan assumes for single kernels, forward and for attention backward."""
        return {"tflops": speeds_of_kernels(self._hardware(), self._has_cudnn())}

    def device(self) -> Figures:
        """Return the speeds that the plan assumes for square products and for copies."""
        hardware, size = self._hardware(), 8192
        speeds = {"copy_gbs": hardware.memory_bandwidth * hardware.efficiency.memory / 1e9}
        for kind in hardware.peaks.keys() & {"bf16", "fp8"}:
            seconds = operations.product(hardware, kind, size, size, size)
            speeds[f"{kind}_tflops"] = 2 * size**3 / seconds / 1e12
        return speeds

    def _hardware(self) -> Hardware:
        return described_hardware(compose([*self.described, "precision=bf16"]).config)

    def _has_cudnn(self) -> bool:
        return described(compose(self.described).config).reached.attention_cudnn is not None


def _printed(log: str) -> Figures:
    """Return the document at the beginning of a command's output; empty if there is none."""
    if not log.startswith("{"):
        return {}
    found: Figures = json.JSONDecoder().raw_decode(log)[0]
    return found


def figures(document: Figures, time: RankTime) -> Figures:
    """Return the summary of a rehearsal of one rank.

    `kernels` are the Triton kernels that Inductor wrote, and `eager_gb` the bytes of element-wise operations
    outside of compiled code, such as sums of gradients and updates. Seconds and bytes are of a step.
    """
    (rank,) = document["ranks"]
    compiled = document["compiled"]["kernels"]
    names = {it["name"] for it in compiled}
    most = max(compiled, key=lambda it: (it["spilled"], it["registers"]), default=None)
    return {
        "device": document["device"],
        "step_time_s": time.seconds,
        "tokens_per_s": document["time"]["tokens_per_s_per_device"],
        "memory_gib": rank["allocated"] / 2**30,
        "reserved_gib": rank["reserved"] / 2**30,
        "host_gaps_s": time.host_gaps,
        "launches": sum(time.counts.values()),
        "kernels": {
            "count": len(compiled),
            "launches": sum(it["times"] for it in compiled),
            "gb": sum(it["times"] * it["bytes"] for it in compiled) / 1e9,
            "share": sum(it for work, it in time.operations.items() if work[1] in names) / time.seconds,
            "worst": most and {name: most[name] for name in ("name", "registers", "spilled")},
            "spilling": [it["name"] for it in compiled if it["spilled"]],
            "reading_twice": [it["name"] for it in compiled if it["reads_again"]],
        },
        "eager_gb": sum(
            work[2] * count / 1e9
            for work, count in time.counts.items()
            if work[0] == "bytes" and work[1] not in names
        ),
        "compiler": document["compiler"],
        "waits": sum(it["times"] for it in rank["waits"] if it["phase"].startswith("step")),
        "operations": _most(time, {it["name"]: it for it in compiled}),
        "block": document["compiled"]["order"],
    }  # fmt: skip


_CODE = ("bytes", "registers", "spilled", "shared", "reads_again", "lines")


def _most(time: RankTime, compiled: dict[str, Figures]) -> list[Figures]:
    """Return the operations with most seconds, with the machine code of Inductor's kernels."""
    seconds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for work, spent in time.operations.items():
        what = work[1] if work[1] in compiled else text_of(work)
        seconds[what] += spent  # type: ignore[assignment]
        counts[what] += time.counts[work]
    return [
        {"what": what, "count": counts[what]}
        | {"seconds": _rounded(spent), "share": _rounded(spent / time.seconds)}
        | {name: it for name in _CODE if (it := compiled.get(what, {}).get(name))}
        for what, spent in seconds.most_common(MOST)
    ]


def _rounded(number: float) -> float:
    return float(f"{number:.4g}")


def speeds_of_kernels(hardware: Hardware, has_cudnn: bool) -> dict[str, list[float]]:
    """Return the TFLOP/s that the plan assumes for products of experts and attention, by the item's name."""
    speeds = {}
    for width, ffn, experts, rows in kernels.GROUPED:
        seconds = operations.product(hardware, "bf16", rows, ffn, width, experts)
        flops = 2.0 * experts * rows * width * ffn
        speeds[f"grouped {width}x{ffn}, {rows} rows"] = [flops / seconds / 1e12]
    names = ("cudnn", "flash") if has_cudnn else ("flash",)
    for kernel in names:
        for head in kernels.HEAD_SIZES:
            sizes = (1, kernels.SEQ, kernels.SEQ, kernels.HEADS, head)
            seconds = operations.attention(hardware, "bf16", *sizes, True, kernel)
            flops = 2.0 * kernels.SEQ**2 * kernels.HEADS * head
            back = 2.5 / operations.BACKWARD_ATTENTION
            speeds[f"{kernel} {head}"] = [flops * it / seconds / 1e12 for it in (1.0, back)]
    return {name: [_rounded(it) for it in both] for name, both in speeds.items()}


if __name__ == "__main__":
    main()
