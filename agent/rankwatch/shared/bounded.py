"""A dict that cannot grow without limit."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(dict[K, V]):
    """At most ``most`` entries: one too many drops the oldest. Look-ups cost what a dict's cost.

    Whoever takes an entry out with ``pop`` and sets it again makes it the newest: so the least recently used one is dropped.
    Only ``self[key] = value`` looks at the limit.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > self._most:
            del self[next(iter(self))]
