"""Whether a gradient that an optimizer is about to use is not finite: one look at all of them, or none.

Where the training calls ``clip_grad_norm_``, the norm that it has computed says the same.
"""

from __future__ import annotations

import functools
import logging
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from ..measure.extremes import Unmeasurable, local

log = logging.getLogger(__name__)

_looks: weakref.WeakSet[GradientLook] = weakref.WeakSet()


class _Norm(NamedTuple):
    """A norm, and the gradients that it was computed from."""

    gradients: frozenset[int]
    value: Tensor


class GradientLook:
    """Looks at the gradients of an optimizer, until ``remove``. ``guarded`` makes a function that catches its errors."""

    def __init__(self, guarded: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        self.took = guarded(self._take)
        """Called with gradients, and the norm that the training computed from them."""
        self._norms: list[_Norm] = []
        _wrap()
        _looks.add(self)

    def remove(self) -> None:
        _looks.discard(self)

    def forget(self) -> None:
        """A backward begins: it changes gradients whose norm is known."""
        self._norms.clear()

    def _take(self, gradients: Iterable[Tensor], norm: Tensor) -> None:
        self._norms.append(_Norm(frozenset(map(id, gradients)), norm.detach()))

    def is_bad(self, optimizer: Optimizer, *, may_wait: bool) -> bool:
        """Whether one of the optimizer's gradients is not finite. Without ``may_wait``, only those on the host are read."""
        gradients = gradients_of(optimizer)
        if not gradients or not (may_wait or gradients[0].is_cpu):
            return False
        known: set[int] = set()
        norms = []
        for norm in self._norms:
            if not known.issuperset(norm.gradients):
                known |= norm.gradients
                norms.append(norm.value)
        rest = [gradient for gradient in gradients if id(gradient) not in known]
        try:
            suspects = not _are_finite([*norms, *_norms(rest)])
        except RuntimeError as error:  # a layout or dtype that has no norm
            log.debug("cannot take the norm of the gradients: %s", error)
            suspects = True
        # A norm may overflow where no gradient has, and gradients may have been mended since the norm was taken.
        return suspects and any(map(is_bad, gradients))


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    groups = [group["params"] for group in optimizer.param_groups]
    return [parameter.grad for group in groups for parameter in group if parameter.grad is not None]


def is_bad(gradient: Tensor) -> bool:
    """Whether a gradient, or this rank's shard of it, is not finite; False if it cannot be read."""
    try:
        return not bool(torch.isfinite(local(gradient)).all())
    except (Unmeasurable, RuntimeError) as error:
        log.debug("cannot read a gradient: %s", error)
        return False


def is_of_anomaly(error: BaseException) -> bool:
    """Whether the user's ``torch.autograd.detect_anomaly`` has raised an exception because of a nan in a backward."""
    return isinstance(error, RuntimeError) and "returned nan values in its" in str(error)


def have_come(gradients: list[Tensor]) -> bool:
    """Whether gradients can be read within a second: on a device, a collective may wait for a rank that has failed."""
    devices = {gradient.device for gradient in gradients if gradient.device.type == "cuda"}
    until = time.monotonic() + 1.0
    while not all([torch.cuda.current_stream(device).query() for device in devices]):
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def _norms(gradients: list[Tensor]) -> list[Tensor]:
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        values = gradient.detach() if type(gradient) is Tensor and gradient.layout is torch.strided else local(gradient)
        if not values.is_meta:
            alike.setdefault((values.device, values.dtype), []).append(values)
    return [norm for values in alike.values() for norm in torch._foreach_norm(values)]


def _are_finite(norms: list[Tensor]) -> bool:
    """Reads the norms: once for each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for norm in norms:
        by_device.setdefault(norm.device, []).append(norm.to(torch.float64 if norm.is_cpu else torch.float32))
    return all([bool(torch.isfinite(torch.stack(some)).all()) for some in by_device.values()])


def _wrap() -> None:
    """Wraps the function in which ``clip_grad_norm_`` computes the norm. The wrapper stays; it costs next to nothing."""
    name = "_get_total_norm" if hasattr(clip_grad, "_get_total_norm") else "clip_grad_norm_"  # torch before 2.6
    original = getattr(clip_grad, name)
    if not hasattr(original, "_rankwatch"):
        observed = _observed(original, takes_parameters=name == "clip_grad_norm_")
        setattr(clip_grad, name, observed)
        if name == "clip_grad_norm_":
            torch.nn.utils.clip_grad_norm_ = observed


def _observed(original: Callable[..., Any], takes_parameters: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def total_norm(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or not _looks:
            return original(tensors, *args, **kwargs)
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        norm = original(tensors, *args, **kwargs)
        if type(norm) is Tensor:  # to read a DTensor's, the ranks would communicate
            gradients = [tensor.grad for tensor in tensors if tensor.grad is not None] if takes_parameters else tensors
            for look in tuple(_looks):
                look.took(gradients, norm)
        return norm

    total_norm._rankwatch = True  # type: ignore[attr-defined]
    return total_norm
