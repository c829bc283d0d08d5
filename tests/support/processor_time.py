"""The processor seconds of the tests by folder, printed at the end next to an earlier run's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import psutil
import pytest

_START = "(start of the workers)"
RECORDED = {
    "train": 508, "cli": 492, "rehearse": 293, "measure": 212, "project": 174, "plan": 137, "parallel": 113,
    "data": 101, "launch": 99, "backends": 92, "cluster": 89, "checkpoint": 78, "config": 61, _START: 49,
    "models": 49, "sweep": 46, "processes": 40, "runs": 30, "generate": 22, "metrics": 11, "agent": 3,
    "common": 3, "view": 1,
}  # fmt: skip
"""Seconds of folders of tests on 2 cores on 2026-11-28; processes of other hosts, in tests of clusters, are not
counted."""
_KEY = "processor_seconds"


class ProcessorTime:
    """A plugin of pytest that adds up what each file's tests and the processes that they started used."""

    def __init__(self, config: pytest.Config) -> None:
        self._workeroutput: dict[str, Any] | None = getattr(config, "workeroutput", None)
        self._seconds: Counter[str] = Counter()
        self._before: float | None = None

    def pytest_runtestloop(self) -> None:
        if self._before is None:
            self._before = _used()
            self._seconds[_START] = self._before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Any:
        result = yield
        if nextitem is None or nextitem.path != item.path:  # once a file: it asks every process
            assert self._before is not None
            now = _used()
            folders = item.nodeid.split("/")
            self._seconds[folders[1] if len(folders) > 2 else "."] += now - self._before
            self._before = now
        return result

    def pytest_sessionfinish(self) -> None:
        if self._workeroutput is not None:
            self._workeroutput[_KEY] = dict(self._seconds)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._seconds.update(getattr(node, "workeroutput", {}).get(_KEY, {}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        total = round(sum(self._seconds.values()))
        if total < sum(RECORDED.values()) / 2:  # only some of the tests
            return
        terminalreporter.section("processor seconds by folder, and recorded ones")
        for folder, seconds in self._seconds.most_common():
            line = f"{folder:28}{seconds:7.0f}{RECORDED.get(folder, ''):>7}"
            terminalreporter.write_line(line)
        terminalreporter.write_line(f"{'all':28}{total:7}{sum(RECORDED.values()):7}")


def _used() -> float:
    """Return the processor seconds of this process, its children, and their ended children."""
    this = psutil.Process()
    total = 0.0
    for process in (this, *this.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:  # it has ended meanwhile
            continue
        total += sum(times[:4])  # user, system, and both of its children that were waited for
    return total
