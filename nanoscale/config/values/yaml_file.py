"""One YAML file, read as data: no tags, no duplicate keys, no alias bombs; every key has its line.

The scalars follow YAML 1.2: `on`, `off`, `yes` and `no` are texts, `1e-4` is a number.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from nanoscale.common.errors import Violation, reason
from nanoscale.config.violations import refuse

LARGEST_FILE = 1 << 20
LARGEST_DOCUMENT = 10_000
"""The most nodes, with an alias's content counted at each use."""
DEEPEST = 50


@dataclass(frozen=True)
class YamlDocument:
    """A mapping and the lines of its parts."""

    name: str
    """The file's name in messages."""
    content: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)
    """Dotted path of a key or list item to its line, from 1."""

    def source(self, path: str) -> str:
        """Return `recipes/mine.yaml:12` for a dotted path within it."""
        line = self.lines.get(path)
        return self.name if line is None else f"{self.name}:{line}"


def read(path: Path, name: str | None = None) -> YamlDocument:
    """Read one YAML file.

    Raises:
        UserError: it is not a readable UTF-8 file holding one plain mapping; the line is named.
    """
    name = name or str(path)
    return parse(read_text(path, name), name)


def read_text(path: Path, name: str) -> str:
    """Return the text of a YAML file that is not parsed yet. Raises UserError like `read`."""
    if path.is_dir():
        _refuse(name, "is a folder; a YAML file is needed")
    if path.is_fifo() and path.parts[1:2] != ("dev",):  # the shell's <(…) is in /dev/fd
        _refuse(name, "is a pipe; a file is needed")
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_FILE + 1)
    except OSError as error:
        _refuse(name, f"cannot be read: {reason(error)}")
    if len(raw) > LARGEST_FILE:
        _refuse(name, f"has more than {LARGEST_FILE} bytes, the most of a configuration")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        _refuse(name, "is not UTF-8 text", raw.count(b"\n", 0, error.start) + 1)


def parse(text: str, name: str) -> YamlDocument:
    """Parse YAML text; `name` is its name in messages. Raises UserError like `read`."""
    try:
        depth = 0
        for event in yaml.parse(text, Loader=_Loader):  # PyYAML's C composer would overflow
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if depth > DEEPEST:
                _refuse(name, "is nested too deeply", _line(event))
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = error.problem or error.context or "cannot be parsed"
        last = len(text.splitlines())
        _refuse(name, f"is not YAML: {what}", min(mark.line + 1, last) if mark else None)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        _refuse(name, f"holds a character that YAML does not allow: {error.reason}", line)
    except yaml.YAMLError as error:
        _refuse(name, f"is not YAML: {error}")
    if root is None:
        return YamlDocument(name, {})
    if not isinstance(root, yaml.MappingNode):
        _refuse(name, "must hold `key: value` lines", _line(root))
    _measure(root, name, {})
    lines: dict[str, int] = {}
    return YamlDocument(name, _plain(root, name, "", lines), lines)


def to_yaml(values: Mapping[str, Any]) -> str:
    """Return plain data as YAML that readers of YAML 1.1, of 1.2 and `read` interpret equally."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)
    return text


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """The C parser if PyYAML has it, with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """A dumper that quotes texts that either version of YAML would misread."""


def _resolver(tag: str, pattern: str, first: Iterable[str]) -> None:
    for kind in (_Loader, _Dumper):
        kind.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), list(first))


_FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
_resolver("null", r"^(~|null|Null|NULL|)$", ["~", "n", "N", ""])
_resolver("bool", r"^(true|True|TRUE|false|False|FALSE)$", "tTfF")
_resolver("int", r"^[-+]?[0-9]+$", "-+0123456789")
_resolver("float", rf"^({_FLOAT})$", "-+.0123456789")


def _line(part: yaml.Event | yaml.Node) -> int:
    return part.start_mark.line + 1 if part.start_mark else 1


def _measure(node: yaml.Node, name: str, sizes: dict[int, int]) -> int:
    """Return the number of nodes that `node` expands to; refuses bombs and circles."""
    line = _line(node)
    known = sizes.get(id(node))
    if known == 0:
        _refuse(name, "holds an anchor that contains itself", line)
    if known is not None:
        return known
    sizes[id(node)] = 0
    children = [] if isinstance(node, yaml.ScalarNode) else node.value
    if isinstance(node, yaml.MappingNode):
        children = [part for pair in children for part in pair]
    size = 1 + sum(_measure(child, name, sizes) for child in children)
    if size > LARGEST_DOCUMENT:
        _refuse(name, f"expands to more than {LARGEST_DOCUMENT} values through its aliases", line)
    sizes[id(node)] = size
    return size


def _plain(node: yaml.Node, name: str, path: str, lines: dict[str, int]) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, name)
    if node.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
        _refuse_tag(node, name)
    if isinstance(node, yaml.SequenceNode):
        lines |= {f"{path}{i}": _line(child) for i, child in enumerate(node.value)}
        return [_plain(it, name, f"{path}{i}.", lines) for i, it in enumerate(node.value)]
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = _line(key_node)
        if not isinstance(key_node, yaml.ScalarNode):
            _refuse(name, "has a list or a mapping as a key", line)
        _scalar(key_node, name)
        key = key_node.value
        if key in result:
            _refuse(name, f"has the key `{key}` twice, first in line {lines[path + key]}", line)
        lines[path + key] = line
        result[key] = _plain(value_node, name, f"{path}{key}.", lines)
    return result


def _scalar(node: yaml.ScalarNode, name: str) -> object:
    try:
        return _SCALARS[node.tag.removeprefix("tag:yaml.org,2002:")](node.value)
    except (ValueError, KeyError):
        _refuse_tag(node, name)


_SCALARS: dict[str, Callable[[str], object]] = {
    "str": str,
    "null": lambda text: None,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
    "int": int,
    "float": lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
}


def _refuse_tag(node: yaml.Node, name: str) -> NoReturn:
    tag = node.tag.replace("tag:yaml.org,2002:", "!!")
    _refuse(name, f"uses the tag `{tag}`; a configuration is plain data", _line(node))


def _refuse(name: str, message: str, line: int | None = None) -> NoReturn:
    source = name if line is None else f"{name}:{line}"
    refuse([Violation("", name, source, message)])
