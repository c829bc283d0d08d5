"""The live view of a run: one panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

from nanoscale.common import display
from nanoscale.common.units import GIB, byte_size, counted, duration, number
from nanoscale.launch.lifecycle.command import LaunchPlan
from nanoscale.runs import metrics
from nanoscale.runs.directory import RunDirectory
from nanoscale.runs.jsonlines import Object, Tail
from nanoscale.runs.tail import LineTail

if TYPE_CHECKING:
    from rich.console import RenderableType

    Panel = Callable[[], RenderableType]

_PLAIN_EVERY_S = 1.0
_SMOOTHED_STEPS = 20
_MOST_HOSTS = 8
"""The most hosts named at the start; more are only counted."""
_SHOWN_BYTES = 1 << 14
"""The most bytes of a rank's output in one poll."""
_BACKLOG_BYTES = 1 << 18
"""The most bytes of a rank's output that wait to be shown; earlier ones are only in its log."""
_LONGEST_LINE = 1 << 12
_SILENCE_S, _SILENT_GAPS = 30.0, 3
"""The silence that is reported: at least this long, and that many times as long as any before."""
_UNFINISHED_S = 5.0
"""Seconds after which the beginning of a line is shown without its end."""
_SILENT = ("attempt", "end", "failure")
"""Kinds of events that the beginning and the end of the view report already."""


