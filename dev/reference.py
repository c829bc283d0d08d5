"""Write the references of every key and of the backends, from the schema and the rules: `make docs`."""

from __future__ import annotations

from pathlib import Path

from nanoscale.config import reference
from nanoscale.config.rules.backends import OUTSIDE, table
from nanoscale.config.violations import shown

DOCS = Path(__file__).parent.parent / "docs"
HEAD = """# Configuration reference

Written by `make docs` from `nanoscale/config/schema.py`. `nanoscale config explain KEY` says the same of
one key, and who set it. Defaults are the schema's; groups and recipes set others.

A value may refer to another key, as in `${{train.seq_len}}`. Keys that name files or folders may also refer
to an environment variable, as in `data.path='${{oc.env:DATA}}/tokens'` or `'${{oc.env:DATA,/data}}'` with a
default: {paths}.
The value is written to config.yaml and the variable's name to provenance.json; names that look like secrets
are refused. `\\${{` stands for `${{` itself.
"""


def render() -> str:
    """The whole page."""
    named = (f"`{key.name}`" for key in reference.declared().values() if key.path)
    parts = [HEAD.format(paths=", ".join(named))]
    for section in filter(None, reference.sections()):
        keys = [k for k in reference.declared().values() if k.name.rpartition(".")[0] == section]
        parts.append(f"\n## {section}\n\n{reference.meaning(section)}\n")
        parts.append("| key | type | default | unit | meaning |\n|---|---|---|---|---|")
        for key in keys:
            kind = ", ".join(filter(None, (key.type, key.bounds)))
            cells = (f"`{key.name}`", kind, f"`{shown(key.default)}`", key.unit, key.meaning)
            parts.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(parts) + "\n"


def render_backends() -> str:
    """The page on what each backend honours."""
    head = (
        "# What each backend honours\n\n"
        "Written by `make docs` from the laws that refuse the rest; `nanoscale config backends` shows\n"
        "the same. An entry other than *yes* is what the backend takes.\n\n"
        f"The sections {', '.join(f'`{name}`' for name in OUTSIDE)} hold with both.\n"
    )
    rows = [f"| `{key}` | {native} | {deepspeed} |" for key, native, deepspeed in table()]
    return "\n".join([head, "| key | native | deepspeed |", "|---|---|---|", *rows]) + "\n"


def pages() -> dict[str, str]:
    """Every page by its name."""
    return {"configuration.md": render(), "backends.md": render_backends()}


if __name__ == "__main__":
    DOCS.mkdir(exist_ok=True)
    for page, text in pages().items():
        (DOCS / page).write_text(text)
