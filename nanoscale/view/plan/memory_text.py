"""Memory for the terminal: a bar per pipeline rank, a letter for each part, compared with the device's
capacity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nanoscale.common.units import byte_size
from nanoscale.plan.memory.peak import RankMemory
from nanoscale.view.charts import legend

if TYPE_CHECKING:
    from rich.text import Text

MOST_RANKS = 16
"""The most bars; others in the middle are left out, but never the worst rank's bar."""
LOOKS = {
    "weights": ("w", "#000000 on #6ea8fe"),
    "compute copies": ("c", "#000000 on #4fc3d9"),
    "gradients": ("g", "#000000 on #5fbf6f"),
    "optimizer": ("o", "#000000 on #d9b44a"),
    "units in flight": ("u", "#000000 on #9be7f2"),
    "activations": ("a", "#000000 on #d98ad9"),
    "logits and loss": ("l", "#000000 on #f2a6c8"),
    "communication buffers": ("b", "#000000 on #f2dd6e"),
    "fragmentation": ("f", "#000000 on #a3a9b0"),
    "context": ("x", "#000000 on #d5dbe1"),
}
"""The letter and style of each part."""


def bars(memory: Sequence[RankMemory], capacity: int, width: int) -> Text:
    """Return lines of `width` columns; bars beyond the capacity continue behind its mark, `|`."""
    from rich.text import Text

    worst = max(memory, key=lambda rank: rank.total)
    label = len(f"rank {len(memory) - 1} ")
    tail = max(len(f" {byte_size(rank.total)}") for rank in memory)
    columns = max(20, width - label - tail - 1)
    scale = columns / max(capacity, worst.total)
    text = Text(no_wrap=True)
    for number in shown(memory, worst):
        if number is None:
            text.append("…\n")
            continue
        rank = memory[number]
        text.append(f"{f'rank {number}':<{label}}", "bold" if rank is worst else "")
        _bar(text, rank, round(capacity * scale), columns, scale)
        text.append(f" {byte_size(rank.total)}\n", "bold" if rank is worst else "")
    used = [name for name in LOOKS if any(rank.part(name).bytes for rank in memory)]
    entries = [(*LOOKS[name], name) for name in used]
    device = ("|", "bold", f"{byte_size(capacity)} of the device")
    return text.append_text(legend([*entries, device], width, label))


def shown(memory: Sequence[RankMemory], worst: RankMemory) -> list[int | None]:
    """Return the ranks to show; None stands for ranks that are left out."""
    count = len(memory)
    if count <= MOST_RANKS:
        return list(range(count))
    half = MOST_RANKS // 2 - 1
    chosen = sorted({*range(half), worst.rank, *range(count - half, count)})
    found: list[int | None] = []
    for number in chosen:
        if found and found[-1] is not None and number > found[-1] + 1:
            found.append(None)
        found.append(number)
    return found


def _bar(text: Text, rank: RankMemory, limit: int, columns: int, scale: float) -> None:
    cells: list[tuple[str, str]] = []
    reached = 0.0
    for part in rank.parts:
        reached += part.bytes * scale
        cells += [LOOKS[part.name]] * (round(reached) - len(cells))
    cells += [(" ", "")] * (columns - len(cells))
    for position, (letter, style) in enumerate(cells[:columns]):
        if position == limit:
            text.append("|", "bold red")
        text.append(letter, style or None)
    if limit >= columns:
        text.append("|", "bold red")
