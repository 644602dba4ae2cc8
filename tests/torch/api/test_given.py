"""An argument of ``watch`` that is given counts, also where it is the default."""

from __future__ import annotations

import inspect

import pytest
from torch import nn

import rankwatch


def test_a_default_that_is_given_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANKWATCH_FINGERPRINTS", "4")
    monkeypatch.setenv("RANKWATCH_POLICY", "strict")
    with rankwatch.watch(nn.Linear(2, 2)) as told_by_the_environment:
        config = told_by_the_environment._config
        assert (config.fingerprints, config.policy.value) == (4, "strict")
    with rankwatch.watch(nn.Linear(2, 2), fingerprints=16, check=None) as given:
        assert (given._config.fingerprints, given._config.policy.value) == (16, "strict")
    assert inspect.signature(rankwatch.watch).parameters["fingerprints"].default == 16
