"""``DebugUnderflowOverflow``: the Hugging Face class of that name, with rankwatch's detector."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from torch import nn

from ..errors import RankwatchError
from ..judge.reporter import BadReading
from ..shared.printable import cleaned
from ..shared.types.config import Config, OthersOptionsError, Policy, disable, is_disabled, resolve
from ..shared.types.frame import Frame, Kind, State
from ..shared.types.trip import Trip
from ..shared.words.text import format_dump, format_frame
from ..touch.parts import modules_in
from .detect_overflow import describe_bad_reading, emit
from .registry import prepare
from .reports import Reports
from .watch_object import Watch

log = logging.getLogger(__name__)


class _TheirText(Reports):
    """What a trip and a traced batch look like in the Hugging Face detector."""

    def on_trace(self, frames: list[Frame]) -> None:
        emit(self.heading() + "".join(f"{_complaints(frame)}{format_frame(frame)}\n" for frame in cleaned(frames)))

    def report_alone(self, trip: Trip, bad_readings: list[BadReading]) -> None:
        emit("".join(map(describe_bad_reading, bad_readings)) + format_dump(cleaned(trip.frames)))


FRAMES = 21
"""Frames that a report shows, as there."""


class DebugUnderflowOverflow(Watch):
    """A replacement for ``transformers.debug_utils.DebugUnderflowOverflow``: same arguments, same text, same ValueError.

    As there, any non-finite parameter, input or output trips (policy ``strict``), every root forward counts as a batch, and
    traced batches are printed but not judged. With a collector configured, the verdict is over all ranks, as with ``watch``.

    Args:
        model: the model to watch.
        max_frames_to_save: how many of the last frames a report shows.
        trace_batch_nums: batches (from 0) to print in full.
        abort_after_batch_num: stop after this batch, before its backward.
    """

    _counts_all = True
    _judges_traced = False
    _Reports = _TheirText

    def __init__(
        self,
        model: nn.Module,
        max_frames_to_save: int = FRAMES,
        trace_batch_nums: Sequence[int] | None = None,
        abort_after_batch_num: int | None = None,
    ) -> None:
        if is_disabled():
            self._sleep()
            return
        prepare()
        try:
            config = resolve(
                max_frames_to_save=None if max_frames_to_save == FRAMES else max_frames_to_save,
                trace_batch_nums=trace_batch_nums,
                abort_after_batch_num=abort_after_batch_num,
                policy=Policy.STRICT,
            )
            super().__init__(model, config)
        except OthersOptionsError as error:
            disable(error)
            self._sleep()
        except RankwatchError:
            raise
        except Exception:
            if not isinstance(model, nn.Module):
                raise
            log.exception("rankwatch: an error of ours as the watch began; training goes on, and is not watched")
            self._sleep()

    def _sleep(self) -> None:
        super().__init__(nn.Module(), Config())
        self.close()


def _complaints(frame: Frame) -> str:
    """The lines about a traced frame's non-finite readings, to be printed before the frame."""
    seen = [r for r in frame.readings if r.kind in (Kind.PARAMETER, Kind.INPUT, Kind.OUTPUT)]
    return "".join(describe_bad_reading(BadReading(r.label, r.state is State.NAN, r.state is State.INF)) for r in seen)


def remove_their_detector(model: nn.Module) -> bool:
    """Removes the hooks of ``transformers``' own detector from a model; returns whether there were any.

    That detector would raise first, on one rank only, and the other ranks would not be stopped.
    """
    theirs = sys.modules.get("transformers.debug_utils")
    if theirs is None:
        return False
    hooks = [(module._forward_hooks, *hook) for module in modules_in(model) for hook in module._forward_hooks.items()]
    found = [one for one in hooks if isinstance(getattr(one[2], "__self__", None), theirs.DebugUnderflowOverflow)]
    for of_module, key, _ in found:
        del of_module[key]
    return bool(found)
