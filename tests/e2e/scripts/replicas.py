"""One training of ``tests/desynced``: ``replicas.py NAME FOLDER [bare]``.

Each rank notes the checksums of its parameters after each optimizer step, as they are when a forward begins, and writes them
and its losses to FOLDER when it ends: that is the truth that the report is compared with. What it sent is written there as
well. ``bare``: without a call of ``watch``. BATCHES: how many, other than the table says.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

import rankwatch

sys.path.append(str(Path(__file__).parents[2]))
from desynced import CASES
from desynced.case import Case
from recorded.noting import note_what_is_sent


class Oracle:
    """What the parameters of this rank really were."""

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = root
        self._steps: Counter[int] = Counter()
        self.seen: dict[int, dict[str, str]] = {}
        register_optimizer_step_post_hook(lambda optimizer, *_: self._steps.update([id(optimizer)]))

    def look(self) -> None:
        steps = max(self._steps.values(), default=0)  # of several optimizers, such as one inside of the other
        if steps not in self.seen:
            self.seen[steps] = {name: checksum(parameter) for name, parameter in self._root.named_parameters()}


def checksum(parameter: Any) -> str:
    values = getattr(parameter, "_local_tensor", parameter).detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(values.numpy().tobytes(), digest_size=8).hexdigest()


def train(case: Case, folder: Path, *, is_bare: bool) -> None:
    rank = dist.get_rank()
    training = case.build(rank)
    oracle, losses = Oracle(training.root), []
    note_what_is_sent(folder)
    with nullcontext() if is_bare else rankwatch.watch(training.root, **case.options):
        for number in range(int(os.environ.get("BATCHES", case.batches))):
            training.before(number)
            oracle.look()
            losses.append(float(training.step(number)))
    (folder / f"rank{rank}.json").write_text(json.dumps({"losses": losses, "seen": oracle.seen}))


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    name, folder, *rest = sys.argv[1:]
    train(CASES[name], Path(folder), is_bare=rest == ["bare"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
