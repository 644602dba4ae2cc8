"""A function is wrapped once, and the wrapper stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rankwatch.touch.patched import patch


class Scaler:
    def scale(self, value: int) -> int:
        """Doubles it."""
        return 2 * value


class Sharded(Scaler):
    pass


def plus_one(original: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any) -> Any:
        return original(*args) + 1

    return wrapper


def test_a_method_is_wrapped_once_also_where_a_class_has_it_from_its_parent() -> None:
    for cls in (Scaler, Sharded, Scaler):
        patch(cls, "scale", plus_one)
    assert (Scaler().scale(3), Sharded().scale(3)) == (7, 7)
    assert (Scaler.scale.__name__, Scaler.scale.__doc__) == ("scale", "Doubles it.")


def test_what_is_not_there_or_cannot_be_set_is_left_as_it_is() -> None:
    patch(None, "scale", plus_one)
    patch(Sharded, "unscale", plus_one)
    patch(int, "bit_length", plus_one)
    assert not hasattr(Sharded, "unscale")
    assert (7).bit_length() == 3
