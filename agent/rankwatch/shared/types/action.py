"""What to do after a run, for programs: a scheduler's script, or ``rankwatch run --max-restarts``."""

from __future__ import annotations

from ..str_enum import StrEnum


class Action(StrEnum):
    """The names in JSON are fixed."""

    FIX_CODE = "fix-code"
    """The code, or its settings, make it: the same again leads to the same end."""
    LOOK_AT_DATA = "look-at-data"
    """The data make it, and more than one batch of them may."""
    SKIP_BATCH = "skip-batch"
    """One batch was bad, and others were good before: leave out its step."""
    RESTART = "restart"
    """Nothing is known to be wrong: start again, from the last checkpoint."""
    RESTART_ELSEWHERE = "restart-elsewhere"
    """A machine is suspected: start again without it."""
    RESTORE_CHECKPOINT = "restore-checkpoint"
    """What the run was continued from, or has trained so far, is bad: start again from an earlier checkpoint."""
    STOP = "stop"
    """Do not start again: it was stopped on purpose, or would end like this again, or nothing says that it would not."""


RESTARTS = frozenset({Action.RESTART, Action.RESTART_ELSEWHERE})
"""What a program can do by itself: start the same command again."""
