"""Write the references of every key and of the backends, from the schema and the rules: `make docs`."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

import yaml

from nanoscale.config import reference
from nanoscale.config.deepspeed import SAME
from nanoscale.config.rules.backends import OUTSIDE, table
from nanoscale.config.translation.from_file import convert_file
from nanoscale.config.values.equivalents import Equivalent, equivalent
from nanoscale.config.values.other_trainers import kinds
from nanoscale.config.values.yaml_file import to_yaml
from nanoscale.config.violations import shown
from nanoscale.runs.metrics import known_metrics

DOCS = Path(__file__).parent.parent / "docs"
HEAD = """# Configuration reference

This page is written by `make docs` from `nanoscale/config/schema.py`. `nanoscale config explain KEY` shows the
same for one key, and who set it. The defaults are the schema's; groups and recipes set others.

A value may refer to another key, as in `${{train.seq_len}}`. Keys that name files or folders may also refer
to an environment variable, as in `data.path='${{oc.env:DATA}}/tokens'` or `'${{oc.env:DATA,/data}}'` with a
default: {paths}.
The value is written to config.yaml and the variable's name to provenance.json; names that look like secrets
are refused. `\\${{` stands for `${{` itself.
"""

EQUIVALENTS = """# Coming from another trainer

This page is written by `make docs` from `nanoscale/config/values/equivalents.yaml`. The command line
answers these names with their equivalents: it proposes `optimizer.lr=1e-5` for `--learning_rate 1e-5`.

`nanoscale config from FILE` makes a recipe of a whole configuration, and shows what became of each setting.
It reads:

{titles}

JSON, TOML and YAML are recognized by the ending of the file. Of any other text, such as a shell script, the
options (`--learning_rate 1e-5 …`) are read. A variable of a script is replaced if the script assigns it once;
nothing of a file is run. The recipe also has what the other trainer does by default. The global batch is
micro batch · accumulation · data-parallel degree. If the file does not say how many devices there are, the
degree is 1, and `--dp N` sets another one.

Files of {unread} are named and refused.

