"""Whose file of secrets it is: the owner's alone, whom nobody can make wait, and in whose folder nobody puts another one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rankwatch.shared.system.private import OPEN, NotOursError, NotPrivateError, check_private

ANOTHER = 65534


def check(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | OPEN)
    try:
        check_private(descriptor, path)
    finally:
        os.close(descriptor)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.touch(0o600)
    return path


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601])
def test_a_file_that_others_can_use_is_refused(file: Path, mode: int) -> None:
    check(file)
    file.chmod(mode)
    with pytest.raises(NotPrivateError, match=f"mode {mode:04o}.*chmod 600"):
        check(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")
def test_a_file_of_another_user_is_refused_though_nobody_else_can_read_it(file: Path) -> None:
    os.chown(file, ANOTHER, ANOTHER)
    with pytest.raises(NotOursError, match=f"belongs to user {ANOTHER}, and this process to user 0"):
        check(file)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path in (tmp_path / "fifo", tmp_path, Path("/dev/null")):
        with pytest.raises(NotPrivateError, match="no regular file"):
            check(path)


@pytest.mark.parametrize(("mode", "is_private"), [(0o777, False), (0o1777, True), (0o773, False), (0o775, True)])
def test_a_folder_in_which_all_can_replace_it_is_refused(file: Path, mode: int, is_private: bool) -> None:
    file.parent.chmod(mode)
    if is_private:
        check(file)
        return
    with pytest.raises(NotPrivateError, match=r"all users can replace it: chmod \+t"):
        check(file)
