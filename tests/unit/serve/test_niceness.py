"""Which thread runs first: only the calling thread becomes nicer."""

from __future__ import annotations

import os
import threading

import pytest

from rankwatch_monitor.serve import niceness as precedence


def test_only_the_calling_thread_becomes_nicer() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    seen: list[int] = []

    def work() -> None:
        precedence.yield_to_others(3)
        seen.append(os.getpriority(os.PRIO_PROCESS, 0))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [min(before + 3, 19)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_where_niceness_is_forbidden_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not here")

    before = os.getpriority(os.PRIO_PROCESS, 0)
    monkeypatch.setattr(os, "setpriority", refuse)
    precedence.yield_to_others(3)
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
