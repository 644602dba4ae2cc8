"""Options: argument, then environment, then file, then default; an unknown option is named with its source."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from jobs import ROOT
from rankwatch.errors import UsageError
from rankwatch.shared.types.config import Config, Policy, is_disabled, resolve


def test_defaults() -> None:
    assert resolve({}) == Config()


def test_an_option_that_is_given_counts_also_with_its_default(tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text("every = 10\nfingerprints = 4\n")
    env = {"RANKWATCH_CONFIG": str(file), "RANKWATCH_FINGERPRINTS": "16"}
    assert (resolve(env).every, resolve(env).fingerprints) == (10, 16)
    assert resolve(env, every=1).every == 1
    assert resolve({**env, "RANKWATCH_EVERY": "3"}, every=1).every == 1
    assert resolve({**env, "RANKWATCH_EVERY": "3"}, every=None).every == 3


def test_arguments_win_over_the_environment() -> None:
    env = {
        "RANKWATCH_MAX_FRAMES_TO_SAVE": "5",
        "RANKWATCH_TRACE_BATCH_NUMS": "149, 150",
        "RANKWATCH_ABORT_AFTER_BATCH_NUM": "0",
        "RANKWATCH_POLICY": "strict",
        "RANKWATCH_IGNORE": "*.mask,head:output",
        "RANKWATCH_CONNECTION": "/run/c.json",
    }
    patterns = ("*.mask", "head:output")
    assert resolve(env) == Config(5, frozenset({149, 150}), 0, Policy.STRICT, patterns, connection="/run/c.json")
    given = resolve(env, max_frames_to_save=7, trace_batch_nums=[1], policy="off", connection="/mine.json")
    assert given == Config(7, frozenset({1}), 0, Policy.OFF, patterns, connection="/mine.json")


def test_a_file_of_options_comes_last(tmp_path: Path) -> None:
    path = tmp_path / "rankwatch.toml"
    path.write_text('trace_batch_nums = [3]\nevery = 4\npolicy = "strict"\nignore = ["*.mask"]\ngradients = true\n')
    env = {"RANKWATCH_CONFIG": str(path), "RANKWATCH_EVERY": "2"}
    given = resolve(env, policy="off")
    assert given == Config(trace_batch_nums=frozenset({3}), every=2, policy=Policy.OFF, ignore=("*.mask",), gradients=True)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("evry = 2", "rankwatch.toml: evry is no option of rankwatch; did you mean every?"),
        ("loss_scale = 2", "loss_scale is no option of rankwatch; did you mean"),
        ("[watch]\nevery = 2", "watch is no option of rankwatch"),
        ("every = 0", "rankwatch.toml: every = 0: expected a whole number of at least 1"),
        ("every = ", "rankwatch.toml are no TOML: Invalid value"),
        ("trace_batch_nums = 3", "expected batch numbers"),
    ],
)
def test_a_bad_file_of_options(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "rankwatch.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=re.escape(complaint)):
        resolve({"RANKWATCH_CONFIG": str(path)})


def test_a_file_of_options_that_has_no_end_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "rankwatch.toml")
    with pytest.raises(UsageError, match=r"rankwatch.toml: it is no regular file"):
        resolve({"RANKWATCH_CONFIG": str(path)})


def test_a_missing_file_of_options() -> None:
    with pytest.raises(UsageError, match="cannot read the options in /no/such/file"):
        resolve({"RANKWATCH_CONFIG": "/no/such/file"})


def test_modes() -> None:
    assert (is_disabled({}), is_disabled({"RANKWATCH_MODE": "enabled"})) == (False, False)
    assert is_disabled({"RANKWATCH_MODE": "disabled"})
    with pytest.raises(UsageError, match="RANKWATCH_MODE='off': expected enabled or disabled"):
        is_disabled({"RANKWATCH_MODE": "off"})


def test_no_command_line_option_is_reported_as_unknown(caplog: pytest.LogCaptureFixture) -> None:
    sources = "".join(path.read_text() for path in (ROOT / "monitor").rglob("*.py"))
    names = re.findall(r'types\.env\("([a-z_-]+)"', sources)
    assert len(names) > 5
    resolve({f"RANKWATCH_{name.upper().replace('-', '_')}": "x" for name in names if name != "connection"})
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("max_frames_to_save", 0, "max_frames_to_save=0: expected a whole number of at least 1"),
        ("max_frames_to_save", 1.5, "expected a whole number"),
        ("trace_batch_nums", 3, "trace_batch_nums=3: expected batch numbers"),
        ("trace_batch_nums", [-1], "at least 0"),
        ("abort_after_batch_num", "x", "expected a whole number"),
        ("policy", "lax", "policy='lax': expected one of first, strict, off"),
        ("ignore", "*.mask", "expected a list of name patterns"),
        ("connection", 3, "expected the path of a connection file"),
    ],
)
def test_bad_arguments(option: str, value: object, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        resolve({}, **{option: value})


def test_a_mistyped_variable_causes_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert resolve({"RANKWATCH_TRACE_BATCHES": "1", "RANKWATCH_JOB": "x"}) == Config()
    assert [record.getMessage() for record in caplog.records] == [
        "rankwatch: RANKWATCH_TRACE_BATCHES is no option and does nothing; did you mean RANKWATCH_TRACE_BATCH_NUMS?"
    ]


def test_bad_environment_names_the_variable() -> None:
    with pytest.raises(UsageError, match="RANKWATCH_POLICY='lax'"):
        resolve({"RANKWATCH_POLICY": "lax"})
