"""The facts that come from the collector itself: inputs came from outside, and findings are what the run made of all inputs.

What a rank says is an input, too: as the message that it is.
"""

from __future__ import annotations

OWN_FACTS: dict[str, type[OwnFact]] = {}
"""By kind."""


class OwnFact:
    """A dataclass. Its kind, by which the record and people know it, is its name in small letters."""

    __slots__ = ()

    def __init_subclass__(cls, *, is_kind: bool = True) -> None:
        if is_kind:  # twice for a dataclass with slots: the second class is the one that is used
            OWN_FACTS[cls.__name__.lower()] = cls

    def describe(self, rank: int) -> str:
        """The fact in words, without its rank."""
        raise NotImplementedError


class Finding(OwnFact, is_kind=False):
    """Changes the run by ``Books.apply`` alone: when it is found, and when it is replayed."""

    __slots__ = ()
