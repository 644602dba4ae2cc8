"""Nested values -> labelled leaves."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest

from rankwatch.measure.walk import MAX_LEAVES, flatten, leaves

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Record:
    hidden: Any
    cache: Any = None


@dataclasses.dataclass
class ModelOutput(OrderedDict[str, Any]):
    """Like transformers' ModelOutput: a dataclass and a mapping; the mapping holds only the fields that are set."""

    logits: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        self["logits"] = self.logits


class Rows(dict[str, Any]):
    """Like a TensorDict: a mapping of keys that iterates over its rows, and has no truth value."""

    def __bool__(self) -> bool:
        raise RuntimeError

    def __iter__(self) -> Any:
        return iter([Rows()])


class Unread(dict[str, Any]):
    """Its values are made when they are asked for, and this one's cannot be."""

    def __getitem__(self, key: str) -> Any:
        raise OSError


@dataclasses.dataclass
class Lazy:
    hidden: dataclasses.InitVar[Any]
    cache: Any = 1

    def __getattribute__(self, name: str) -> Any:
        if name == "cache":
            raise ValueError
        return super().__getattribute__(name)


@pytest.mark.parametrize(
    ("value", "labels"),
    [
        (1, ["output"]),
        (None, ["output"]),
        ("text", ["output"]),
        ((1, [2, (3,)]), ["output[0]", "output[1][0]", "output[1][1][0]"]),
        ({"past": [(1, 2)]}, ["output[past][0][0]", "output[past][0][1]"]),
        (Pair(1, 2), ["output[0]", "output[1]"]),
        (Record(1), ["output.hidden", "output.cache"]),
        (ModelOutput(logits=1), ["output.logits"]),
        ((), []),
        ([], ["output"]),
        ({"past": {}}, ["output[past]"]),
        (Record, ["output"]),
        (Rows(past=Rows(key=1), x=2), ["output[past][key]", "output[x]"]),
        ({"past": Rows(), "x": 2}, ["output[past]", "output[x]"]),
        ((Unread(x=1), 2), ["output[0]", "output[1]"]),
        ([Lazy(1), 2], ["output[0]", "output[1]"]),
    ],
)
def test_labels(value: Any, labels: list[str]) -> None:
    assert [label for label, _ in leaves(value, "output")] == labels
    found: list[Any] = []
    flatten(value, found)
    assert len(found) == len(labels)


def test_cycles_and_very_wide_values_are_bounded() -> None:
    cycle: list[Any] = []
    cycle += [cycle, cycle]
    assert len(leaves(cycle, "input")) <= MAX_LEAVES
    assert len(leaves(list(range(10 * MAX_LEAVES)), "input")) == MAX_LEAVES
