"""The options of ``watch``: argument, then the ``RANKWATCH_*`` environment where the argument stands at its default."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from .errors import UsageError
from .trip import Policy

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Config:
    """What ``watch`` was asked for; see there for the meaning of each field."""

    max_frames_to_save: int = 21
    trace_batch_nums: frozenset[int] = frozenset()
    abort_after_batch_num: int | None = None
    policy: Policy = Policy.FIRST
    ignore: tuple[str, ...] = ()
    connection: str | None = None


def resolve(environ: Mapping[str, str] | None = None, **arguments: Any) -> Config:
    """The configuration from ``arguments`` and, for those left at their default, from ``RANKWATCH_<NAME>``.

    In the environment lists are separated by commas: ``RANKWATCH_TRACE_BATCH_NUMS=149,150``.

    Raises:
        UsageError: a value does not fit its option; the text names the option and where the value came from.
    """
    env = os.environ if environ is None else environ
    _warn_of_unknown(env)
    values: dict[str, Any] = {}
    for option in fields(Config):
        variable = f"RANKWATCH_{option.name.upper()}"
        argument = arguments.get(option.name, option.default)
        given = _CHECKS[option.name](argument, f"{option.name}={argument!r}")
        if given == option.default and env.get(variable):
            text = env[variable]
            given = _CHECKS[option.name](_PARSE.get(option.name, _text)(text), f"{variable}={text!r}")
        values[option.name] = given
    return Config(**values)


# Those of watch() are the fields of Config; these are the command line's and the job's.
_FURTHER = (
    "JOB", "LISTEN", "CONNECTION_FILE", "RUNS_DIR", "HEARTBEAT", "DECISION_WINDOW", "ABORT_GRACE", "ON_LOST"
)  # fmt: skip


def _warn_of_unknown(env: Mapping[str, str]) -> None:
    known = {f"RANKWATCH_{name}" for name in (*_FURTHER, *(field.name.upper() for field in fields(Config)))}
    for variable in env:
        if variable.startswith("RANKWATCH_") and variable not in known:
            nearest = get_close_matches(variable, known, n=1, cutoff=0)
            log.warning("rankwatch: %s is no option and does nothing; did you mean %s?", variable, nearest[0])


def _text(value: str) -> Any:
    return value


def _split(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


def _whole(value: Any, where: str, least: int) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise UsageError(f"{where}: expected a whole number") from None
    if isinstance(value, float) or number < least:
        raise UsageError(f"{where}: expected a whole number of at least {least}")
    return number


def _batches(value: Any, where: str) -> frozenset[int]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise UsageError(f"{where}: expected batch numbers, such as [149, 150]")
    return frozenset(_whole(item, where, 0) for item in value)


def _policy(value: Any, where: str) -> Policy:
    try:
        return Policy(value)
    except ValueError:
        raise UsageError(f"{where}: expected one of {', '.join(policy.value for policy in Policy)}") from None


def _patterns(value: Any, where: str) -> tuple[str, ...]:
    if isinstance(value, (str, bytes)) or not all(isinstance(item, str) for item in value):
        raise UsageError(f"{where}: expected a list of name patterns, such as ['*.attn_mask']")
    return tuple(value)


def _optional_path(value: Any, where: str) -> str | None:
    if value is None or isinstance(value, (str, os.PathLike)):
        return None if value is None else os.fspath(value)
    raise UsageError(f"{where}: expected the path of a connection file")


_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "max_frames_to_save": lambda value, where: _whole(value, where, 1),
    "trace_batch_nums": _batches,
    "abort_after_batch_num": lambda value, where: None if value is None else _whole(value, where, 0),
    "policy": _policy,
    "ignore": _patterns,
    "connection": _optional_path,
}
_PARSE: dict[str, Callable[[str], Any]] = {"trace_batch_nums": _split, "ignore": _split}