The command also says whether `nanoscale train` accepts the recipe, and what to type next. Below are the main
names of each trainer; `nanoscale config explain NAME` answers every name of the table.
"""


def render() -> str:
    """Return the reference of every key."""
    named = (f"`{key.name}`" for key in reference.declared().values() if key.path)
    parts = [HEAD.format(paths=", ".join(named))]
    entries = {
        f"{key.name}.NAME": kind
        for key in reference.declared().values()
        if (kind := reference.entry_type(key.annotation)) is not None
    }
    for section, kind in (reference.sections() | entries).items():
        if not section:
            continue
        about = kind.__doc__ if section in entries else reference.meaning(section)
        parts.append(f"\n## {section}\n\n{about}\n")
        parts.append("| key | type | default | unit | meaning |\n|---|---|---|---|---|")
        for key in reference.keys_of(kind, section).values():
            form = ", ".join(filter(None, (key.type, key.bounds)))
            cells = (f"`{key.name}`", form, f"`{shown(key.default)}`", key.unit, key.meaning)
            parts.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(parts) + "\n"


def render_backends() -> str:
    """Return the page on the keys that one of the backends does not support, or only in part."""
    rows = table()
    differing = [row for row in rows if row[1:] != ("yes", "yes")]
    sections = dict.fromkeys(key.partition(".")[0] for key, *_ in rows)
    return "\n".join(
        [
            "# Where the backends differ\n",
            "This page is written by `make docs` from the rules that refuse everything else. It lists the",
            "keys that a backend does not support, or only with the values named here. A setting that the",
            "chosen backend cannot honor is an error before the launch, never ignored.\n",
            f"Both backends support all other keys of the sections {_listed(sections)},",
            f"and all keys of the sections {_listed(OUTSIDE)}.\n",
            "`nanoscale config backends` shows the same for every key. [deepspeed.md](deepspeed.md)",
            "explains the DeepSpeed backend.\n",
            "| key | native | deepspeed |",
            "|---|---|---|",
            *(f"| `{key}` | {native} | {deepspeed} |" for key, native, deepspeed in differing),
            "",
        ]
    )


def _listed(names: Iterable[str]) -> str:
    *first, last = (f"`{name}`" for name in names)
    return f"{', '.join(first)} and {last}"


def render_equivalents() -> str:
    """Return the page on files of other trainers: the main names of each, and an example."""
    read = [kind for kind in kinds() if not kind.unread]
    titles = "\n".join(f"- {kind.title}" for kind in read)
    unread = [
        kind.title.partition("'")[0]
        for kind in kinds()
        if kind.unread and kind.name != "factory_v1"
    ]
    parts = [EQUIVALENTS.format(titles=titles, unread=f"{', '.join(unread[:-1])} and {unread[-1]}")]
    for kind in read:
        parts.append(
            f"\n## {kind.title[0].upper()}{kind.title[1:]}\n\n| theirs | here |\n|---|---|"
        )
        for name in kind.main.split():
            path = f"{kind.name}.{name}"
            meant = equivalent(path, path.count(".") + 1) or equivalent(path)
            key = SAME.get(name) if kind.name == "deepspeed" else None
            parts.append(f"| `{name}` | {f'`{key}`' if key else _here(meant)} |")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / kind.file
            file.write_text(kind.example, encoding="utf-8")
            recipe = to_yaml(convert_file(file)[1].recipe).rstrip()
        language = {".sh": "text"}.get(file.suffix, file.suffix.removeprefix("."))
        parts.append(f"\n`nanoscale config from {kind.file} --out mine.yaml` makes of\n")
        parts.append(
            f"```{language}\n{kind.example.rstrip()}\n```\n\nthe recipe\n\n```yaml\n{recipe}\n```"
        )
    return "\n".join(parts) + "\n"


def _here(meant: Equivalent | None) -> str:
    """Return the cell of a name's equivalent."""
    assert meant is not None
    values: dict[str, list[str]] = {}
    for value, words in meant.overrides.items():
        values.setdefault(words, []).append(value or "any other value")
    cells = [f"`{key}`" for key in meant.keys]
    cells += [f"`{words}` ({', '.join(theirs)})" for words, theirs in values.items() if words]
    cells += [f"`{command}`" for command in meant.commands]
    cells += [meant.note] if meant.note else []
    return "; ".join(cells or [meant.fault]).replace("|", "/")


def render_index() -> str:
    """Return the index of all pages for programs: titles in the order of the site, and the sections of each."""
    site = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8"))
    lines = ["# nanoscale", "", f"> {site['site_description']}", ""]
    lines += ["AGENTS.md says how programs use and change it.", ""]
    for entry in site["nav"]:
        ((title, inside),) = entry.items()
        pages = inside if isinstance(inside, list) else [entry]
        lines += [f"## {title}", ""] if isinstance(inside, list) else []
        for page in pages:
            ((name, path),) = page.items()
            text = (DOCS.parent / path).read_text(encoding="utf-8")
            blocks = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
            sections = re.findall(r"^## (.+)$", blocks, re.M)
            target = os.path.relpath(DOCS.parent / path, DOCS)
            lines.append(
                f"- [{name}]({target})" + (f": {' · '.join(sections)}" if sections else "")
            )
        lines.append("")
    return "\n".join(lines)


def render_metrics() -> str:
    """Return the page on the run directory with the table of all metrics."""
    rows = "".join(f"| `{name}` | {it.meaning} |\n" for name, it in known_metrics().items())
    text = (DOCS / "run-directory.md").read_text(encoding="utf-8")
    return re.sub(r"(## Metrics\n.*?\n\|---\|---\|\n)(\|.*?\n)+", rf"\1{rows}", text, flags=re.S)


def pages() -> dict[str, str]:
    """Return every page by its name."""
    return {
        "configuration.md": render(),
        "backends.md": render_backends(),
        "coming-from.md": render_equivalents(),
        "llms.txt": render_index(),
        "run-directory.md": render_metrics(),
    }


if __name__ == "__main__":
    DOCS.mkdir(exist_ok=True)
    for page, text in pages().items():
        (DOCS / page).write_text(text)
