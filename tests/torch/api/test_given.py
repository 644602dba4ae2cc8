"""An argument of ``watch`` that is given counts, also where it is the default."""

from __future__ import annotations

import inspect

import pytest
from torch import nn

import rankwatch


def test_a_default_that_is_given_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKWATCH_EVERY", "10")
    monkeypatch.setenv("RANKWATCH_POLICY", "strict")
    with rankwatch.watch(nn.Linear(2, 2)) as told_by_the_environment:
        assert (told_by_the_environment._config.every, told_by_the_environment._config.policy.value) == (10, "strict")
    with rankwatch.watch(nn.Linear(2, 2), every=1, check=None) as given:
        assert (given._config.every, given._config.policy.value) == (1, "strict")
    assert inspect.signature(rankwatch.watch).parameters["every"].default == 1
