"""Whether a gradient that an optimizer is about to use is not finite: one look at all of them, or none.

Where the training calls ``clip_grad_norm_``, the norm that it has computed says the same.
"""

from __future__ import annotations

import functools
import logging
import math
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from ..measure import sums
from ..measure.extremes import Unmeasurable, local
from ..measure.tape import Event, to_host, wait_for

log = logging.getLogger(__name__)

_looks: weakref.WeakSet[GradientLook] = weakref.WeakSet()


class Norms(NamedTuple):
    """Norms of gradients, on the host their sums, on their way to the host. None: there are none of this layout or dtype."""

    copies: list[tuple[Tensor, Event | None]] | None

    def wait(self) -> None:
        for _, event in reversed(self.copies or ()):  # with the last one, the others have come
            wait_for(event)

    @property
    def are_finite(self) -> bool:
        """If so, their sum is, unless it overflows."""
        sums = [norms if norms.ndim == 0 else norms.sum(dtype=torch.float64) for norms, _ in self.copies or ()]
        return self.copies is not None and all([math.isfinite(one.item()) for one in sums])


class _KnownNorm(NamedTuple):
    """A norm that the training has computed, and the gradients, with their versions at that time."""

    gradients: list[Tensor]
    versions: list[int]
    norm: Tensor

    @property
    def unchanged(self) -> set[int]:
        """The gradients that are as they were, except that ``clip_grad_norm_`` has multiplied them."""
        pairs = zip(self.gradients, self.versions, strict=True)
        return {id(gradient) for gradient, version in pairs if gradient._version <= version + 1}


class GradientLook:
    """Looks at gradients, until ``remove``. ``guarded`` makes a function that catches its errors."""

    def __init__(self, guarded: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        self.took = guarded(self._take)
        """Called with gradients, and the norm that the training computed from them."""
        self._known: list[_KnownNorm] = []
        _wrap()
        _looks.add(self)

    def remove(self) -> None:
        self.forget()
        _looks.discard(self)

    def forget(self) -> None:
        """The gradients whose norm is known were used, or change."""
        self._known.clear()

    def _take(self, gradients: Iterable[Tensor], norm: Tensor) -> None:
        known = list(gradients)
        self._known.append(_KnownNorm(known, [gradient._version for gradient in known], norm.detach()))

    def norms_of(self, gradients: list[Tensor]) -> Norms:
        """Begins to read what tells of gradients whether they are finite: the norms that the training knows, and the others'."""
        seen: set[int] = set()
        norms = []
        for known in self._known:
            unchanged = known.unchanged
            if not unchanged <= seen:
                seen |= unchanged
                norms.append(known.norm)
        try:
            norms += _norms([gradient for gradient in gradients if id(gradient) not in seen] if seen else gradients)
            return Norms([to_host(norm) for norm in norms])
        except RuntimeError as error:
            log.debug("cannot take the norm of the gradients: %s", error)
            return Norms(None)


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    groups = [group["params"] for group in optimizer.param_groups]
    return [gradient for group in groups for parameter in group if (gradient := parameter.grad) is not None]


def is_bad(gradient: Tensor) -> bool:
    """Whether a gradient, or this rank's shard of it, is not finite; False if it cannot be read."""
    try:
        return not bool(torch.isfinite(local(gradient)).all())
    except (Unmeasurable, RuntimeError) as error:
        log.debug("cannot read a gradient: %s", error)
        return False


def are_all_bad(gradients: list[Tensor]) -> bool:
    """Whether each of several gradients is not finite, as far as this rank has a part of it."""
    try:
        here = [gradient for gradient in gradients if local(gradient).numel()]
    except (Unmeasurable, RuntimeError):
        return False
    return len(here) > 1 and all(map(is_bad, here))


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
        time.sleep(0.001)  # torch has no wait for a stream that ends after a time
    return True


@torch.no_grad()
def _norms(gradients: list[Tensor]) -> list[Tensor]:
    if not gradients:
        return []
    values = [one if type(one) is Tensor and one.layout is torch.strided else local(one) for one in gradients]
    groups: Any = _group_tensors_by_device_and_dtype([values])  # type: ignore[list-item]
    return [
        torch.stack(sums.of(alike) if device.type == "cpu" else torch._foreach_norm(alike))
        for (device, _), ([alike], _) in groups.items()
        if device.type != "meta"
    ]


def _wrap() -> None:
    """Wraps the function in which ``clip_grad_norm_`` computes the norm. The wrapper stays; it costs next to nothing."""
    name = "_get_total_norm" if hasattr(clip_grad, "_get_total_norm") else "clip_grad_norm_"  # torch before 2.6
    original = getattr(clip_grad, name)
    if not hasattr(original, "_rankwatch"):
        observed = _observed(original, takes_parameters=name == "clip_grad_norm_")
        setattr(clip_grad, name, observed)
        if name == "clip_grad_norm_":
            torch.nn.utils.clip_grad_norm_ = observed


def _observed(original: Callable[..., Any], *, takes_parameters: bool) -> Callable[..., Any]:
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
