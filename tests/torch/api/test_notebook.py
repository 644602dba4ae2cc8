"""Cells of a notebook that are run again, in a real interactive session of Python."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jobs import environment

BEGIN = """
import collections, functools, sys, types
import rankwatch, torch
from rankwatch.api.registry import open_watches
from torch import nn

def watched(case):
    print(f"{case}:", sorted(type(watch.root).__name__ for watch in open_watches()))

class A(nn.Linear): pass

class B(nn.Linear): pass

class Trainer: pass

class Slots: __slots__ = ("model",)

class HalfMade(nn.Module):
    def __init__(self): pass

class Lazy(dict):
    def values(self): raise RuntimeError("not yet")

class Shell: __module__ = "IPython.core.interactiveshell"

def slots(model):
    held = Slots()
    held.model = model
    return held

def module(model):
    sys.modules["train"] = types.ModuleType("train")
    vars(sys.modules["train"]).update(model=model, __file__="/home/me/train.py")

def generator(model):
    def batches(model):
        yield 1
        model(torch.ones(1, 1))
    made = batches(model)
    next(made)
    return made

def held_by(hold):
    model = A(1, 1)
    rankwatch.watch(model)
    return hold(model)

def both():
    a, b = A(1, 1), B(1, 1)
    rankwatch.watch(a)
    rankwatch.watch(b)
    return a, b

"""
CELLS = {
    "made anew": ("model = A(1, 1); watch = rankwatch.watch(model)\nmodel = B(1, 1); watch = rankwatch.watch(model)", ["B"]),
    "shown": (
        "model = A(1, 1); watch = rankwatch.watch(model)\nmodel\nmodel = B(1, 1); watch = rankwatch.watch(model)",
        ["B"],
    ),
    "two": ("a, b = A(1, 1), B(1, 1)\nwatches = [rankwatch.watch(a), rankwatch.watch(b)]", ["A", "B"]),
    "in a function": ("models = both()", ["A", "B"]),
    "wrapped": (
        "model = A(1, 1); w = rankwatch.watch(model)\nmodel = nn.Sequential(model)\nb = B(1, 1); v = rankwatch.watch(b)",
        ["A", "B"],
    ),
    "in an attribute": (
        "trainer = Trainer(); trainer.models = {'policy': A(1, 1)}; w = rankwatch.watch(trainer.models['policy'])\n"
        "b = B(1, 1); v = rankwatch.watch(b)",
        ["A", "B"],
    ),
    "in a closure": (
        "step = (lambda model: [rankwatch.watch(model), lambda: model])(A(1, 1))[1]\nb = B(1, 1); v = rankwatch.watch(b)",
        ["A", "B"],
    ),
    "in a list of a module": (
        "net = nn.Sequential(); net.ema = [A(1, 1)]; w = rankwatch.watch(net.ema[0])\nb = B(1, 1); v = rankwatch.watch(b)",
        ["A", "B"],
    ),
    "deleted beside much data": (
        "data = [[float(j) for j in range(2000)] for i in range(150)]\n"
        "net = nn.Sequential(*[nn.Linear(1, 1) for i in range(3000)])\n"
        "model = A(1, 1); w = rankwatch.watch(model)\ndel model\nb = B(1, 1); v = rankwatch.watch(b); del data, net",
        ["B"],
    ),
    "deleted": ("model = A(1, 1); w = rankwatch.watch(model)\ndel model\nb = B(1, 1); v = rankwatch.watch(b)", ["B"]),
}
HELD_BY = {
    "slots": "slots",
    "a queue": "lambda model: collections.deque([model])",
    "a partial function": "lambda model: functools.partial(print, model)",
    "a default": "lambda model: lambda held=model: held",
    "a class": "lambda model: type('Config', (), {'__module__': '__main__', 'model': model})",
    "a module of the user's": "module",
    "a generator": "generator",
    "a dict with code of its own": "lambda model: Lazy(model=model)",
    "a list beside a module that is half made": "lambda model: [HalfMade(), model]",
}
AND_ANOTHER = "b = B(1, 1); v = rankwatch.watch(b)"
CELLS |= {f"held by {name}": (f"held = held_by({hold}); {AND_ANOTHER}", ["A", "B"]) for name, hold in HELD_BY.items()}
CELLS["held by the notebook itself"] = (
    f"shell = Shell(); shell.result = A(1, 1); shell.names = globals(); w = rankwatch.watch(shell.result)\n{AND_ANOTHER}",
    ["B"],
)


UNDO = """
for one in list(open_watches()): one.close()

model = watch = watches = a = b = models = w = v = trainer = step = held = shell = None
_ = sys.modules.pop('train', None)
"""


def session(*flags: str, cells: str) -> str:
    done = subprocess.run(
        [sys.executable, *flags], input=cells, env=environment(), capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.fixture(scope="module")
def seen() -> str:
    """What is watched after each case, in one session: loading torch takes longer than all of them."""
    return session(
        "-i", "-q", cells=BEGIN + "".join(f"{cell}\nwatched({name!r})\n{UNDO}" for name, (cell, _) in CELLS.items())
    )


@pytest.mark.parametrize("name", CELLS)
def test_what_is_watched_after_the_cells(name: str, seen: str) -> None:
    assert f"{name}: {CELLS[name][1]}\n" in seen


@pytest.mark.slow
def test_a_script_is_no_notebook() -> None:
    """There a model may be held in ways that are not looked for."""
    script = (
        "held = [A(1, 1)]\nrankwatch.watch(held[0])\nheld = iter(held)\nb = B(1, 1)\nrankwatch.watch(b)\nwatched('script')\n"
    )
    assert "script: ['A', 'B']\n" in session("-", cells=BEGIN + script)
