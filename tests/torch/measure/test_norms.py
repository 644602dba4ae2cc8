"""Norms that are not finite if one value is not, and the largest numbers."""

from __future__ import annotations

import math

import pytest
import torch

from rankwatch.measure import norms
from rankwatch.measure.norms import JOINED, LARGE, SMALL

SIZES = (1, SMALL, SMALL + 1, LARGE, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", range(len(SIZES)))
def test_one_bad_value_in_any_tensor_shows(dtype: torch.dtype, bad: float, place: int) -> None:
    tensors = [torch.ones(size, dtype=dtype) for size in SIZES]
    assert torch.isfinite(torch.stack(norms.of(tensors))).all()
    tensors[place][-1] = bad
    assert not torch.isfinite(torch.stack(norms.of(tensors))).all()


def test_small_ones_of_any_shapes_are_joined() -> None:
    tensors = [torch.tensor(3.0), torch.ones(3), torch.ones(3, 3), torch.ones(2, 2).T, torch.tensor(4.0), 2 * torch.ones(3)]
    assert sorted(one.item() ** 2 for one in norms.of(tensors)) == pytest.approx([4, 9, 15, 25])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(LARGE,), (3, LARGE), (LARGE, 3), (7,), ()], ids=str)
def test_they_are_those_of_torch(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.randn(shape).to(dtype)
    for one in (values, values.mT if values.ndim == 2 else values):
        [norm] = norms.of([one])
        assert norm.item() == pytest.approx(torch.linalg.vector_norm(one.double()).item(), rel=0.01)


def test_no_more_is_joined_than_was_said() -> None:
    tensors = [torch.full((SMALL,), 1.0)] * (JOINED // SMALL + 1) + [torch.empty(0)]
    assert [one.item() ** 2 for one in norms.of(tensors)] == [JOINED, SMALL, 0]
    assert norms.of([]) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_the_largest_are_those_of_torch_and_never_overflow(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    ends = [torch.tensor(values, dtype=dtype) for values in ([1.0, -most], -2.0, [0.0, most])]
    tensors = [ends[0], torch.randn(5, 3).to(dtype).mT, *ends[1:]]
    assert [one.item() for one in norms.largest(tensors)] == [values.abs().max().item() for values in tensors]
    for bad in (math.nan, math.inf, -math.inf):
        tensors[1][2, 1] = bad
        assert [bool(torch.isfinite(one)) for one in norms.largest(tensors)] == [True, False, True, True]
    assert norms.largest([]) == []


def test_the_largest_of_what_torch_cannot_order_is_refused() -> None:
    with pytest.raises(RuntimeError):
        norms.largest([torch.tensor([True])])
