"""The gradients of parameters after they were reduced over the ranks: a sum of finite gradients may be inf.

DDP reduces during the backward, so its gradients are measured again when the backward has ended. A training loop that
reduces them itself does so between the backward and the optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..measure.collectives import Collectives
from ..measure.extremes import dtype_name
from ..measure.modules import Modules, NamedModule
from ..measure.recorder import Recorder
from ..measure.weights import mark_shard
from ..shared.types.frame import REDUCED, Kind, ReadingSpec
from ..touch.torch_private import active_ddp, is_reducing
from .backward import EmitFor, ParameterGradients


class ReducedGradients:
    """Measures gradients that were measured before they were reduced; only then can the two be compared.

    Args:
        model: the modules of the model.
        parameters: know whether a parameter's gradient was measured as it came.
        collectives: count the reductions that were called from Python.
    """

    def __init__(
        self,
        recorder: Recorder,
        emit: EmitFor,
        model: Modules,
        parameters: ParameterGradients,
        collectives: Collectives,
    ) -> None:
        self._recorder = recorder
        self._emit = emit
        self._model = model
        self._parameters = parameters
        self._collectives = collectives
        self._count = 0
        self._is_reduced_by_ddp = False

    def forward_begins(self) -> None:
        ddp = active_ddp()
        self._is_reduced_by_ddp = ddp is not None and ddp.require_backward_grad_sync and is_reducing(ddp)

    def backward_ends(self) -> None:
        self._count = self._collectives.reductions
        if self._is_reduced_by_ddp:
            self._measure(reversed(self._model.watched))

    def before_step(self) -> None:
        if self._collectives.reductions != self._count:
            self._count = self._collectives.reductions
            self._measure(reversed(self._model.watched))

    def _measure(self, modules: Iterable[NamedModule]) -> None:
        self._recorder.forget()  # DDP and collectives do not change a version
        for named in modules:
            found = [
                (
                    ReadingSpec(Kind.GRADIENT, mark_shard(f"{name}.grad", value) + REDUCED, dtype_name(value.dtype)),
                    value.grad,
                )
                for name, value in named.module._parameters.items()
                if value is not None and value.grad is not None and self._parameters.was_measured(value)
            ]
            if found:
                rows = tuple([row for row, _ in found])
                self._emit(named, rows, [self._recorder.cell(gradient) for _, gradient in found])
