"""Print exact versions of nanoscale's dependencies, extras and development tools as installed here.

Only the dependencies of pyproject.toml, and theirs in turn, are listed.
"""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [
        *project["project"]["dependencies"],
        *(r for extra in project["project"]["optional-dependencies"].values() for r in extra),
        *project["dependency-groups"]["dev"],
    ]
    print("# Written by `make lock`; the Makefile installs from it.")
    for name, version in sorted(closure(wanted).items()):
        print(f"{name}=={version}")


def closure(wanted: list[str]) -> dict[str, str]:
    """Return the versions by name of the installed packages of `wanted` and of all their dependencies."""
    found: dict[str, str] = {}
    queue = [Requirement(text) for text in wanted]
    seen: set[tuple[str, str]] = set()
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        extras = {"", *requirement.extras}
        if all((name, extra) in seen for extra in extras):
            continue
        seen |= {(name, extra) for extra in extras}
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue  # a marker of another platform leads here
        found[name] = package.version.split("+")[0]
        for text in package.requires or []:
            needed = Requirement(text)
            marker = needed.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                queue.append(needed)
    return found


if __name__ == "__main__":
    main()
