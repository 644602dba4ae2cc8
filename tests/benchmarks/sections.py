"""Which part of a step watching makes longer: forward, backward, the optimizer's step. Of a compiled model, on one thread.

    python tests/benchmarks/sections.py [--models t5,resnet] [--way compiled] [--small] [--rounds 32] [--json FILE]

In every round each mode does one step, in a shuffled order. A ratio compares two steps of one round by the CPU time of the
training thread; the figure is the median. "bare (again)" is a second bare model: its distance from 1 is the noise. "between": in
no batch that is timed is more than the root looked at, so that graphs run without readings.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "agent")]

import torch
from torch import Tensor

from benchmarks.models import COMPILED, WAYS, Setting, Trainee
from benchmarks.overhead import take_turns

MODES = "bare", "bare (again)", "default", "between"
SECTIONS = "forward", "backward", "step", "whole"


class Sections(Trainee):
    """Takes the seconds of each section of its steps."""

    def __init__(self, setting: Setting, mode: str) -> None:
        super().__init__(setting, mode, clock=time.thread_time)
        self.laps: list[tuple[float, ...]] = []

    def step(self) -> None:
        begin = self._clock()
        output = self._call(**self._batch)
        loss = output if isinstance(output, Tensor) else output.loss
        forward = self._clock()
        loss.backward()
        backward = self._clock()
        self._optimizer.step()
        end = self._clock()
        self._optimizer.zero_grad()
        self.laps.append((forward - begin, backward - forward, end - backward, end - begin))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=["t5", "resnet"])
    parser.add_argument("--way", choices=WAYS, default=COMPILED)
    parser.add_argument("--small", action="store_true", help="tiny shapes, to see that all works")
    parser.add_argument("--rounds", type=int, default=32)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for model in arguments.models:
        setting = Setting(model, "small" if arguments.small else "cpu", "cpu", "float32", arguments.way)
        print(
            f"\n{setting}, {arguments.rounds} rounds\n  {'mode':<14}" + "".join(f"{one:>10}" for one in SECTIONS), flush=True
        )
        trainees = [Sections(setting, mode) for mode in MODES]
        for trainee in trainees:
            trainee.warm_up()
            trainee.laps.clear()
        take_turns(trainees, arguments.rounds)
        for trainee in trainees:
            ratios = [
                statistics.median([own / bare for own, bare in zip(mine, its, strict=True)])
                for mine, its in zip(zip(*trainee.laps, strict=True), zip(*trainees[0].laps, strict=True), strict=True)
            ]
            rows.append({"model": model, "mode": trainee.mode, **dict(zip(SECTIONS, ratios, strict=True))})
            print(f"  {trainee.mode:<14}" + "".join(f"{one:10.3f}" for one in ratios), flush=True)
        for trainee in trainees:
            trainee.close()
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
