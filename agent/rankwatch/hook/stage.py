"""Stages of ``torch.distributed.pipelining``, known by their shape: nobody who does without pipelines is to import it."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Protocol, runtime_checkable

from torch import nn

from ..errors import UsageError
from ..measure.modules import advise
from ..shared.frame import NO_STAGE

_PIPELINING = "torch.distributed.pipelining.stage"
_MICRO_BATCH = "forward_one_chunk"


@runtime_checkable
class PipelineStage(Protocol):
    """What ``watch`` needs of a stage: the part of the model that it runs, and its place in the pipeline."""

    submod: nn.Module
    stage_index: int


def module_and_stage(model: Any) -> tuple[nn.Module, int]:
    """The module to watch and its place in a pipeline, or NO_STAGE.

    Raises:
        UsageError: neither a module nor a stage.
    """
    if isinstance(model, nn.Module):
        return model, NO_STAGE
    if isinstance(model, PipelineStage) and isinstance(model.submod, nn.Module):
        return model.submod, model.stage_index
    raise UsageError(f"watch() takes a torch.nn.Module or a pipeline stage, {advise(model)}")


def calling_stage(module: nn.Module) -> PipelineStage | None:
    """The stage that calls this module just now, if one does."""
    if _PIPELINING not in sys.modules:
        return None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self") if frame.f_globals.get("__name__") == _PIPELINING else None
        if isinstance(caller, PipelineStage) and caller.submod is module:
            return caller
        frame = frame.f_back
    return None


def is_rehearsal() -> bool:
    """Whether a pipeline runs this forward to learn shapes: before its first micro-batch, on whatever is in memory.

    torch 2.13 runs it with gradients on, so nothing but the caller tells it from a micro-batch.
    """
    if _PIPELINING not in sys.modules:
        return False
    frame, is_in_stage = sys._getframe(1), False
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == _PIPELINING:
            if frame.f_code.co_name == _MICRO_BATCH:
                return False
            is_in_stage = True
    return is_in_stage
