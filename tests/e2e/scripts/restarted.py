"""A DDP training for ``rankwatch run --max-restarts``: ``restarted.py WHAT FOLDER``; before step STOPS, WHAT happens to rank 1.

``killed``: at the first start alone; the next one goes on from the checkpoint of the last step. ``killed-always``: at each start.
``raises`` and ``overflows``: at each start. Each start writes a file with what it was told, in FOLDER.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, STOPS = 8, 4


def main(what: str, folder: Path) -> None:
    restart = int(os.environ["RANKWATCH_RESTART"])
    dist.init_process_group("gloo")
    rank, checkpoint = dist.get_rank(), folder / "checkpoint"
    first = int(checkpoint.read_text()) if checkpoint.exists() else 0
    if rank == 0:
        (folder / f"start-{restart}").write_text(f"{first} {os.environ.get('RANKWATCH_ACTION', '')}")
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(first, STEPS):
        loss = model(torch.randn(4, 4)).square().mean()
        if rank == 1 and step == STOPS:
            if what == "killed-always" or (what == "killed" and restart == 0):
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "raises":
                raise KeyError("planted")
            if what == "overflows":
                loss = (0 * loss).log()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and what == "killed":
            checkpoint.write_text(str(step + 1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
