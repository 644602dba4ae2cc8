"""Changes of tensors that autograd does not see: those by a collective, and those in place without a new version."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..measure.recorder import PendingFrame
from ..measure.tape import Cell
from ..shared.types.frame import Kind, Phase, State
from ..shared.words.text import describe_module


def guilty_collective(frames: Sequence[PendingFrame]) -> tuple[str, State]:
    """The collective that made the last frame bad, though this rank's part was finite, and the state of its sum.

    It ran in the frame's module, or just before it, in the module around it. Empty: there is none.
    """
    for frame in _inside(frames):
        for reduction in reversed(frame.reductions):
            bad = [whole.state for whole in reduction.wholes if whole.is_bad]
            if bad:
                return (reduction.name if reduction.made_bad else ""), State.NAN if State.NAN in bad else State.INF
    return "", State.FINITE


def _inside(frames: Sequence[PendingFrame]) -> Iterable[PendingFrame]:
    """The last frame and, before it, those of the modules in its module, in the same call."""
    *earlier, last = frames
    yield last
    if last.spec.phase is Phase.BACKWARD:
        return
    prefix = f"{last.spec.module}." if last.spec.module else ""
    for frame in reversed(earlier):
        is_inside = frame.position[:2] == last.position[:2] and frame.spec.phase is last.spec.phase
        if not is_inside or not frame.spec.module.startswith(prefix) or frame.spec.module == last.spec.module:
            return
        yield frame


def mark_stale(before: Sequence[Cell], frame: PendingFrame, frames: Sequence[PendingFrame]) -> str:
    """Compares a frame that was measured anew with its numbers from before.

    A tensor that was finite and is bad now was changed in place, without its version counter. Other frames of the batch show
    it as it was, too: only of the one that made it is that true. Returns a description of the module that made it; empty if
    nothing was changed in this way.
    """
    changed = ""
    for index in range(frame.weights, len(before)):
        old, new = before[index], frame.cells[index]
        if old.state is State.FINITE and new.is_bad:
            maker = None
            for other in frames:
                for row, cell in enumerate(other.cells):
                    if cell is not old:
                        continue
                    if maker is None and other.spec.readings[row].kind is Kind.OUTPUT:
                        maker = other
                    elif other is not maker:
                        other.cells[row] = Cell(State.UNMATERIALISED)
            if maker is not None and maker is not frame:
                changed = changed or describe_module(maker.spec)
    return changed
