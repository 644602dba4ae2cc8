"""Collectives of several ranks: ``calls.py FOLDER NAME...`` calls what each name says, in a group of its own where it can.

Each rank writes to FOLDER how often each group was called, the digest, and the last calls, after each name. Nothing is watched.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

from rankwatch.measure.collectives import count_collectives
from rankwatch.measure.ledger import LEDGER
from rankwatch.shared.types.messages import Recount
from trainings.ranks import Net, flat, fully, split

Case = Callable[[Path], Any]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def group() -> Any:
    """A new one of all ranks."""
    return dist.new_group(list(range(dist.get_world_size())))


def rank() -> int:
    return dist.get_rank()


def values(count: int = 8) -> Tensor:
    return torch.ones(count)


def several(count: int = 8) -> list[Tensor]:
    return [values(count) for _ in range(dist.get_world_size())]


# --- alike on all ranks -----------------------------------------------------------------------------------------------


@case
def every_kind(folder: Path) -> None:
    size = dist.get_world_size()
    dist.all_reduce(values())
    dist.broadcast(values(), 1)
    dist.reduce(values(), 0)
    dist.all_gather(several(), values())
    dist.all_gather_into_tensor(values(8 * size), values())
    dist.reduce_scatter_tensor(values(), values(8 * size), op=dist.ReduceOp.MAX)
    dist.gather(values(), several() if rank() == 0 else None, 0)
    dist.scatter(values(), several() if rank() == 1 else None, 1)
    dist.barrier()
    dist.monitored_barrier()


@case
def one_line_for_each_rank(folder: Path) -> None:
    if rank() == 0:
        dist.broadcast(values(), 0)
    else:
        dist.broadcast(values(), 0)


@case
def subgroups(folder: Path) -> None:
    halves = [dist.new_group([one for one in range(dist.get_world_size()) if one % 2 == half]) for half in range(2)]
    for _ in range(2 + rank() % 2):
        dist.all_reduce(values(), group=halves[rank() % 2])


@case
def mesh(folder: Path) -> None:
    made = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for name in ("data", "tensor"):
        dist.all_reduce(values(), group=made[name].get_group())


@case
def objects(folder: Path) -> None:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, "x" * rank())
    dist.broadcast_object_list([rank()], 0)
    dist.gather_object("x" * rank(), found if rank() == 0 else None, 0)
    dist.scatter_object_list([None], found if rank() == 0 else None, 0)


def train(net: Any, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        net(torch.rand(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@case
def fsdp1(folder: Path) -> None:
    train(flat())


@case
def fsdp2(folder: Path) -> None:
    train(fully())


@case
def tensor_parallel(folder: Path) -> None:
    net = split(Net(), init_device_mesh("cpu", (dist.get_world_size(),)))
    train(net)
    dist.all_reduce(values())


class Exchanged(torch.autograd.Function):
    """A sequence that lies on all ranks, by heads: all to all, there and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        out = torch.empty_like(gradient)
        dist.all_to_all_single(out, gradient.contiguous())
        return out


exchanged: Any = Exchanged.apply


@case
def context_parallel(folder: Path) -> None:
    x = torch.rand(4, 8, requires_grad=True)
    for _ in range(2):
        exchanged(exchanged(x).tanh()).sum().backward()


@case
def uneven_experts(folder: Path) -> None:
    """As a mixture of experts: each rank sends as many rows to each other as its router says."""
    size, own = dist.get_world_size(), rank()
    given = [1 + own + other for other in range(size)]
    taken = torch.zeros(size, dtype=torch.int64)
    dist.all_to_all_single(taken, torch.tensor(given))
    dist.all_to_all_single(torch.zeros(int(taken.sum())), torch.zeros(sum(given)), taken.tolist(), given)


@case
def uneven_gathers(folder: Path) -> None:
    dist.all_gather(several(4), values(4))
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([rank()]))


@case
def ddp(folder: Path) -> None:
    """Its buffers are broadcast before each forward; one forward more on rank 0 has no backward."""
    net = DistributedDataParallel(Net(middle=nn.BatchNorm1d), broadcast_buffers=False)
    train(net)
    with net.no_sync():
        net(torch.rand(4, 8)).sum().backward()
    if rank() == 0:
        net(torch.rand(4, 8))
    net(torch.rand(4, 8)).sum().backward()


@case
def ddp_with_buffers(folder: Path) -> None:
    train(DistributedDataParallel(Net(middle=nn.BatchNorm1d)))


@case
def unused_parameters(folder: Path) -> None:
    net = Net()
    net.spare = nn.Linear(8, 8)
    train(DistributedDataParallel(net, find_unused_parameters=True))


@case
def joined(folder: Path) -> None:
    net = DistributedDataParallel(Net(middle=nn.BatchNorm1d), find_unused_parameters=True)
    with net.join():
        train(net, 2 + rank())


