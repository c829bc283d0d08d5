"""Print the lowest versions of the dependencies, extras and development tools that pyproject.toml admits.

Only direct dependencies are listed; pip chooses theirs.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [
        *project["project"]["dependencies"],
        *(r for extra in project["project"]["optional-dependencies"].values() for r in extra),
        *project["dependency-groups"]["dev"],
    ]
    for line in sorted({lowest(Requirement(text)) for text in wanted}):
        print(line)


def lowest(requirement: Requirement) -> str:
    """Return the requirement with its lowest version alone."""
    versions = [it.version for it in requirement.specifier if it.operator == ">="]
    return f"{requirement.name}=={versions[0]}" if versions else str(requirement)


if __name__ == "__main__":
    main()
