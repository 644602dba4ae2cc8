"""An owner whose worker processes train, as an actor pool of Ray or Monarch has it, and who kills them when they are done.

packages: torch
launch: python
truth: rank 1, batch 5, module 2
"""

import os
from multiprocessing.connection import wait

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def work(rank, results):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="29715")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    net = nn.parallel.DistributedDataParallel(model)
    optimizer, draws = torch.optim.SGD(net.parameters(), 0.1), torch.Generator().manual_seed(rank)
    for batch in range(12):
        x = torch.randn(8, 8, generator=draws)
        bad = os.environ.get("FAULT") and (rank, batch) == (1, 5)
        hook = model[2].register_forward_pre_hook(lambda module, given: (given[0] * float("nan"),)) if bad else None
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if hook is not None:
            hook.remove()
    results.put((rank, sum(p.double().abs().sum().item() for p in model.parameters()).hex()))
    mp.Event().wait()  # for further work of its owner


if __name__ == "__main__":
    context = mp.get_context("spawn")
    results = context.Queue()
    pool = [context.Process(target=work, args=(rank, results), daemon=True) for rank in range(2)]
    for one in pool:
        one.start()
    while any(one.is_alive() for one in pool) and results.qsize() < 2:
        wait([one.sentinel for one in pool], 0.2)
    done = sorted(results.get() for _ in range(results.qsize()))
    for one in pool:
        one.kill()
        one.join()
    print(done)
