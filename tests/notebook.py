"""A detector whose observer stores everything in lists, and models for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from rankwatch.errors import BatchLimitReached, OverflowDetected, TrainingAborted
from rankwatch.hook.detector import Detector
from rankwatch.judge.outside import Outside
from rankwatch.judge.reporter import BadReading
from rankwatch.rerun.capsule.capsule import CapsuleRules
from rankwatch.shared.types.closeup import CloseUp
from rankwatch.shared.types.config import resolve
from rankwatch.shared.types.fingerprint import Fingerprint, FingerprintTable
from rankwatch.shared.types.frame import BatchSummary, Frame, FrameTable, Position
from rankwatch.shared.types.messages import Counts
from rankwatch.shared.types.notice import Notice
from rankwatch.shared.types.trip import Trip
from trainings.parts import multiplied


class Notebook:
    """An observer that stores everything."""

    def __init__(self) -> None:
        self.sent: list[tuple[FrameTable, BatchSummary]] = []
        self.detector: Detector | None = None
        self.notices: list[Notice] = []
        self.traces: list[list[Frame]] = []
        self.trips: list[Trip] = []
        self.left_out: list[Trip] = []
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

    @property
    def trip(self) -> Trip:
        """The only trip."""
        (trip,) = self.trips
        return trip

    def trip_of(self, call: Callable[..., object], *args: Any) -> Trip:
        """The only trip, which this call raises."""
        try:
            call(*args)
        except OverflowDetected:
            return self.trip
        raise AssertionError("nothing tripped")

    def trip_by_the_end(self, call: Callable[..., object], *args: Any) -> Trip:
        """The only trip, which this call raises, or which is told as the watch ends after it."""
        assert self.detector is not None
        with suppress(OverflowDetected):
            call(*args)
        self.detector.remove()
        return self.trip

    def calls(self) -> Counts:
        return ()

    def on_batch(self, table: FrameTable, summary: BatchSummary, calls: Counts) -> None:
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

    def on_left_out(self, trip: Trip) -> None:
        self.left_out.append(trip)

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


class Fragile(Gain):
    """Raises an error of the user's own where the gain is negative."""

    def forward(self, x: Tensor) -> Tensor:
        if self.gain < 0:
            raise ValueError("the user's own")
        return super().forward(x)


def model_of(*modules: nn.Module) -> Any:
    """Modules one after another; typed as anything, since their attributes are those of many classes."""
    torch.manual_seed(0)
    return nn.Sequential(*(modules or (nn.Linear(4, 4), Gain(), nn.Linear(4, 2))))


class ScaledTraining:
    """A training with a real loss scaler; the test chooses the batches with bad gradients."""

    def __init__(self, *, init_scale: float = 1024.0, **options: Any) -> None:
        self.model, self.detector, self.notebook = watching(**options)
        self.optimizer = sgd(self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
        self.scales: list[float] = []
        """The loss scale of each batch's backward."""

    def step(self, scaled: Tensor) -> None:
        self.scales.append(self.scaler.get_scale())
        scaled.backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def batch(self, *, bad: bool) -> None:
        """The loss is finite, also where its gradient is not."""
        self.step(self.scaler.scale(multiplied(self.model(ones()), torch.inf if bad else 1.0).sum()))


def first_weight(model: Any) -> Tensor:
    weight: Tensor = model[0].weight
    return weight.detach()


_detectors: list[Detector] = []

OUTSIDE = Outside()
"""What runs outside of all models."""


UNHURRIED = {"RANKWATCH_CLOSEUP": "60", "RANKWATCH_BUDGET": "0"}
"""A close-up may take two seconds of wall time, which other processes may take away; a budget may leave batches out."""


def watched(model: nn.Module, **options: Any) -> tuple[Detector, Notebook]:
    notebook = Notebook()
    style = {key: options.pop(key) for key in ("count_all", "judge_traced", "sends_at_once") if key in options}
    _detectors.append(Detector(model, resolve(UNHURRIED, **options), notebook, **style, outside=OUTSIDE))
    notebook.detector = _detectors[-1]
    return _detectors[-1], notebook


def watching(*modules: nn.Module, **options: Any) -> tuple[Any, Detector, Notebook]:
    """A model of these modules, and its watch."""
    model = model_of(*modules)
    return model, *watched(model, **options)


def unwatch() -> None:
    """Removes the hooks of all detectors that ``watched`` made."""
    while _detectors:
        _detectors.pop().remove()


def ones() -> Tensor:
    return torch.ones(3, 4)


def sgd(model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr)


def learn(loss: Tensor, *optimizers: torch.optim.Optimizer) -> None:
    """The backward of a loss, and a step of each optimizer."""
    loss.backward()
    take_step(*optimizers)


def take_step(*optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
