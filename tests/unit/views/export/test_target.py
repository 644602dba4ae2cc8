"""Export targets: complete files, on any file system, and no existing file is overwritten."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from rankwatch.errors import UsageError
from rankwatch_monitor.views.export.target import whole


@pytest.fixture(params=["local", "file://", "memory://"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A file to write, on each of three file systems, in an empty folder."""
    if request.param == "memory://":
        fsspec.filesystem("memory").makedirs(str(tmp_path))
    return f"{'' if request.param == 'local' else request.param}{tmp_path}/out.parquet"


def content(url: str) -> bytes:
    with fsspec.open(url, "rb") as file:
        read: bytes = file.read()
        return read


def beside(url: str) -> list[str]:
    file_system, path = fsspec.url_to_fs(url)
    return [Path(name).name for name in file_system.ls(str(Path(path).parent), detail=False)]


def test_a_file_appears_once_it_is_complete(url: str) -> None:
    with whole(url, overwrite=False) as file:
        file.write(b"first")
        assert "out.parquet" not in beside(url)
    assert content(url) == b"first"
    assert beside(url) == ["out.parquet"]


def test_an_existing_file_is_replaced_only_on_request(url: str) -> None:
    with whole(url, overwrite=True) as file:
        file.write(b"first")
    complaint = r"out\.parquet exists: name another file, or replace it by --overwrite"
    with pytest.raises(UsageError, match=complaint), whole(url, overwrite=False):
        pytest.fail("it was there")
    assert content(url) == b"first"
    with whole(url, overwrite=True) as file:
        file.write(b"second")
    assert content(url) == b"second"
    assert beside(url) == ["out.parquet"]


def break_off(url: str, error: type[BaseException]) -> None:
    with whole(url, overwrite=True) as file:
        file.write(b"half")
        raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_export_that_fails_leaves_the_old_files(url: str, error: type[BaseException]) -> None:
    for before in ([], ["out.parquet"]):
        assert beside(url) == before
        with pytest.raises(error):
            break_off(url, error)
        assert beside(url) == before
        with whole(url, overwrite=True) as file:
            file.write(b"first")
    assert content(url) == b"first"


def test_an_unwritable_target_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for url, complaint in (
        (f"{tmp_path}", "it is a folder; name a file"),
        (f"{tmp_path}/missing/out", "No such file or directory"),
        (f"{tmp_path}/file/out", "Not a directory"),
        ("no-such-protocol://out", "Protocol not known: no-such-protocol"),
        ("/proc/out", "No such file or directory"),
    ):
        with pytest.raises(UsageError, match=f"cannot write {url}: .*{complaint}"), whole(url, overwrite=True):
            pytest.fail("it cannot be written")


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    def fill() -> None:
        with whole(f"{tmp_path}/out", overwrite=False) as file, open("/dev/full", "wb", buffering=0) as full:
            file.write(b"half")
            full.write(b"more")

    with pytest.raises(UsageError, match=r"cannot write .*: .*No space left on device"):
        fill()
    assert list(tmp_path.iterdir()) == []
