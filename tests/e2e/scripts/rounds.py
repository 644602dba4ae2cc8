"""A training that torchrun's agents launch several times: ``rounds.py HOW FOLDER`` starts the agents, each with one rank.

In the first round, rank 1 dies before it watches, once all others do. In the second one it is the first to watch, and its data
goes bad: all ranks of that round are to stop.

``c10d``: two agents; ``given``: with one ``RANKWATCH_START`` for both rounds; ``alone``: without a store of torchrun's;
``static``: a static rendezvous, in which rank 0 lives on and waits for the next rank 1; ``more``: a third agent comes with the
second round; ``replaced``: the agent of rank 1 ends with its rank, and another one takes its place; ``gone``: in the second
round the store does not answer rank 0 any more; ``scaled``: one agent, then three, of which one dies, then the other two.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.run
from torch import nn

import rankwatch

sys.path.append(str(Path(__file__).parents[2]))

from ports import free_port

STEPS, BAD = 400, 5


def start(how: str, folder: Path) -> None:
    """Forks the agents; further ones once the first round is over."""
    port = free_port()
    rdzv = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job"]
    if how == "static":
        rdzv = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    conf = ["--rdzv-conf", "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"] if how != "static" else []
    nodes = {"more": "2:3", "scaled": "1:3"}.get(how, "2")
    if how == "given":
        os.environ["RANKWATCH_START"] = "42"
    if how in ("alone", "more", "replaced", "scaled"):  # with that store, torch 2.13 tells a later agent no address
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    agents = []
    for number in range(3 if how in ("more", "replaced", "scaled") else 2):
        if number == 2 and how != "scaled":
            wait_for(folder / "died")
        if number and how == "scaled":
            wait_for(folder / "watched-0")
        arguments = [*("--nnodes", nodes, "--nproc-per-node", "1", "--monitor-interval", "0.1"), *rdzv, *conf]
        restarts = "0" if how == "static" and number == 0 else "1"
        arguments += ["--max-restarts", restarts, "--local-addr", "127.0.0.1"]
        arguments += ["--node-rank", str(number)] if how == "static" else []
        agents.append(os.fork())
        if not agents[-1]:
            torch.distributed.run.main([*arguments, __file__, how, str(folder)])
            os._exit(0)
        if number == 0:
            wait_for_store(port)  # which the first agent has
    left = set(agents)
    while len(left) > (1 if how == "scaled" else 0):  # the last one would wait for others for ever
        left.discard(os.wait()[0])
    for agent in left:
        os.kill(agent, signal.SIGKILL)


def wait_for_store(port: int) -> None:
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.01)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def train(how: str, folder: Path) -> None:
    warnings.simplefilter("ignore")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_first = not (folder / "died").exists()
    if how == "scaled" and is_first:
        rankwatch.watch(nn.Linear(4, 1))
        (folder / f"watched-{rank}").touch()
        while ranks < 3:  # until the next round begins
            time.sleep(0.1)
        wait_for(folder / "watched-1")
        wait_for(folder / "watched-2")
    if is_first and rank == (2 if how == "scaled" else 1):
        wait_for(folder / "watched-0")
        (folder / "died").touch()
        if how in ("replaced", "scaled"):
            os.kill(os.getppid(), signal.SIGKILL)
        sys.exit(3)
    if is_first and how == "scaled":
        sys.exit(3)
    if not is_first and rank != 1:
        wait_for(folder / "watched-1")
    if not is_first and rank == 0 and how == "gone":
        os.kill(os.getppid(), signal.SIGSTOP)
    torch.manual_seed(rank)
    model = nn.Linear(4, 1)
    rankwatch.watch(model)
    (folder / f"watched-{rank}").touch()
    if how == "gone":
        os.kill(os.getppid(), signal.SIGCONT)
    # Not the agents' store, from which torch 2.13 reads the addresses of processes that have ended.
    file = folder / f"{'first' if is_first or how == 'static' else 'second'}-{os.environ['MASTER_PORT']}"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        x = torch.randn(4, 4)
        if rank == 1 and step == BAD:
            x[0] = torch.nan
        model(x).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    (folder / f"trained-{rank}").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    (train if "RANK" in os.environ else start)(sys.argv[1], Path(sys.argv[2]))
