"""Sums that are not finite if one value is not."""

from __future__ import annotations

import math

import pytest
import torch

from rankwatch.measure import sums
from rankwatch.measure.sums import JOINED, SMALL

SIZES = (1, SMALL, SMALL + 1, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", range(len(SIZES)))
def test_one_bad_value_in_any_tensor_shows(dtype: torch.dtype, bad: float, place: int) -> None:
    tensors = [torch.ones(size, dtype=dtype) for size in SIZES]
    assert torch.isfinite(torch.stack(sums.of(tensors))).all()
    tensors[place][-1] = bad
    assert not torch.isfinite(torch.stack(sums.of(tensors))).all()


def test_small_ones_of_any_shapes_are_summed() -> None:
    tensors = [torch.tensor(2.0), torch.ones(3), torch.ones(3, 1), torch.ones(2, 3).T, torch.tensor(3.0), torch.ones(3)]
    assert sorted(one.item() for one in sums.of(tensors)) == [3, 5, 6, 6]


def test_no_more_is_joined_than_was_said() -> None:
    tensors = [torch.full((SMALL,), 1.0)] * (JOINED // SMALL + 1) + [torch.empty(0)]
    assert [one.item() for one in sums.of(tensors)] == [JOINED, SMALL, 0]
    assert sums.of([]) == []
