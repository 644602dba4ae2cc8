"""``DebugUnderflowOverflow``: the Hugging Face class of that name, over our detector."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .config import resolve
from .frame import Reading, State
from .text import format_dump
from .trip import Policy, Trip
from .watcher import Watch, _print


class DebugUnderflowOverflow(Watch):
    """A drop-in for ``transformers.debug_utils.DebugUnderflowOverflow``: same arguments, same text, a ValueError at the end.

    Any non-finite parameter, input or output trips (policy ``strict``), every root forward counts as a batch, and traced
    batches are printed but not judged, as there. With a collector configured, all ranks are watched as by ``watch``.

    Args:
        model: the model to watch.
        max_frames_to_save: how many of the last frames a report shows.
        trace_batch_nums: batches (from 0) to print in full.
        abort_after_batch_num: stop after this batch, before its backward.
    """

    _style = {"count_all": True, "judge_traced": False}

    def __init__(
        self,
        model: nn.Module,
        max_frames_to_save: int = 21,
        trace_batch_nums: Sequence[int] | None = None,
        abort_after_batch_num: int | None = None,
    ) -> None:
        config = resolve(
            max_frames_to_save=max_frames_to_save,
            trace_batch_nums=() if trace_batch_nums is None else trace_batch_nums,
            abort_after_batch_num=abort_after_batch_num,
            policy=Policy.STRICT,
        )
        super().__init__(model, config)

    def _report_alone(self, trip: Trip, tripping: list[Reading]) -> None:
        lines = [f"{reading.label} has {'nans' if reading.state is State.NAN else 'infs'}\n" for reading in tripping]
        _print("".join(lines) + format_dump(trip.frames))
