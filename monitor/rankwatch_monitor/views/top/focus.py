"""The part of a run that is shown, and how keys change it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

Name: TypeAlias = str | int
"""A host or a rank."""

PAGE = 10


class Focus(NamedTuple):
    """What is shown: the ranks of ``host``, or ``rank`` alone, or without both all nodes. The cursor is at ``chosen``.

    ``by_growth``: the fastest growing modules come first, and not those nearest to overflow. ``help``: the line with which the
    help begins that is shown in their place; None: it is not shown.
    """

    host: str = ""
    rank: int | None = None
    chosen: Name | None = None
    by_growth: bool = False
    help: int | None = None

    def cursor(self, names: Sequence[Name]) -> int:
        """The cursor's index in ``names``, whose order may have changed since."""
        return names.index(self.chosen) if self.chosen in names else 0


_STEPS = {"up": -1, "down": 1, "page-up": -PAGE, "page-down": PAGE}


def press(focus: Focus, key: str, names: Sequence[Name], *, is_root: bool) -> Focus:
    """The focus after a key.

    Args:
        names: the names on the screen, in order; while one rank is shown, the ranks of its node.
        is_root: whether ``back`` leads nowhere.
    """
    if key == "help":
        return focus._replace(help=0 if focus.help is None else None)
    if focus.help is not None:
        return focus._replace(help=None if key == "back" else max(0, focus.help + _STEPS.get(key, 0)))
    if key == "growth":
        return focus._replace(by_growth=not focus.by_growth)
    if focus.rank is not None:
        if key == "back":
            return focus._replace(rank=None, chosen=focus.rank)
        if key in _STEPS and focus.rank in names:
            rank = _moved(names, names.index(focus.rank), _STEPS[key])
            return focus._replace(rank=rank if isinstance(rank, int) else None)
        return focus
    if key in _STEPS and names:
        return focus._replace(chosen=_moved(names, focus.cursor(names), _STEPS[key]))
    if key == "enter" and names:
        name = names[focus.cursor(names)]
        return focus._replace(rank=name) if isinstance(name, int) else focus._replace(host=name, chosen=None)
    if key == "back" and focus.host and not is_root:
        return focus._replace(host="", chosen=focus.host)
    return focus


def window(index: int, count: int, room: int) -> range:
    """The rows to show, of ``count`` rows, where there is room for ``room`` of them. The row at ``index`` is one of them."""
    first = min(max(0, index - room // 2), max(0, count - room))
    return range(first, min(count, first + room))


def _moved(names: Sequence[Name], index: int, by: int) -> Name:
    return names[min(max(0, index + by), len(names) - 1)]
