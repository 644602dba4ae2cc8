"""A rank that trains until a signal comes; then it saves and ends well. ``signalled.py FOLDER``: what came is a file there.

``signalled.py FOLDER begun`` prints this when it has begun, and ends by SIGTERM alone.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

FOLDER = Path(sys.argv[1])
GOT = FOLDER / f"signals-{os.environ.get('RANK', '0')}"


def take(number: int, frame: FrameType | None) -> None:
    with GOT.open("a") as got:
        got.write(f"{number}\n")


def has_got(*numbers: int) -> bool:
    return GOT.exists() and any(str(number) in GOT.read_text().split() for number in numbers)


for one in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGSEGV, signal.SIGINT}:
    signal.signal(one, take)
if sys.argv[2:]:
    print(sys.argv[2], flush=True)
    while not has_got(signal.SIGTERM):
        time.sleep(0.01)
    sys.exit()

import torch  # noqa: E402

import rankwatch  # noqa: E402

model = torch.nn.Linear(4, 1)
with rankwatch.watch(model):
    while not has_got(signal.SIGUSR1, signal.SIGUSR2):
        model(torch.ones(2, 4)).sum().backward()
        time.sleep(0.01)
        (FOLDER / "trains").touch()
    torch.save(model.state_dict(), FOLDER / "saved.pt")
