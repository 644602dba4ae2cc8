"""Tensor -> (abs min, abs max). The only file with numerics."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64 * 1024
"""Elements per pass: the scratch of |x| stays in the cache while it is reduced."""

_SIXTEEN_BIT_OR_MORE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Unmeasurable(Exception):
    """A tensor has no values to read (meta), or a layout or dtype torch cannot reduce."""


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype without ``torch.``."""
    return str(dtype)[6:]


def local(tensor: Tensor) -> Tensor:
    """The values that lie on this rank: a DTensor's shard, else the tensor itself, without its autograd history."""
    detached = tensor.detach()
    to_local = getattr(detached, "to_local", None)
    return to_local().detach() if to_local is not None else detached


class Measure:
    """Measures tensors, reusing one scratch buffer per device and dtype. Not thread-safe."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def __call__(self, values: Tensor, low: Tensor, high: Tensor) -> None:
        """Writes abs min and abs max of ``values`` into the 0-dim tensors ``low`` and ``high``, without a host sync.

        A nan anywhere makes both nan. Integers and booleans are measured as numbers, complex numbers by their magnitude.
        ``values`` is not empty and carries no autograd history (see ``local``).

        Raises:
            Unmeasurable: there are no values, or no way to reduce them.
        """
        if values.device.type == "meta" or values.layout is not torch.strided or values.is_nested or values.is_quantized:
            raise Unmeasurable(f"{values.device.type}, {values.layout}")
        if values.dtype not in _SIXTEEN_BIT_OR_MORE:
            values = _widened(values)
        if values.device.type != "cpu" or not values.is_contiguous():
            smallest, largest = torch.aminmax(values.abs())
        elif values.numel() <= CHUNK:
            smallest, largest = torch.aminmax(torch.abs(values.view(-1), out=self._scratch_of(values)[: values.numel()]))
        else:
            smallest, largest = self._in_chunks(values.view(-1))
        low.copy_(smallest)
        high.copy_(largest)

    def _in_chunks(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        scratch = self._scratch_of(flat)
        parts = [torch.aminmax(torch.abs(part, out=scratch[: part.numel()])) for part in torch.split(flat, CHUNK)]
        return torch.stack([part.min for part in parts]).amin(), torch.stack([part.max for part in parts]).amax()

    def _scratch_of(self, values: Tensor) -> Tensor:
        key = (values.device, values.dtype)
        if key not in self._scratch:
            # An inference tensor could not be written to outside of inference mode again.
            with torch.inference_mode(False):
                self._scratch[key] = torch.empty(CHUNK, dtype=values.dtype, device=values.device)
        return self._scratch[key]


def _widened(values: Tensor) -> Tensor:
    """``values`` in a dtype that abs and aminmax know and that holds each of them exactly enough for three digits."""
    try:
        if values.is_complex():
            return values.abs()
        if values.dtype.is_floating_point:
            return values.to(torch.float32)  # float8: torch cannot take its extremes
        return values.to(torch.float64)  # abs of the smallest int8 is no int8
    except (RuntimeError, NotImplementedError) as error:
        raise Unmeasurable(str(error)) from None


class Counts(NamedTuple):
    """The shape of a tensor (of its local shard) and how many of its elements are not finite."""

    shape: tuple[int, ...]
    numel: int
    nans: int
    infs: int


def count_non_finite(value: Tensor | float) -> Counts:
    """Counts in several passes and with host syncs: for after a trip."""
    values = local(value) if isinstance(value, Tensor) else torch.tensor(value)
    if values.dtype.is_floating_point and values.dtype not in _SIXTEEN_BIT_OR_MORE:
        values = values.to(torch.float32)
    return Counts(tuple(values.shape), values.numel(), int(torch.isnan(values).sum()), int(torch.isinf(values).sum()))
