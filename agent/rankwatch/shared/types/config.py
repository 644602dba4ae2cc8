"""The options of ``watch``: the argument, then the ``RANKWATCH_*`` environment, then the file that RANKWATCH_CONFIG names.

The first of them that gives an option decides, also where what it gives is the default; None gives nothing.
"""

from __future__ import annotations

import logging
import os
import stat
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeAlias, get_args, get_type_hints

from ...errors import TrainingAborted, UsageError
from ..str_enum import StrEnum
from ..system.private import OPEN
from .bad_step import ABORT, OnBadStep, parse
from .fields import MAX_CLOSEUP
from .tuning import Check

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

log = logging.getLogger(__name__)

_Checker: TypeAlias = Callable[[Any, str], Any]


class OthersOptionsError(UsageError):
    """The file of options is another user's, who may read it alone."""


class Policy(StrEnum):
    """Which non-finite readings trip.

    FIRST (the default): outputs, own parameters, marked tensors, the loss, and the gradients that a module's backward computes. A
    non-finite input or buffer (an additive ``-inf`` attention mask, say) is evidence, but does not trip. Nor does a
    non-finite gradient that a module receives, except the root module's: that one comes from the loss.

    STRICT: also positional inputs, as in the Hugging Face detector; every gradient; and a nan in a buffer or keyword input,
    which that detector does not read. An inf there is mostly a mask: torch's own transformer layers pass theirs by keyword.

    OFF: nothing trips; readings are only measured and sent.
    """

    FIRST = "first"
    STRICT = "strict"
    OFF = "off"


class Capsule(StrEnum):
    """What the rank of a trip writes, so that ``rankwatch replay`` can run the bad forward again.

    ON: the module, with what it was given.

    NO_INPUTS: the module alone. Of what it was given, shapes and ranges: replay draws numbers like these.

    OFF: nothing.
    """

    ON = "on"
    NO_INPUTS = "no-inputs"
    OFF = "off"


# Each of these is given a value, and "NAME=VALUE" for its error, and returns the value as Config has it.


def _at_least(least: int) -> _Checker:
    def check(value: Any, where: str) -> int:
        try:
            number = int(value)
        except (TypeError, ValueError):
            raise UsageError(f"{where}: expected a whole number") from None
        if isinstance(value, float) or number < least:
            raise UsageError(f"{where}: expected a whole number of at least {least}")
        return number

    return check


def _one_of(words: type[StrEnum]) -> _Checker:
    def check(value: Any, where: str) -> StrEnum:
        try:
            return words(value)
        except ValueError:
            raise UsageError(f"{where}: expected one of {', '.join(words)}") from None

    return check


def _function(what: str) -> _Checker:
    def check(value: Any, where: str) -> Any:
        if value is not None and not callable(value):
            raise UsageError(f"{where}: expected a function {what}")
        return value

    return check


def _unless_none(check: _Checker) -> _Checker:
    return lambda value, where: None if value is None else check(value, where)


