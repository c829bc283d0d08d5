"""The files that a configuration can be composed from, and their names in messages.

The user's folders come first: a file of the same name there hides ours.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nanoscale
from nanoscale.common.errors import UserError, Violation
from nanoscale.config import reference
from nanoscale.config.composing import interpolation
from nanoscale.config.composing.interpolation import unescape
from nanoscale.config.reference import Values
from nanoscale.config.values.convert import unknown_key
from nanoscale.config.violations import nearest, refuse, shown

if TYPE_CHECKING:  # completion lists files without reading them
    from nanoscale.config.values.yaml_file import YamlDocument

RECIPE = "recipe"
ROOT = "config"
"""conf/config.yaml, which defines the order of merging."""
SCHEMA = "schema"
"""No file: the defaults of the schema; `schema/model` has the defaults of one section."""


@cache
def packaged() -> tuple[Path, Path]:
    """Return the folders `conf` and `recipes` of nanoscale, from the wheel or the sources."""
    package = Path(nanoscale.__file__).resolve().parent
    inside = package / "conf"
    base = package if inside.is_dir() else package.parent
    return base / "conf", base / "recipes"


@dataclass(frozen=True)
class Option:
    """One file of a group."""

    group: str
    name: str
    path: Path
    origin: str
    """`nanoscale`, or the user's folder that contains it."""

    @property
    def about(self) -> str:
        """Return the first line of the comment at its head."""
        for line in self.path.read_text(errors="replace", encoding="utf-8").splitlines():
            if line.startswith("#") and line.strip("# "):
                return line.strip("# ").rstrip(".")
            if line.strip():
                break
        return ""


