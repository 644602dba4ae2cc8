"""An exception of ours that ends a training is printed without the frames of this package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import rankwatch
from jobs import environment

SCRIPT = """
import rankwatch, torch
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
rankwatch.watch(model, closeup=0)

def step():
    model(torch.full((2, 4), 3e38) * 10)

step()
"""


def test_the_traceback_ends_in_the_users_code_and_torch() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment(), capture_output=True, text=True)
    assert done.returncode == 77, done.stderr
    trace = done.stderr[done.stderr.index("Traceback") :]
    assert 'File "<string>", line 7, in step' in trace
    assert str(Path(rankwatch.__file__).parent) not in trace
    assert trace.splitlines()[-1].startswith("rankwatch.errors.OverflowDetected: rank 0 of 1")