class LiveView:
    """A view that follows a run's metrics, events and ranks' output. Use it as a context; `poll` often."""

    def __init__(self, run: RunDirectory, stream: TextIO) -> None:
        self.running = False
        self._run = run
        self._steps = 0
        self._events = Tail(run.events)
        self._events.poll()  # skips the events of earlier attempts
        self._metrics: Tail | None = None
        self._outputs: dict[str, LineTail] = {}
        self._written: set[str] = set()
        """Ranks with output that may have to be shown."""
        self._looks_everywhere = False
        self._first_step = 0
        self._began = time.monotonic()
        self._step_times: list[float] = []
        self._record: Object | None = None
        self._last_step = 0.0
        self._longest_gap = 0.0
        self._told_after = 0.0
        self._screen = _screen(stream)

    def __enter__(self) -> LiveView:
        return self

    def begin(self, plan: LaunchPlan, steps: int, doing: str = "starting") -> None:
        """Show an attempt from its start."""
        self._flush_outputs()
        self.running = False
        self._steps, self._record, self._metrics = steps, None, None
        self._began = time.monotonic()
        self._outputs = _outputs(self._run, plan)
        ranks = counted(plan.world_size, "rank")
        mesh = f", mesh {plan.mesh}" if plan.mesh.used else ""
        self._screen.line(f"{doing} {ranks} on {_names([it.host for it in plan.hosts])}{mesh}")

    def join(self, plan: LaunchPlan, steps: int) -> None:
        """Show a running attempt: its events so far, its last step, and everything from now on."""
        self.begin(plan, steps, "watching")
        for tail in self._outputs.values():
            tail.skip(0)  # the logs hold the output so far
        self._looks_everywhere = True
        self._events = Tail(self._run.events)
        past = self._events.poll()
        start = {"kind": "attempt", "attempt": plan.attempt}
        starts = [n for n, event in enumerate(past) if start.items() <= event.items()]
        for event in self._handle(past[starts[-1] :] if starts else []):
            self._event(event)
        for record in self._new_records()[-1:]:
            self._step(record)

    def line(self, text: str) -> None:
        self._screen.line(text)

    def __exit__(self, *_: object) -> None:
        self._flush_outputs()
        self._screen.close()

    def poll(self) -> None:
        """Show everything new since the last poll."""
        self._show_outputs()
        news: list[tuple[Object, Callable[[Object], None]]]
        news = [(event, self._event) for event in self._handle(self._events.poll())]
        news += [(record, self._step) for record in self._new_records()]
        self._tell_silence()
        for item, show in sorted(news, key=lambda pair: float(pair[0].get("time", 0.0))):
            show(item)
        self._screen.refresh(self._panel)

    def wrote(self, host: str, rank: int) -> None:
        """Note that a rank's output has grown; of thousands of logs, only the noted ones are read."""
        self._written.add(f"{host}:{rank}")

    def _show_outputs(self) -> None:
        names = self._outputs if self._looks_everywhere else self._written & self._outputs.keys()
        for name in sorted(names):
            tail = self._outputs[name]
            self._show_output(name, tail, _SHOWN_BYTES)
            if time.monotonic() - tail.grew_at > _UNFINISHED_S:
                self._output(name, _unfinished(tail))
                self._written.discard(name)

    def _flush_outputs(self) -> None:
        for name, tail in self._outputs.items():
            self._show_output(name, tail, _BACKLOG_BYTES)
            self._output(name, _unfinished(tail))

    def _show_output(self, name: str, tail: LineTail, limit: int) -> None:
        left_out = tail.skip(_BACKLOG_BYTES)
        self._output(name, tail.poll(limit))
        if left_out:
            text = f"[{left_out:,} bytes of its output here are only in {tail.path}]"
            self._output(name, [*_unfinished(tail), text.encode()])

    def _handle(self, new: list[Object]) -> list[Object]:
        """Update the state of the attempt from events, and return them."""
        for event in new:
            if event.get("kind") == "resumed":
                self._first_step = int(event.get("step", 0))
            if event.get("kind") == "running":
                # Not earlier: until now the file may hold steps that this attempt removes.
                self._metrics = Tail(self._run.metrics)
                self.running = True
        return new

    def _new_records(self) -> list[Object]:
        records = self._metrics.poll() if self._metrics is not None else []
        return [record for record in records if int(record.get("step", 0)) > self._first_step]

    def _tell_silence(self) -> None:
        """Say that no step was logged for long, and again whenever that time has doubled."""
        if self._record is None:
            return
        silence = time.monotonic() - self._last_step
        if silence > max(_SILENCE_S, _SILENT_GAPS * self._longest_gap, 2 * self._told_after):
            self._told_after = silence
            self._screen.line(f"no step for {duration(silence)}, since step {self._record['step']}")

    def _event(self, event: Object) -> None:
        kind, message = event.get("kind"), str(event.get("message", ""))
        if kind == "sample":
            lines = [f"    {line}" for line in str(event.get("text", "")).splitlines()]
            self._screen.line("\n".join([f"{message}:", *lines]))
        elif kind not in _SILENT:
            self._screen.line(message)

    def _step(self, record: Object) -> None:
        now = time.monotonic()
        if self._record is not None:
            self._longest_gap = max(self._longest_gap, now - self._last_step)
        self._record, self._last_step, self._told_after = record, now, 0.0
        self._step_times = [*self._step_times, float(record["step_time_s"])][-_SMOOTHED_STEPS:]
        values = (f"{label} {value}" for label, value in figures(record).items())
        eta = f"ETA {duration(self._eta())}"
        line = "  ".join([f"step {record['step']}/{self._steps}", *values, eta])
        last = int(record["step"]) >= self._steps
        self._screen.step(line, last=last, evaluated=record.get("eval_loss") is not None)

    def _output(self, name: str, lines: list[bytes]) -> None:
        texts = [line.decode(errors="replace").rstrip() for line in lines]
        if texts:
            self._screen.line("\n".join(f"{name} │ {text}" for text in texts))

    def _eta(self) -> float:
        """Return the seconds to the last step."""
        assert self._record is not None
        left = self._steps - int(self._record["step"])
        return left * sum(self._step_times) / len(self._step_times)

    def _panel(self) -> RenderableType:
        from rich.text import Text

        if self._record is None:
            doing = "preparing the first step" if self.running else "starting the ranks"
            return Text(f"{doing} … {duration(time.monotonic() - self._began)}", style="dim")
        return _progress(self._record, self._steps, self._eta())


