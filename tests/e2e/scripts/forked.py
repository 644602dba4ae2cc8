"""Runs a script as torchrun does on one node, ``forked.py RANKS SCRIPT ...``, but imports torch once: the ranks are forked.

For tests that do not depend on torchrun: a job takes a third of torchrun's time, and less where a nursery forks it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import runpy
import signal
import sys
from pathlib import Path

import torch._dynamo  # noqa: F401  each rank would import it with its first optimizer
import torch.distributed as dist

import rankwatch.api.watch_object  # noqa: F401

sys.path.append(str(Path(__file__).parents[2]))

from ports import free_port

_destroy = dist.destroy_process_group


def leave_groups(group: dist.ProcessGroup | None = None) -> None:
    """``destroy_process_group``, but no gloo group is destroyed before its process ends.

    Where a DDP model drops a group last, the group's destructor waits for its threads, and holds the interpreter's lock, which
    such a thread may need to free its last collective: a deadlock (pytorch#56297; torch 2.13, one of about 95 trainings at a
    load of 8).
    """
    for each in dist.distributed_c10d._world.pg_map:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
    _destroy(group)


def start(rank: int, world_size: int, port: int) -> int:
    """Forks a rank; does not return in the rank's process."""
    child = os.fork()
    if child:
        return child
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    sys.argv[:] = sys.argv[2:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    dist.destroy_process_group = leave_groups
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


def main() -> int:
    """When a rank fails, terminates the others and returns 1, like torchrun."""
    port = free_port()
    world_size = int(sys.argv[1])
    running = [start(rank, world_size, port) for rank in range(world_size)]
    code = 0
    while running:
        ended, status = os.wait()
        running.remove(ended)
        if status and not code:
            code = 1
            for rank in running:
                os.kill(rank, signal.SIGTERM)
    return code


if __name__ == "__main__":
    gc.freeze()  # the ranks do not search the shared objects for garbage
    sys.exit(main())
