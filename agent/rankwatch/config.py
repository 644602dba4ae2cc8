"""The options of ``watch``: argument, then the ``RANKWATCH_*`` environment where the argument stands at its default."""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from .errors import UsageError
from .trip import Policy

log = logging.getLogger(__name__)


class Check(str, enum.Enum):
    """When readings are read and judged."""

    FRAME = "frame"
    """After each module's forward."""
    BATCH = "batch"
    """Before the root's forward returns."""
    ASYNC = "async"
    """When they have come, without waiting for them: a batch later at most."""


@dataclass(frozen=True, slots=True)
class Config:
    """What ``watch`` was asked for; see there for the meaning of each field."""

    max_frames_to_save: int = 21
    trace_batch_nums: frozenset[int] = frozenset()
    abort_after_batch_num: int | None = None
    policy: Policy = Policy.FIRST
    ignore: tuple[str, ...] = ()
    check: Check | None = None
    every: int = 1
    modules: tuple[str, ...] = ()
    weights_every: int = 16
    gradients: bool = False
    loss_scale: Callable[[], float] | None = None
    max_scale_shrinks: int = 10
    connection: str | None = None


@dataclass(frozen=True, slots=True)
class Tuning:
    """Options changed while the training runs; 0 and None leave an option as it is."""

    every: int = 0
    check: Check | None = None
    modules: tuple[str, ...] | None = None
    ignore: tuple[str, ...] | None = None
    trace_batch_nums: frozenset[int] | None = None

    def updated(self, later: Tuning) -> Tuning:
        """Both, the later one first."""
        return Tuning(
            later.every or self.every,
            later.check if later.check is not None else self.check,
            later.modules if later.modules is not None else self.modules,
            later.ignore if later.ignore is not None else self.ignore,
            later.trace_batch_nums if later.trace_batch_nums is not None else self.trace_batch_nums,
        )


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
    "JOB", "LISTEN", "ADDRESS", "CONNECTION_FILE", "RUNS_DIR", "HEARTBEAT", "DECISION_WINDOW", "ABORT_GRACE",
    "ON_LOST", "STALL_AFTER", "ON_STALL", "STATUS",
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


def _check(value: Any, where: str) -> Check | None:
    if value is None:
        return None
    try:
        return Check(value)
    except ValueError:
        raise UsageError(f"{where}: expected one of {', '.join(check.value for check in Check)}") from None


def _flag(value: Any, where: str) -> bool:
    words = {True: True, False: False, "1": True, "0": False, "true": True, "false": False}
    known = value.lower() if isinstance(value, str) else value
    if known not in words:
        raise UsageError(f"{where}: expected true or false")
    return words[known]


def _loss_scale(value: Any, where: str) -> Callable[[], float] | None:
    if value is None or callable(value):
        return value  # type: ignore[no-any-return]
    raise UsageError(f"{where}: expected a function without arguments that returns the scale in use")


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
    "check": _check,
    "every": lambda value, where: _whole(value, where, 1),
    "modules": _patterns,
    "weights_every": lambda value, where: _whole(value, where, 0),
    "gradients": _flag,
    "loss_scale": _loss_scale,
    "max_scale_shrinks": lambda value, where: _whole(value, where, 1),
    "connection": _optional_path,
}
_PARSE: dict[str, Callable[[str], Any]] = {"trace_batch_nums": _split, "ignore": _split, "modules": _split}
