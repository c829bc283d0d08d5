"""Names of Trainer, Megatron, torchtitan, DeepSpeed and torchrun, and their equivalents here.

`equivalents.yaml` is the table. A name is looked up whole (`training.local_batch_size`), then without its
sections (`local_batch_size`), in any spelling of dashes, underscores and capitals.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from nanoscale.config.optimizers import OPTIMIZERS


@dataclass(frozen=True)
class Equivalent:
    """The equivalent of one name of another trainer: one of `keys`, `overrides` and `commands`."""

    keys: tuple[str, ...] = ()
    """Keys that take the same value; several if trainers differ in the meaning of the name."""
    overrides: Mapping[str, str] = field(default_factory=dict)
    """Value in lower case → its overrides; "" stands for every other value."""
    commands: tuple[str, ...] = ()
    """The command to run, if no override means the same."""
    note: str = ""
    """The difference from here; empty if there is none."""
    fault: str = ""
    """The reason why a value of a DeepSpeed JSON that `overrides` lacks cannot be honored."""

    @property
    def about(self) -> tuple[str, ...]:
        """The keys and sections to read about, for `config explain`."""
        explained = "nanoscale config explain "
        words = [word for text in self.overrides.values() for word in text.split()]
        names = [*self.keys, *(word.partition("=")[0] for word in words)]
        names += [it.removeprefix(explained) for it in self.commands if it.startswith(explained)]
        return tuple(dict.fromkeys(names))


def equivalent(name: str, parts: int = 1) -> Equivalent | None:
    """Return the equivalent of a name of another trainer, found by at least this number of its dotted parts;
    None for a name that is not in the table."""
    table = _byspelling()
    whole = spelling(name)
    while whole and (whole not in table or whole.count(".") + 1 < parts):
        whole = whole.partition(".")[2]
    return table.get(whole)


@cache
def equivalents() -> dict[str, Equivalent]:
    """Return the table: names, several separated by spaces, and their equivalents here."""
    from nanoscale.config.values.yaml_file import read  # shell completion has no time for it

    table = read(Path(__file__).with_suffix(".yaml")).content
    optimizers = {
        name: f"optimizer={own}"
        for own, rule in OPTIMIZERS.items()
        for name in (own, *rule.other_names)
    }
    names = "optim optimizer.type optimizer_type torchtitan.optimizer.name axolotl.optimizer megatron.optimizer"
    table[names] = {"values": optimizers}
    return {line: _equivalent(row) for line, row in table.items()}


@cache
def _byspelling() -> dict[str, Equivalent]:
    return {spelling(it): row for line, row in equivalents().items() for it in line.split()}


def spelling(name: str) -> str:
    """Return a name without dashes, underscores and capitals."""
    return name.strip("-+~").lower().replace("-", "").replace("_", "")


def _equivalent(row: Any) -> Equivalent:
    if isinstance(row, str):
        return Equivalent(keys=tuple(row.split()))
    if isinstance(row, list):
        on, off = row
        return Equivalent(overrides={"true": on, "false": off, "1": on, "0": off})
    commands = [f"nanoscale config explain {row['explain']}"] if "explain" in row else []
    commands += [row["run"]] if "run" in row else []
    keys, overrides = tuple(row.get("keys", "").split()), row.get("values", {})
    return Equivalent(keys, overrides, tuple(commands), row.get("note", ""), row.get("fault", ""))
