"""The remaining messages of torchao's log."""

from __future__ import annotations

import logging

from nanoscale.models.torchao_log import silence_torchao


def test_extensions_that_do_not_load_are_no_news_and_all_else_is(caplog):
    silence_torchao()
    log = logging.getLogger("torchao")
    log.warning("Failed to load /x/torchao/_C_mxfp8.so: undefined symbol")
    log.warning("Skipping import of cpp extensions due to incompatible torch version")
    assert [record.getMessage()[:8] for record in caplog.records] == ["Skipping"]
