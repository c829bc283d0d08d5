"""A real browser: Chromium without a window, asked through chromedriver (WebDriver, W3C 2018)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

LIMIT_S = 60.0
ARGUMENTS = (
    "headless",
    "no-sandbox",
    "disable-gpu",
    "disable-background-networking",
    "disable-sync",
)


class Browser:
    """A session of a browser, for one page after the other."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, address: str) -> None:
        """Open a page, and wait until it is loaded."""
        _post(f"{self._session}/url", {"url": address})

    def ask(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        return _post(f"{self._session}/execute/sync", {"script": f"return {script}", "args": []})


@contextmanager
def browser(width: int) -> Iterator[Browser]:
    """Start a browser whose screen has `width` points, as a phone's; skip the test where there is none."""
    if shutil.which("chromedriver") is None:
        pytest.skip("needs chromedriver and Chromium (apt-get install chromium-driver)")
    driver = subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert driver.stdout is not None
        found = (re.search(r"on port (\d+)", line) for line in driver.stdout)
        port = next(it for it in found if it and it[1] != "0")[1]
        screen = {"deviceMetrics": {"width": width, "height": 800, "pixelRatio": 1.0}}
        options = {"args": [f"--{it}" for it in ARGUMENTS], "mobileEmulation": screen}
        wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
        server = f"http://127.0.0.1:{port}/session"
        session = f"{server}/{_post(server, wanted)['sessionId']}"
        yield Browser(session)
        urllib.request.urlopen(
            urllib.request.Request(session, method="DELETE"), timeout=LIMIT_S
        ).close()
    finally:
        driver.terminate()
        driver.wait(LIMIT_S)


def _post(address: str, document: object) -> Any:
    body = json.dumps(document).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        return json.load(answer)["value"]
