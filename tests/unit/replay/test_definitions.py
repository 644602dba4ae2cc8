"""Which statements of a script a definition needs."""

from __future__ import annotations

import ast

import pytest

from rankwatch.replay.definitions import needed

SCRIPT = """
from __future__ import annotations
import torch
from torch import nn
SCALE = 3.0
SCALE *= 2
rank = start()
model = build(rank)
def helper(e):
    x = e / e.sum()
    return [rank for rank in x]
class Scores(nn.Module):
    width: Width = 4
    def forward(self, x):
        model = torch.exp(x) * SCALE
        return helper(model)
class Width:
    pass
for batch in range(10):
    x = load(rank)
    e = model(x)
if __name__ == "__main__":
    SCALE = 7.0
"""


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("Scores", [2, 3, 4, 5, 6, 9, 12, 17]),  # not the script's own x, e, rank and model
        ("helper", [2, 9]),
        ("model", [2, 7, 8]),
        ("nothing", [2]),
    ],
)
def test_the_names_of_a_functions_own_are_not_those_of_the_script(name: str, lines: list[int]) -> None:
    assert [statement.lineno for statement in needed(ast.parse(SCRIPT), {name})] == lines


def test_what_is_known_needs_no_statement() -> None:
    assert [one.lineno for one in needed(ast.parse(SCRIPT), {"Scores"}, {"SCALE", "helper"})] == [2, 3, 4, 12, 17]
