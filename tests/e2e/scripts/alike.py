"""One healthy training of several ranks, those of the table ``tests/agreeing``: ``alike.py NAME FOLDER``.

Each rank writes what it sent to FOLDER.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

from agreeing import CASES, STEPS
from recorded.noting import note_what_is_sent


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    note_what_is_sent(Path(sys.argv[2]))
    step = CASES[sys.argv[1]].build()
    torch.manual_seed(100 + rank)
    for number in range(STEPS):
        step(number)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
