"""Ranks that train command by command. Each is forked from this process, which has imported torch.

The socket whose descriptor is the argument takes requests: ``["start", environment]`` with the descriptors of the rank's
control socket, stdout and stderr (the answer is its process id), and ``["wait", pid]`` (the answer is its exit code).
A rank takes ``[method, arguments...]`` of ``Rank`` from its control socket, line by line, and answers with the method's result.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo.config  # watch() needs this module, and each rank would import it by itself
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import rankwatch

HOUR = 3600


class Control:
    """A rank's connection to its test."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._lines, self._answers = self._socket.makefile("r"), self._socket.makefile("w")

    def __iter__(self) -> Iterator[list[Any]]:
        return (json.loads(line) for line in self._lines)

    def next_word(self) -> None:
        """Waits for any command."""
        self._lines.readline()

    def say(self, answer: object) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def close(self) -> None:
        for each in (self._lines, self._answers, self._socket):
            each.close()

    def has_word(self, within: float) -> bool:
        return bool(select.select([self._socket], [], [], within)[0])


class Gate(nn.Module):
    """x -> gain * x, as soon as the gate is open. Frame 1 of each batch."""

    def __init__(self, control: Control) -> None:
        super().__init__()
        self.control = control
        self.is_open = True
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_open:
            self.control.say("holding")
            self.control.next_word()
        return x * self.gain


class Model(nn.Module):
    def __init__(self, control: Control) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.gate = Gate(control)
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.gate(self.first(x)))
        return out


class Samples(Dataset[tuple[Tensor, int]]):
    """Samples that a worker makes, without or with the model; each with the worker's process id."""

    def __init__(self, model: Model | None) -> None:
        self.model = model

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = torch.ones(2, 4) * index
        return (x if self.model is None else self.model(x).detach().expand(2, 4)), os.getpid()


class Rank:
    def __init__(self, control: Control) -> None:
        self.control = control
        torch.manual_seed(0)
        self.model = Model(control)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.done = 0
        """Batches trained."""

    def run(self) -> None:
        if "FAULT_WAITS" in os.environ:
            self.control.say("waiting")
            self.control.next_word()
        with rankwatch.watch(self.model) as self.watch:
            self.control.say("ready")
            for name, *arguments in self.control:
                if name == "close":
                    break
                self.control.say(getattr(self, name)(*arguments))

    # --- the commands of a test ------------------------------------------------------------------------------------------

    def batches(self, count: int) -> int:
        for _ in range(count):
            self._batch(torch.randn(2, 4))
        return self.done

    def train(self, pace: float = 0.002) -> int:
        """Trains until the next command comes."""
        while not self.control.has_word(pace):
            self.batches(1)
        self.control.next_word()
        return self.done

    def hold(self) -> int:
        """Answers ``holding`` in the middle of a forward; the next command continues the forward."""
        self.model.gate.is_open = False
        try:
            return self.batches(1)
        finally:
            self.model.gate.is_open = True

    def trip(self) -> int:
        self.model.gate.gain = float("inf")
        return self.batches(1)

    def save(self) -> int:
        """Answers ``holding`` in the middle of a save; the next command ends the save."""
        with rankwatch.hold():
            self.control.say("holding")
            self.control.next_word()
        return self.done

    def come_back(self) -> str:
        """Trains until the abort, closes the watch, and lives on until its deadline is over."""
        try:
            while True:
                self.batches(1)
        except rankwatch.TrainingAborted:
            self.watch.close()
        for thread in threading.enumerate():
            if thread.name == "rankwatch-deadline":
                thread.join()
        return "came back"

    def raise_the_abort(self) -> None:
        """Trains until the abort, which nobody catches, and which no ``with`` closes the watch for."""
        try:
            while True:
                self.batches(1)
        except rankwatch.TrainingAborted as error:
            sys.excepthook(type(error), error, error.__traceback__)

    def keep_interpreter(self, seconds: int) -> None:
        """Answers ``kept``, and keeps the GIL in C."""
        self.control.say("kept")
        ctypes.PyDLL(None).sleep(seconds)

    def keep_interpreter_in_abort(self, seconds: int) -> None:
        """Waits for the abort, and then keeps the GIL in C."""
        while not self.watch._order.reason:
            time.sleep(0.01)
        ctypes.PyDLL(None).sleep(seconds)

    def is_connected(self) -> bool:
        return self.watch.is_connected

    def settle(self) -> bool:
        """Waits until the collector has acknowledged all messages."""
        assert self.watch._link is not None
        return self.watch._link._spool.wait_until_empty(30)

    def break_hooks(self) -> None:
        self.watch._detector._recorder.call = _broken  # type: ignore[method-assign, union-attr]

    def jump(self, hours: float) -> None:
        """Sets the wall clock of this process."""
        true_time = time.time
        time.time = lambda: true_time() + hours * HOUR

    def load(self, with_model: bool) -> dict[str, Any]:
        """Trains on samples of two forked workers; returns how many made samples, and their exit codes."""
        samples = Samples(self.model if with_model else None)
        loader = DataLoader(samples, batch_size=None, num_workers=2, multiprocessing_context="fork")
        makers: set[int] = set()
        workers: list[Any] = []
        for x, maker in loader:
            workers = workers or multiprocessing.active_children()
            makers.add(maker)
            self._batch(x)
        for worker in workers:
            worker.join()
        return {"makers": len(makers - {os.getpid()}), "exit_codes": [worker.exitcode for worker in workers]}

    def leave_child(self) -> int:
        """Forks a process that does nothing until it is killed; returns its process id."""
        child = os.fork()
        if child == 0:
            self.control.close()
            while True:
                signal.pause()
        return child

    def _batch(self, x: Tensor) -> None:
        self.model(x).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1


def _broken(*arguments: object) -> Any:
    raise RuntimeError("planted")


def serve(requests: socket.socket) -> Control | None:
    """Forks ranks. Returns the control socket in each rank, and None in this process, once the test has ended."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, 1 << 16, 3)
        if not request:
            return None
        what, argument = json.loads(request)
        if what == "wait":
            requests.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(argument, 0)[1]))
            continue
        child = os.fork()
        if child == 0:
            requests.close()
            os.environ.update(argument)
            for stream, descriptor in enumerate(descriptors[1:], start=1):
                os.dup2(descriptor, stream)
                os.close(descriptor)
            return Control(descriptors[0])
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(b"%d" % child)


if __name__ == "__main__":
    gc.freeze()  # the ranks do not search the shared objects for garbage when they end
    control = serve(socket.socket(fileno=int(sys.argv[1])))
    if control is not None:
        Rank(control).run()
