"""A rank of a training of the table: ``training.py TABLE NAME [FOLDER [bare]]``, such as ``training.py agreeing ddp``.

What the rank sends of its replicas is written to FOLDER. Of a training of ``desynced``, the losses are written there as well, and
the checksums of the parameters and buffers after each optimizer step, as they are when a forward begins: that is the truth that
the report is compared with. ``bare``: without a call of ``watch``. BATCHES: how many, other than the table says.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

import rankwatch

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

from recorded.noting import note_calls, note_what_is_sent
from trainings.case import Training
from trainings.table import TABLES


class Oracle:
    """What the parameters and buffers of this rank really were."""

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = root
        self._steps: Counter[int] = Counter()
        self.seen: dict[int, dict[str, str]] = {}
        register_optimizer_step_post_hook(lambda optimizer, *_: self._steps.update([id(optimizer)]))

    def look(self) -> None:
        steps = max(self._steps.values(), default=0)  # of several optimizers, such as one inside of the other
        if steps not in self.seen:
            named = (*self._root.named_parameters(), *self._root.named_buffers())
            self.seen[steps] = {name: checksum(values) for name, values in named}


def checksum(values: Any) -> str:
    values = getattr(values, "_local_tensor", values).detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(values.numpy().tobytes(), digest_size=8).hexdigest()


def train_and_note(training: Training, batches: int, file: Path) -> None:
    oracle, losses = Oracle(training.root), []
    for number in range(batches):
        training.before(number)
        oracle.look()
        losses.append(float(training.step(number)))
    file.write_text(json.dumps({"losses": losses, "seen": oracle.seen}))


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    table, name, *rest = sys.argv[1:]
    case, rank = TABLES[table][name], dist.get_rank()
    if rest:
        note_what_is_sent(Path(rest[0]))
    training = case.make(seed=rank)
    torch.manual_seed(100 + rank)
    batches = int(os.environ.get("BATCHES", case.batches))
    watch = None if training.is_watched or "bare" in rest else rankwatch.watch(training.root, **case.options)
    if table == "desynced":
        train_and_note(training, batches, Path(rest[0], f"rank{rank}.json"))
        if watch is not None:
            watch.close()  # the watches of the other tables end with their processes
    else:
        for number in range(batches):
            training.batch(number)
    dist.barrier()
    if rest:
        note_calls(Path(rest[0]), rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
