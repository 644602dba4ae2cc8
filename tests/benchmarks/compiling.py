"""What watching adds to the time in which torch.compile compiles a model: the first step, in processes of their own.

    python tests/benchmarks/compiling.py [--models gpt2,t5] [--small] [--pairs 5] [--json FILE]

Each process has an empty cache. A ratio compares two processes that ran one after the other; the figure is the median. "bare
(again)" is a second bare process: its distance from 1 is the noise. On one thread, and on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "agent")]

import torch

from benchmarks.models import COMPILED, Setting, Trainee
from benchmarks.small import SMALL, SmallTrainee

TARGET = 1.3
LAYERS = "layers"
"""Stands for the compiled model of small modules."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=["gpt2", "t5", LAYERS])
    parser.add_argument("--small", action="store_true", help="tiny shapes, to see that all works")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--first-step-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    size = "small" if arguments.small else "cpu"
    if arguments.first_step_of:
        print(first_step(arguments.models[0], size, arguments.first_step_of))
        return
    rows = []
    print(f"  {'model':<10}{'mode':<14}{'s':>8}{'ratio':>8}", flush=True)
    for model in arguments.models:
        runs = [[in_process(model, size, mode) for mode in ("bare", "bare", "default")] for _ in range(arguments.pairs)]
        for place, mode in ((1, "bare (again)"), (2, "default")):
            ratio = statistics.median([run[place] / run[0] for run in runs])
            seconds = statistics.median([run[place] for run in runs])
            verdict = "" if place == 1 or ratio <= TARGET else f"  <= {TARGET}: missed"
            rows.append({"model": model, "mode": mode, "seconds": seconds, "ratio": ratio})
            print(f"  {model:<10}{mode:<14}{seconds:8.2f}{ratio:8.3f}{verdict}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))


def in_process(model: str, size: str, mode: str) -> float:
    command = [sys.executable, __file__, "--models", model, "--first-step-of", mode, *["--small"] * (size == "small")]
    with tempfile.TemporaryDirectory() as folder:
        own = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
        return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=own).stdout)


def first_step(model: str, size: str, mode: str) -> float:
    trainee: Trainee | SmallTrainee
    if model == LAYERS:
        small = next(small for small in SMALL if small.way == COMPILED)
        trainee = SmallTrainee(small.build, torch.randn(small.shape), mode, COMPILED)
    else:
        trainee = Trainee(Setting(model, size, "cpu", "float32", COMPILED), mode)
    torch._dynamo.reset()  # imports the compiler
    begin = time.perf_counter()
    trainee.step()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
