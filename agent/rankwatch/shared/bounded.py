"""A dict that cannot grow without limit."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(dict[K, V]):
    """A dict of at most ``most`` entries: a further one drops the oldest. Look-ups cost the same as in a dict.

    To drop the least recently used entry instead, take an entry out with ``pop`` when it is used, and set it again. Only
    ``self[key] = value`` checks the limit.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > self._most:
            del self[next(iter(self))]
