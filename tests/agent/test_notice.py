"""Notices of a host's end, from metadata services as the clouds' documentation describes them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from nanoscale.agent import notice
from nanoscale.agent.notice import seconds_left, watch


class Metadata:
    """The metadata services of three clouds, at one address."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.action: dict[str, str] | None = None
        self.preempted = "FALSE"
        self.events: list[dict[str, Any]] = []

    def answer(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        match path.partition("?")[0]:
            case "/latest/api/token" if method == "PUT":
                lifetime = int(headers["X-aws-ec2-metadata-token-ttl-seconds"])
                return (200, "secret") if 1 <= lifetime <= 21600 else (400, "")
            case "/latest/meta-data/spot/instance-action":
                if headers.get("X-aws-ec2-metadata-token") != "secret":
                    return 401, ""
                return (200, json.dumps(self.action)) if self.action else (404, "not found")
            case "/computeMetadata/v1/instance/preempted":
                return (
                    (200, self.preempted)
                    if headers.get("Metadata-Flavor") == "Google"
                    else (403, "")
                )
            case "/metadata/scheduledevents" if headers.get("Metadata") == "true":
                return 200, json.dumps({"DocumentIncarnation": 1, "Events": self.events})
            case "/metadata/instance/compute/name" if "format=text" in path:
                return 200, "vm_3"
            case "/empty":
                return 200, ""
            case "/leave":
                return 200, "leave"
        return 500, ""


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers = {name.title(): text for name, text in self.headers.items()}
            known = ("X-aws-ec2-metadata-token-ttl-seconds", "X-aws-ec2-metadata-token")
            headers |= {name: headers[name.title()] for name in known if name.title() in headers}
            code, body = service.answer(self.command, self.path, headers)
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body.encode())

        do_PUT = do_GET  # noqa: N815 - as http.server names it

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service = Metadata(f"http://127.0.0.1:{server.server_port}")
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("NANOSCALE_METADATA", service.address)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # a local service needs no proxy
    yield service
    server.shutdown()
    server.server_close()


def test_aws_says_when_the_instance_ends(metadata: Metadata) -> None:
    assert seconds_left("aws") is None
    end = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 120))
    metadata.action = {"action": "terminate", "time": end}
    assert seconds_left("aws") == pytest.approx(120, abs=3)


def test_gcp_leaves_thirty_seconds(metadata: Metadata) -> None:
    assert seconds_left("gcp") is None
    metadata.preempted = "TRUE"
    assert seconds_left("gcp") == 30


def test_azure_lists_events_of_neighbors_too(metadata: Metadata) -> None:
    event = {"EventType": "Preempt", "Resources": ["vm_4"], "EventStatus": "Scheduled"}
    event |= {"NotBefore": formatdate(time.time() + 20, usegmt=True)}
    metadata.events = [event, {**event, "EventType": "Freeze", "Resources": ["vm_3"]}]
    assert seconds_left("azure") is None
    metadata.events.append({**event, "Resources": ["vm_3", "vm_4"]})
    assert seconds_left("azure") == pytest.approx(20, abs=3)
    metadata.events = [{**event, "NotBefore": "", "Resources": ["vm_3"]}]
    assert seconds_left("azure") == 30, "an event that began has no time"


def test_a_file_and_a_url_with_a_body_are_notices(metadata: Metadata, tmp_path: Path) -> None:
    file = tmp_path / "leave"
    assert seconds_left(str(file)) is seconds_left(f"{metadata.address}/empty") is None
    file.touch()
    assert seconds_left(str(file)) == seconds_left(f"{metadata.address}/leave") == float("inf")


def test_a_notice_is_repeated_and_a_problem_is_not(
    metadata: Metadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher may not listen between two attempts."""
    sent: list[dict[str, Any]] = []
    looks = iter(range(4))

    def pause(_seconds: float) -> None:
        if next(looks) == 3:
            raise InterruptedError
        metadata.preempted = "TRUE"

    monkeypatch.setattr(notice.time, "sleep", pause)  # type: ignore[attr-defined]
    for source in ("gcp", f"{metadata.address}/broken"):
        with pytest.raises(InterruptedError):
            watch(source, lambda kind, **about: sent.append({"kind": kind, **about}))
        looks = iter(range(4))
    assert [about.get("seconds") for about in sent] == [30, 30, 30, None]
    assert "500" in sent[-1]["problem"]
