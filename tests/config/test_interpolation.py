"""References in values: one rule for typed keys, mappings, files and the command line."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from nanoscale.common.errors import UserError, Violation
from nanoscale.config import reference
from nanoscale.config.composing import frozen
from nanoscale.config.composing.compose import Setting, compose
from nanoscale.config.composing.interpolation import escape, resolve, unescape
from nanoscale.config.resolved import resolved
from nanoscale.config.schema import Config, DataSource
from nanoscale.config.values.provenance import Composed
from nanoscale.launch.lifecycle.prepare import provenance
from tests.support.recipes import complete


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CORPUS", "/data/c4")
    monkeypatch.delenv("NOWHERE", raising=False)


def violation(*words: str) -> Violation:
    with pytest.raises(UserError) as caught:
        compose(["recipe=debug", *words])
    (found,) = caught.value.violations
    return found


def test_environment_variables_are_read_in_keys_that_name_paths() -> None:
    composed = compose(
        [
            "recipe=debug",
            "data.path='${oc.env:CORPUS}/tokens'",
            "run.root='${oc.env:NOWHERE,/scratch/runs}'",
            "data.valid_path='${data.path}-valid'",
            "data.mixture={a: {path: '${oc.env:CORPUS}/a', weight: 1}}",
        ],
        options={
            "launcher.hostfile": Setting("${oc.env:CORPUS}/hosts", "command line: --hostfile")
        },
    )
    config = composed.config
    assert (config.data.path, config.run.root) == ("/data/c4/tokens", "/scratch/runs")
    assert config.data.valid_path == "/data/c4/tokens-valid"
    assert config.data.mixture == {"a": DataSource("/data/c4/a", weight=1)}
    assert config.launcher.hostfile == "/data/c4/hosts"
    written = provenance(composed)
    assert written["data.path"]["environment"] == ["CORPUS"]
    assert written["data.mixture"]["environment"] == ["CORPUS"]
    assert "environment" not in written["data.valid_path"]
    assert "/data/c4" not in json.dumps(written)


def test_a_file_follows_the_same_rule() -> None:
    Path("mine.yaml").write_text(
        "data:\n  path: ${oc.env:CORPUS}/tokens\nlauncher:\n  env:\n    A: ${run.root}\n"
    )
    config = compose(["recipe=./mine.yaml"]).config
    assert (config.data.path, config.launcher.env) == ("/data/c4/tokens", {"A": "runs"})
    Path("mine.yaml").write_text("launcher:\n  env:\n    A: ${oc.env:CORPUS}\n")
    with pytest.raises(UserError) as caught:
        compose(["recipe=./mine.yaml"])
    assert caught.value.violations[0].source == "mine.yaml:2"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("launcher.env={A: '${oc.env:CORPUS}'}", "only in keys that are paths"),
        ("launcher.env.A='${oc.env:CORPUS}'", "only in keys that are paths"),
        ("backend.extra={a: ['${oc.env:CORPUS}']}", "only in keys that are paths"),
        ("train.sample_prompt='${oc.env:CORPUS}'", "only in keys that are paths"),
        ("data.path='${oc.env:API_TOKEN}'", "API_TOKEN, which looks like a secret"),
        ("data.path='${oc.env:db_password,/x}'", "db_password, which looks like a secret"),
        ("data.mixture={a: {path: '${oc.env:AWS_SECRET}'}}", "looks like a secret"),
        ("data.path='${oc.env:NOWHERE}/x'", "the environment variable NOWHERE, which is not set"),
        ("data.mixture={a: {path: '${oc.env:NOWHERE}'}}", "NOWHERE, which is not set"),
        ("launcher.env={A: '${no.such.key}'}", "refers to no.such.key, which is an unknown key"),
        ("launcher.env={a.b: '${no.such.key}'}", "refers to no.such.key, which is an unknown key"),
        ("launcher.env.A='${launcher.env.A}'", "refers to itself"),
        ("data.path='${now:%Y}'", "other resolvers are not supported"),
        ("data.path='x${'", "other resolvers are not supported"),
        ("data.path='${run.root}${run.root}'", "may refer to one other key"),
        ("data.path='${run.name}/x'", "refers to run.name within a text, which is null"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_key(word, said, monkeypatch):
    monkeypatch.setenv("API_TOKEN", "hunter2")
    found = violation(word)
    assert said in found.message and word.startswith(found.key.partition("{")[0][:8])
    assert "hunter2" not in str(found) and found.source == "command line"


def test_a_variable_that_is_not_set_comes_with_what_to_type():
    found = violation("data.path='${oc.env:NOWHERE}/x'")
    assert "export NOWHERE=…" in found.remedy and "${oc.env:NOWHERE,/default/path}" in found.remedy
    assert "${oc.env:CORPUS}" in violation("data.path='${CORPUS}/x'").remedy
    assert (
        compose(["data.path='${oc.env:NOWHERE,/default/path}'"]).config.data.path == "/default/path"
    )


NASTY = [
    "${HOME}", "\\${HOME}", "\\\\${HOME}", "a\\", "\\", "${", "\\${", "$${x}", "${oc.env:CORPUS}",
    "${run.root}", "x\\\\\\${y}z${", "a, b: [c] {d}", "'\"", "= é\t", "",
]  # fmt: skip
KEYS = [
    "A", "a b", "a\\b", "a\\", "a,b", "a:b", "{a}", "a.b", "1", "true", "${A}", "a'b", "é", "[a]",
]  # fmt: skip


def nasty() -> Config:
    """Return a configuration whose mappings and lists hold everything that a grammar could change."""
    values = dict(zip(KEYS, [*NASTY, *NASTY], strict=False))
    plain = asdict(complete())
    plain["backend"]["extra"] = {**values, "deep": {"list": NASTY, **values}}
    plain["model"]["hf_config"] = {"chat_template": "{% if ${x} %}\\${y}", "n": 1, "f": 1e-5}
    plain["launcher"]["env"] = {f"V{number}": text for number, text in enumerate(NASTY)}
    plain["launcher"]["slurm"]["setup"] = ["echo ${HOME} \\${X:-y}", "${"]
    plain["launcher"]["container_mounts"] = ["${a}:/b"]
    plain["train"]["sample_prompt"] = "\\${literal} ${text}"
    from nanoscale.config.values.convert import to_config

    return resolved(to_config(plain, lambda _: "test"))


def test_a_frozen_configuration_is_read_as_it_was_written(tmp_path: Path) -> None:
    config, file = nasty(), tmp_path / "config.yaml"
    asked = replace(config, run=replace(config.run, name="\\${a}"))
    file.write_text(frozen.dump(config, asked))
    assert frozen.load(file) == config
    assert frozen.dump(frozen.load(file), asked) == file.read_text()
    assert (
        resolved(compose([], config_file=file).config) == asked
    )  # the name of a run is open again
    plain = asdict(config)
    assert unescape("", escape("", plain)) == plain
    assert resolve(escape("", plain), lambda _: "") == (plain, [])


def test_overrides_keep_every_key_and_text_of_a_mapping() -> None:
    """Mappings of options and of files reach the configuration without any grammar in between."""
    literal = escape("", asdict(nasty()))
    options = {
        key: Setting(value, "command line: --x")
        for key, value in (
            ("backend.extra", literal["backend"]["extra"]),
            ("launcher.env", literal["launcher"]["env"]),
            ("launcher.slurm.setup", literal["launcher"]["slurm"]["setup"]),
        )
    }
    config = compose(["recipe=debug"], options=options).config
    assert config.backend.extra == nasty().backend.extra
    assert config.launcher.env == nasty().launcher.env
    assert config.launcher.slurm.setup == nasty().launcher.slurm.setup


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        ("a\\ b", "a b"),
        ("a\\,b", "a,b"),
        ("a\\:b", "a:b"),
        ("a\\\\b", "a\\b"),
        ("1", "1"),
        ("x.y", "x.y"),
    ],
)
def test_an_escaped_key_is_read_once(typed: str, key: str) -> None:
    assert compose([f"backend.extra={{{typed}: {{{typed}: 1}}}}"]).config.backend.extra == {
        key: {key: 1}
    }


def test_mappings_are_merged_into_what_is_there() -> None:
    composed: Composed = compose(
        ["launcher.env={A: 1, B: 2}", "launcher.env.B=3", "launcher.env={C: 4}"]
    )
    assert composed.config.launcher.env == {"A": 1, "B": 3, "C": 4}


def test_keys_that_name_paths_are_marked() -> None:
    marked = {name for name, key in reference.declared().items() if key.path}
    assert {
        "run.root",
        "data.path",
        "data.mixture",
        "launcher.hostfile",
        "cluster.python",
    } <= marked
    assert not marked & {"run.name", "launcher.env", "launcher.slurm.setup", "backend.extra"}
