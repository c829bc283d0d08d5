"""Write docs/configuration.md, the reference of every key, from config/schema.py: `make docs`."""

from __future__ import annotations

from pathlib import Path

from nanoscale.config import reference
from nanoscale.config.report import shown

TARGET = Path(__file__).parent.parent / "docs" / "configuration.md"
HEAD = """# Configuration reference

Written by `make docs` from `nanoscale/config/schema.py`. `nanoscale config explain KEY` says the same of
one key, and who set it. Defaults are the schema's; groups and recipes set others.
"""


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for section in filter(None, reference.sections()):
        keys = [k for k in reference.declared().values() if k.name.rpartition(".")[0] == section]
        parts.append(f"\n## {section}\n\n{reference.meaning(section)}\n")
        parts.append("| key | type | default | unit | meaning |\n|---|---|---|---|---|")
        for key in keys:
            kind = ", ".join(filter(None, (key.type, key.bounds)))
            cells = (f"`{key.name}`", kind, f"`{shown(key.default)}`", key.unit, key.meaning)
            parts.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(render())
