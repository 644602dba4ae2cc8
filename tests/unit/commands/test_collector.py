"""The options of a collector, from the command line and the environment."""

from __future__ import annotations

import argparse

import pytest

from rankwatch_monitor.commands.collector import add_collector_options, options_of
from rankwatch_monitor.decide.core.options import Options


def parsed(*arguments: str) -> Options:
    parser = argparse.ArgumentParser()
    add_collector_options(parser, None, "")
    return options_of(parser.parse_args(arguments))


@pytest.mark.parametrize(
    ("given", "aborts"), [([], False), (["--on-desync", "note"], False), (["--on-desync", "abort"], True)]
)
def test_on_desync(given: list[str], aborts: bool) -> None:
    assert parsed(*given).abort_on_desync is aborts
    assert parsed(*[each.replace("-desync", "_desync") for each in given]).abort_on_desync is aborts


def test_on_desync_from_the_environment(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANKWATCH_ON_DESYNC", "abort")
    assert parsed().abort_on_desync
    assert not parsed("--on-desync", "note").abort_on_desync
    monkeypatch.setenv("RANKWATCH_ON_DESYNC", "stop")
    with pytest.raises(SystemExit):
        parsed()
    assert "'stop': expected note or abort" in capsys.readouterr().err
