"""A pipeline of one stage per rank, ``pipeline.py gpipe|1f1b|backward``, four micro-batches a step.

``gpipe`` and ``1f1b``: stage 1 overflows in the forward of one micro-batch and notices only after it has sent the output on,
as ``check="async"`` allows; stage 2 trips at once over its input. ``backward``: stage 2 overflows in a backward.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import rankwatch
from rankwatch.shared.types import messages
from rankwatch_monitor.record.reader import RunRecord
from rankwatch_monitor.record.schema import FILE

STEPS, MICRO_BATCHES, LAYERS = 4, 4, 2
FAULT_AT, FAULTY_LAYER = 6, {"gpipe": "3", "1f1b": "3", "backward": "5"}
"""A micro-batch of the second step, neither its first nor its last; and the second of its stage's layers."""


class Scale(torch.autograd.Function):
    """Multiplies the input by one gain, and its gradient by another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: float, gradient_gain: float) -> Tensor:
        ctx.gain = gradient_gain
        return x * gain * gain

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.gain * ctx.gain, None, None


class Gain(nn.Module):
    def __init__(self, how: str, name: str) -> None:
        super().__init__()
        self.how = how if FAULTY_LAYER[how] == name else ""
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        # Except on stage 0, the schedule itself makes the first call: it infers shapes, on uninitialised memory.
        self.calls += 1
        if self.calls == 1:
            return x * float("nan")
        gain = 1e30 if self.calls - 2 == FAULT_AT and self.how else 1.0
        out: Tensor = Scale.apply(x, *((1.0, gain) if self.how == "backward" else (gain, 1.0)))  # type: ignore[no-untyped-call]
        return out


class Layer(nn.Module):
    def __init__(self, how: str, name: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.gain = Gain(how, name)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.gain(torch.tanh(self.linear(x)))
        return out


class Part(nn.Module):
    """The model, with only this stage's layers."""

    def __init__(self, how: str, stage: int) -> None:
        super().__init__()
        names = [str(LAYERS * stage + layer) for layer in range(LAYERS)]
        self.layers = nn.ModuleDict({name: Layer(how, name) for name in names})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def await_the_others(part: nn.Module, given: Any) -> None:
    """Delays stage 1's check until the collector has received stage 2's trip."""
    calls = next(gain.calls for gain in part.modules() if isinstance(gain, Gain))
    while calls - 2 == FAULT_AT and not has_tripped(2):
        time.sleep(0.01)


def has_tripped(rank: int) -> bool:
    run = Path(os.environ["RUNS_DIR"]) / "latest" / FILE
    if not run.exists():
        return False
    with RunRecord(run) as record:
        return any(entry.rank == rank and isinstance(entry.fact, messages.Tripped) for entry in record.entries())


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    how, rank, ranks = sys.argv[1], dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    stage = PipelineStage(Part(how, rank), rank, ranks, torch.device("cpu"))
    schedule = (Schedule1F1B if how == "1f1b" else ScheduleGPipe)(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    check = "async" if rank == 1 and how != "backward" else "frame"
    if check == "async":
        stage.submod.register_forward_pre_hook(await_the_others)
    with rankwatch.watch(stage, check=check, gradients=how == "backward"):
        optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.01)
        for _ in range(STEPS):
            inputs, targets = torch.randn(2, 4 * MICRO_BATCHES, 8)
            given: dict[str, Any] = {"target": targets} if rank == ranks - 1 else {}
            schedule.step(*([inputs] if rank == 0 else []), **given)
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
