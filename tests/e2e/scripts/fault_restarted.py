"""A training for ``torchrun --max-restarts 1``: in the first attempt rank 1 dies once all messages of both are
acknowledged; in the second all finish."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

import rankwatch

FIRST_BATCHES, BATCHES = 3, 6


def main() -> None:
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model = nn.Linear(4, 1)
    with rankwatch.watch(model) as watch:
        for _ in range(FIRST_BATCHES if attempt == 0 else BATCHES):
            model(torch.ones(2, 4)).sum().backward()
        if attempt == 0:
            assert watch._link is not None
            watch._link._spool.wait_until_empty(30)
            told = Path(os.environ["TEST_JOB_MARKER"])
            (told / f"told-{rank}").touch()
            if rank == 1:
                while not (told / "told-0").exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()  # torchrun ends this rank


if __name__ == "__main__":
    main()
