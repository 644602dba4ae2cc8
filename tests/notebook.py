"""A detector whose observer stores everything in lists, and models for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rankwatch.errors import BatchLimitReached, OverflowDetected, TrainingAborted
from rankwatch.hook.detector import Detector
from rankwatch.judge.observer import BadReading
from rankwatch.rerun.capsule import CapsuleRules
from rankwatch.shared.cause import Trip
from rankwatch.shared.closeup import CloseUp
from rankwatch.shared.config import resolve
from rankwatch.shared.fingerprint import Fingerprint, FingerprintTable
from rankwatch.shared.frame import BatchSummary, Frame, FrameTable, Position
from rankwatch.shared.notice import Notice


class Notebook:
    """An observer that stores everything."""

    def __init__(self) -> None:
        self.sent: list[tuple[FrameTable, BatchSummary]] = []
        self.detector: Detector | None = None
        self.notices: list[Notice] = []
        self.traces: list[list[Frame]] = []
        self.trips: list[Trip] = []
        self.found: list[tuple[Position, int]] = []
        self.closeups: list[CloseUp] = []
        self.rules: CapsuleRules | None = None
        self.bad_readings: list[list[BadReading]] = []
        self.faults: list[str] = []
        self.fingerprints: list[tuple[FingerprintTable, Fingerprint]] = []

    @property
    def batches(self) -> list[tuple[FrameTable, BatchSummary]]:
        """The parts that were sent, and the last forward, if it waits for its loss."""
        unsent = self.detector.unsent() if self.detector is not None else None
        return self.sent if unsent is None else [*self.sent, unsent]

    def on_batch(self, table: FrameTable, summary: BatchSummary) -> None:
        self.sent.append((table, summary))

    def on_notice(self, notice: Notice) -> None:
        self.notices.append(notice)

    def on_trace(self, frames: list[Frame]) -> None:
        self.traces.append(frames)

    def on_found(self, trip: Trip) -> None:
        self.found.append((trip.position, len(self.sent)))

    def is_wanted(self) -> bool:
        return True

    def capsule_rules(self) -> CapsuleRules | None:
        return self.rules

    def on_closeup(self, closeup: CloseUp) -> None:
        self.closeups.append(closeup)

    def on_trip(self, trip: Trip, bad_readings: list[BadReading]) -> TrainingAborted:
        self.trips.append(trip)
        self.bad_readings.append(bad_readings)
        return OverflowDetected("tripped")

    def on_fault(self, fault: str) -> None:
        self.faults.append(fault)

    def on_fingerprint(self, table: FingerprintTable, fingerprint: Fingerprint) -> None:
        self.fingerprints.append((table, fingerprint))

    def on_limit(self, batch: int) -> TrainingAborted:
        return BatchLimitReached(str(batch))

    def frames(self, batch: int = -1) -> list[Frame]:
        table, summary = self.batches[batch]
        return list(summary.frames(table))


class Gain(nn.Module):
    """x -> gain * x, with the gain a plain attribute."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


def model_of(*modules: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(modules or (nn.Linear(4, 4), Gain(), nn.Linear(4, 2))))


def first_weight(model: nn.Sequential) -> Tensor:
    weight = model[0].weight
    assert isinstance(weight, Tensor)
    return weight.detach()


_detectors: list[Detector] = []


UNHURRIED = {"RANKWATCH_CLOSEUP": "60"}
"""A close-up may take two seconds of wall time, which other processes may take away."""


def watched(model: nn.Module, **options: Any) -> tuple[Detector, Notebook]:
    notebook = Notebook()
    style = {key: options.pop(key) for key in ("count_all", "judge_traced", "sends_at_once") if key in options}
    _detectors.append(Detector(model, resolve(UNHURRIED, **options), notebook, **style))
    notebook.detector = _detectors[-1]
    return _detectors[-1], notebook


def unwatch() -> None:
    """Removes the hooks of all detectors that ``watched`` made."""
    while _detectors:
        _detectors.pop().remove()


def ones() -> Tensor:
    return torch.ones(3, 4)
