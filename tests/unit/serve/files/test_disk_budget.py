"""How far the files of one key may grow."""

from __future__ import annotations

import pytest

from rankwatch_monitor.decide.keys import budget
from rankwatch_monitor.serve.files.disk_budget import DiskBudgets


def test_all_files_of_one_key_count_and_those_of_another_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "DISK_AT_ONCE", 100.0)
    monkeypatch.setattr(budget, "DISK_PER_SECOND", 10.0)
    disk = DiskBudgets()
    for run, bound in (("greedy-0", "greedy"), ("greedy-1", "greedy"), ("llama-0", "llama")):
        disk.begin(run, bound)
    disk.measure("greedy-0", 60)
    disk.measure("greedy-0", 60)
    assert disk.may_grow("greedy-0", 0.0)
    disk.spend("greedy-1", 45)  # a trace
    assert not disk.may_grow("greedy-0", 0.0)
    assert not disk.may_grow("greedy-1", 0.0)
    assert disk.may_grow("llama-0", 0.0)
    assert disk.may_grow("greedy-1", 1.0)


def test_what_another_collector_wrote_of_a_run_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "DISK_AT_ONCE", 100.0)
    disk = DiskBudgets()
    disk.adopt("train-0", 1000)
    disk.measure("train-0", 1050)
    assert disk.may_grow("train-0", 0.0)
    disk.measure("train-0", 1110)
    assert not disk.may_grow("train-0", 0.0)
