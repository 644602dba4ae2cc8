"""The keys that a collector issues to jobs."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from rankwatch.errors import ConnectionFileError
from rankwatch.shared.link.connection import KeyPair
from rankwatch.shared.types import messages
from rankwatch_monitor.serve.door import key_file
from rankwatch_monitor.serve.door.credentials import Credentials


def test_more_jobs_than_a_collector_has_room_for_get_no_keys(tmp_path: Path) -> None:
    keys = Credentials(tmp_path / "connection.json", insecure=False)
    for number in range(4095):
        keys.ring.invite(f"job-{number}", KeyPair(f"public-{number}", f"secret-{number}"))
    last = keys.issue("the last")
    assert isinstance(last, messages.Invited)
    assert keys.issue("one more") == messages.Error("4096 jobs have keys already", "none")
    assert keys.ring.invited("one more") is None
    assert keys.issue("the last") == last  # a job that has keys gets the same ones
    assert keys.issue("job-7") == messages.Invited("job-7", "public-7", "secret-7")


def published(folder: Path) -> Credentials:
    keys = Credentials(folder / "connection.json", insecure=False)
    keys.publish("tcp://host:1", "tcp://*:1", "train")
    return keys


def test_of_two_collectors_that_start_at_one_place_the_second_is_told_before_either_has_written(tmp_path: Path) -> None:
    first = Credentials(tmp_path / "connection.json", insecure=False)
    with pytest.raises(ConnectionFileError, match="in use by a running collector; choose another"):
        Credentials(tmp_path / "connection.json", insecure=False)
    first.publish("tcp://host:1", "tcp://*:1", "train")
    with pytest.raises(ConnectionFileError, match="in use by a running collector; choose another"):
        Credentials(tmp_path / "connection.json", insecure=False)
    first.withdraw()
    assert list(tmp_path.iterdir()) == []
    published(tmp_path).withdraw()


def test_a_collector_that_never_published_leaves_nothing_and_takes_nothing(tmp_path: Path) -> None:
    Credentials(tmp_path / "connection.json", insecure=False).withdraw()
    assert list(tmp_path.iterdir()) == []
    published(tmp_path).release()  # as a crash does
    left = {path: path.read_text() for path in tmp_path.iterdir()}
    Credentials(tmp_path / "connection.json", insecure=False).withdraw()  # it could not listen
    with pytest.raises(ConnectionFileError, match="is of a collector with encryption"):
        Credentials(tmp_path / "connection.json", insecure=True)
    assert {path: path.read_text() for path in tmp_path.iterdir()} == left


@pytest.mark.parametrize("first_goes", [True, False])
def test_a_collector_withdraws_its_own_files_alone(tmp_path: Path, first_goes: bool) -> None:
    first = published(tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()  # by somebody who starts another collector at the same place
    second = published(tmp_path)
    (first if first_goes else second).withdraw()
    left = [path.name for path in sorted(tmp_path.iterdir())]
    assert left == (["connection.json", "connection.json.server-key"] if first_goes else [])
    (second if first_goes else first).withdraw()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_another_collector_put_in_place_stays(tmp_path: Path) -> None:
    ours = published(tmp_path)
    (tmp_path / "connection.json").write_text("another's")
    ours.withdraw()
    assert [path.name for path in tmp_path.iterdir()] == ["connection.json"]


def test_no_secret_is_written_into_a_file_that_somebody_else_laid_there(tmp_path: Path) -> None:
    planted = tmp_path / "connection.json.server-key"
    planted.touch()
    planted.chmod(0o666)
    with pytest.raises(ConnectionFileError, match="server-key has mode 0666: others can read the keys in it; chmod 600 it"):
        published(tmp_path)
    assert planted.read_text() == ""
    planted.rename(tmp_path / "another")
    (tmp_path / "another").write_text("a file of ours")
    (tmp_path / "another").chmod(0o600)
    planted.symlink_to(tmp_path / "another")
    with pytest.raises(ConnectionFileError, match=r"cannot write .*server-key"):
        published(tmp_path)
    assert (tmp_path / "another").read_text() == "a file of ours"
    planted.unlink()
    published(tmp_path).withdraw()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")
@pytest.mark.parametrize("planted", ["connection.json", "connection.json.server-key"])
def test_keys_that_another_user_planted_are_not_taken_over(tmp_path: Path, planted: str) -> None:
    published(tmp_path).release()
    os.chown(tmp_path / planted, 65534, 65534)
    before = {path: path.read_text() for path in tmp_path.iterdir()}
    with pytest.raises(ConnectionFileError, match=rf"{planted} belongs to user 65534, and this process to user 0"):
        Credentials(tmp_path / "connection.json", insecure=False)
    assert {path: path.read_text() for path in tmp_path.iterdir()} == before


def test_a_fifo_in_the_place_of_either_file_holds_no_collector_up(tmp_path: Path) -> None:
    for name in ("connection.json", "connection.json.server-key"):
        os.mkfifo(tmp_path / name, 0o600)
        with pytest.raises(ConnectionFileError, match=f"{name} is no regular file"):
            Credentials(tmp_path / "connection.json", insecure=False)
        (tmp_path / name).unlink()
    keys = published(tmp_path)
    (tmp_path / "connection.json").unlink()
    os.mkfifo(tmp_path / "connection.json", 0o600)
    keys.withdraw()


def test_a_key_file_that_its_holder_removes_before_it_lets_go_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock = tmp_path / "keys", key_file._lock
    left = ["the holder"]

    def removed_meanwhile(descriptor: int, at: Path) -> None:
        if left:
            left.pop()
            at.unlink()
        lock(descriptor, at)

    monkeypatch.setattr(key_file, "_lock", removed_meanwhile)
    ours = key_file.KeyFile(path)
    ours.write(["secret"])
    assert path.read_text() == "secret\n"
    ours.close()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_RDWR, "NFS answers EBADF"
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    keys = published(tmp_path)
    (line,) = caplog.messages
    assert f"connection.json.server-key cannot be locked there ({os.strerror(number)}): start no second collector" in line
    keys.withdraw()
    assert list(tmp_path.iterdir()) == []


def test_a_key_that_cannot_be_written_spoils_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = published(tmp_path)
    before = (tmp_path / "connection.json.server-key").read_text()

    def full(descriptor: int, text: bytes, at: int) -> int:
        if len(text) < 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, text[:-9], at)

    write = os.pwrite
    with monkeypatch.context() as disk:
        disk.setattr(os, "pwrite", full)
        assert isinstance(keys.issue("job"), messages.Invited)
    assert "the keys of job job end with this collector" in caplog.text
    assert (tmp_path / "connection.json.server-key").read_text() == before
    keys.release()
    published(tmp_path).withdraw()
