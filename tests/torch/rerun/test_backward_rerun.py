"""Which outputs of a forward were made from others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankwatch.rerun import backward_rerun
from rankwatch.rerun.backward_rerun import _made_of

X = torch.ones(3, requires_grad=True)


def chain(x: Tensor) -> list[Tensor]:
    """Each made from the one before."""
    first = x.exp()
    second = first.sin()
    return [first, second, second.cos()]


def apart(x: Tensor) -> list[Tensor]:
    """The first two are made from the input alone, the third from the second."""
    first, second = x.exp(), x.sin().tan()
    return [first, second, second.cos()]


def turned(x: Tensor) -> list[Tensor]:
    """As ``chain``, returned from the last to the first."""
    return chain(x)[::-1]


def one(x: Tensor) -> list[Tensor]:
    return [x.exp(), torch.ones(3)]


def of_first(x: Tensor) -> list[Tensor]:
    first, _ = x.exp(), x.exp()
    return [first, first.abs().sqrt()]


def of_another(x: Tensor) -> list[Tensor]:
    """As many nodes as ``of_first``, of the same names: the second output is made from another tensor."""
    first, other = x.exp(), x.exp()
    return [first, other.abs().sqrt()]


MADE: list[tuple[Any, dict[int, set[int]]]] = [
    (of_first, {0: {1}}),
    (of_another, {}),
    (chain, {0: {1, 2}, 1: {2}}),
    (apart, {1: {2}}),
    (turned, {2: {0, 1}, 1: {0}}),
    (one, {}),
]


def test_outputs_are_found_by_the_graph_whatever_came_before() -> None:
    root = nn.Module()
    for forward, made in [*MADE, *MADE[::-1]]:
        assert _made_of(root, forward(X)) == made


def test_a_graph_that_looks_as_before_is_not_walked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    root, walks, walk = nn.Module(), list[int](), backward_rerun._made_from

    def counted(nodes: Sequence[Any], lowest: int) -> Any:
        walks.append(lowest)
        return walk(nodes, lowest)

    monkeypatch.setattr(backward_rerun, "_made_from", counted)
    for _ in range(3):
        assert _made_of(root, chain(X.exp())) == {0: {1, 2}, 1: {2}}
        assert _made_of(root, apart(X)) == {1: {2}}
    assert len(walks) == 2
