"""Watches a training script without a change to it: ``torchrun ... -m rankwatch.attach train.py ARGS``.

``rankwatch run`` does the same for its command. PYTHONPATH makes every Python process that inherits it search for the model
to watch (``startup/sitecustomize.py``, then ``finder.py``), even after a fork, a spawn or an exec. The script then starts in
this process as it would by itself: arguments, ``__main__``, tracebacks and exit code are its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import UsageError
from .shared.system.log_lines import asked_for
from .shared.types.config import OthersOptionsError, disable, is_disabled, resolve

STARTUP = Path(__file__).parent / "zero_code" / "startup"

USAGE = "usage: torchrun ... -m rankwatch.attach [--rankwatch-config FILE] train.py ARGS (or -m MODULE ARGS)"

OPTIONS = ("--rankwatch-config", "--rankwatch_config")

_OF_LAUNCHERS = ("--local-rank", "--local_rank")
"""Options that torch.distributed.launch and DeepSpeed's launcher put before the script's arguments. They are the script's."""


def attached(environ: Mapping[str, str], config: str | None = None) -> dict[str, str]:
    """The environment that makes every Python process search for the model to watch.

    Args:
        environ: the current environment; ``RANKWATCH_ATTACH=0`` or ``RANKWATCH_MODE=disabled`` turn the search off.
        config: a file of options; it takes precedence over ``RANKWATCH_CONFIG``.

    Raises:
        UsageError: an option in ``RANKWATCH_*`` or in the file is wrong. It is checked here, before the job begins.
    """
    env = dict(environ)
    if config is not None:
        env["RANKWATCH_CONFIG"] = str(Path(config).absolute())
    if env.setdefault("RANKWATCH_ATTACH", "1") not in ("0", "1"):
        raise UsageError(f"RANKWATCH_ATTACH={env['RANKWATCH_ATTACH']!r}: expected 0 or 1")
    if is_disabled(env) or env["RANKWATCH_ATTACH"] == "0":
        return env
    asked_for(env)
    resolve(env)
    before = env.get("PYTHONPATH")
    if str(STARTUP) not in (before or "").split(os.pathsep):
        env["PYTHONPATH"] = os.pathsep.join([str(STARTUP), *([before] if before else [])])
    return env


def main() -> int:
    """Starts the script in this process; returns only on a usage error."""
    try:
        config, command = _parse(sys.argv[1:])
        env = attached(os.environ, config)
    except OthersOptionsError as error:
        disable(error)
        env = dict(os.environ)
    except UsageError as error:
        sys.stderr.write(f"rankwatch: {error}\n")
        return error.exit_code
    os.execve(sys.executable, [sys.executable, *_flags(sys.orig_argv), *command], env)


def _flags(given: Sequence[str]) -> list[str]:
    """Python's own options before ``-m rankwatch.attach``, such as -u or -X dev: the script gets them too."""
    at = next(i for i, word in enumerate(given) if word.endswith("rankwatch.attach"))
    last = given[at].removesuffix("rankwatch.attach") or given[at - 1]  # -m, or -um
    before = given[1 : at if given[at].startswith("-") else at - 1]
    return [*before, *([last[:-1]] if last != "-m" else [])]


def _parse(given: Sequence[str]) -> tuple[str | None, list[str]]:
    """The file of options, and the command: the script's name, or -m and the module's, with all that follows."""
    config, passed, rest = None, [], list(given)
    while rest and rest[0].startswith("--"):
        option, equals, value = rest.pop(0).partition("=")
        if option in _OF_LAUNCHERS and equals:
            passed.append(f"{option}={value}")
        elif option not in OPTIONS:
            raise UsageError(f"{option} is no option of rankwatch.attach; {USAGE}")
        elif not equals and not rest:
            raise UsageError(f"{option} needs a file; {USAGE}")
        else:
            config = value if equals else rest.pop(0)
    if not rest or rest == ["-m"]:
        raise UsageError(f"nothing to start; {USAGE}")
    script = 1 if rest[0] != "-m" else 2
    return config, [*rest[:script], *passed, *rest[script:]]


if __name__ == "__main__":
    sys.exit(main())
