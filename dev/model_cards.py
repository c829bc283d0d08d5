"""Write docs/model-cards.md: a card of each causal model type of transformers, by `nanoscale conform --card`.

    python dev/model_cards.py            # types without a card, one after another; stop it at any time
    python dev/model_cards.py TYPE …     # these, again
    python dev/model_cards.py --page     # only the page, of the cards that exist

The cards are kept in docs/model-cards.json, with their dates and versions.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CARDS, PAGE = ROOT / "docs" / "model-cards.json", ROOT / "docs" / "model-cards.md"
LIMIT_S = 900
HEAD = """\
# Models of transformers in every layout

Each row is a small random model of one `model_type`, with all of its kinds of layers, made and compared by

```sh
nanoscale conform --card TYPE
```

A number is the largest relative difference of losses, gradients and metrics from one process in fp64
([conform.md](conform.md#the-card-of-a-model)). *documents*: packed rows compared with separate documents. *resume elsewhere*: each
layout's checkpoint resumed in one process. *export*: logits of the exported folder in transformers; names, dtypes and bytes of
its tensors are equal to the folder that was read. Differences near 1e-7 come from parts that transformers computes in fp32,
such as norms, and rotary angles in *export*. A note says why a layout is refused (r), differs (d) or fails (f).
`make model-cards` makes the cards that are missing, two or three a minute, and writes this page.
"""  # noqa: E501


def main(arguments: list[str]) -> None:
    cards = json.loads(CARDS.read_text(encoding="utf-8")) if CARDS.exists() else {}
    if "--page" not in arguments:
        for family in arguments or sorted(set(families()) - set(cards)):
            cards[family] = card(family)
            print(family, "made" if "rows" in cards[family] else cards[family]["error"], flush=True)
            save(cards)
    save(cards)


def families() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def card(family: str) -> dict[str, Any]:
    """Return the document of a card, or the `error` for which there is none."""
    command = [sys.executable, "-m", "nanoscale", "conform", "--card", family, "--json"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        result: dict[str, Any] = json.loads(ended.stdout)
    except subprocess.TimeoutExpired:
        return {"error": f"no card within {LIMIT_S} s"}
    except ValueError:
        return {"error": "\n".join(ended.stderr.splitlines()[-2:])}
    if "error" in result:
        return {"error": result["error"]["violations"][0]["message"]}
    return result


def save(cards: dict[str, Any]) -> None:
    """Write the cards, without this machine's name and folders in their messages, and the page."""
    lines = ",\n".join(f"{json.dumps(it)}: {json.dumps(cards[it])}" for it in sorted(cards))
    lines = re.sub(r"rank \d+ on \S+ failed: ", "a rank failed: ", lines)
    lines = re.sub(r"[^ ]*/nanoscale-card-\w+/\w+/checkpoints/", "", lines)
    CARDS.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    cards = json.loads(CARDS.read_text(encoding="utf-8"))
    PAGE.write_text("\n".join(page(cards)) + "\n", encoding="utf-8")


def page(cards: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the page."""
    made = {name: it for name, it in sorted(cards.items()) if "rows" in it}
    yield HEAD
    if not made:
        return
    rows = list(next(iter(made.values()))["rows"])
    dates = sorted({it["date"] for it in made.values()})
    when = f"on {dates[0]}" if len(dates) == 1 else f"from {dates[0]} to {dates[-1]}"
    versions = {it: made[max(made, key=lambda name: made[name]["date"])]["versions"][it]
        for it in ("nanoscale", "torch", "transformers")}  # fmt: skip
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield f"{len(made)} types, made {when} with {named}.\n"
    yield f"| type | parameters | {' | '.join(rows)} |"
    yield "|---" * (len(rows) + 2) + "|"
    notes: dict[str, int] = {}
    for name, it in made.items():
        cells = [shown(it["rows"].get(row), notes) for row in rows]
        yield f"| `{name}` | {it['parameters']:,} | {' | '.join(cells)} |"
    yield "\n## Notes\n"
    yield from (f"{number}. {note}" for note, number in notes.items())
    if len(made) < len(cards):
        yield "\n## Types without a card\n"
        yield "A small model of the type's default configuration cannot be built, or is not small.\n"
        yield "| type | reason |\n|---|---|"
        for name in sorted(cards.keys() - made.keys()):
            yield f"| `{name}` | {quoted(cards[name]['error'])} |"


def shown(cell: dict[str, Any] | None, notes: dict[str, int]) -> str:
    """Return a cell: a number, or the letter of its outcome and the number of its note."""
    if cell is None:
        return "unverified"
    if cell["outcome"] == "equal":
        return f"{cell['largest']:.0e}"
    if not cell["message"] or cell["outcome"] == "unverified":
        return str(cell["outcome"])
    number = notes.setdefault(quoted(cell["message"]), len(notes) + 1)
    return f"{cell['outcome'][0]} {number}"


def quoted(text: str) -> str:
    """Return a sentence of the program as code, in which Markdown has no marks."""
    for mark, instead in (("`", "'"), ("|", "/"), ("](", "] (")):
        text = text.replace(mark, instead)
    return f"`{' '.join(text.split())}`"


if __name__ == "__main__":
    main(sys.argv[1:])
