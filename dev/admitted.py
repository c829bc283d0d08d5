"""Print the dependencies, extras and development tools that pyproject.toml admits, for pip.

    python dev/admitted.py lowest    their lowest versions
    python dev/admitted.py ranges    their ranges, as they are written: pip takes the newest

Only direct dependencies are listed; pip chooses theirs.
"""

from __future__ import annotations

import argparse
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("lowest", "ranges"))
    shown = lowest if parser.parse_args().what == "lowest" else str
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = [
        *project["project"]["dependencies"],
        *(r for extra in project["project"]["optional-dependencies"].values() for r in extra),
        *project["dependency-groups"]["dev"],
    ]
    for line in sorted({shown(Requirement(text)) for text in wanted}):
        print(line)


def lowest(requirement: Requirement) -> str:
    """Return the requirement with its lowest version alone."""
    versions = [it.version for it in requirement.specifier if it.operator == ">="]
    return f"{requirement.name}=={versions[0]}" if versions else str(requirement)


if __name__ == "__main__":
    main()
