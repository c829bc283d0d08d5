"""The configuration in the run directory: complete, resolved, and read without Hydra.

Every rank reads it; `nanoscale train --config FILE` repeats the run that wrote it.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from nanoscale.config.convert import to_config
from nanoscale.config.document import read, to_yaml
from nanoscale.config.reopen import resolved
from nanoscale.config.schema import Config

HEADER = """\
# A resolved configuration of nanoscale, complete. It repeats the run with
#   nanoscale train --config FILE
"""
RESOLVED = """\
# What was left open, as it was asked for: open again where an override changes what it follows from.
"""


def dump(config: Config, requested: Config | None = None) -> str:
    """The configuration as YAML, in the schema's order.

    Args:
        config: what `rules.check` returned.
        requested: what `compose` returned before it was checked, so that the keys that were left
            open can be resolved anew when the file is taken up with other devices or degrees.
    """
    final = asdict(config)
    text = HEADER + to_yaml(final)
    opened = resolved(asdict(requested), final) if requested is not None else {}
    return text + (RESOLVED + to_yaml({"resolved": opened}) if opened else "")


def load(path: Path) -> Config:
    """Read a frozen configuration.

    Raises:
        UserError: the file is damaged or was not written by this version; the line is named.
    """
    document = read(path)
    content = {name: value for name, value in document.content.items() if name != "resolved"}
    return to_config(content, document.source)
