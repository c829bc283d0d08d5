"""The files that Hydra sees."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from nanoscale.config.composing.hydra_search import searching, without_values
from nanoscale.config.composing.library import RECIPE, ROOT, Library
from nanoscale.config.composing.overrides import read_words

CHOSEN = (
    [f"recipe={name}" for name in Library().options(RECIPE)],
    ["recipe=llama-8b", "cluster=h100-sxm", "~zero", "parallel.tp=2"],
)


@pytest.mark.parametrize("words", [[word] for word in CHOSEN[0]] + [CHOSEN[1]])
def test_the_order_of_merging_follows_from_the_lists_of_defaults(words):
    library = Library()
    with searching(library), initialize_config_dir(str(Path.cwd()), version_base="1.3"):
        asked = read_words(words, library)
        library.choices, library.touched = asked.choices, asked.touched()
        loader = GlobalHydra.instance().config_loader()
        whole = loader.compute_defaults_list(ROOT, asked.for_hydra(), RunMode.RUN).defaults
        with without_values():
            order = loader.compute_defaults_list(ROOT, asked.for_hydra(), RunMode.RUN)
    assert order.defaults == whole
    assert len(whole) > 10
