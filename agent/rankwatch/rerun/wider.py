"""Runs a forward in a wider precision: each floating point number that an operator reads or makes has at least this dtype.

Nothing is copied beforehand, and the module is not changed: under the mode, operators get their tensors converted, and a
conversion to a narrower dtype, by the user's code or by autocast, gives the wide one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from ..touch.parts import modules_in, parameters_in
from .arguments import storage_of
from .careful import Careful, tensors
from .limit import Limit

_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}


class Way(NamedTuple):
    """How a forward may be made wide. ``kernels``: those that are replaced by plain ones, which compute in each dtype."""

    kernels: tuple[str, ...]
    with_weights: bool


ATTENTION, ONEDNN = "fused attention", "oneDNN"
ALL_KERNELS = ATTENTION, ONEDNN


_OPERATORS = {ATTENTION: ("scaled_dot_product",), ONEDNN: ("mkldnn", "conv", "linear", "mm", "lstm")}


def kernels_of(operator: str) -> list[str]:
    """Those that an operator of this name may have; of one that is not known: all."""
    return [one for one in ALL_KERNELS if not operator or any(word in operator for word in _OPERATORS[one])]


def ways(*, has_backward: bool) -> list[Way]:
    """In this order: as the training computes, as far as that is possible. What a fused kernel makes is not to be hidden."""
    weights = (True,) if has_backward else (False, True)
    return [Way(kernels, with_weights) for kernels in ((), ALL_KERNELS) for with_weights in weights]


class Wider(Careful):
    """Computes in ``dtype`` what would be computed in a narrower one.

    What is written to a buffer is written to its wide copy, and read from there. ``way.with_weights``: the module also has wide
    parameters and buffers, as code that compares dtypes wants it. ``with_gradients``: these parameters need gradients.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        buffers: Sequence[Tensor],
        limit: Limit,
        wanted: Callable[[], bool],
        *,
        way: Way,
        with_gradients: bool = False,
    ) -> None:
        super().__init__(buffers, limit, wanted)
        self._with_weights = way.with_weights
        self._replaced = way.kernels
        self._with_gradients = with_gradients
        self._parameters: dict[int, nn.Parameter] = {}
        self._dtype = dtype
        self._buffers = {storage_of(value) for value in buffers}
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        """The wide copies of buffers, by ``id``; with the buffers, so that no id is used again."""

    def given(self, values: Any) -> Any:
        """Arguments with each tensor and dtype made wide."""
        return tree_map(self._widened, values)

    def kernels(self) -> AbstractContextManager[None]:
        return plain_kernels(self._replaced)

    def prepare(self, module: nn.Module) -> None:
        if not self._with_weights:
            return
        wide = self._parameters = {
            id(value): nn.Parameter(self._converted(value.detach()), self._with_gradients and value.requires_grad)
            for value in parameters_in(module)
        }
        for inner in modules_in(module):
            for name, value in inner._parameters.items():
                inner._parameters[name] = None if value is None else wide[id(value)]
            for name, buffer in inner._buffers.items():
                inner._buffers[name] = None if buffer is None else self._widened(buffer)
            for name, kept in list(vars(inner).items()):
                if type(kept) is list and any(id(value) in wide for value in kept):  # the flat weights of an nn.LSTM
                    setattr(inner, name, [wide.get(id(value), value) for value in kept])

    def in_place_of(self, parameter: Tensor) -> Tensor:
        return self._parameters.get(id(parameter), parameter)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.guard(func, args, kwargs)
        args, kwargs = self.given((args, kwargs))
        result = func(*args, **kwargs)
        outputs = tensors(result)
        if any(self._is_narrow(value.dtype) for value in outputs):  # the operator chose a dtype by itself
            result = tree_map(lambda value: self._converted(value) if isinstance(value, Tensor) else value, result)
            outputs = tensors(result)
        self.own(outputs, tensors([args, kwargs]))
        return result

    def _widened(self, value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return self._wide(value) if self._is_narrow(value) else value
        if not isinstance(value, Tensor) or not self._is_narrow(value.dtype):
            return value
        if storage_of(value) not in self._buffers:
            return self._converted(value)
        known = self._copies.get(id(value))
        if known is None:
            known = self._copies[id(value)] = (value, self._converted(value))
        return known[1]

    def _is_narrow(self, dtype: torch.dtype) -> bool:
        if dtype.is_complex:
            return dtype.itemsize < 2 * self._dtype.itemsize
        return dtype.is_floating_point and dtype.itemsize < self._dtype.itemsize

    def _wide(self, dtype: torch.dtype) -> torch.dtype:
        return _COMPLEX[self._dtype] if dtype.is_complex else self._dtype

    def _converted(self, value: Tensor) -> Tensor:
        return value.to(self._wide(value.dtype)) if self._is_narrow(value.dtype) else value


@contextmanager
def plain_kernels(replaced: Sequence[str]) -> Iterator[None]:
    """Kernels that compute in each dtype: fused attention and oneDNN know only some."""
    had_mkldnn = torch._C._get_mkldnn_enabled()
    with sdpa_kernel(SDPBackend.MATH) if ATTENTION in replaced else nullcontext():
        torch._C._set_mkldnn_enabled(had_mkldnn and ONEDNN not in replaced)
        try:
            yield
        finally:
            torch._C._set_mkldnn_enabled(had_mkldnn)
