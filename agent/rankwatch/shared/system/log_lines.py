"""The lines of the log: for people with time and level, for programs as one JSON object each.

``rankwatch run`` and ``rankwatch collector`` write them to stderr. In a rank the script's own logging decides how our lines look,
unless RANKWATCH_LOG_FORMAT asks for JSON.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from ...errors import UsageError
from ..printable import paragraph
from ..str_enum import StrEnum

OURS = "rankwatch: "
"""Begins a line that says who speaks: between the lines of a training, nothing else does."""

VARIABLE = "RANKWATCH_LOG_FORMAT"

_RUN = re.compile(r"\brun ([A-Za-z0-9._-]*-\d+(?:\.\d+)?)(?![\w-])")
"""A line that speaks of a run names it, as in ``run train-0: 2 ranks``. ``Ledger`` makes the names."""


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class TimedLines(logging.Formatter):
    """``05:18:03 WARNING rankwatch: TEXT`` on a terminal; elsewhere, where days pass, with the date and the time zone.

    Paths and errors of the system in it are made printable.
    """

    def __init__(self, *, is_short: bool) -> None:
        super().__init__()
        self._form = "%H:%M:%S" if is_short else "%Y-%m-%dT%H:%M:%S%z"

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime(self._form, time.localtime(record.created))
        return paragraph(f"{at} {record.levelname} {OURS}{super().format(record).removeprefix(OURS)}")


class JsonLines(logging.Formatter):
    """``{"time": "2026-11-26T05:18:03.120Z", "level": "WARNING", "logger": ..., "message": ..., "run": "train-0"}``.

    ``run`` is there if the line speaks of one, ``rank`` in a process that has one, ``traceback`` with an exception.
    """

    def format(self, record: logging.LogRecord) -> str:
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        return _json(record.created, record.levelname, record.name, record.getMessage(), trace)


def line(text: str) -> str:
    """A line of a rank that does not go through its logging, which may be what hangs."""
    if os.environ.get(VARIABLE) == LogFormat.JSON:
        return _json(time.time(), "WARNING", "rankwatch", text)
    return f"{OURS}{paragraph(text)}"


def asked_for(environ: Mapping[str, str] | None = None) -> LogFormat:
    """What the environment asks for. Raises UsageError for an unknown format."""
    text = (os.environ if environ is None else environ).get(VARIABLE) or LogFormat.TEXT
    try:
        return LogFormat(text)
    except ValueError:
        raise UsageError(f"{VARIABLE}={text!r}: expected {' or '.join(LogFormat)}") from None


def write_log(form: str) -> None:
    """The lines that this process writes to stderr look so from now on."""
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler:
            is_short = handler.stream.isatty()
            handler.setFormatter(JsonLines() if form == LogFormat.JSON else TimedLines(is_short=is_short))


def is_json() -> bool:
    """Whether this process writes its log as JSON."""
    return any(isinstance(handler.formatter, JsonLines) for handler in logging.getLogger().handlers)


def write_lines_of_a_rank(name: str = "rankwatch") -> None:
    """Where JSON is asked for, the lines of this logger go to stderr as JSON, and to none of the script's handlers."""
    logger = logging.getLogger(name)
    if asked_for() is LogFormat.JSON and not any(isinstance(one.formatter, JsonLines) for one in logger.handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonLines())
        logger.addHandler(handler)
        logger.propagate = False


def _json(created: float, level: str, logger: str, text: str, trace: str = "") -> str:
    at = datetime.fromtimestamp(created, timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    text = text.removeprefix(OURS)  # the agent's own lines begin with it
    fields: dict[str, Any] = {"time": at, "level": level, "logger": logger, "message": text}
    if found := _RUN.search(text):
        fields["run"] = found.group(1)
    if (rank := os.environ.get("RANK", "")).isdecimal():
        fields["rank"] = int(rank)
    if trace:
        fields["traceback"] = trace
    return json.dumps(fields)
