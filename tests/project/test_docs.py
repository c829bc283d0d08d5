"""Generated pages equal the program's output, and references of pages exist."""

from __future__ import annotations

import importlib.util
import math
import re
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    ROOT / "CHANGELOG.md",
    ROOT / "tests" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").glob("*.md")),
]
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def test_the_references_are_those_of_the_schema_and_the_rules() -> None:
    script = _script("reference")
    for page, text in script.pages().items():
        assert (script.DOCS / page).read_text() == text, "run `make docs`"


def test_new_measurements_of_faults_replace_the_old_ones_alone() -> None:
    script = _script("faults")
    page = script.PAGE.read_text()
    fault = {"fault": "x", "ended_s": 1.0, "left": 0, "lost_steps": None, "code": -9}
    written = script.render(page, [{**fault, "shown": "a|b"}], [1.0, 2.0])
    assert "| x | 1.0 s | 0 | – | SIGKILL | a\\|b |\n" in written
    assert "worker SIGKILL" in page and "worker SIGKILL" not in written
    assert page.split(script.BEGIN)[0] == written.split(script.BEGIN)[0]
    assert page.split(script.END)[1] == written.split(script.END)[1]
    assert script.HEAD.split("{date}")[1][:40] in page, "the page has another head"


@by_page
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.is_file() and file.is_relative_to(ROOT), target
        assert not anchor or anchor in _anchors(file), target


@by_page
def test_files_that_a_page_names_exist(page: Path) -> None:
    """The changelog names files of the past."""
    if page.name == "CHANGELOG.md":
        return
    named = re.findall(r"`((?:nanoscale|tests|scripts|conf|benchmarks)/[\w./-]*)`", _prose(page))
    assert [it for it in named if "NAME" not in it and not (ROOT / it).exists()] == []


def test_the_site_has_every_page() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = list(_leaves(site["nav"]))
    assert sorted(listed) == sorted(str(page.relative_to(ROOT)) for page in PAGES)


def test_the_cost_of_interruptions_follows_from_the_formula() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    rows = re.findall(
        r"^\| ([\d,]+) \| ([\d.]+) \| (.+) h \| (.+) h \| (.+) h \|$", page, flags=re.M
    )
    assert len(rows) == 4
    for gpus, interruptions, *lost in rows:
        rate = int(gpus.replace(",", "")) * 466 / (54 * 24 * 16_384)
        assert float(interruptions) == pytest.approx(720 * rate, rel=0.05)
        for hours, interval in zip(lost, (0.25, 1, 4), strict=True):
            takes = (1 / rate + 1 / 6) * math.expm1(rate * interval)
            assert float(hours) == pytest.approx(720 * (1 - interval / takes), abs=0.05)


def test_pictures_are_shown_and_load_nothing() -> None:
    folder = ROOT / "docs" / "pictures"
    shown: set[Path] = set()
    for page in PAGES:
        names = re.findall(r'(?:src|srcset)="([^"]+)"', _prose(page))
        shown |= {(page.parent / name).resolve() for name in names}
    assert shown == set(folder.iterdir()), "run `make pictures`"
    for picture in shown:
        text = picture.read_text()
        assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
        assert text.count("://") == 1 and "@import" not in text, "only the namespace is an address"
        assert len(text.encode()) < 60_000


def test_the_readme_is_short() -> None:
    assert (ROOT / "README.md").stat().st_size <= 10_000


def test_the_citation_names_the_version_and_the_licence() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"] == "Apache-2.0"


def _script(name: str) -> Any:
    """Return a program of dev/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "dev" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def _prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in headings}


def _leaves(node: object):
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for value in node.values():
            yield from _leaves(value)
    elif isinstance(node, list):
        for value in node:
            yield from _leaves(value)
