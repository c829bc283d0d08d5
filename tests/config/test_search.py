"""The files of a configuration merge as Hydra merges them."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nanoscale.config.composing.compose import _merged, merge_order
from nanoscale.config.composing.library import RECIPE, Library
from nanoscale.config.composing.overrides import read_words
from nanoscale.config.values.provenance import Layer

CHOSEN = (
    *([f"recipe={name}"] for name in Library().options(RECIPE)),
    ["recipe=llama-8b", "cluster=h100-sxm", "~zero", "parallel.tp=2"],
    ["recipe=./top.yaml"],
)
BASE = "defaults: [debug]\nmodel: {rope_scaling: {factor: 2}}\nlauncher: {env: {A: '1', B: '${train.steps}'}}\n"
TOP = "defaults: [./base.yaml, _self_]\nmodel: {rope_scaling: null}\nlauncher: {env: {B: '2'}, ssh_args: []}\n"


@pytest.mark.parametrize("words", CHOSEN, ids=" ".join)
def test_files_merge_as_in_omegaconf(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE)
    Path("top.yaml").write_text(TOP)
    library = Library()
    asked = read_words(words, library)
    library.choices, library.touched = asked.choices, asked.touched()
    layers = [Layer(library.serve(file), section) for file, section in merge_order(library)]
    merged = _merged(layers, [])
    assert len(layers) > 10
    expected = OmegaConf.create()
    for layer in layers:
        expected = OmegaConf.merge(expected, OmegaConf.create(layer.content))
    assert merged == OmegaConf.to_container(expected, resolve=False)
    assert merged["train"]["seed"] == 0
