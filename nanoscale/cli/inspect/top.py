"""`nanoscale top`: all runs of a folder, live on a terminal, or as a page."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import DONE, print_json
from nanoscale.common import display
from nanoscale.view.blocks import Report, page, rich_table, show_table

if TYPE_CHECKING:
    from nanoscale.view.run.top_table import Row, RunsAtAGlance

_EVERY_S = 3.0
_KEYS = "↑ ↓ choose · enter: follow · l: logs · s: stop · q: quit"
_VERBS = {"\n": ["watch"], "\r": ["watch"], "l": ["logs"], "s": ["stop"]}


def top(
    root: Path = opt.option("Show the runs in this folder", default=Path("runs")),
    web: bool = opt.flag(
        "Show them as a page on this machine, at an address with a token", "--web"
    ),
    as_json: opt.AsJson = False,
) -> int:
    """Show all runs live: state, step, loss, speed beside the plan, memory, what is left."""
    from nanoscale.view.run.top_table import RunsAtAGlance, top_table

    runs = RunsAtAGlance(root)
    if as_json:
        print_json(runs.rows())
    elif web:
        _serve(runs, root)
    elif sys.stdin.isatty() and sys.stdout.isatty():
        _show_live(runs)
    else:
        show_table(display.console(), top_table(runs.rows()))
    return DONE


def _show_live(runs: RunsAtAGlance) -> None:
    """Refresh the table until `q`; keys run the commands of `nanoscale runs` on the chosen run."""
    from rich.console import Group
    from rich.live import Live

    from nanoscale.view.run.top_table import top_table

    chosen, key = 0, ""
    while key != "q":
        screen, before = display.console(), tuple[Any, ...]()
        with Live(console=screen, screen=True, auto_refresh=False) as live, _single_keys():
            while key not in ("q", *_VERBS):
                rows = runs.rows()
                chosen = max(0, min(chosen, len(rows) - 1))
                height = max(1, screen.height - 4)
                first = max(0, chosen - height + 1)
                now = rows[first : first + height], chosen, screen.size
                if now != before:  # drawing costs more than looking
                    shown, before = rich_table(top_table(now[0]), screen.width), now
                    for chosen_row in shown.rows[chosen - first : chosen - first + 1]:
                        chosen_row.style = "reverse"
                    live.update(Group(shown, _KEYS), refresh=True)
                key = _key(_EVERY_S)
                chosen += {"\x1b[A": -1, "k": -1, "\x1b[B": 1, "j": 1}.get(key, 0)
        if key in _VERBS and rows:
            _run(_VERBS[key], rows[chosen])
        key = "q" if key == "q" else ""


def _run(verb: list[str], row: Row) -> None:
    command = [sys.executable, "-m", "nanoscale", "runs", *verb, row["path"]]
    try:
        subprocess.run(command, check=False)
        display.note("enter: back to all runs", end="")
        sys.stdin.readline()
    except KeyboardInterrupt:
        return


@contextmanager
def _single_keys() -> Iterator[None]:
    """Let the terminal pass on each key at once."""
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _key(limit_s: float) -> str:
    """Return the next key, "" after the limit, and `q` if the terminal is gone."""
    if not select.select([sys.stdin], [], [], limit_s)[0]:
        return ""
    return os.read(sys.stdin.fileno(), 8).decode(errors="replace") or "q"


_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "Referrer-Policy": "no-referrer",
}
"""The page runs no program, fetches nothing, and neither it nor its address, which is a secret, is kept."""


def _serve(runs: RunsAtAGlance, root: Path) -> None:
    """Serve one page to who knows its token, until Ctrl-C."""
    import hmac
    import secrets
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    from nanoscale.view.run.top_table import top_table

    token, reading = secrets.token_urlsafe(16), threading.Lock()

    class Page(BaseHTTPRequestHandler):
        timeout = 5  # who connects and asks nothing keeps out nobody

        def do_GET(self) -> None:
            if not hmac.compare_digest(self.path.encode(), f"/{token}/".encode()):
                self.send_error(404)
                return
            now = time.strftime("%H:%M:%S")
            with reading:
                rows = runs.rows()
            text = page(Report(f"Runs in {root.absolute()} at {now}", [top_table(rows)]))
            refresh = f'<head><meta http-equiv="refresh" content="{_EVERY_S:g}">'
            body = text.replace("<head>", refresh, 1).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            for name, value in _HEADERS.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Write nothing: the address is a secret."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        display.show(f"http://127.0.0.1:{server.server_port}/{token}/")
        display.note("Ctrl-C ends the page, and no run")
        sys.stdout.flush()
        server.serve_forever()
