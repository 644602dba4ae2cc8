"""The kinds of facts of a run's journal: inputs come from outside, findings are what the run made of them."""

from __future__ import annotations


class Finding:
    """Changes the run by ``Run.apply`` alone: when it is found, and when it is replayed."""

    __slots__ = ()
