"""Stages of ``torch.distributed.pipelining``, recognised by their attributes, so that the package need not be imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, Protocol, runtime_checkable

from torch import nn

from ..errors import UsageError
from ..measure.modules import advise
from ..shared.types.frame import NO_STAGE
from ..touch.stack import outwards

_PIPELINING = "torch.distributed.pipelining.stage"
_MICRO_BATCH = {"forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"}


@runtime_checkable
class PipelineStage(Protocol):
    """The attributes of a stage that ``watch`` needs: its module, and its number in the pipeline."""

    submod: nn.Module
    stage_index: int


def module_and_stage(model: Any, by: str = "watch") -> tuple[nn.Module, int]:
    """The module to watch and its stage, or NO_STAGE.

    Raises:
        UsageError: ``model`` is neither a module nor a stage.
    """
    if isinstance(model, nn.Module):
        return model, NO_STAGE
    if isinstance(model, PipelineStage) and isinstance(model.submod, nn.Module):
        return model.submod, model.stage_index
    raise UsageError(f"{by}() takes a torch.nn.Module or a pipeline stage, {advise(model)}")


def calling_stage(module: nn.Module) -> PipelineStage | None:
    """The stage that is calling this module, if one is."""
    for frame in _of_pipelining():
        caller = frame.f_locals.get("self")
        if isinstance(caller, PipelineStage) and caller.submod is module:
            return caller
    return None


def is_rehearsal() -> bool:
    """Whether a pipeline runs what calls this only to learn shapes: before its first micro-batch, on uninitialised memory.

    torch 2.13 runs the loss too, and all with gradients on: only the caller distinguishes it from a micro-batch.
    """
    callers = {frame.f_code.co_name for frame in _of_pipelining()}
    return bool(callers) and callers.isdisjoint(_MICRO_BATCH)


def _of_pipelining() -> Iterator[FrameType]:
    """The frames of stages on the stack."""
    if _PIPELINING in sys.modules:
        yield from (frame for frame in outwards(sys._getframe(1)) if frame.f_globals.get("__name__") == _PIPELINING)
