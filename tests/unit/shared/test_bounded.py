"""The bounded dict: its limit, and which entry it drops."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from rankwatch.shared.bounded import BoundedDict


def test_a_further_entry_drops_the_oldest() -> None:
    numbers = BoundedDict[str, int](2)
    for number, key in enumerate("abac"):
        numbers[key] = number
    assert numbers == {"b": 1, "c": 3}


@given(st.lists(st.integers(0, 9)), st.integers(1, 5))
def test_with_pop_and_set_it_drops_the_least_recently_used(keys: list[int], most: int) -> None:
    bounded = BoundedDict[int, int](most)
    recent: OrderedDict[int, int] = OrderedDict()
    for time, key in enumerate(keys):
        bounded.pop(key, None)
        bounded[key] = recent[key] = time
        recent.move_to_end(key)
        if len(recent) > most:
            recent.popitem(last=False)
    assert list(bounded.items()) == list(recent.items())
