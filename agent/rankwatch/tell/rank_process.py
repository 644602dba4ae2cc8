"""The seat of a rank: of the processes that inherit its ``RANK``, one speaks for it.

The process that watches a model marks its environment. A child of it, a tokenizer or a probe, finds the mark there and takes no
seat. Nor does a child that comes first: a process above it was started as this rank, and has loaded torch. A process that has
replaced itself by ``exec`` is still the same one. A wrapper that does not load torch, or a launcher, is no rank; nor is what
spawned this process with another place in the job, or under a collector of its own.
"""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import UsageError
from ..shared.system.identity import Identity, identify
from ..shared.system.process import command_of, environment_of, has_loaded, parent_of, started_at

_VARIABLE = "RANKWATCH_SEAT"

_PLACE = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("SLURM_STEP_ID", "SLURM_PROCID", "RANKWATCH_LAUNCH"),
)
"""The variables that give a process its place in a job. What a rank starts by ``rankwatch run`` is another job."""

_LAUNCHERS = frozenset({"accelerate", "accelerate-launch", "torchrun", "deepspeed", "composer", "fabric", "rankwatch"})
_LAUNCHING = ("torch.distributed.", "accelerate.commands.", "deepspeed.launcher.")
"""Programs and modules that load torch and start ranks, and are none."""


def take(who: Identity) -> None:
    """Marks the environment, for the children of this process."""
    os.environ[_VARIABLE] = ":".join(map(str, (os.getpid(), started_at(os.getpid()), *_place(who))))


def leave() -> None:
    """Removes the mark: this process watches nothing any more."""
    os.environ.pop(_VARIABLE, None)


def holder(who: Identity) -> int | None:
    """The process that is this rank, and that started this process; None: this process may speak for the rank."""
    return _marked(who) or _above(who)


def _marked(who: Identity) -> int | None:
    try:
        pid, started, *place = map(int, os.environ.get(_VARIABLE, "").split(":"))
    except ValueError:  # no mark, or from a system without /proc
        return None
    is_another = pid != os.getpid() and started_at(pid) == started
    return pid if is_another and tuple(place) == _place(who) else None


def _above(who: Identity) -> int | None:
    """A process above this one that was started with the same place in the job, and that may train."""
    if not _was_given(who):
        return None
    pid = parent_of(os.getpid())
    while pid > 1:
        theirs = environment_of(pid)
        if any(theirs.get(name) != os.environ.get(name) for name in _PLACE):
            return None
        if has_loaded(pid, "libtorch") and not _is_launcher(command_of(pid)):
            return pid
        pid = parent_of(pid)
    return None


def _was_given(who: Identity) -> bool:
    """Whether the rank comes from the environment that this process was started with."""
    try:
        given = identify(environment_of(os.getpid()))
    except UsageError:
        return False
    return bool({"RANK", "SLURM_STEP_ID"} & os.environ.keys()) and _place(given) == _place(who)


def _is_launcher(command: list[str]) -> bool:
    return any(
        Path(word).name in _LAUNCHERS or word.startswith(_LAUNCHING) or "/torch/distributed/" in word for word in command
    )


def _place(who: Identity) -> tuple[int, int, int]:
    return who.rank, who.world_size, who.restart
