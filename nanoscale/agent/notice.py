"""A notice that this host will be taken away: of a cloud's metadata service, of a URL, or by a file."""

import json
import math
import os
import time
from collections.abc import Callable
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from nanoscale.config.machines import NOTICE_S

_EVERY_S, _ANSWER_S = 5.0, 2.0
_ENDING = ("Preempt", "Terminate", "Reboot", "Redeploy")
"""Azure's types of events that end this host or its processes."""


def watch(source: str, send: Callable[..., None]) -> None:
    """Send a message each time that a notice stands, and one if the source cannot be read. Never returns."""
    has_failed = False
    while True:
        try:
            if (left_s := seconds_left(source)) is not None:
                send("notice", source=source, seconds=left_s if left_s < math.inf else None)
        except Exception as error:  # whatever the service answers, the ranks train
            if not has_failed:
                send("notice", source=source, problem=f"{type(error).__name__}: {error}")
            has_failed = True
        time.sleep(_EVERY_S)


def seconds_left(source: str) -> float | None:
    """Return the seconds that a notice leaves, inf if it does not say; None: there is no notice.

    Raises:
        OSError, ValueError: the source does not answer, or with something else.
    """
    if source not in _CLOUDS:
        present = _get(source) if "://" in source else Path(source).exists()
        return math.inf if present else None
    base = os.environ.get("NANOSCALE_METADATA", "http://169.254.169.254")  # tests set it
    if (end := _CLOUDS[source](base)) is None:
        return None
    return max(0.0, end - time.time()) if end else NOTICE_S[source]


def _aws(base: str) -> float | None:
    """Return the end of a spot instance, UNIX seconds; 0: unknown; None: it stays."""
    name = "X-aws-ec2-metadata-token"
    token = _get(f"{base}/latest/api/token", "PUT", {f"{name}-ttl-seconds": "60"})
    action = _get(f"{base}/latest/meta-data/spot/instance-action", "GET", {name: token})
    return datetime.fromisoformat(json.loads(action)["time"]).timestamp() if action else None


def _gcp(base: str) -> float | None:
    url = f"{base}/computeMetadata/v1/instance/preempted"
    state = _get(url, "GET", {"Metadata-Flavor": "Google"})
    return 0.0 if state.strip() == "TRUE" else None


def _azure(base: str) -> float | None:
    """Return the earliest end by an event of this machine; the service lists its neighbors' events too."""
    header, query = {"Metadata": "true"}, "api-version=2020-07-01"
    listed = _get(f"{base}/metadata/scheduledevents?{query}", "GET", header)
    events = [it for it in json.loads(listed)["Events"] if it["EventType"] in _ENDING]
    if not events:
        return None
    name = _get(f"{base}/metadata/instance/compute/name?{query}&format=text", "GET", header)
    local = [it.get("NotBefore") for it in events if name in it["Resources"]]
    ends = [parsedate_to_datetime(it).timestamp() if it else 0.0 for it in local]
    return min(ends, default=None)


_CLOUDS = {"aws": _aws, "gcp": _gcp, "azure": _azure}


def _get(url: str, method: str = "GET", headers: dict[str, str] | None = None) -> str:
    """Return the body of an answer; empty without content. A local service needs no proxy."""
    request = Request(url, method=method, headers=headers or {})
    try:
        with build_opener(ProxyHandler({})).open(request, timeout=_ANSWER_S) as answer:
            return str(answer.read(1 << 20).decode()) if answer.status == 200 else ""
    except HTTPError as error:
        if error.code == 404:
            return ""
        raise
