"""Which folder a command means."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankwatch_monitor.commands.arguments import run_folder


@pytest.mark.parametrize("given", ["", "latest", "train-3"])
def test_the_newest_run_is_named_by_its_own_folder(given: str, tmp_path: Path) -> None:
    (tmp_path / "train-3").mkdir()
    (tmp_path / "latest").symlink_to("train-3")
    assert run_folder(tmp_path / given) == tmp_path / "train-3"


def test_a_folder_that_is_not_there_stays_as_it_was_given(tmp_path: Path) -> None:
    assert run_folder(tmp_path / "latest") == tmp_path / "latest"
    (tmp_path / "latest").symlink_to("gone-0")
    assert run_folder(tmp_path / "latest") == tmp_path / "gone-0"
