"""The connection file: private from its first byte, strict when read."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rankwatch.errors import ConnectionFileError
from rankwatch.shared.link.connection import FORMAT, Connection, OthersFileError, read, render, write

KEY = "k" * 40
CONNECTION = Connection("tcp://127.0.0.1:27077", KEY, KEY, KEY, "train")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "connection.json"


def test_a_private_file_round_trips(path: Path) -> None:
    os.umask(0)
    try:
        write(CONNECTION, path)
    finally:
        os.umask(0o022)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read(path) == CONNECTION
    assert list(path.parent.iterdir()) == [path]


def test_a_missing_folder_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(ConnectionFileError, match=r"its folder .*/mistyped does not exist"):
        write(CONNECTION, tmp_path / "mistyped" / "connection.json")


def test_the_text_itself_serves_in_the_environment(path: Path) -> None:
    write(CONNECTION, path)
    assert read(path.read_text()) == CONNECTION


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(ConnectionFileError, match="does not exist: is the collector running"):
        read(tmp_path / "none.json")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622])
def test_readable_by_others(path: Path, mode: int) -> None:
    write(CONNECTION, path)
    path.chmod(mode)
    with pytest.raises(ConnectionFileError, match=f"has mode {mode:04o}.*chmod 600"):
        read(path)


def test_a_fifo_makes_nobody_wait(path: Path) -> None:
    os.mkfifo(path, 0o600)
    with pytest.raises(ConnectionFileError, match="is no regular file"):
        read(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_another_users_file_is_told_from_other_faults(path: Path) -> None:
    write(CONNECTION, path)
    os.chown(path, 65534, 65534)
    with pytest.raises(OthersFileError, match="belongs to user 65534"):
        read(path)
    os.chown(path, 0, 0)
    os.seteuid(65534)
    try:
        with pytest.raises(OthersFileError, match="Permission denied"):
            read(path)
    finally:
        os.seteuid(0)


def _body(**changes: Any) -> str:
    fields = {name: getattr(CONNECTION, name) for name in CONNECTION.__slots__}
    return json.dumps({"rankwatch_connection": list(FORMAT), **fields, **changes})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "malformed"),
        ("[]", "malformed"),
        ('{"address": 1}', "malformed"),
        (_body(server_public="short"), "malformed"),
        (_body(address=None), "malformed"),
        (_body(for_job_alone=1), "malformed"),
        (_body(rankwatch_connection=[FORMAT[0] + 1, 0]), "is of version 2, this rankwatch reads version 1"),
    ],
)
def test_malformed_or_of_another_version(path: Path, text: str, complaint: str) -> None:
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConnectionFileError, match=complaint):
        read(path)


def test_a_newer_minor_version_is_read() -> None:
    assert read(_body(rankwatch_connection=[FORMAT[0], 9], more="of it")) == CONNECTION


def test_without_keys_only_this_machine_is_reached(tmp_path: Path) -> None:
    plain = {"server_public": "", "client_public": "", "client_secret": ""}
    for address in ("tcp://127.0.0.1:1", "tcp://localhost:1"):
        assert not read(_body(**plain, address=address)).is_encrypted
    for address in ("tcp://head:1", "tcp://10.0.0.1:1", "tcp://127.0.0.1.example.org:1", "localhost"):
        with pytest.raises(ConnectionFileError, match=r"plain text is for loopback alone|malformed"):
            read(_body(**plain, address=address))
    with pytest.raises(ConnectionFileError, match="malformed"):
        read(_body(server_public=""))


def test_names_in_it_are_printable(tmp_path: Path) -> None:
    evil = "\x1b[2J\nrankwatch: forged"
    assert read(render(replace(CONNECTION, job=evil))).job == "\\x1b[2J\\nrankwatch: forged"
    harmful = (
        render(replace(CONNECTION, address=f"tcp://{evil}:1")),
        json.dumps({"rankwatch_connection": [evil, 0]}),
        f"tcp://{evil}",
        str(tmp_path / evil),
    )
    for source in harmful:
        with pytest.raises(ConnectionFileError) as raised:
            read(source)
        assert str(raised.value).isprintable()
