"""A training that loses a node, and goes on with the other one: ``elastic.py FOLDER`` starts two of torchrun's agents with two
ranks each. Before step LOST the second node is told to leave; the ranks of the first one start again from the last checkpoint."""

from __future__ import annotations

import os
import signal
import socket
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.run
from torch import nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

import rankwatch

sys.path.append(str(Path(__file__).parents[2]))

from ports import free_port

STEPS, LOST, SAVES = 200, 110, 20


def start(folder: str) -> int:
    """Forks both agents, so that they meet in the first rendezvous."""
    port = free_port()
    arguments = [
        *("--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "3", "--monitor-interval", "0.1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job", "--local-addr", "127.0.0.1"),
        *("--rdzv-conf", "last_call_timeout=3,keep_alive_interval=4,heartbeat_timeout=10"),
        *(__file__, folder),
    ]
    first, second = become_agent(arguments), 0
    while socket.socket().connect_ex(("127.0.0.1", port)):  # the first agent has the store: it must be the one that lives
        pass
    os.environ["MORTAL"] = "1"
    second = become_agent(arguments)
    codes = [os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1]) for agent in (first, second)]
    return codes[0]


def become_agent(arguments: list[str]) -> int:
    agent = os.fork()
    if not agent:
        torch.distributed.run.main(arguments)
        os._exit(0)
    return agent


def train(folder: Path) -> None:
    warnings.simplefilter("ignore")
    # The agent's store outlives a restart, and torch 2.13 reads from it the addresses of processes that have ended.
    store, number, ranks = next(rendezvous("env://"))
    restart = PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    dist.init_process_group("gloo", store=restart, rank=number, world_size=ranks)
    rank, checkpoint = dist.get_rank(), folder / "checkpoint"
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)))
    rankwatch.watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = 0
    if checkpoint.exists():
        kept = torch.load(checkpoint)
        model.module.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        first = kept["step"]
    for step in range(first, STEPS):
        if step == LOST and "MORTAL" in os.environ:
            os.kill(os.getppid(), signal.SIGTERM)
            signal.pause()
        x = torch.randn(4, 8)
        (model(x) - x[:, :4].sin()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % SAVES == SAVES - 1 and rank == 0:
            kept = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(kept, folder / "new")
            (folder / "new").replace(checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(Path(sys.argv[1]))
    else:
        sys.exit(start(sys.argv[1]))
