"""A small DDP training with a planted fault: ``train.py SCENARIO``. The model is four blocks that square their input."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

import rankwatch

BATCHES = 12
FAULT_AT = 5
FAULTY_RANK = 1


class Square(nn.Module):
    """x -> gain * x * x: with a gain of 1e38 float32 overflows from |x| = 1.9 on."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * x * self.gain


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.square = Square()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.square(self.linear(x) + 2.0)
        return y / (1.0 + y.abs())  # inf becomes nan: nothing bad is swallowed on its way to the model's output


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Job:
    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.model = Model()
        self.wrapped = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.wrapped.parameters(), lr=1e-3)
        torch.manual_seed(self.rank)

    def step(self, batch: int) -> None:
        self.wrapped(torch.randn(4, 8)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def overflow_in(self, block: int) -> None:
        square = self.model.blocks[block].square
        assert isinstance(square, Square)
        square.gain = 1e38

    # --- scenarios: called before each batch --------------------------------------------------------------------------

    def healthy(self, batch: int) -> None:
        pass

    def overflow(self, batch: int) -> None:
        if batch == FAULT_AT and self.rank == FAULTY_RANK:
            self.overflow_in(block=2)

    def overflow_when_told(self, batch: int) -> None:
        """Trains until the file that FAULT_FILE names exists, then overflows."""
        if batch != FAULT_AT:
            return
        told = torch.zeros(1)
        while not told.item():
            self.step(batch)
            time.sleep(0.01)
            told[0] = Path(os.environ["FAULT_FILE"]).exists()
            dist.broadcast(told, 0)
        self.overflow(batch)

    def overflow_on_two(self, batch: int) -> None:
        if batch == FAULT_AT and self.rank in (1, 3):
            self.overflow_in(block=2 if self.rank == 1 else 1)

    def overflow_at_once(self, batch: int) -> None:
        if self.rank == FAULTY_RANK:
            self.overflow_in(block=0)

    def others_in_all_reduce(self, batch: int) -> None:
        """The faulty rank overflows in a batch the others never start: they wait for it in a collective."""
        if batch == FAULT_AT:
            if self.rank == FAULTY_RANK:
                self.overflow_in(block=0)
            else:
                dist.all_reduce(torch.ones(1))

    def user_error(self, batch: int) -> None:
        if batch == FAULT_AT and self.rank == FAULTY_RANK:
            raise KeyError("a bug of the user's own")

    def bare(self, batch: int) -> None:
        """Without rankwatch: to measure how long an ordinary exception takes."""
        if batch == FAULT_AT and self.rank == FAULTY_RANK:
            Path(os.environ["FAULT_TIME_FILE"]).write_text(str(time.time()))
            raise KeyError("a bug of the user's own")

    def killed(self, batch: int) -> None:
        if batch == FAULT_AT and self.rank == FAULTY_RANK:
            os.kill(os.getpid(), signal.SIGKILL)

    def others_in_eval(self, batch: int) -> None:
        """The others evaluate, without a collective, until they are aborted."""
        if batch != FAULT_AT:
            return
        if self.rank == FAULTY_RANK:
            self.overflow_in(block=3)
            self.model(torch.randn(4, 8))
        self.model(torch.randn(4, 8))
        self.model.eval()
        with torch.no_grad():
            while True:
                self.model(torch.randn(4, 8))

    def stuck(self, batch: int) -> None:
        """Ranks 0 and 1 never return: rank 0 waits in a collective for rank 1, and rank 1 hangs."""
        if batch != FAULT_AT:
            return
        if self.rank == 3:
            self.overflow_in(block=1)
        self.wrapped(torch.randn(4, 8))
        if self.rank == 0:
            dist.all_reduce(torch.ones(1), group=self.pair)
        if self.rank == 1:
            threading.Event().wait()

    def run(self, scenario: str) -> None:
        if scenario == "stuck":
            self.pair = dist.new_group([0, 1])
        prepare = getattr(self, scenario)
        with nullcontext() if scenario == "bare" else rankwatch.watch(self.wrapped):
            for batch in range(BATCHES):
                prepare(batch)
                self.step(batch)
        dist.destroy_process_group()


def main() -> None:
    Job().run(sys.argv[1])


if __name__ == "__main__":
    if os.environ.get("WITH_RECORD"):
        record(main)()
    else:
        main()
