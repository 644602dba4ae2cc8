"""A connection file that is read again."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from rankwatch.shared.link import connection as connections
from rankwatch.shared.link.connection import Connection
from rankwatch.tell.contact import INTERVAL, ConnectionSource

KNOWN = Connection("tcp://head:1", "s" * 40, "p" * 40, "c" * 40, "train")


@pytest.mark.parametrize("changes", [{"server_public": "t" * 40}, {"address": "tcp://head:2"}, {"client_secret": "d" * 40}])
def test_what_is_new_in_the_file_is_found_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    path = tmp_path / "connection.json"
    monkeypatch.chdir(tmp_path)
    source = ConnectionSource("connection.json", KNOWN)
    monkeypatch.chdir("/")
    assert source.renewed(10.0) is None  # no file
    connections.write(KNOWN, path)
    assert source.renewed(10.0 + INTERVAL) is None
    connections.write(replace(KNOWN, **changes), path)
    assert source.renewed(10.1 + INTERVAL) is None  # too early
    assert source.renewed(10.0 + 2 * INTERVAL) == replace(KNOWN, **changes)
    assert source.renewed(10.0 + 3 * INTERVAL) is None


def test_a_file_that_others_can_read_is_not_used_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "connection.json"
    connections.write(replace(KNOWN, address="tcp://head:2"), path)
    path.chmod(0o644)
    source = ConnectionSource(str(path), KNOWN)
    assert [source.renewed(INTERVAL * look) for look in range(5)] == [None] * 5
    (line,) = caplog.messages
    assert "others can read the keys in it; chmod 600 it" in line


def test_who_was_given_text_is_told_to_renew_it(caplog: pytest.LogCaptureFixture) -> None:
    text = json.dumps({"rankwatch_connection": [1, 0], **asdict(KNOWN)})
    source = ConnectionSource(text, KNOWN)
    assert [source.renewed(INTERVAL * look) for look in range(5)] == [None] * 5
    (line,) = caplog.messages
    assert line == (
        "rankwatch: the collector does not answer; its connection was given as text: if it was started again with new keys, "
        "ranks need the new text"
    )
