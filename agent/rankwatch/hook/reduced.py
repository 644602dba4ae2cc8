"""The gradients of parameters after they were reduced over the ranks: a sum of finite gradients may be inf.

DDP reduces during the backward, so its gradients are measured again when the backward has ended. A training loop that
reduces them itself does so between the backward and the optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch.distributed as dist
from torch import Tensor

from ..measure.extremes import dtype_name
from ..measure.modules import NamedModule
from ..measure.recorder import Recorder
from ..measure.weights import mark_shard
from ..shared.types.frame import REDUCED, Kind, ReadingSpec
from ..touch.torch_private import active_ddp
from .backward import EmitFor


class ReducedGradients:
    """Measures gradients that were measured before they were reduced; only then can the two be compared.

    Args:
        modules: returns the watched modules.
        was_measured: whether a parameter's gradient was measured as it came.
        reductions: returns the number of reductions that were called from Python.
    """

    def __init__(
        self,
        recorder: Recorder,
        emit: EmitFor,
        *,
        modules: Callable[[], list[NamedModule]],
        was_measured: Callable[[Tensor], bool],
        reductions: Callable[[], int],
    ) -> None:
        self._recorder = recorder
        self._emit = emit
        self._modules = modules
        self._was_measured = was_measured
        self._reductions = reductions
        self._count = 0
        self._is_reduced_by_ddp = False

    def forward_begins(self) -> None:
        ddp = active_ddp()
        self._is_reduced_by_ddp = ddp is not None and ddp.require_backward_grad_sync and dist.get_world_size() > 1

    def backward_ends(self) -> None:
        self._count = self._reductions()
        if self._is_reduced_by_ddp:
            self._measure(reversed(self._modules()))

    def before_step(self) -> None:
        if self._reductions() != self._count:
            self._count = self._reductions()
            self._measure(reversed(self._modules()))

    def _measure(self, modules: Iterable[NamedModule]) -> None:
        self._recorder.forget()  # DDP and collectives do not change a version
        for named in modules:
            found = [
                (
                    ReadingSpec(Kind.GRADIENT, mark_shard(f"{name}.grad", value) + REDUCED, dtype_name(value.dtype)),
                    value.grad,
                )
                for name, value in named.module._parameters.items()
                if value is not None and value.grad is not None and self._was_measured(value)
            ]
            if found:
                rows = tuple([row for row, _ in found])
                self._emit(named, rows, [self._recorder.cell(gradient) for _, gradient in found])
