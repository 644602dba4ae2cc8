"""Which buffers are compared between ranks, and when."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rankwatch.measure.modules import named_modules
from rankwatch.replicas import constants
from rankwatch.replicas.constants import Constant, constants_in
from rankwatch.shared.types.fingerprint import OF_BUFFERS, RankMesh

INPUTS = RankMesh((0, 1, 2, 3), (2, 2), (False, True))
"""Ranks 0 and 1 are tensor-parallel and have the same inputs, as 2 and 3."""


def with_buffer(value: Tensor | None, name: str = "table") -> nn.Module:
    model = nn.Module()
    model.register_buffer(name, value, persistent=False)
    return model


def names(root: nn.Module) -> list[str]:
    return [one.name for one in constants_in(named_modules(root).values(), INPUTS)]


def test_a_buffer_is_compared_with_the_ranks_whose_inputs_differ() -> None:
    (found,) = constants_in(named_modules(with_buffer(torch.rand(3))).values(), INPUTS)
    assert found.mesh == RankMesh((0, 1, 2, 3), (2, 2), (True, False), source=OF_BUFFERS, is_declared=False)
    assert found.mesh.replicas_of(1) == (1, 3)
    assert not found.is_trainable


@pytest.mark.parametrize(
    "value",
    [
        None, torch.arange(3), torch.rand(0), torch.zeros(3).fill_(2.0), torch.empty(3, device="meta"),
        nn.Parameter(torch.rand(3)).to_sparse(),
    ],
    ids=["none", "integers", "empty", "written", "meta", "sparse"],
)  # fmt: skip
def test_what_may_be_a_ranks_own_or_cannot_be_read_is_no_constant(value: Tensor | None) -> None:
    assert names(with_buffer(value)) == []


def test_what_is_saved_is_no_constant() -> None:
    model = nn.Module()
    model.register_buffer("table", torch.rand(3))
    assert names(model) == []


def test_a_table_of_several_layers_has_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.rand(3)
    model = nn.Sequential(with_buffer(table), with_buffer(table), with_buffer(torch.rand(8)), with_buffer(torch.rand(2)))
    assert names(model) == ["0.table", "2.table", "3.table"]
    monkeypatch.setattr(constants, "MOST_NUMBERS", 6)
    assert names(model) == ["0.table", "3.table"]


def test_a_buffer_is_read_once_a_forward_has_left_it_as_it_was_and_not_for_long() -> None:
    model = with_buffer(torch.tensor([1.0, 2.0, 3.0]))
    own = Constant(model, "table")
    assert own() is None
    for _ in range(constants.LOOKS):
        found = own()
        assert found is not None
        assert found.tolist() == [1.0, 3.0, 2.0, 4.65625]
    assert own() is None


@pytest.mark.parametrize("way", ["written", "written unseen", "replaced", "gone"])
def test_what_a_forward_writes_or_replaces_is_not_read(way: str) -> None:
    model = with_buffer(torch.rand(3))
    own = Constant(model, "table")
    assert own() is None
    table = model.get_buffer("table")
    if way == "written":
        table.mul_(2)
    elif way == "written unseen":
        table.data.mul_(2)
    else:
        model._buffers["table"] = 2 * table if way == "replaced" else None
    assert [own(), own()] == [None, None]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_numbers_of_any_width_are_read_but_for_their_last_bits(dtype: torch.dtype) -> None:
    made = [torch.tensor(values).to(dtype) for values in ([0.5, 1.0], [0.5, 1.0 + 1e-7])]
    models = [with_buffer(one) for one in made]
    owns = [Constant(model, "table") for model in models]
    assert [own() for own in owns] == [None, None]
    first, second = [own() for own in owns]
    assert first is not None
    assert second is not None
    assert torch.equal(first, second)