def _seconds(value: Any, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if isinstance(value, bool) or not 0.0 <= number <= MAX_CLOSEUP:
        raise UsageError(f"{where}: expected seconds, from 0 (none) to {MAX_CLOSEUP:g}")
    return number


def _share(value: Any, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if isinstance(value, bool) or not 0.0 <= number <= 1.0:
        raise UsageError(f"{where}: expected a share of a step's time from 0 (no budget) to 1, such as 0.02")
    return number


def _batches(value: Any, where: str) -> frozenset[int]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise UsageError(f"{where}: expected batch numbers, such as [149, 150]")
    return frozenset(_at_least(0)(item, where) for item in value)


def _flag(value: Any, where: str) -> bool:
    words = {True: True, False: False, "1": True, "0": False, "true": True, "false": False}
    known = value.lower() if isinstance(value, str) else value
    if known not in words:
        raise UsageError(f"{where}: expected true or false")
    return words[known]


def _patterns(value: Any, where: str) -> tuple[str, ...]:
    given = value if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else [None]
    patterns = tuple(given)
    if not all(isinstance(item, str) for item in patterns):
        raise UsageError(f"{where}: expected a list of name patterns, such as ['*.attn_mask']")
    return patterns


def _on_bad_step(value: Any, where: str) -> OnBadStep:
    if isinstance(value, OnBadStep):
        return value
    try:
        return parse(value if isinstance(value, str) else "")
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None


def _path(value: Any, where: str) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise UsageError(f"{where}: expected the path of a connection file")
    return os.fspath(value)


@dataclass(frozen=True, slots=True)
class Config:
    """The options of one watch; ``watch`` says what each means."""

    max_frames_to_save: Annotated[int, _at_least(1)] = 21
    trace_batch_nums: Annotated[frozenset[int], _batches] = frozenset()
    abort_after_batch_num: Annotated[int | None, _unless_none(_at_least(0))] = None
    policy: Annotated[Policy, _one_of(Policy)] = Policy.FIRST
    ignore: Annotated[tuple[str, ...], _patterns] = ()
    check: Annotated[Check | None, _unless_none(_one_of(Check))] = None
    every: Annotated[int | None, _unless_none(_at_least(1))] = None
    budget: Annotated[float, _share] = 0.02
    modules: Annotated[tuple[str, ...], _patterns] = ()
    weights_every: Annotated[int, _at_least(0)] = 16
    fingerprints: Annotated[int, _at_least(0)] = 16
    gradients: Annotated[bool, _flag] = False
    guard: Annotated[bool, _flag] = True
    on_bad_step: Annotated[OnBadStep, _on_bad_step] = ABORT
    loss_scale: Annotated[Callable[[], float] | None, _function("without arguments that returns the scale in use")] = None
    max_scale_shrinks: Annotated[int, _at_least(1)] = 10
    first_batch: Annotated[int, _at_least(0)] = 0
    closeup: Annotated[float, _seconds] = 2.0
    capsule: Annotated[Capsule, _one_of(Capsule)] = Capsule.ON
    capsule_mib: Annotated[int, _at_least(1)] = 2048
    stop: Annotated[
        Callable[[TrainingAborted], None] | None, _function("that is given the exception, and has the training stop")
    ] = None
    connection: Annotated[str | None, _unless_none(_path)] = None


_CHECKS: dict[str, _Checker] = {
    name: get_args(hint)[1] for name, hint in get_type_hints(Config, include_extras=True).items()
}

FUNCTIONS = frozenset({"loss_scale", "stop"})
"""Options that only an argument can set."""


def is_disabled(environ: Mapping[str, str] | None = None) -> bool:
    """Whether ``RANKWATCH_MODE=disabled`` switches every watch off. Raises UsageError for an unknown mode."""
    mode = (os.environ if environ is None else environ).get("RANKWATCH_MODE", "")
    if mode not in ("", "enabled", "disabled"):
        raise UsageError(f"RANKWATCH_MODE={mode!r}: expected enabled or disabled")
    return mode == "disabled"


def disable(why: OthersOptionsError) -> None:
    """Nothing is watched in this process, nor in those that it starts: whoever named the options cannot be asked for others."""
    log.warning("rankwatch: %s; training goes on, and is not watched", why)
    os.environ["RANKWATCH_MODE"] = "disabled"


def resolve(environ: Mapping[str, str] | None = None, **arguments: Any) -> Config:
    """The configuration from ``arguments``, those that were given; others come from ``RANKWATCH_<NAME>`` or the file.

    In the environment, commas separate the items of a list: ``RANKWATCH_TRACE_BATCH_NUMS=149,150``. ``RANKWATCH_CONFIG`` is
    the path of the file, which is TOML: ``trace_batch_nums = [149, 150]``.

    Raises:
        UsageError: a value does not fit its option, or the file cannot be used; the text names the option and its source.
        OthersOptionsError: the file is another user's. A training goes on unwatched.
    """
    env = os.environ if environ is None else environ
    _warn_of_unknown(env)
    path = env.get("RANKWATCH_CONFIG", "")
    in_file = read_file(Path(path)) if path else {}
    values: dict[str, Any] = {}
    for option in fields(Config):
        name, check = option.name, _CHECKS[option.name]
        variable = f"RANKWATCH_{name.upper()}"
        argument, given = arguments.get(name), option.default
        if argument is not None:
            given = check(argument, f"{name}={argument!r}")
        elif text := env.get(variable):
            is_list = isinstance(option.default, (tuple, frozenset))
            given = check(_split(text) if is_list else text, f"{variable}={text!r}")
        elif name in in_file:
            given = check(in_file[name], f"{path}: {name} = {in_file[name]!r}")
        values[name] = given
    config = Config(**values)
    if config.on_bad_step.skips and (not config.guard or config.policy is Policy.OFF):
        raise UsageError(
            f"on_bad_step={config.on_bad_step}: the gradient guard decides which step is left out; it needs guard=True, and a "
            "policy other than off"
        )
    return config


def _split(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]


def read_file(path: Path) -> dict[str, Any]:
    """The options in a TOML file. Only their names are checked.

    Raises:
        UsageError: the file cannot be read, is no TOML, or has an option that does not exist.
    """
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | OPEN), encoding="utf-8") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # a FIFO would have no end
                raise UsageError(f"cannot read the options in {path}: it is no regular file")
            found: dict[str, Any] = tomllib.loads(file.read())
    except PermissionError as error:
        raise OthersOptionsError(
            f"cannot read the options in {path}: {error.strerror}, as this process is of user {os.geteuid()}: give the file to "
            "all, chmod a+r, or start as its owner"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the options in {path}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"the options in {path} are no TOML: {error}") from None
    known = sorted(_CHECKS.keys() - FUNCTIONS)
    for name in found:
        if name not in known:
            nearest = get_close_matches(name, known, n=1, cutoff=0)[0]
            raise UsageError(f"{path}: {name} is no option of rankwatch; did you mean {nearest}?")
    return found


# Options of the command line and of the job; the options of watch() are the fields of Config.
_FURTHER = (
    "JOB", "LISTEN", "ADDRESS", "CONNECTION_FILE", "RUNS_DIR", "HEARTBEAT", "DECISION_WINDOW", "ABORT_GRACE", "HOLD_LIMIT",
    "ON_LOST", "STALL_AFTER", "ON_STALL", "ON_DESYNC", "ON_VERDICT", "ARCHIVE", "LOG_FORMAT", "STATUS", "FRAMES", "METRICS",
    "HOST", "PORT", "MAX_RESTARTS", "RESTART", "ACTION", "HOSTS",
    "MODE", "CONFIG", "ATTACH", "START", "LAUNCH", "SEAT",
)  # fmt: skip


def _warn_of_unknown(env: Mapping[str, str]) -> None:
    known = {f"RANKWATCH_{name}" for name in (*_FURTHER, *(field.name.upper() for field in fields(Config)))}
    for variable in env:
        if variable.startswith("RANKWATCH_") and variable not in known:
            nearest = get_close_matches(variable, known, n=1, cutoff=0)
            log.warning("rankwatch: %s is no option and does nothing; did you mean %s?", variable, nearest[0])
