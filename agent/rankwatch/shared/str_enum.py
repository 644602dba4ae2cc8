"""``enum.StrEnum``, which Python 3.10 lacks."""

from __future__ import annotations

import enum


class StrEnum(str, enum.Enum):
    """Members are their values, also where they are printed."""

    __str__ = str.__str__
