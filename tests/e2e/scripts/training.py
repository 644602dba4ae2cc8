"""A rank of a training of the table: ``training.py TRUTH NAME``, such as ``training.py Alike ddp``."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

import rankwatch

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

from trainings import ranks, truths  # noqa: F401  the ranks fill the table
from trainings.case import cases


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    truth, name = sys.argv[1:]
    case, rank = cases(getattr(truths, truth))[name], dist.get_rank()
    training = case.make(seed=rank)
    torch.manual_seed(100 + rank)
    if not training.is_watched:
        rankwatch.watch(training.root, **case.options)
    for number in range(case.batches):
        training.batch(number)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
