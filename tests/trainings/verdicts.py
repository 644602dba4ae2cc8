"""Runs hostile trainings, and prints what is said beside what is true: ``python -m trainings.verdicts [NAME ...]``."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from dataclasses import dataclass

import torch

from notebook import unwatch, watched
from rankwatch.api import registry
from rankwatch.errors import TrainingAborted
from rankwatch.shared.types.tuning import NO_CHANGE, Tuning
from rankwatch.shared.words.cause import classify
from trainings.alone import HOSTILE
from trainings.case import Case
from trainings.truths import Trip


@dataclass(frozen=True)
class Said:
    """What a verdict said."""

    batch: int
    module: str
    cause: str
    state: str
    label: str
    sentences: str
    tripped: bool = True

    def __str__(self) -> str:
        if not self.tripped:
            return f"no trip {self.sentences}"
        return f"{self.batch} {self.module or '(root)'} {self.label} {self.state} {self.cause}: {self.sentences}"


def said(case: Case[Trip], tuning: Tuning = NO_CHANGE) -> Said:
    """Trains, and returns what the watch found; the training itself goes on as it would without one."""
    training = case.make()
    detector, notebook = watched(training.root, **case.options)
    detector.tune(tuning)
    registry.remember(detector)  # type: ignore[arg-type]  # detect_overflow finds it there
    try:
        for number in range(case.batches):
            training.batch(number)
    except TrainingAborted:
        pass
    finally:
        unwatch()
        registry.forget(detector)  # type: ignore[arg-type]
    if not notebook.trips:
        noticed = " ".join(f"[{n.kind.name} {n.module}.{n.label or n.why}]" for n in notebook.notices)
        return Said(-1, "", "", "", "", f"{noticed} {detector.fault}".strip(), tripped=False)
    trip = notebook.trips[0]
    cause, sentences = classify(trip)
    since = f" [bad since {trip.bad_since}]" if getattr(trip, "bad_since", -1) >= 0 else ""
    culprit = trip.culprit
    module, state = trip.frame.spec.module, culprit.state.name.lower()
    return Said(trip.position.batch, module, cause.value, state, culprit.label, sentences + since)


def judged(truth: Trip, found: Said) -> str:
    """``right``, or ``partial`` where only the cause or a sentence is not as it should be, or ``wrong``."""
    if truth.notice:
        return "right" if not found.tripped and truth.notice in found.sentences else "wrong"
    if not found.tripped:
        return "wrong"
    there = found.batch in truth.batch and found.module in truth.module and found.label.startswith(truth.label)
    false = any(words in found.sentences for words in truth.never)
    if not there or false:
        return "wrong"
    complete = all(words in found.sentences for words in truth.says)
    return "right" if complete and found.cause in truth.cause and found.state in truth.state else "partial"


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    counts: dict[str, int] = {}
    for name in names or HOSTILE:
        case, start = HOSTILE[name], time.perf_counter()
        try:
            found = said(case)
            how, text = judged(case.truth, found), str(found)
        except Exception as error:  # noqa: BLE001  the table shows it
            how, text = "wrong", f"the training failed: {error!r}"
        counts[how] = counts.get(how, 0) + 1
        print(
            f"{how:8}{name}  ({time.perf_counter() - start:.2f} s)\n        true: {case.truth}\n        said: {text}",
            flush=True,
        )
    print(counts)


if __name__ == "__main__":
    main(sys.argv[1:])
