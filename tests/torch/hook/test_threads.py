"""Several threads that train, evaluate and call parts of models, all at a time: nothing breaks, and no number changes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from collectors import until
from notebook import learn, model_of, ones, sgd, watched, watching
from rankwatch.hook import backwards, loss
from rankwatch.hook.compiled.entry import CompiledEntry
from rankwatch.hook.loss import versions_of

STEPS = 100


def evaluate(model: nn.Sequential) -> None:
    with torch.no_grad():
        model(ones())


def call_a_part(model: nn.Sequential) -> None:
    with torch.no_grad():
        model[0](ones())


def call_a_part_with_gradients(model: nn.Sequential) -> None:
    model[0](ones())


def train(model: nn.Module) -> None:
    optimizer = sgd(model)
    for _ in range(STEPS):
        learn(model(ones()).square().mean(), optimizer)


@pytest.fixture(autouse=True)
def _many_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@contextmanager
def repeated(call: Callable[[], None]) -> Iterator[None]:
    """Calls it in another thread, again and again."""
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            call()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("options", [{}, {"check": "batch", "gradients": True, "fingerprints": 1}], ids=str)
@pytest.mark.parametrize("call", [evaluate, call_a_part, call_a_part_with_gradients])
def test_another_thread_calls_the_model_between_its_forwards(
    call: Callable[[nn.Sequential], None], options: dict[str, object]
) -> None:
    torch.manual_seed(0)
    alone = model_of()
    train(alone)
    model, detector, notebook = watching(**options)
    with repeated(lambda: call(model)):
        train(model)
    assert (detector.fault, notebook.trips, detector._doors._inside) == ("", [], 0)
    assert all(map(torch.equal, alone.parameters(), model.parameters()))
    before = detector.position.batch
    train(model)
    assert detector.position.batch == before + STEPS
    if call is not evaluate:
        assert before == STEPS - 1


def test_models_that_are_trained_each_in_its_own_thread() -> None:
    """A backward that replaces a gradient while another thread reads it ends the process."""
    models = [model_of() for _ in range(3)]
    detectors = [watched(model, gradients=True)[0] for model in models]
    threads = [threading.Thread(target=train, args=[model]) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [(detector.position.batch, detector.fault) for detector in detectors] == [(STEPS - 1, "")] * 3


def test_gradients_are_read_in_the_thread_that_trains_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = model_of(), model_of()
    _, notebook = watched(model)
    read = set()

    def note(modules: Any) -> list[tuple[int, int] | None]:
        read.add(threading.get_ident())
        return versions_of(modules)

    for module in (loss, backwards):
        monkeypatch.setattr(module, "versions_of", note)
    with repeated(lambda: other(ones()).sum().backward()):
        train(model)
    assert read == {threading.get_ident()}
    labels = [frame.spec.readings[0].label for batch in range(STEPS) for frame in notebook.frames(batch)]
    assert labels.count("loss") == STEPS


def test_a_hook_that_was_ended_by_an_interruption_holds_no_other_thread_up_for_good() -> None:
    model, detector, _ = watching()
    train(model)
    detector._doors._inside = threading.get_ident()
    thread = threading.Thread(target=train, args=[model])
    thread.start()
    thread.join()
    assert (detector.position.batch, detector._doors._inside, detector.fault) == (2 * STEPS - 1, 0, "")


def test_a_model_that_is_trained_while_its_detector_is_made_is_watched_once_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook whose training runs in the background."""
    model = model_of()
    optimizer = sgd(model)

    def step() -> None:
        learn(model(ones()).sum(), optimizer)

    def waits(thread: threading.Thread) -> bool:
        frame = sys._current_frames().get(thread.ident or 0)
        while frame is not None and frame.f_code.co_name != "_await_turn":
            frame = frame.f_back
        return frame is not None

    def made(*args: Any, **kwargs: Any) -> CompiledEntry:  # the hooks are there before it is
        threads.append(threading.Thread(target=step))
        threads[0].start()
        until(lambda: waits(threads[0]) or not threads[0].is_alive())
        return CompiledEntry(*args, **kwargs)

    threads = list[threading.Thread]()
    monkeypatch.setattr("rankwatch.hook.detector.CompiledEntry", made)
    detector, notebook = watched(model)
    threads[0].join()
    assert notebook.faults == []
    step()
    assert detector.position.batch >= 0
