"""What a rank tells of the collectives that it has called, by the process group.

All members of a group must call the same: the same number of calls, each with the same signature. Numbers count from 1 on.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from .fields import string

MAX_TOLD = 8
"""Groups of one BATCH or BEAT: of more, the next ones tell the rest."""

MAX_PARTING = 16
"""Groups of which a process tells as it ends."""

LAST_WORDS = 0
"""The number of such a RECOUNTED: it answers no RECOUNT."""

MAX_CALLS = 64
"""Calls of one answer."""


class GroupCount(NamedTuple):
    """How many collectives of this group the rank has called, and a digest over all their signatures, in their order.

    ``group`` is the same on all members, and never that of another group: a digest of its name, of its members, and of how many
    groups of this name and these members the process had before.
    """

    group: int
    calls: int
    digest: int


class CollectiveCall(NamedTuple):
    """One call. ``signature``: of what must be alike on all members; ``what``: the same for people, as in "all_reduce of 4096
    float32 (sum)". ``site``: the user's line, as in "train.py:88 in save"; it may be another one on each rank."""

    signature: int
    what: Annotated[str, string(80)]
    site: Annotated[str, string(160)]