@dataclass
class Library:
    """The folders searched for one composition, and the files read from them."""

    config_dir: Path | None = None
    config_file: Path | None = None
    choices: dict[str, str | None] = field(default_factory=dict)
    """Groups chosen on the command line; null: the group returns to the schema's defaults."""
    touched: frozenset[str] = frozenset()
    """Keys set on the command line."""
    violations: list[Violation] = field(default_factory=list)
    """The problems of the files served so far."""
    opened: Values = field(default_factory=dict)
    """Keys that the frozen configuration had left open, with their requested values."""
    served: dict[str, YamlDocument] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.config_dir is not None and not self.config_dir.is_dir():
            folder, source = str(self.config_dir), "option --config-dir"
            refuse([Violation("--config-dir", folder, source, "is not a folder")])

    def folders(self, group: str) -> list[Path]:
        """List the folders of a group's files, in the order of precedence."""
        conf, recipes = packaged()
        user_dir = self.config_dir
        if group != RECIPE:
            return [*([user_dir / group] if user_dir else []), conf / group]
        own = [user_dir / "recipes", user_dir / "recipe"] if user_dir else []
        return [*own, Path("recipes"), recipes]

    @staticmethod
    @cache
    def groups() -> tuple[str, ...]:
        """Return the groups, in the order of the schema, then recipe."""
        conf, _ = packaged()
        return (*(name for name in reference.sections() if name and (conf / name).is_dir()), RECIPE)

    def options(self, group: str) -> dict[str, Option]:
        """Return a group's options by name; names of files in sub-folders contain a slash."""
        result: dict[str, Option] = {}
        conf, recipes = packaged()
        for folder in self.folders(group):
            packed = folder.resolve().parent == conf or folder.resolve() == recipes
            for path in sorted(path for path in folder.rglob("*.yaml") if path.is_file()):
                name = path.relative_to(folder).with_suffix("").as_posix()
                origin = "nanoscale" if packed else str(folder)
                result.setdefault(name, Option(group, name, path, origin))
        return dict(sorted(result.items()))

    def find(self, config: str) -> Path | None:
        """Return the file of a path in the groups, such as `model/llama-8b` or `recipe/./mine.yaml`."""
        group, _, name = config.partition("/")
        if not name:
            return packaged()[0] / "config.yaml" if config == ROOT else None
        if group not in self.groups():
            return None
        as_path = group == RECIPE and (is_path(name) or Path(name) == self.config_file)
        if as_path and Path(name).exists():
            return Path(name)
        if Path(name).is_absolute() or ".." in Path(name).parts:
            return None
        for folder in self.folders(group):
            path = folder / (name if name.endswith(".yaml") else f"{name}.yaml")
            if path.exists():
                return path
        return None

    def serve(self, config: str) -> YamlDocument:
        """Return the content to merge; its problems are removed and kept in `violations`."""
        if config not in self.served:
            self.served[config] = self._load(config)
        return self.served[config]

    def unasked(self) -> frozenset[str]:
        """Return the names of served files that nobody chose: default options of groups, a frozen file."""
        chosen = {RECIPE, *self.choices}
        for config, document in self.served.items():
            for entry in document.content.get("defaults", []):
                if isinstance(entry, dict) and config != ROOT:  # `override /group: option`
                    chosen.update(name.removeprefix("override /") for name in entry)
        frozen = f"{RECIPE}/{self.config_file}"
        return frozenset(
            document.name
            for config, document in self.served.items()
            if config == frozen or config.partition("/")[0] not in chosen
        )

    def _load(self, config: str) -> YamlDocument:
        from nanoscale.config.composing.frozen import reopen, unknown_names, without_removed
        from nanoscale.config.values.other_trainers import refuse_foreign
        from nanoscale.config.values.yaml_file import YamlDocument, read

        group, _, name = config.partition("/")
        if group == SCHEMA:
            return YamlDocument("default", reference.defaults(reference.sections()[name]))
        path = self.find(config)
        if path is None:
            raise KeyError(config)
        try:
            document = read(path, display(path))
        except UserError:
            refuse_foreign(path)
            raise
        own = reference.sections().keys() - {"optimizer", "scheduler"}  # DeepSpeed's, too
        is_whole = path == self.config_file or len(document.content) > 8
        if is_whole and not any(isinstance(document.content.get(name), dict) for name in own):
            refuse_foreign(path)
        self._check_header(path, document, group)
        if config == ROOT:
            entries = [
                {RECIPE: str(self.config_file)} if RECIPE in entry and self.config_file else entry
                for entry in document.content["defaults"]
            ]
            # The command line's choices are repeated after the recipe. Each replaces the whole section: keys
            # that the option does not set return to the schema's defaults.
            last = []
            for chosen, option in self.choices.items():
                if chosen != RECIPE:
                    last.append(f"{SCHEMA}/{chosen}")
                    last += [f"{chosen}/{option}"] if option is not None else []
            return replace(document, content={"defaults": [SCHEMA, *entries, *last]})
        if group == RECIPE:
            document = without_removed(document)
            for name, value in unknown_names(document.content).items():
                source = document.source(f"resolved.{name}")
                self.violations.append(unknown_key(name, value, source))
            if path == self.config_file:
                opened = document.content.get("resolved")
                values = opened if isinstance(opened, dict) else {}
                self.opened = {key: unescape(key, value) for key, value in values.items()}
            document = replace(document, content=reopen(document.content, self.touched))
        defaults = self._defaults(document, group, path)
        section = "" if group == RECIPE else group
        content = self._known(document, document.content, section, "")
        content.pop("defaults", None)
        if defaults:
            content["defaults"] = defaults
        return replace(document, content=content)

    def _check_header(self, path: Path, document: YamlDocument, group: str) -> None:
        """Refuse Hydra's `# @package`, which would move the keys; here each key has one place."""
        expected = "_global_" if group == RECIPE else "_group_"
        for line, text in enumerate(path.read_text("utf-8-sig").splitlines(), 1):
            found = re.match(r"#\s*@package\s+(\S+)", text)
            if found and found[1] != expected:
                message = (
                    f"moves the file's keys with `@package {found[1]}`, which is not supported"
                )
                source = f"{document.name}:{line}"
                self.violations.append(Violation("", document.name, source, message))
            if text.strip() and not text.startswith("#"):
                return

    def _known(self, document: YamlDocument, content: Values, section: str, path: str) -> Values:
        """Return the part of a mapping that the schema declares."""
        kept: Values = {}
        for name, value in content.items():
            dotted = f"{section}.{name}" if section else name
            source = document.source(f"{path}{name}")
            if name == "defaults" and not path:
                continue
            if "." in name:
                nested = ": {".join(name.split(".")) + f": {shown(value)}" + "}" * name.count(".")
                message = "is written with dots; in a file, each level is a mapping of its own"
                self.violations.append(Violation(dotted, value, source, message, (nested,)))
            elif dotted not in reference.declared() and dotted not in reference.sections():
                file_section = section if not path else ""
                self.violations.append(unknown_key(dotted, value, source, file_section))
            elif isinstance(value, (str, int, float)) and not section and name in self.groups():
                self.violations.append(self._option_as_key(name, value, source))
            elif isinstance(value, dict) and dotted in reference.sections():
                kept[name] = self._known(document, value, dotted, f"{path}{name}.")
            elif problem := misplaced(dotted, value):
                self.violations.append(Violation(dotted, value, source, problem))
            else:
                kept[name] = value
        return kept

    def _option_as_key(self, group: str, option: object, source: str) -> Violation:
        """Return the violation for `model: llama-1b` at the top of a recipe, which means the group's option."""
        known = self.options(group)
        near = (str(option),) if option in known else nearest(str(option), known) or tuple(known)
        return Violation(
            group, option, source, "chooses an option, which belongs in the recipe's list `defaults:`",
            tuple(f"override /{group}: {name}" for name in near),
            remedy="begin the recipe with a line `defaults:` and write the choice below it: "
            f"`  - override /{group}: {near[0]}`",
        )  # fmt: skip

    def _defaults(self, document: YamlDocument, group: str, path: Path) -> list[Any]:
        """Return the checked defaults list: the file's bases, then the groups that it overrides."""
        entries = document.content.get("defaults") or []
        if not isinstance(entries, list):
            self._wrong_entry(document, "defaults", entries, "must be a list of files")
            return []
        bases: list[Any] = []
        overrides: list[Any] = []
        for index, entry in enumerate(entries):
            where = f"defaults.{index}"
            if entry == "_self_" and entry in bases:
                self._wrong_entry(document, where, entry, "is in the list twice")
            elif isinstance(entry, str):
                bases += self._base(document, where, entry, group, path)
            elif isinstance(entry, dict) and len(entry) == 1:
                overrides += self._override(document, where, *next(iter(entry.items())), group)
            else:
                message = "takes a name, or `override /group: option`"
                self._wrong_entry(document, where, entry, message)
        return bases + overrides

    def _base(
        self, document: YamlDocument, where: str, entry: str, group: str, path: Path
    ) -> list[str]:
        if entry == "_self_":
            return [entry]
        if group == RECIPE and is_path(entry):
            # Hydra resolves a base from the current folder; the author meant the file's own.
            base = Path(path).parent / entry
            if base.exists():
                return [f"./{os.path.relpath(base)}"]
        elif self.find(f"{group}/{entry}"):
            return [entry]
        near = nearest(entry, self.options(group))
        self._wrong_entry(document, where, entry, f"names no {group} that exists", near)
        return []

    def _override(
        self, document: YamlDocument, where: str, name: str, option: object, group: str
    ) -> list[dict[str, str]]:
        target = name.removeprefix("override ").strip().removeprefix("/")
        if group != RECIPE or target not in self.groups() or target == RECIPE:
            near = nearest(target, (g for g in self.groups() if g != RECIPE))
            proposals = tuple(f"override /{g}: {option}" for g in near)
            message = "names no group that a recipe can choose from"
            if group != RECIPE:
                message = "is possible in recipes only"
            self._wrong_entry(document, where, f"{name}: {option}", message, proposals)
            return []
        if not isinstance(option, str) or self.find(f"{target}/{option}") is None:
            near = nearest(str(option), self.options(target)) or tuple(self.options(target))
            proposals = tuple(f"override /{target}: {n}" for n in near)
            message = f"names no option of {target}"
            self._wrong_entry(document, where, f"{name}: {option}", message, proposals)
            return []
        return [{f"override /{target}": option}]

    def _wrong_entry(
        self, document: YamlDocument, where: str, entry: object, message: str,
        suggestions: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        source = document.source(where)
        self.violations.append(Violation("defaults", entry, source, message, suggestions))


def misplaced(key: str, value: object) -> str:
    """Return a problem of a value that does not depend on its key's type; empty if there is none."""
    if isinstance(value, list) and not reference.declared()[key].takes_list:
        return "does not take a list"
    if isinstance(value, dict) and not reference.is_mapping(key):
        return "takes one value, not a mapping"
    return interpolation.problem(key, value)


def is_path(name: str) -> bool:
    """True if a recipe is given as a file rather than by name."""
    return name.endswith((".yaml", ".yml")) or name.startswith(("/", "./", "../"))


def display(path: Path) -> str:
    """Return the name of a file in messages: short, and clear about its owner."""
    absolute = path.resolve()
    for folder in packaged():
        if absolute.is_relative_to(folder):
            return f"nanoscale/{folder.name}/{absolute.relative_to(folder).as_posix()}"
    here = Path.cwd()
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else path)
