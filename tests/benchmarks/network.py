"""Whether the network can delay a training: steps with a collector that is healthy, absent, stopped or drowning.

    python tests/benchmarks/network.py [--rounds 300] [--flooding-ranks 64] [--json FILE]

In one process, each of five models (one of them bare) does one training step in every round, in a shuffled order. Each watched
model has its own collector on another core: "healthy" answers; "absent" never ran, only its connection file exists; "stopped"
gets SIGSTOP once the training runs, so that its connection is open and accepts nothing; "drowning" gets batches from 64
simulated ranks faster than it accepts them. "ratio" is a step's time divided by the bare model's in the same round, the median
over the rounds; "p99" is the 99th percentile of the steps divided by the bare model's; "longest" is in milliseconds. The cost
of watching is in all four (and is high: the model is small, so that a delay would show); the four must not differ.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("tests", "agent", "monitor")]

import torch
from torch import nn

import rankwatch
from benchmarks.load import Crowd, collector, quantile
from rankwatch.shared.link import connection as connections
from rankwatch.shared.link import sockets
from rankwatch.shared.link.connection import Connection

MODES = ("bare", "healthy", "absent", "stopped", "drowning")
WARM_UP = 5


class Trainee:
    """A small transformer, watched or not."""

    def __init__(self, mode: str, path: Path | None) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.mode = mode
        self.model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.randn(8, 64, 128)
        self.watch = rankwatch.watch(self.model, connection=path) if path else None
        self.seconds: list[float] = []

    def step(self) -> None:
        begun = time.perf_counter()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - begun)


def absent_collector(folder: Path) -> Path:
    """The connection file of a collector that nobody has started."""
    server, client = sockets.new_key_pair(), sockets.new_key_pair()
    path = folder / "absent.json"
    connections.write(Connection("tcp://127.0.0.1:1", server.public, client.public, client.secret, ""), path)
    return path


def flood(path: Path, ranks: int, core: int, stop: threading.Event) -> None:
    """Sends more batches than the collector can handle."""
    crowd = Crowd(path, "flood", ranks, range(ranks), [core])
    crowd.call("connect")
    while not stop.is_set():
        crowd.call("flood", 1.0)
    crowd.close()


def run(rounds: int, flooding_ranks: int, folder: Path) -> list[dict[str, Any]]:
    cores = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        paths: dict[str, Path | None] = {"bare": None, "absent": absent_collector(folder)}
        processes: dict[str, int] = {}
        for mode in ("healthy", "stopped", "drowning"):
            (folder / mode).mkdir()
            usage, paths[mode] = stack.enter_context(collector(folder / mode, cores[-1], folder / f"{mode}.log"))
            processes[mode] = usage.pid
        os.sched_setaffinity(0, {cores[0]})
        torch.set_num_threads(1)
        trainees = [Trainee(mode, paths[mode]) for mode in MODES]
        for _ in range(WARM_UP):
            for trainee in trainees:
                trainee.step()
        os.kill(processes["stopped"], signal.SIGSTOP)
        stack.callback(os.kill, processes["stopped"], signal.SIGCONT)
        flooded = str(paths["drowning"])
        crowd = ["--flooding-ranks", str(flooding_ranks), "--core", str(cores[-1])]
        flooding = subprocess.Popen([sys.executable, __file__, "--flood", flooded, *crowd])
        stack.callback(flooding.wait)
        stack.callback(flooding.terminate)
        wait_for_flood(folder / "drowning.log")
        order = list(trainees)
        for trainee in trainees:
            trainee.seconds.clear()
        for _ in range(rounds):
            random.shuffle(order)
            for trainee in order:
                trainee.step()
        rows = [row(trainee, trainees[0]) for trainee in trainees]
        for trainee in trainees:
            if trainee.watch is not None:
                trainee.watch.close()
    return rows


def wait_for_flood(log: Path) -> None:
    while "run flood-0" not in log.read_text():
        time.sleep(0.05)


def row(trainee: Trainee, bare: Trainee) -> dict[str, Any]:
    return {
        "mode": trainee.mode,
        "ms": 1000 * statistics.median(trainee.seconds),
        "ratio": statistics.median(mine / its for mine, its in zip(trainee.seconds, bare.seconds, strict=True)),
        "p99": quantile(trainee.seconds, 0.99) / quantile(bare.seconds, 0.99),
        "longest": 1000 * max(trainee.seconds),
        "is connected": trainee.watch is not None and trainee.watch.is_connected,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--flooding-ranks", type=int, default=64)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--flood", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.flood:
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        flood(arguments.flood, arguments.flooding_ranks, arguments.core, stop)
        return
    with tempfile.TemporaryDirectory() as folder:
        rows = run(arguments.rounds, arguments.flooding_ranks, Path(folder))
    print(f"  {'collector':<12}{'ms':>9}{'ratio':>9}{'p99':>9}{'longest':>9}")
    for line in rows:
        print(f"  {line['mode']:<12}{line['ms']:9.2f}{line['ratio']:9.3f}{line['p99']:9.3f}{line['longest']:9.1f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
