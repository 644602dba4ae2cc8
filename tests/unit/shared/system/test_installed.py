"""The command that adds an extra can be pasted into a shell."""

from __future__ import annotations

import shlex

import pytest

from rankwatch.shared.system.installed import to_add


@pytest.mark.parametrize(("extra", "asked"), [("top", "rankwatch[top]"), ("", "rankwatch")])
def test_the_command_asks_pip_for_the_extra(extra: str, asked: str) -> None:
    assert shlex.split(to_add(extra)) == ["pip", "install", asked]
