"""The lines of the log: what people read, and what programs parse."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from datetime import datetime, timezone

import pytest

from rankwatch.errors import UsageError
from rankwatch.shared.system.log_lines import VARIABLE, JsonLines, TimedLines, line, write_lines_of_a_rank


def record(text: str, *arguments: object, level: int = logging.WARNING, trace: object = None) -> logging.LogRecord:
    made = logging.LogRecord("rankwatch_monitor.serve", level, __file__, 1, text, arguments, trace)  # type: ignore[arg-type]
    made.created = 1_790_000_000.25
    return made


def as_json(text: str, *arguments: object, **named: object) -> dict[str, object]:
    formatted = JsonLines().format(record(text, *arguments, **named))  # type: ignore[arg-type]
    assert "\n" not in formatted
    found: dict[str, object] = json.loads(formatted)
    return found


def test_people_read_time_and_level() -> None:
    said = record("run %s: 2 ranks", "train-0", level=logging.INFO)
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO rankwatch: run train-0: 2 ranks", TimedLines(is_short=True).format(said))
    long = TimedLines(is_short=False).format(said)
    at, level, *rest = long.split(" ")
    assert datetime.strptime(at, "%Y-%m-%dT%H:%M:%S%z").timestamp() == 1_790_000_000
    assert (level, " ".join(rest)) == ("INFO", "rankwatch: run train-0: 2 ranks")


def test_a_line_that_names_itself_is_named_once_and_obeyed_by_no_terminal() -> None:
    said = TimedLines(is_short=True).format(record("rankwatch: one\x1b[2J\nrankwatch: forged"))
    assert said[9:] == "WARNING rankwatch: one\\x1b[2J\n| rankwatch: forged"


def test_programs_read_one_object_a_line() -> None:
    found = as_json("run %s: tripped\nand more", "train.2-0.3")
    assert found == {
        "time": datetime.fromtimestamp(1_790_000_000.25, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.250Z"),
        "level": "WARNING",
        "logger": "rankwatch_monitor.serve",
        "message": "run train.2-0.3: tripped\nand more",
        "run": "train.2-0.3",
    }


@pytest.mark.parametrize(
    ("text", "run"),
    [
        ("what came last of run train-0 is not in its record: disk full", "train-0"),
        ("refused process 7: rank 3 of run 10.0.0.1-29500-0.2 is held", "10.0.0.1-29500-0.2"),
        ("run a-0: rank 1 failed: ValueError: run b-1", "a-0"),
        ("cannot run the command of --on-verdict for run my_job-12: no", "my_job-12"),
        ("run train-0.", "train-0"),
        ("collecting on tcp://node:27077", None),
        ("the run goes on", None),
        ("run nightly-build", None),
        ("run x-1y", None),
    ],
)
def test_the_run_is_a_field(text: str, run: str | None) -> None:
    assert as_json(text).get("run") == run


def test_an_exception_has_its_traceback_and_a_rank_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    try:
        raise KeyError("x")
    except KeyError:
        found = as_json("rankwatch: an error of ours", trace=sys.exc_info())
    assert (found["rank"], found["message"]) == (3, "an error of ours")
    assert str(found["traceback"]).endswith("KeyError: 'x'")


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("rankwatch_lines")
    yield logger
    logger.handlers.clear()
    logger.propagate = True


def test_a_rank_leaves_its_lines_to_the_script_unless_it_is_asked(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.delenv(VARIABLE, raising=False)
    write_lines_of_a_rank(logger.name)
    assert logger.handlers == []
    assert line("rank 1: ended") == "rankwatch: rank 1: ended"
    monkeypatch.setenv(VARIABLE, "json")
    for _ in range(2):
        write_lines_of_a_rank(logger.name)
    logger.warning("rankwatch: rank %d: the collector is back", 1)
    (said,) = stderr.getvalue().splitlines()
    assert json.loads(said)["message"] == "rank 1: the collector is back"
    assert json.loads(line("rank 1: ended"))["message"] == "rank 1: ended"
    monkeypatch.setenv(VARIABLE, "yaml")
    with pytest.raises(UsageError, match="RANKWATCH_LOG_FORMAT='yaml': expected text or json"):
        write_lines_of_a_rank(logger.name)