def figures(record: Object) -> dict[str, str]:
    """Format a logged step's metrics, by their labels."""
    hidden = {"hfu"} if record.get("hfu") == record.get("mfu") else set()
    hidden |= set() if record.get("gpus_slowed") else {"gpus_slowed"}
    texts: dict[str, str] = {}
    for name, metric in metrics.known_metrics().items():
        if not metric.label or name not in record or name in hidden:
            continue
        text = metric.null if record[name] is None else _formatted(record[name], metric.form)
        texts[metric.label] = ", ".join(filter(None, (texts.get(metric.label), text)))
    for name, loss in record.items():
        if name.startswith("eval_tasks/"):
            texts[name.removeprefix("eval_tasks/")] = number(loss, ".4f")
        if name.startswith("eval_loss/"):
            texts[f"on {name.removeprefix('eval_loss/')}"] = number(loss, ".4f")
    return {label: text for label, text in texts.items() if text}


def _formatted(value: Any, form: str) -> str:
    units: dict[str, Callable[[Any], str]] = {
        "s": duration,
        "GiB": lambda size: byte_size(GIB * size),
        "steps": lambda steps: counted(steps, "step"),
    }
    return units.get(form, form.format)(value)


def _progress(record: Object, steps: int, eta: float) -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    step = int(record["step"])
    bar = Table.grid(padding=(0, 2), expand=True)
    bar.add_column(no_wrap=True)
    bar.add_column(ratio=1)
    bar.add_column(no_wrap=True)
    bar.add_row(
        Text(f"step {step}/{steps}", style="bold"),
        ProgressBar(total=steps, completed=step),
        Text(f"ETA {duration(eta)}"),
    )
    line = Text(overflow="ellipsis")
    for label, value in figures(record).items():
        line.append(f"{label} ", style="dim").append(f"{value}   ")
    return Group(bar, line)


def _names(hosts: list[str]) -> str:
    if len(hosts) <= _MOST_HOSTS:
        return ", ".join(hosts)
    return f"{', '.join(hosts[:2])} … {hosts[-1]} ({len(hosts)} hosts)"


def _outputs(run: RunDirectory, plan: LaunchPlan) -> dict[str, LineTail]:
    return {
        f"{host.host}:{rank}": LineTail(
            run.log(plan.attempt, host.host, rank, "out"), _LONGEST_LINE
        )
        for host in plan.hosts
        for rank in host.ranks
    }


def _unfinished(tail: LineTail) -> list[bytes]:
    """Return the beginning of a line whose end has not come, as a line."""
    return [rest] if (rest := tail.take_remainder()) else []


def _screen(stream: TextIO) -> _Plain | _Terminal:
    if stream.isatty():
        with display.survive_lost_stream(stream):
            return _Terminal(stream)
    return _Plain(stream)


class _Plain:
    """A plain output: a line per step, but at most about one a second, and always the last."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._waiting: str | None = None
        self._shown = float("-inf")

    def line(self, text: str) -> None:
        self.close()
        self._print(text)

    def step(self, line: str, *, last: bool, evaluated: bool) -> None:
        """Show one step in a line, which may be left out."""
        self._waiting = line
        if last or evaluated or self._is_time():
            self.close()

    def refresh(self, panel: Panel) -> None:
        if self._is_time():
            self.close()

    def close(self) -> None:
        if self._waiting is not None:
            line, self._waiting = self._waiting, None
            self._shown = time.monotonic()
            self._print(line)

    def _is_time(self) -> bool:
        return time.monotonic() - self._shown >= _PLAIN_EVERY_S

    def _print(self, text: str) -> None:
        with display.survive_lost_stream(self._stream):
            display.show(text, stream=self._stream)


class _Terminal:
    """A panel that stays at the bottom, with lines scrolling above it."""

    def __init__(self, stream: TextIO) -> None:
        from rich.live import Live

        self._stream = stream
        self._console = display.console(stream)
        self._live = Live(console=self._console, auto_refresh=False)
        self._live.start()

    def line(self, text: str) -> None:
        with display.survive_lost_stream(self._stream):
            display.print_lines(self._console, text)

    def step(self, line: str, *, last: bool, evaluated: bool) -> None:
        if evaluated:
            self.line(line)

    def refresh(self, panel: Panel) -> None:
        with display.survive_lost_stream(self._stream):
            self._live.update(panel(), refresh=True)

    def close(self) -> None:
        with display.survive_lost_stream(self._stream):
            self._live.stop()
