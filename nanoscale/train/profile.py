"""Recording of the steps that `profile.steps` selects: a trace, a summary, and on a GPU its memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from nanoscale.common.units import duration
from nanoscale.config.schema import Profile
from nanoscale.config.values import forms
from nanoscale.config.values.forms import Steps
from nanoscale.metrics.meter import wait_for
from nanoscale.metrics.step_parts import table_lines
from nanoscale.metrics.trace import events_of, parts_of
from nanoscale.parallel import process_group

_MOST_ALLOCATIONS = 1_000_000
"""The most allocations in a memory snapshot; the last ones are kept."""
_TABLE_ROWS = 25


def recording(device: torch.device, first: int, last: int, begin: int) -> profile:
    """Create a profiler of the steps `first` to `last`, which is started before step `begin`.

    Its first actions are slow, so it should begin a step before the first recorded one.
    """

    def action(number: int) -> ProfilerAction:
        step = begin + number
        if step < first:
            return ProfilerAction.WARMUP
        if step > last:
            return ProfilerAction.NONE
        return ProfilerAction.RECORD_AND_SAVE if step == last else ProfilerAction.RECORD

    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities, schedule=action)


class Recorder:
    """A rank's recorder of its training. Every rank has one, and calls it at the same steps."""

    def __init__(
        self,
        folder: Path,
        settings: Profile,
        rank: int,
        device: torch.device,
        note: Callable[..., None],
    ) -> None:
        """Record into `folder`, which is created when there is something to write."""
        self._folder = folder
        self._series = forms.series_of(settings.steps)
        self._is_recorded = rank in settings.ranks
        self._rank = rank
        self._device = device
        self._note = note
        self._current: Steps | None = None
        self._begun_at = 0
        self.profiler: profile | None = None
        """The profiler that records at present."""

    @classmethod
    def disabled(cls) -> Recorder:
        return cls(Path(), Profile(), 0, torch.device("cpu"), lambda *_, **__: None)

    def before(self, step: int) -> None:
        """Prepare for a step; call it before each one."""
        if not self._series:
            return
        if self._current is not None and step > self._current[1]:
            self.end(step)
        if self._current is None:
            self._begin(step)
        if self._current is not None and step == self._current[0]:
            wait_for(self._device)  # queued operations belong to other steps
            if self.profiler is not None and self._device.type == "cuda":
                most = _MOST_ALLOCATIONS
                torch.cuda.memory._record_memory_history(max_entries=most, stacks="python")
        if self.profiler is not None and step > self._begun_at:
            self.profiler.step()

    def labeled(self, name: str) -> AbstractContextManager[Any]:
        """Return a context whose content has this name in the trace."""
        return nullcontext() if self.profiler is None else record_function(name)

    def end(self, step: int) -> None:
        """Write the recording that ends before this step, if there is one. All ranks call it."""
        if self._current is None:
            return
        (first, last), self._current = self._current, None
        profiler, self.profiler = self.profiler, None
        last = min(last, step - 1)
        if profiler is not None:
            wait_for(self._device)
            profiler.stop()
        if last < first:
            return  # it was stopped in the previous step
        problem = None
        try:
            if profiler is not None:
                self._write(profiler, first, last)
        except OSError as error:  # is not a reason to end the training
            problem = f"of rank {self._rank} could not be written: {error}"
        problems = [text for text in process_group.gather(problem) if text is not None]
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        message = f"profile of {steps} {problems[0] if problems else f'in {self._folder}'}"
        self._note("profile", message, first=first, last=last)

    def _begin(self, step: int) -> None:
        """Start a recording whose series begins after this step or has begun; the step before it warms up."""
        series = next((steps for steps in self._series if steps[0] - 1 <= step <= steps[1]), None)
        if series is None:
            return
        first = max(series[0], step)
        self._current, self._begun_at = (first, series[1]), step
        if self._is_recorded:
            self.profiler = recording(self._device, first, series[1], step)
            self.profiler.start()

    def _write(self, profiler: profile, first: int, last: int) -> None:
        steps = f"step-{first}" if first == last else f"steps-{first}-{last}"
        name = f"{steps}.rank-{self._rank}"
        self._folder.mkdir(exist_ok=True)
        if self._device.type == "cuda":
            try:
                torch.cuda.memory._dump_snapshot(str(self._folder / f"{name}.memory.pickle"))
            finally:
                torch.cuda.memory._record_memory_history(enabled=None)
        profiler.export_chrome_trace(str(self._folder / f"{name}.trace.json.gz"))
        parts = parts_of(events_of(profiler))
        lines = [f"{steps} of rank {self._rank}", ""]
        if parts is not None:
            lines.append(f"a step took {duration(parts.step_s)} of the {parts.where}'s time")
            lines += [*table_lines(asdict(parts)), ""]
        sort_by = f"self_{'device' if self._device.type == 'cuda' else 'cpu'}_time_total"
        operations = profiler.key_averages()
        table = operations.table(sort_by, row_limit=_TABLE_ROWS, max_name_column_width=70)
        lines += ["the most expensive operations", table]
        (self._folder / f"{name}.txt").write_text("\n".join(lines), "utf-8")
