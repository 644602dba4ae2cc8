"""The seat of a rank: of the processes that inherit its ``RANK``, one speaks for it.

The process that watches a model marks its environment. A child of it, a tokenizer or a probe, finds the mark there and takes no
seat. A process that has replaced itself by ``exec`` is still the same one. What a rank starts with another place in the job, or
under a collector of its own, is another rank.
"""

from __future__ import annotations

import os

from ..shared.system.identity import Identity
from ..shared.system.process import started_at

_VARIABLE = "RANKWATCH_SEAT"


def take(who: Identity) -> None:
    """Marks the environment, for the children of this process."""
    os.environ[_VARIABLE] = ":".join(map(str, (os.getpid(), started_at(os.getpid()), *_place(who))))


def leave() -> None:
    """Removes the mark: this process watches nothing any more."""
    os.environ.pop(_VARIABLE, None)


def holder(who: Identity) -> int | None:
    """The process that is this rank, and that started this process; None: this process may speak for the rank."""
    try:
        pid, started, *place = map(int, os.environ.get(_VARIABLE, "").split(":"))
    except ValueError:  # no mark, or from a system without /proc
        return None
    is_another = pid != os.getpid() and started_at(pid) == started
    return pid if is_another and tuple(place) == _place(who) else None


def _place(who: Identity) -> tuple[int, int, int]:
    return who.rank, who.world_size, who.restart
