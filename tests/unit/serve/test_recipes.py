"""The scripts that the pages give for ``--on-verdict``, with a server beside them that writes down what it is sent."""

from __future__ import annotations

import json
import shlex
import socketserver
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from e2e.pages import python_of
from rankwatch_monitor.decide.core.effects import Alert, Trouble
from rankwatch_monitor.decide.core.report import Outcome, Report
from rankwatch_monitor.serve.processes.notifier import Notifier

LOST = Report("train-0", "train", 0, 2, Outcome.LOST, "rank 1 was lost", None, 7, None, ())
STALLED = "rank 1 of 2 stalled: no progress for 300 s"


class Slack(BaseHTTPRequestHandler):
    received: list[Any]

    def do_POST(self) -> None:
        self.received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()


class Mail(socketserver.StreamRequestHandler):
    """As much of SMTP as a mail needs."""

    received: list[str]

    def handle(self) -> None:
        self._say("220 here")
        for line in self.rfile:
            command = line.split()[0].upper()
            self._say({b"DATA": "354 go on", b"QUIT": "221 bye"}.get(command, "250 fine"))
            if command == b"DATA":
                self.received.append(b"".join(iter(self.rfile.readline, b".\r\n")).decode())
                self._say("250 taken")

    def _say(self, text: str) -> None:
        self.wfile.write(f"{text}\r\n".encode())


@contextmanager
def serving(server: socketserver.TCPServer) -> Iterator[int]:
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def tell(folder: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Tells a script of the pages of a stall, and then of the end of the run."""
    (folder / name).write_text(python_of("behaviour.md", f"# {name}"))
    (folder / "report.txt").write_text("rankwatch: run train-0 lost\n")
    command = shlex.join([sys.executable, str(folder / name)])
    stall = Alert(Trouble.STALL, STALLED, replace(LOST, folder=str(folder / "no")))
    for event in (stall, replace(LOST, folder=str(folder))):
        notifier = Notifier(command)
        notifier.alert(event) if isinstance(event, Alert) else notifier.tell(event)
        notifier.close()
    assert caplog.messages == []


def test_slack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    Slack.received = []
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Slack)) as port:
        monkeypatch.setenv("SLACK_URL", f"http://127.0.0.1:{port}")
        tell(tmp_path, "tell.py", caplog)
    assert Slack.received == [{"text": f"train-0: {STALLED}"}, {"text": "train-0: lost: rank 1 was lost"}]


def test_mail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    Mail.received = []
    with serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Mail)) as port:
        for name, value in (("SMTP_HOST", "127.0.0.1"), ("SMTP_PORT", str(port)), ("MAIL_TO", "you@example.org")):
            monkeypatch.setenv(name, value)
        tell(tmp_path, "send_mail.py", caplog)
    stall, end = Mail.received
    assert "Subject: train-0: stall" in stall
    assert STALLED in stall
    assert "Subject: train-0: verdict" in end
    assert "lost: rank 1 was lost" in end
    assert "rankwatch: run train-0 lost" in end


@pytest.mark.slow
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Offline: what it would send lies in a file of each run."""
    pytest.importorskip("wandb")
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_DIR", str(tmp_path)), ("WANDB_SILENT", "true")):
        monkeypatch.setenv(name, value)
    tell(tmp_path, "alert.py", caplog)
    sent = b"".join(path.read_bytes() for path in sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb")))
    for text in ("train-0: stall", STALLED, "train-0: verdict", "lost: rank 1 was lost"):
        assert text.encode() in sent
