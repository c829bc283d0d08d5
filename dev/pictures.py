"""Make docs/pictures: terminals with real plans and trainings, as SVG, light and dark. `make pictures`.

Two short trainings run on CPUs, in a terminal of their own; a picture shows its screen in the middle of them.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.segment import Segment, Segments
from rich.terminal_theme import DIMMED_MONOKAI, TerminalTheme
from rich.text import Text

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
LIGHT = (
    TerminalTheme(  # background, foreground; black, red, green, yellow, blue, magenta, cyan, white
        (255, 255, 255),
        (36, 41, 47),
        [
            (36, 41, 47),
            (207, 34, 46),
            (60, 160, 80),
            (212, 167, 44),
            (84, 140, 230),
            (180, 130, 220),
            (70, 175, 185),
            (110, 119, 129),
        ],
        [
            (160, 168, 176),
            (255, 129, 130),
            (110, 200, 130),
            (250, 200, 120),
            (130, 180, 250),
            (240, 140, 190),
            (130, 210, 220),
            (225, 228, 232),
        ],
    )
)
THEMES = {"light": LIGHT, "dark": DIMMED_MONOKAI}
COLUMNS = 110
HOME = "/home/you"
PLAN = (
    "plan recipe=llama-70b cluster=h100-sxm cluster.hosts=16 parallel=dp zero=stage3 parallel.tp=8"
    " parallel.pp=4 train.micro_batch=1 train.tokens=140G"
)
TRAIN = "train recipe=tiny train.steps=120 run.name=first"
CHAT = (
    "train recipe=chat model.init_from=./model data.path=chats.jsonl train.seq_len=64"
    " train.global_batch=32 train.steps=60 run.name=chats"
)
# Readers' own fonts: a picture loads nothing.
SVG = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{
  font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px;
}}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        plan = typed(PLAN, here)
        training = typed(TRAIN, here, until_step=80)
        export = "checkpoints export first --format hf --out model"
        typed(export, here)
        chats = [chat(number) for number in range(4000)]
        (here / "chats.jsonl").write_text("".join(json.dumps(it) + "\n" for it in chats))
        tuning = typed(CHAT, here, until_step=40)
    mfu = next(number for number, line in enumerate(plan) if "MFU" in line)
    timeline = next(number for number, line in enumerate(plan) if "utilization" in line)
    first_blocks = [number for number, line in enumerate(plan) if not line][2]
    memory = [f"$ nanoscale {PLAN}", *plan[:first_blocks], "…"]
    result = plan[mfu : mfu + 2]
    draw("run", [*memory, *result, "", f"$ nanoscale {TRAIN}", *training])
    draw("plan", [*memory, *plan[timeline:mfu], *result])
    draw("chat", [f"$ nanoscale {CHAT}", *tuning])


def chat(number: int) -> dict[str, object]:
    left, right = divmod(number, 64)
    question = {"role": "user", "content": f"What is {left} + {right}?"}
    return {"messages": [question, {"role": "assistant", "content": str(left + right)}]}


def typed(line: str, here: Path, until_step: int | None = None) -> list[str]:
    """Run a command on a terminal.

    Returns:
        The lines on its screen at the end, or when the live panel has shown a step; the command is then
        stopped as by Ctrl-C. They contain the escape sequences of colors.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 200, COLUMNS, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "nanoscale", *line.split()],
        cwd=here,
        env={**os.environ, "TERM": "xterm-256color", "HOME": str(here)},
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    output, screen = b"", None
    while True:
        select.select([ours], [], [])
        try:
            output += os.read(ours, 1 << 16)
        except OSError:  # the terminal has no writer left
            break
        text = output.decode(errors="ignore")
        frame, erased, _ = text.rpartition("\r\x1b[2K")  # before it, a whole panel
        steps = re.findall(r"step (\d+)/", frame)
        if until_step and screen is None and erased and steps and int(steps[-1]) >= until_step:
            screen = on_screen(frame)
            process.send_signal(signal.SIGINT)
    os.close(ours)
    code = process.wait()
    if code != (130 if until_step else 0) or (until_step and screen is None):
        raise SystemExit(f"{line} ended with exit code {code}:\n{output.decode(errors='replace')}")
    lines = screen or on_screen(output.decode())
    return [it.replace(os.fspath(here), HOME).rstrip() for it in lines]


def on_screen(output: str) -> list[str]:
    """Return the lines that a terminal shows after an output, which only erases whole lines and goes up."""
    rows, row = [""], 0
    for token in re.split(r"(\x1b\[\d*A|\x1b\[2K|\x1b\[\?25[lh]|\r|\n)", output):
        if token == "\n":
            row += 1
            rows += [""] * (row == len(rows))
        elif token.endswith("A") and token.startswith("\x1b["):
            row -= int(token[2:-1] or 1)
        elif token == "\x1b[2K":
            rows[row] = ""
        elif token != "\r" and not token.startswith("\x1b[?25"):
            rows[row] += token
    return rows[: max(number for number, text in enumerate(rows) if text.strip()) + 1]


def draw(name: str, lines: list[str]) -> None:
    for kind, theme in THEMES.items():
        path = PICTURES / f"{name}-{kind}.svg"
        path.write_text(svg(lines, theme), encoding="utf-8")
        print(f"{path} {path.stat().st_size / 1000:.1f} kB")


def svg(lines: list[str], theme: TerminalTheme) -> str:
    console = Console(file=io.StringIO(), record=True, width=COLUMNS, force_terminal=True)
    for line in lines:
        text = Text.from_ansi(line)
        if line.startswith("$ "):
            text.stylize("bold")
        console.print(Segments(Segment.simplify(console.render(text))), end="")
    drawing = console.export_svg(title="", theme=theme, code_format=SVG, unique_id="t")
    return re.sub(r' clip-path="url\(#t-line-\d+\)"|[ \t]+$', "", drawing, flags=re.M)


if __name__ == "__main__":
    main()