@case
def zero_redundancy(folder: Path) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net = DistributedDataParallel(Net())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    for _ in range(2):
        net(torch.rand(4, 8)).sum().backward()
        optimizer.step()


@case
def saved(folder: Path) -> None:
    dcp: Any = import_module("torch.distributed.checkpoint")
    net = fully()
    dcp.save(net.state_dict(), checkpoint_id=folder / "saved")
    dcp.load(net.state_dict(), checkpoint_id=folder / "saved")


@case
def saved_beside(folder: Path) -> None:
    """A thread saves in a group of its own, while the training goes on."""
    dcp: Any = import_module("torch.distributed.checkpoint")
    net, beside = fully(), group()
    future = dcp.async_save(net.state_dict(), checkpoint_id=folder / "beside", process_group=beside)
    train(net, 3)
    future.result()


@case
def later(folder: Path) -> None:
    works = [dist.barrier(async_op=True), dist.all_reduce(values(), async_op=True)]
    for work in works:
        work.wait()


@case
def coalesced(folder: Path) -> None:
    with dist.distributed_c10d._coalescing_manager():
        dist.all_reduce(values())
        dist.all_reduce(values(4))


@case
def pairs(folder: Path) -> None:
    """Nothing is counted, but one reduction."""
    dist.all_reduce(values())
    other = dist.get_world_size() - 1 - rank()
    sends = [dist.P2POp(dist.isend, values(), other), dist.P2POp(dist.irecv, values(), other)]
    for work in dist.batch_isend_irecv(sends):
        work.wait()
    if rank() == 0:
        dist.send(values(), 1)
    elif rank() == 1:
        dist.recv(values(), 0)


@case
def group_that_ends(folder: Path) -> None:
    passing = group()
    dist.all_reduce(values(), group=passing)
    dist.destroy_process_group(passing)
    del passing
    gc.collect()


@case
def made_again(folder: Path) -> None:
    """The default group, with its name and its members, is another one."""
    own, size = rank(), dist.get_world_size()
    dist.all_reduce(values())
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=own, world_size=size)
    dist.all_reduce(values())


# --- unequal: gloo would end the processes of some of these ----------------------------------------------------------


def silent() -> Any:
    """A group of all ranks in which nothing is sent, and nobody waits."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers it

    return dist.new_group(list(range(dist.get_world_size())), backend="fake")


@case
def one_barrier_more(folder: Path) -> None:
    own = silent()
    dist.all_reduce(values(), group=own)
    if rank() == 0:
        dist.barrier(group=own)
    dist.all_reduce(values(), group=own)


@case
def one_more_in_c(folder: Path) -> None:
    """As a layer that is tensor parallel calls it."""
    own = silent()
    dist.all_reduce(values(), group=own)
    if rank() == 0:
        torch.ops._c10d_functional.all_reduce(values(), "sum", own.group_name)
    dist.barrier(group=own)


@case
def another_kind(folder: Path) -> None:
    own = silent()
    dist.all_reduce(values(), group=own)
    if rank() == 0:
        dist.broadcast(values(), 0, group=own)
    else:
        dist.all_reduce(values(), group=own)


@case
def another_size(folder: Path) -> None:
    dist.all_reduce(values(8 + rank()), group=silent())


@case
def another_dtype(folder: Path) -> None:
    dist.all_reduce(values().double() if rank() else values(), group=silent())


@case
def another_op(folder: Path) -> None:
    dist.all_reduce(values(), op=dist.ReduceOp.MAX if rank() else dist.ReduceOp.SUM, group=silent())


@case
def another_root(folder: Path) -> None:
    dist.broadcast(values(), rank(), group=silent())


@case
def another_order(folder: Path) -> None:
    own = silent()
    for count in (8, 4) if rank() else (4, 8):
        dist.all_reduce(values(count), group=own)


@case
def object_exchange(folder: Path) -> None:
    own = silent()
    if rank():
        dist.all_reduce(values(), group=own)
    else:
        dist.all_gather_object([None] * dist.get_world_size(), 1, own)


def note(folder: Path, name: str) -> None:
    found = {}
    for calls in LEDGER.groups():
        count = calls.count()
        told = LEDGER.recounted(Recount(1, calls.key, max(1, count.calls - 60)))
        lines = [f"{one.what} at {one.site}" for one in told.calls]
        found[calls.key] = {
            "name": told.name,
            "size": told.size,
            "calls": count.calls,
            "digest": count.digest,
            "last": lines,
        }
    (folder / f"{name}-{rank()}.json").write_text(json.dumps(found))


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    count_collectives()
    dist.init_process_group("gloo")
    folder, *names = sys.argv[1:]
    for name in names:
        CASES[name](Path(folder))
        note(Path(folder), name)
    os._exit(0)


if __name__ == "__main__":
    main()
