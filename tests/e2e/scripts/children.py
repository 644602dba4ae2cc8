"""A rank whose children inherit its environment: ``children.py FILE SCENARIO``. FILE takes what each process says of itself.

``during``: a child trains within the rank's own watch, and overflows. ``exec``: the rank replaces itself by another program while
it is watched. ``nested``: the rank runs a training under a collector of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from torch import nn

import rankwatch

FILE, SCENARIO = sys.argv[1:]


def say(text: str) -> None:
    with open(FILE, "a") as file:
        file.write(text + "\n")


def start_child() -> None:
    child = subprocess.run([sys.executable, __file__, FILE, "child"], capture_output=True, text=True, check=False)
    say(f"child {child.returncode}: {[line for line in child.stderr.splitlines() if line.startswith('rankwatch')]}")


def train(value: float) -> None:
    model = nn.Linear(2, 2)
    with rankwatch.watch(model) as watch:
        say(f"{SCENARIO} {watch.is_connected}")
        for _ in range(3):
            model(torch.full((1, 2), value)).sum().backward()
        if SCENARIO == "during":
            start_child()


if SCENARIO == "nested":
    inner = [sys.executable, "-m", "rankwatch_monitor", "run", "--runs-dir", f"{FILE}.runs", "--job", "inner", "--"]
    subprocess.run([*inner, sys.executable, __file__, FILE, "inner"], check=True)
if SCENARIO == "exec":
    rankwatch.watch(nn.Linear(2, 2))
    os.execv(sys.executable, [sys.executable, __file__, FILE, "executed"])
train(float("inf") if SCENARIO == "child" else 1.0)
