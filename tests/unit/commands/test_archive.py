"""Where an archive can be, which is said before a job starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankwatch.errors import UsageError
from rankwatch_monitor.commands.archive import check_archive


def test_a_path_where_no_archive_can_be(tmp_path: Path) -> None:
    for url in (f"{tmp_path}/to/be/made", f"file:{tmp_path}", "s3:bucket", "memory://runs"):
        check_archive(url)
    (tmp_path / "file").touch()
    for url, why in (
        (f"{tmp_path}/file", f"{tmp_path}/file is no folder"),
        (f"{tmp_path}/file/in/it", f"{tmp_path}/file is no folder"),
        ("s3:/bucket/runs", "a URL has two slashes, as in s3://bucket/runs"),
        ("/proc/sys/runs", "you may not write in /proc/sys"),  # root neither
    ):
        with pytest.raises(UsageError, match=f"^no archive can be at {url}: {why}$"):
            check_archive(url)
